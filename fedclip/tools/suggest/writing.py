# SPDX-License-Identifier: Apache-2.0
"""A proposal as lines of TOML, and in a configuration, whose comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tomlkit

from fedclip.parameters import Config
from fedclip.report.advice import Proposal
from fedclip.report.place import BY_NORM
from fedclip.toml import toml_item, toml_line

__all__ = ["lines_of", "rewritten"]


def lines_of(proposal: Proposal, prefix: str = "optim.") -> Iterator[str]:
    """Yield the lines of TOML of a proposal, section by section."""
    for section, (name, config) in proposal.plugins.items():
        if section == "aggregator":
            yield f"[{prefix.rstrip('.')}]"
            yield toml_line("aggregator", name, config)
        else:
            yield f"[{prefix}{section}]"
            yield toml_line("module", name, config)


def rewritten(text: str, proposal: Proposal) -> str:
    """Return a configuration with a proposal in it; comments and layout stay as they are.

    A proposal takes the place of the first module of its kind: a clipper by norm, a counterpart on
    the server, or a part of update clipping. Without one, it comes first, so that it sees what
    comes in; but `update-clip-client` comes last.

    Raises
    ------
    ValueError
        If the text is no configuration, or a section has a form that can not be edited.
    """
    document: Config = tomlkit.parse(text)
    optim = document.get("optim", document)
    if not hasattr(optim, "keys") or "client_opt" not in optim:
        raise ValueError("there is no client_opt in it to add a clipper to")
    for section, (name, config) in proposal.plugins.items():
        if section == "aggregator":
            optim["aggregator"] = toml_item({"name": name, **config} if config else name)
        else:
            _insert(optim, section, name, config)
    if proposal.name.startswith("step.") and "server_opt" not in proposal.plugins:
        # The clipper that made room may have been a shared one.
        server = optim.get("server_opt")
        there = isinstance(server, Mapping) and "modules" in server
        modules = _modules_of(optim, "server_opt") if there else []
        for place, _ in _alike(modules, "mad-clip-server"):
            del modules[place]
    return str(tomlkit.dumps(document))


def _insert(optim: Config, section: str, name: str, config: Mapping[str, object]) -> None:
    modules = _modules_of(optim, section)
    item = toml_item([name, config] if config else name)
    for place, _ in _alike(modules, name):
        modules[place] = item
        return
    if name == "update-clip-client":
        modules.append(item)
    elif len(modules) == 1 and "\n" not in modules.as_string():
        # Inserted before a single item, tomlkit puts no space after the comma; appended, it does.
        modules.append(modules[0])
        modules[0] = item
    else:
        modules.insert(0, item)


def _alike(modules: Iterable[object], name: str) -> Iterator[tuple[int, str]]:
    """Yield place and name of the first module of the same kind, if there is one."""
    for place, old in enumerate(modules):
        found = old if isinstance(old, str) else old[0] if isinstance(old, list) and old else ""
        if found == name or (_kind(found) and _kind(found) == _kind(name)):
            yield place, found
            return


def _kind(name: str) -> str:
    if name in BY_NORM:
        return "clipper"
    counterpart = name.removesuffix("-server") in BY_NORM and name.endswith("-server")
    return "counterpart" if counterpart else ""


def _modules_of(optim: Config, section: str) -> Any:
    """Return the list of modules of one side, which is made if there is none."""
    table = optim.get(section, 1.0)
    if isinstance(table, str):
        raise ValueError(f"{section} is in another file, {table!r}: edit that one")
    if not isinstance(table, Mapping):
        rate, table = table, tomlkit.table()
        table["lrate"] = rate
        if section in optim:
            del optim[section]
        optim[section] = table
    modules = table.get("modules")
    if modules is None:
        modules = tomlkit.array()
        table["modules"] = modules
        modules = table["modules"]
    if not isinstance(modules, list):
        raise ValueError(f"modules of {section} must be a list, got {modules!r:.100}")
    return modules
