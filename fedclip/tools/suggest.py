# SPDX-License-Identifier: Apache-2.0
"""From the norms of an experiment to lines of TOML.

The norms of all clients are pooled. Each proposal is built, and played through on the norms of
each round, in random order, to see what share of them it would have clipped: about so, because
another limit would have changed the gradients that followed.
"""

from __future__ import annotations

import json
import math
import random
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import tomlkit

from fedclip.parameters import Config
from fedclip.privacy.maps import Plugin
from fedclip.report import Report, Row, number, pooled
from fedclip.report.rows import BY_NORM, UPDATES
from fedclip.toml import toml_item, toml_line
from fedclip.tools.catalogue import build

__all__ = ["FEW", "Place", "Proposal", "in_words", "lines_of", "rewritten", "suggestions"]

FEW = 20
"""Number of norms below which a 95 % quantile says nothing."""

QUANTILES = (0.05, 0.5, 0.9, 0.95, 0.99)
PLACES = {"step": "client_opt", "update": "aggregator", "aggregate": "server_opt"}
"""What may be clipped, and where that is configured."""

_UNMEASURED = {
    "step": 'No clipper by norm ran on the clients: add "no-op" to their modules',
    "update": "The norms of updates were not measured",
    "aggregate": 'No clipper by norm ran on the server: add "no-op" to its modules',
}

# Longer runs are played through on every second norm, or every third, ...
_PLAYED = 20_000

_CHOSEN = (
    "The number comes from all norms of this run, and tells something about them; no privacy "
    "budget covers that. From then on it is fixed, and bounds a sensitivity."
)
_VOTES = (
    "In each round every client sends one bit: whether its update was within the bound. Set "
    "noise_multiplier to cover it by a privacy budget (`fedclip privacy plan`)."
)
_TEXTS = {
    "fixed": ("one fixed limit, above about 95 % of the norms of this run", _CHOSEN),
    "learnt": (
        "a limit that follows the norms of each node and cuts spikes",
        "Each node learns from its own norms, which it keeps to itself. The limit is not known in "
        "advance, so it bounds no sensitivity.",
    ),
    "shared": (
        "one limit for all clients, which follows their norms and cuts a client unlike them",
        "In each round every client sends how many of its norms were of which size, in cleartext "
        "unless secure aggregation is on. The limit bounds no sensitivity.",
    ),
    "update": (
        "one fixed bound for the update of a client, above about 95 % of those of this run",
        _CHOSEN,
    ),
    "median": ("a bound that follows the median of the updates, and starts there", _VOTES),
    "search": (
        "a bound that follows the median of the updates; it is searched for in the first rounds",
        _VOTES,
    ),
}
"""What kinds of proposals do, and what they reveal of the data."""

Lines: TypeAlias = Mapping[str, tuple[str, Mapping[str, object]]]
"""Name and parameters by section: of modules, or (section "aggregator") of the aggregator."""


@dataclass(frozen=True)
class Proposal:
    """Lines of configuration, and what they would do.

    Attributes
    ----------
    name
        Place and kind, as in "step.fixed".
    plugins
        Its lines.
    share
        Share of the norms of this run that would have been clipped; None if that is not known.
    what, reveals
        What it does, and what it reveals of the data.
    """

    name: str
    plugins: Lines
    share: float | None
    what: str
    reveals: str


@dataclass(frozen=True)
class Place:
    """What is known of the norms in one place, and the proposals for it."""

    place: str
    measured_by: str = ""
    nodes: int = 0
    norms: int = 0
    clipped: float = 0.0
    """Share of the steps that the clipper of this run has clipped."""
    quantiles: Mapping[str, float] = field(default_factory=dict)
    lacking: str = ""
    """Why there are no norms to choose by, and what to do about it."""
    proposals: Sequence[Proposal] = ()


def suggestions(report: Report, experiment: str) -> list[Place]:
    """Return what to clip in each place, by the norms of one federation of a report."""
    rows = [row for row in report.whole if row.experiment == experiment]
    clients = [row for row in rows if row.node not in report.servers]
    server = [row for row in rows if row.node in report.servers]
    updates = [row for row in clients if row.name in UPDATES]
    return [
        _place(report, "step", _first(clients)),
        _place(report, "update", updates),
        _place(report, "aggregate", _first(server)),
    ]


