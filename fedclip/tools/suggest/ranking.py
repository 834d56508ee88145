# SPDX-License-Identifier: Apache-2.0
"""Which proposal to start with, and why; docs/suggest.md says the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedclip.report import Report, printable
from fedclip.report.advice import Advice, Proposal
from fedclip.tools.suggest.norms import Norms, read_norms
from fedclip.tools.suggest.proposing import proposals
from fedclip.tools.suggest.seeing import Seen, seen

__all__ = ["advised"]

_ORDERS = {
    "odd update": ("update.adaptive", "step.shared", "update.fixed", "step.fixed", "step.learnt"),
    "odd step": ("step.shared", "update.adaptive", "step.fixed", "update.fixed", "step.learnt"),
    "exploding": ("step.fixed", "step.learnt", "update.fixed", "update.adaptive", "step.shared"),
    "spikes": ("step.learnt", "step.fixed", "step.shared", "update.adaptive", "update.fixed"),
    "": ("step.learnt", "update.adaptive", "step.fixed", "step.shared", "update.fixed"),
}
"""What comes first where, the best first; the server's own come last."""
_ANSWERS = {
    "odd update": "Bound what one client can do to the model: the updates of {} are {}.",
    "odd step": "Bound the steps by one limit for all clients: those of {} are {}.",
    "exploding": "Limit the steps before they grow out of hand, as they did in this run.",
    "spikes": "Cut the spikes: single norms are far above the usual ones of their client.",
    "": "Clipping will not help here: no client and no step is far above the others.",
    "nothing": "There are no norms to choose a limit by.",
}
_WHY = {
    "step.fixed": "The same limit at all times, though norms may fall while a model learns.",
    "step.learnt": "Each client follows its own norms; one unlike the others stays unlike them.",
    "step.shared": "All clients have one limit, so that one unlike the others is cut.",
    "update.fixed": "Bounds how far each client moves the model, by the same number at all times.",
    "update.adaptive": "Bounds how far each client moves the model, whatever its steps were.",
    "aggregate.fixed": "Acts on the average, in which one client's part can not be told apart.",
    "aggregate.learnt": "Acts on the average, in which one client's part can not be told apart.",
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
    places = {norms.place: norms for norms in read_norms(report, experiment)}
    found = {name: seen(norms) for name, norms in places.items() if not norms.lacking}
    bad = {f.kind: f.text for f in report.only([experiment]).findings()}
    case = _case(found, bad)
    ranked = _ranked([p for norms in places.values() for p in proposals(norms)], case)
    start = ranked[0].name if case and ranked else ""
    return Advice(
        _answer(case, found) if found else _ANSWERS["nothing"],
        [printable(text) for text in _findings(places, found, bad)],
        ranked,
        start,
    )


def _case(found: Mapping[str, Seen], bad: Mapping[str, str]) -> str:
    """Return what decides the order; "" where nothing is unusual."""
    steps, updates = found.get("step", Seen()), found.get("update", Seen())
    if updates.odd:
        return "odd update"
    if steps.odd:
        return "odd step"
    if steps.exploding or updates.exploding or bad.keys() & {"diverged", "nonfinite"}:
        return "exploding" if found else ""
    return "spikes" if steps.spikes or updates.spikes else ""


def _ranked(found: Sequence[Proposal], case: str) -> list[Proposal]:
    order = [*_ORDERS[case], "aggregate.fixed", "aggregate.learnt"]
    found = sorted(found, key=lambda proposal: order.index(proposal.name))
    return [replace(proposal, why=_WHY[proposal.name]) for proposal in found]


def _answer(case: str, found: Mapping[str, Seen]) -> str:
    odd = found.get(case.removeprefix("odd "), Seen()).odd
    names = " and ".join(odd) if len(odd) < 3 else f"{len(odd)} clients"
    times = f"{max(odd.values()):.3g} times those of the others" if odd else ""
    return printable(_ANSWERS[case].format(names, times))


def _findings(
    places: Mapping[str, Norms], found: Mapping[str, Seen], bad: Mapping[str, str]
) -> list[str]:
    said = [bad[kind] for kind in ("diverged", "nonfinite") if kind in bad]
    said += [text for one in found.values() for text in one.texts]
    for name, norms in places.items():
        if norms.lacking:
            said.append(f"{_NAMES[name]}: {norms.lacking}.")
        elif (share := norms.whole.clipped_share) and norms.rows[0].name != "no-op":
            said.append(
                f"{_NAMES[name]}: {share:.0%} were clipped in this run; without that, later norms "
                "might have been larger."
            )
    return said


_NAMES = {"step": "Steps", "update": "Updates", "aggregate": "Averages"}
