# SPDX-License-Identifier: Apache-2.0
"""Which proposal to start with, and why; docs/suggest.md has the rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from fedclip.parameters import Config
from fedclip.report import Report, Row, number, printable
from fedclip.report.advice import Advice
from fedclip.report.place import Norms, places_of
from fedclip.report.rows import listed
from fedclip.report.seeing import Seen, seen, told
from fedclip.tools.suggest.proposing import proposals

_ORDERS = {
    "update": ("update.adaptive", "step.fixed", "step.shared", "update.fixed", "step.learnt"),
    "step": ("step.fixed", "update.adaptive", "step.shared", "update.fixed", "step.learnt"),
}
_ORDER = ("step.fixed", "step.learnt", "update.adaptive", "step.shared", "update.fixed")
"""What comes first if clients are odd there, and otherwise."""
_ANSWERS = {
    "step": "The steps of {} the others': bound what a client can do, with {}.",
    "update": "The updates of {} the others': bound what a client can do, with {}.",
    "two": "The norms of {} the other's; of two, none is the usual one: try {}.",
    "diverged": "The model has diverged: start with {1}, by the norms of the first round.",
    "spikes": "Single norms are far above the others, on {}: cut them, and start with {}.",
    "": "Clipping will not help here: no client's norms, and no single norm, are far above others.",
}


def advised(report: Report, experiment: str) -> Advice:
    """Return what to clip first and why, by the norms of one federation of a report.

    Parameters
    ----------
    report
        What was read.
    experiment
        The folder of the federation, one of `report.experiments`.

    Raises
    ------
    ValueError
        If a node's configuration can not be read, so that the order of its norms is unknown.
    """
    places = read_norms(report, experiment)
    found = seen(places)
    bad = {f.kind: f.text for f in report.only([experiment]).findings()}
    lost = [bad[kind] for kind in ("diverged", "nonfinite") if kind in bad]
    findings = [*lost, *told(found), *_clipped(places)]
    # Norms of later rounds are then of no use.
    early = "diverged" in bad
    case, who = _case(found, early)
    ranked = sorted(
        (proposal for norms in places for proposal in proposals(norms, early)),
        key=lambda proposal: _ORDERS.get(case, _ORDER).index(proposal.name),
    )
    start = ranked[0].name if case else ""
    answer = _ANSWERS[case].format(who, start) if found else "There are no norms to choose by."
    odd = [*dict.fromkeys(name for one in found.values() for name in one.odd)]
    return Advice(printable(answer), [*map(printable, findings)], ranked, start, odd)


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, and of updates, of one federation of a report."""
    steps, updates = places_of(
        r for r in report.whole if r.experiment == experiment and r.node not in report.servers
    )
    order = _order(report, steps.rows[0]) if steps.rows else {}
    return [dataclasses.replace(steps, order=order), updates]


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


def _case(found: Mapping[str, Seen], early: bool) -> tuple[str, str]:
    """Return what decides the order, "" where nothing is unusual, and who shows it."""
    for place, one in found.items():
        if one.odd:
            times = f"{'up to ' * (len(one.odd) > 1)}{number(max(one.odd.values()))} times"
            return "two" if one.two else place, f"{listed([*one.odd])} are {times}"
    if found and early:
        return "diverged", ""
    spiky = [*found.get("step", Seen()).spikes]
    return ("spikes", listed(spiky)) if spiky else ("", "")


def _clipped(places: list[Norms]) -> Iterator[str]:
    for norms in places:
        share = norms.whole.clipped_share
        if norms.lacking:
            yield f"{norms.place.capitalize()}s: {norms.lacking}."
        elif share and norms.rows[0].name != "no-op":
            yield (
                f"{norms.place.capitalize()}s: {share:.0%} were clipped in this run; without that, "
                "later norms might have been larger."
            )