def _first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first clipper by norm on each node."""
    found: dict[str, int] = {}
    for row in rows:
        if row.name in BY_NORM:
            found[row.node] = min(found.get(row.node, row.place), row.place)
    return [row for row in rows if found.get(row.node) == row.place and row.name in BY_NORM]


def _place(report: Report, place: str, rows: Sequence[Row]) -> Place:
    whole = pooled(row.record for row in rows)
    count, nodes = sum(whole.counts), len({row.node for row in rows})
    lacking = ""
    if not rows:
        lacking = _UNMEASURED[place]
    elif count < FEW:
        lacking = f"{count} norms are too few to choose a limit by: at least {FEW} are needed"
    elif not whole.norm_median:
        lacking = "Half of the norms, or more, are 0: there is no scale to choose a limit by"
    if lacking:
        found = [_adaptive({}, "search", None)] if place == "update" else []
        return Place(place, nodes=nodes, norms=count, lacking=lacking, proposals=found)
    ord_ = _order(report, rows[0])
    return Place(
        place,
        measured_by=", ".join(dict.fromkeys(row.name for row in rows)),
        nodes=nodes,
        norms=count,
        clipped=0.0 if rows[0].name == "no-op" else whole.clipped_share,
        quantiles={f"{q:g}": whole.norm_quantile(q) or 0.0 for q in QUANTILES}
        | {"max": whole.norm_max or 0.0},
        proposals=[*_updates(rows)] if place == "update" else [*_modules(place, rows, ord_)],
    )


def _order(report: Report, row: Row) -> Config:
    """Return the order of the norm as a parameter, if the node's configuration has another than 2.

    Raises
    ------
    ValueError
        If the configuration can not be read: the norms may then be of any order.
    """
    folder = report.folder if row.node == report.folder.resolve().name else report.folder / row.node
    file = folder / "optimizer_config.json"
    if not file.exists():
        return {}
    try:
        name, config = json.loads(file.read_text(encoding="utf-8"))["modules"][row.place]
        order = config.get("ord", 2) if name == row.name else 2
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f"{file} can not be read, and says of which order norms are") from exc
    return {} if order == 2 else {"ord": order}


# -- proposals --------------------------------------------------------------------------------
def rounded(value: float) -> float:
    """Return a number with two digits, not below the value.

    Examples
    --------
    >>> rounded(1.234), rounded(0.0301), rounded(57.0)
    (1.3, 0.031, 57.0)
    """
    digits = 1 - math.floor(math.log10(value))
    near = round(value, digits)
    return near if near >= value else round(near + 10.0**-digits, digits)


def _modules(place: str, rows: Sequence[Row], ord_: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield proposals of modules, for the clients' steps or the server's."""
    section = PLACES[place]
    limit = rounded(pooled(row.record for row in rows).norm_quantile(0.95) or 0.0)
    found: dict[str, Lines] = {
        "fixed": {section: ("norm-clip", {"max_norm": limit, **ord_})},
        "learnt": {section: ("zscore-clip", dict(ord_))},
    }
    if place == "step":
        clients = ("mad-clip", {"shared": True, **ord_})
        found["shared"] = {section: clients, "server_opt": ("mad-clip-server", dict(ord_))}
    for kind, lines in found.items():
        first, *_ = _built(lines)
        yield Proposal(f"{place}.{kind}", lines, _played(first, rows), *_TEXTS[kind])


def _updates(rows: Sequence[Row]) -> Iterator[Proposal]:
    whole = pooled(row.record for row in rows)
    limit = rounded(whole.norm_quantile(0.95) or 0.0)
    share = sum(n > limit for n in whole.norms()) / max(1, sum(whole.counts))
    lines: Lines = {"aggregator": ("clipped-averaging", {"max_norm": limit})}
    _built(lines)
    yield Proposal("update.fixed", lines, share, *_TEXTS["update"])
    yield _adaptive({"start_norm": rounded(whole.norm_median or 0.0)}, "median", 0.5)


def _adaptive(server: Mapping[str, object], kind: str, share: float | None) -> Proposal:
    lines: Lines = {
        "aggregator": ("clipped-averaging", {}),
        "client_opt": ("update-clip-client", {}),
        "server_opt": ("update-clip-server", server),
    }
    _built(lines)
    return Proposal("update.adaptive", lines, share, *_TEXTS[kind])


def _built(lines: Lines) -> list[Plugin]:
    """Build the plug-ins, so that no line is proposed that would be refused."""
    return [
        build("aggregator" if section == "aggregator" else "module", name, config)
        for section, (name, config) in lines.items()
    ]


def _played(clipper: Plugin, rows: Sequence[Row]) -> float:
    """Return the share of the norms that a clipper would have clipped."""
    nodes: dict[str, dict[int, list[float]]] = {}
    every = 1 + sum(row.record.steps for row in rows) // _PLAYED
    draw = random.Random(0)
    for row in rows:
        norms = row.record.norms()
        draw.shuffle(norms)
        # With a shared limit, all clients together are like one.
        node = "" if getattr(clipper, "shared", False) else row.node
        nodes.setdefault(node, {}).setdefault(row.record.round, []).extend(norms)
    config = {**clipper.get_config(), **({"shared": False} if hasattr(clipper, "shared") else {})}
    steps = clipped = 0
    for rounds in nodes.values():
        twin = type(clipper)(**config)
        for _, norms in sorted(rounds.items()):
            draw.shuffle(norms)
            twin.on_round_start()
            for norm in norms[::every]:
                twin.clip({"w": np.array([norm])})
                steps += 1
                clipped += twin.last.clipped[0]
    return clipped / max(1, steps)


def in_words(place: Place) -> Iterator[str]:
    """Yield what is known of a place, and what is proposed for it, line by line."""
    where = {
        "step": "Steps: the gradient of each batch, on the clients",
        "update": "Updates: what a client shares at the end of a round",
        "aggregate": "Aggregate: the average of the updates, on the server",
    }
    yield where[place.place]
    if place.lacking:
        yield f"  {place.lacking}."
    else:
        nodes = f"{place.nodes} node{'s' * (place.nodes != 1)}"
        yield f"  {place.norms:,} norms of {nodes}, measured by {place.measured_by}:"
        shown = [
            f"{float(q):.0%} below {number(v)}" for q, v in place.quantiles.items() if q != "max"
        ]
        yield from _wrapped(f"{', '.join(shown)}, largest {number(place.quantiles['max'])}", 2)
        if place.clipped:
            text = (
                f"{place.clipped:.0%} of them were clipped in this run: without that, later norms "
                "might have been larger."
            )
            yield from _wrapped(text, 2)
    for proposal in place.proposals:
        share = "" if proposal.share is None else f"; it clips about {proposal.share:.1%} of them"
        yield ""
        yield from _wrapped(f"{proposal.name}: {proposal.what}{share}", 2)
        yield from _wrapped(f"What it reveals: {proposal.reveals}", 4)
        for line in lines_of(proposal):
            yield f"    {line}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )


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
        modules = _modules_of(optim, "server_opt") if "server_opt" in optim else []
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
