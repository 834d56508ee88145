# SPDX-License-Identifier: Apache-2.0
"""Checks shared clippers and their counterparts before a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedclip.federation.statistics.counterpart import SharedServer
from fedclip.privacy.maps import Plugin

CLIENT, SERVER = "client_opt", "server_opt"


def is_shared(plugin: object) -> bool:
    """Whether a plug-in is a clipper with ``shared = true``, or the counterpart of one."""
    return isinstance(plugin, SharedServer) or getattr(plugin, "_sharing", None) is not None


def shared_problems(plugins: Mapping[str, Iterable[Plugin]]) -> list[tuple[str, str]]:
    """Return each problem as a section, ``client_opt`` or ``server_opt``, and a sentence.

    Parameters
    ----------
    plugins
        The modules of ``client_opt`` and ``server_opt``.
    """
    both = [p for p in plugins.get(CLIENT, ()) if is_shared(p)]
    problems = [
        (CLIENT, f"{p.name} belongs in {SERVER}") for p in both if isinstance(p, SharedServer)
    ]
    clients = [p for p in both if not isinstance(p, SharedServer)]
    # A shared clipper in the server's optimizer is an ordinary clipper, not a counterpart.
    servers = [p for p in plugins.get(SERVER, ()) if isinstance(p, SharedServer)]
    clippers = {p.aux_name: p for p in clients}
    counterparts = {p.aux_name: p for p in servers}
    chosen: list[Plugin]
    for side, chosen in ((CLIENT, clients), (SERVER, servers)):
        names = [str(p.aux_name) for p in chosen]
        for twice in sorted({name for name in names if names.count(name) > 1}):
            text = (
                f"{names.count(twice)} modules exchange {twice!r}: only the last would be heard; "
            )
            problems.append((side, text + "give each pair a shared_name of its own"))
    for name, clipper in clippers.items():
        if name not in counterparts:
            text = (
                f"{clipper.name} has shared = true, and {SERVER} lacks {clipper.name + '-server'!r}"
                f"{_named(clipper)}: each client would clip by its own statistics"
            )
            problems.append((CLIENT, text))
        elif not isinstance(clipper, counterparts[name].clipper):
            text = f"{name!r} is {clipper.name}'s, and {counterparts[name].name}'s in {SERVER}"
            problems.append((CLIENT, text))
        else:
            for key, theirs in counterparts[name].settings.items():
                mine = getattr(clipper, key)
                if mine != theirs:
                    text = (
                        f"{clipper.name} has {key} = {mine!r}, its counterpart in {SERVER} "
                        f"{theirs!r}: write the same in both"
                    )
                    problems.append((CLIENT, text))
    for name, counterpart in counterparts.items():
        if name not in clippers:
            text = (
                f"{counterpart.name} needs {counterpart.clipper.name!r} with shared = true"
                f"{_named(counterpart)} in {CLIENT}: the run would end in its first round"
            )
            problems.append((SERVER, text))
    return problems


def _named(plugin: Plugin) -> str:
    return f" with shared_name = {plugin.shared_name!r}" if plugin.shared_name else ""
