# SPDX-License-Identifier: Apache-2.0
"""Which proposal to start with, and why; docs/suggest.md has the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedclip.report import Report, number, printable
from fedclip.report.advice import Advice
from fedclip.report.place import Norms
from fedclip.report.rows import listed
from fedclip.report.seeing import Seen, seen, told
from fedclip.tools.suggest.norms import read_norms
from fedclip.tools.suggest.proposing import proposals

__all__ = ["advised"]

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
