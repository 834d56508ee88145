# SPDX-License-Identifier: Apache-2.0
"""Edits a configuration; its comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from fedclip.cli.output import ToolError
from fedclip.core.parameters import Config
from fedclip.core.toml import toml_item
from fedclip.errors import nearest
from fedclip.report.advice import Lines, Proposal
from fedclip.report.place import BY_NORM, UPDATES

_SIDES = ("client_opt", "server_opt")
_DECLEARNS = {"l2-clipping", "l2-global-clipping"}
_MEASURES: Lines = {side: ("no-op", {}) for side in _SIDES}


def modules_of(document: Config, sides: Sequence[str] = _SIDES) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each module of the optimizers, and where it stands: in a list, and at."""
    optim = document.get("optim", document)
    for side in sides:
        section = optim.get(side)
        modules = section.get("modules", []) if isinstance(section, Mapping) else []
        for place, module in enumerate(modules):
            name = module if isinstance(module, str) else module[0] if module else ""
            yield str(name), modules, place


def set_value(document: Config, key: str, value: object) -> None:
    """Set a value by the way through the sections, or by the name of a module and a parameter."""
    *way, last = key.split(".")
    table: object = document
    for name in way:
        table = table.get(name) if isinstance(table, Mapping) else None
    if isinstance(table, MutableMapping) and way:
        table[last] = value
        return
    found = [*modules_of(document)]
    places = [(modules, i) for name, modules, i in found if [name] == way]
    if not places:
        known = [*document, *(name for name, _, _ in found)]
        hint = nearest(way[0], known) if way else ""
        if way and way[0] in document.get("optim", {}):
            hint = f"; write optim.{key}"
        raise ToolError(f"there is no section and no module {'.'.join(way) or key!r}{hint}")
    # A clipper and its counterpart must agree, and so both get the value.
    for modules, i in places:
        old = modules[i]
        modules[i] = [way[0], {**({} if isinstance(old, str) else old[1]), last: value}]


def relocate(document: Config, file: Path, folder: Path) -> None:
    """Let a configuration that lies in another folder find the same files, and write there."""
    for section in ("data", "model", "experiment"):
        document.setdefault(section, tomlkit.table())
    home = file.resolve().parent
    if not document["data"].get("data_folder"):
        found = [path for path in home.glob("data*") if path.is_dir()]
        if len(found) == 1:
            document["data"]["data_folder"] = str(found[0])
    if not document["model"].get("model_file"):
        document["model"]["model_file"] = str(home / "model.py")
    document["experiment"]["checkpoint"] = str(folder)


def rewritten(text: str, proposal: Proposal) -> str:
    """Return a configuration with a proposal in it; comments and layout stay as they are.

    A proposal takes the place of the first module of its kind: a clipper by norm, a counterpart on
    the server, or a part of update clipping. Without one, it comes first, so that it sees what
    comes in; but `update-clip-client` comes last.

    Raises
    ------
    ValueError
        If the text is no configuration, a section has a form that can not be edited, or noise
        would go with the bound that it is for.
    """
    document: Config = tomlkit.parse(text)
    optim = document.get("optim", document)
    if not hasattr(optim, "keys") or "client_opt" not in optim:
        raise ValueError("there is no client_opt in it to add a clipper to")
    noised = (str(found[i]) for _, found, i in modules_of(document, ["server_opt"]))
    if "aggregator" in proposal.plugins and any("noise_multiplier" in text for text in noised):
        raise ValueError(
            f"it has noise, and {proposal.name} has none: if its bound may tell of the data, write "
            "it into update-clip-server yourself, as start_norm"
        )
    for section, (name, config) in proposal.plugins.items():
        if section == "aggregator":
            optim["aggregator"] = toml_item({"name": name, **config} if config else name)
        else:
            _insert(optim, section, name, config)
    if proposal.name.startswith("step.") and "server_opt" not in proposal.plugins:
        # The clipper that made room may have been a shared one.
        found = (f for f in modules_of(document, ["server_opt"]) if _kind(f[0]) == "counterpart")
        for _, modules, place in [*found][:1]:
            del modules[place]
    return str(tomlkit.dumps(document))


def _insert(optim: Config, section: str, name: str, config: Mapping[str, object]) -> None:
    modules = _list_of(optim, section)
    item = toml_item([name, config] if config else name)
    for old, _, place in modules_of(optim, [section]):
        if old == name or (_kind(old) and _kind(old) == _kind(name)):
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


def _kind(name: str) -> str:
    if name in BY_NORM:
        return "clipper"
    counterpart = name.removesuffix("-server") in BY_NORM and name.endswith("-server")
    return "counterpart" if counterpart else ""


def _list_of(optim: Config, section: str) -> Any:
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


def unclipped(text: str) -> tuple[str, bool]:
    """Return a configuration whose clippers by norm only measure, and whether it had any.

    Raises
    ------
    ValueError
        If it can not be changed, or trains by DP-SGD.
    """
    before: Config = tomlkit.parse(text)
    modules = [name for name, _, _ in modules_of(before)]
    if "sample-clip" in modules or "privacy" in before.get("run", {}):
        raise ValueError(
            "DP-SGD keeps no norms to choose a limit by, and each run would spend budget; its "
            "limit is planned with `fedclip privacy calibrate`"
        )
    document: Config = tomlkit.parse(rewritten(text, Proposal("step.none", _MEASURES)))
    clipped = any(_clips(name) for name in modules)
    for name, found, place in list(modules_of(document))[::-1]:
        if _clips(name):
            del found[place]
    optim = document["optim"]
    aggregator = optim.get("aggregator", "averaging")
    config = {"name": aggregator} if isinstance(aggregator, str) else aggregator
    if config.get("name") == "clipped-averaging":
        steps = config.get("weights") == "steps"
        optim["aggregator"] = {"name": "averaging", "steps_weighted": steps}
        clipped = True
    return str(tomlkit.dumps(document)), clipped


def _clips(name: str) -> bool:
    """Whether a module clips by norm, or is the counterpart of one that does."""
    base = name.removesuffix("-server")
    ours = BY_NORM | {"update-clip", *UPDATES}
    return name in _DECLEARNS or (base in ours and name != "no-op")
