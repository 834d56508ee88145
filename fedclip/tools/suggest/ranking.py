# SPDX-License-Identifier: Apache-2.0
"""Which proposal to start with, and why; docs/suggest.md has the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fedclip.report import Report, number, printable
from fedclip.report.advice import Advice
from fedclip.tools.suggest.norms import Norms, read_norms
from fedclip.tools.suggest.proposing import proposals
from fedclip.tools.suggest.seeing import Seen, seen

__all__ = ["advised"]

_ORDERS = {
    "update": ("update.adaptive", "step.fixed", "step.shared", "update.fixed", "step.learnt"),
    "step": ("step.fixed", "update.adaptive", "step.shared", "update.fixed", "step.learnt"),
}
_ORDER = ("step.fixed", "step.learnt", "update.adaptive", "step.shared", "update.fixed")
"""What comes first if clients are odd there, and otherwise; the server's own limits come last."""
_ANSWERS = {
    "step": "The steps of {} the others': bound what a client can do, with {}.",
    "update": "The updates of {} the others': bound what a client can do, with {}.",
    "two": "The norms of {} the other's; of two, none is the usual one: try {}.",
    "exploding": "Norms got out of hand in this run: start with {1}, at what they were at first.",
    "spikes": "Single norms are far above the others, on {}: cut them, and start with {}.",
    "": "Clipping will not help here: no client's norms, and no single norm, are far above others.",
}
_WHY = {
    "step.fixed": "Cuts whatever is longer than what is usual for most clients.",
    "step.learnt": "Cuts spikes. Each client follows its own norms: one that is wrong stays so.",
    "step.shared": "All clients have one limit, so one unlike the others is cut, but late.",
    "update.fixed": "Bounds what a client does to the model, even when norms fall later.",
    "update.adaptive": "Bounds what a client does to the model, whatever its steps were.",
    "aggregate.fixed": "Acts on the average, where one client can not be told from another.",
    "aggregate.learnt": "Acts on the average, where one client can not be told from another.",
}
_NAMES = {"step": "Steps", "update": "Updates", "aggregate": "Averages"}


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
    found = {norms.place: seen(norms) for norms in places if not norms.lacking}
    bad = {f.kind: f.text for f in report.only([experiment]).findings()}
    lost = [bad[kind] for kind in ("diverged", "nonfinite") if kind in bad]
    findings = [*lost, *_findings(places, found)]
    case, who = _case(found, bool(lost))
    order = [*_ORDERS.get(case, _ORDER), "aggregate.fixed", "aggregate.learnt"]
    ranked = sorted(
        (proposal for norms in places for proposal in proposals(norms, case == "exploding")),
        key=lambda proposal: order.index(proposal.name),
    )
    start = ranked[0].name if case else ""
    answer = _ANSWERS[case].format(who, start) if found else "There are no norms to choose by."
    return Advice(
        printable(answer),
        [printable(text) for text in findings],
        [replace(proposal, why=_WHY[proposal.name]) for proposal in ranked],
        start,
    )


def _case(found: Mapping[str, Seen], lost: bool) -> tuple[str, str]:
    """Return what decides the order, "" where nothing is unusual, and who shows it."""
    clients = {place: found[place] for place in ("step", "update") if place in found}
    for place, one in clients.items():
        if one.odd:
            times = f"{number(max(one.odd.values()))} times"
            return "two" if one.two else place, f"{_listed([*one.odd])} are {times}"
    if clients and (lost or any(one.exploding for one in clients.values())):
        return "exploding", ""
    spiky = [*found.get("step", Seen()).spikes]
    return ("spikes", _listed(spiky)) if spiky else ("", "")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _findings(places: list[Norms], found: Mapping[str, Seen]) -> Iterator[str]:
    for one in found.values():
        yield from one.texts
    for norms in places:
        if norms.lacking and norms.place != "aggregate":
            yield f"{_NAMES[norms.place]}: {norms.lacking}."
        if norms.rows and (share := norms.whole.clipped_share) and norms.rows[0].name != "no-op":
            yield (
                f"{_NAMES[norms.place]}: {share:.0%} were clipped in this run; without that, later "
                "norms might have been larger."
            )
