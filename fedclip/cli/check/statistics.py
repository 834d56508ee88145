# SPDX-License-Identifier: Apache-2.0
"""Checks shared clippers and their counterparts before a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fedclip.engines.declearn.statistics_server import SharedServer
from fedclip.privacy.guarantees import Plugin

CLIENT, SERVER = "client_opt", "server_opt"


def is_shared(plugin: object) -> bool:
    """Whether a plug-in is a clipper with ``shared = true``, or the counterpart of one."""
    return isinstance(plugin, SharedServer) or getattr(plugin, "_sharing", None) is not None


def shared_problems(plugins: Mapping[str, Iterable[Plugin]]) -> Iterator[tuple[str, str]]:
    """Yield each problem as a section, ``client_opt`` or ``server_opt``, and a sentence.

    Parameters
    ----------
    plugins
        The modules of ``client_opt`` and ``server_opt``.
    """
    both = [p for p in plugins.get(CLIENT, ()) if is_shared(p)]
    clients = [p for p in both if not isinstance(p, SharedServer)]
    # A shared clipper in the server's optimizer is an ordinary clipper, not a counterpart.
    servers = [p for p in plugins.get(SERVER, ()) if isinstance(p, SharedServer)]
    clippers = {p.aux_name: p for p in clients}
    counterparts = {p.aux_name: p for p in servers}
    for plugin in both:
        if isinstance(plugin, SharedServer):
            yield CLIENT, f"{plugin.name} belongs in {SERVER}"
    sides: tuple[tuple[str, list[Plugin]], ...] = ((CLIENT, clients), (SERVER, [*servers]))
    for side, chosen in sides:
        names = [str(p.aux_name) for p in chosen]
        for twice in sorted({name for name in names if names.count(name) > 1}):
            text = f"{names.count(twice)} modules exchange {twice!r}: only the last would be heard"
            yield side, f"{text}; give each pair a shared_name of its own"
    for name, clipper in clippers.items():
        other = counterparts.get(name)
        if other is None:
            lacks = f"{SERVER} lacks {clipper.name + '-server'!r}{_named(clipper)}"
            text = f"{clipper.name} has shared = true, and {lacks}"
            yield CLIENT, f"{text}: each client would clip by its own statistics"
        elif not isinstance(clipper, other.clipper):
            yield CLIENT, f"{name!r} is {clipper.name}'s, and {other.name}'s in {SERVER}"
        else:
            for key, theirs in other.settings.items():
                if (mine := getattr(clipper, key)) != theirs:
                    text = f"{clipper.name} has {key} = {mine!r}, its counterpart in {SERVER}"
                    yield CLIENT, f"{text} {theirs!r}: write the same in both"
    for name, counterpart in counterparts.items():
        if name not in clippers:
            where = f"shared = true{_named(counterpart)} in {CLIENT}"
            text = f"{counterpart.name} needs {counterpart.clipper.name!r} with {where}"
            yield SERVER, f"{text}: the run would end in its first round"


def _named(plugin: Plugin) -> str:
    return f" with shared_name = {plugin.shared_name!r}" if plugin.shared_name else ""
