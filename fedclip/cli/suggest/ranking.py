# SPDX-License-Identifier: Apache-2.0
"""Which proposal to start with, and why; docs/suggest.md has the rules."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from fedclip.cli.suggest.proposing import proposals
from fedclip.core.parameters import Config
from fedclip.report import Report, Row, number, printable
from fedclip.report.advice import Advice, Proposal
from fedclip.report.place import Norms, places_of
from fedclip.report.results import Result, result_of
from fedclip.report.rows import listed
from fedclip.report.seeing import Seen, seen, told

# So many proposals are shown in full.
_FULL = 3

_ORDERS = {
    "update": ("update.adaptive", "step.fixed", "step.shared", "update.fixed", "step.learnt"),
    "step": ("step.fixed", "update.adaptive", "step.shared", "update.fixed", "step.learnt"),
}
_ORDER = ("step.fixed", "step.learnt", "update.adaptive", "step.shared", "update.fixed")
"""What comes first if clients are odd there, and otherwise."""
_ANSWERS = {
    "step": "The steps of {} the others': bound what a client can do, with {}.",
    "update": "The updates of {} the others': bound what a client can do, with {}.",
    "two": "The norms of {} the other's; of two, either may be the outlier: try {}.",
    "diverged": "The model has diverged: start with {1}, by the norms of the first round.",
    "spikes": "Single norms are far above the others, on {}: clip them, and start with {}.",
    "tune": "Only `fedclip tune` can tell whether a limit helps: {}.",
    "private": "Noise protects this run, and no norms are recorded to choose by: plan the limit "
    "with `fedclip privacy`.",
    "none": "There are no norms to choose by.",
    "": "Clipping will not help here: no client's norms, and no single norm, are far above others. "
    "Noise that all sites share does not show in norms: there, `fedclip tune` decides.",
}


def advised(report: Report, experiment: str) -> Advice:
    """Return what to clip first and why, by the norms and metrics of one federation of a report.

    Parameters
    ----------
    report
        What was read.
    experiment
        The folder of the federation, one of `report.experiments`.

    Raises
    ------
    ValueError
        If a node's configuration cannot be read, so that the order of its norms is unknown.
    """
    report = report.only([experiment])
    places = read_norms(report, experiment)
    found, result = seen(places), result_of(report, experiment)
    bad = {f.kind: f.text for f in report.findings()}
    lost = [bad[kind] for kind in ("diverged", "nonfinite") if kind in bad]
    findings = [*lost, *told(found), *result.told()]
    findings += [] if _protected(report) else _clipped(places)
    # Norms of later rounds are then of no use.
    early = "diverged" in bad
    case, who = _case(found, early, result)
    if not found:
        case = "private" if _protected(report) else "none"
    if case == "spikes":
        # A spike may spoil the model, and with it the norms of all clients from then on.
        first = min(min(rounds) for rounds in found["step"].spikes.values())
        places = [norms.until(first) for norms in places]
    ranked = sorted(
        (proposal for norms in places for proposal in proposals(norms, early, cut_of(found))),
        key=lambda proposal: _ORDERS.get(case, _ORDER).index(proposal.name),
    )
    fit = ranked if early else [p for p in ranked if spares_healthy(p, cut_of(found))]
    if case in ("step", "update", "two", "diverged", "spikes"):
        ranked = [*fit, *(p for p in ranked if p not in fit)]
        if not fit:
            case, who = "tune", f"{who} the others', and each limit would clip those more"
    start = ranked[0].name if case in ("step", "update", "two", "diverged", "spikes") else ""
    answer = _ANSWERS[case].format(who, start)
    odd = [*dict.fromkeys(name for one in found.values() for name in one.odd)]
    return Advice(printable(answer), [*map(printable, findings)], ranked, start, odd)


def cut_of(found: Mapping[str, Seen]) -> list[str]:
    """Return the clients that a limit is to clip: outliers, or without any those with spikes."""
    odd = dict.fromkeys(name for one in found.values() for name in one.odd)
    return [*(odd or found.get("step", Seen()).spikes)]


def spares_healthy(proposal: Proposal, cut: Collection[str]) -> bool:
    """Whether it clips no other client more often than those that it is to clip, if known."""
    others = [share for name, share in proposal.shares.items() if name not in cut]
    wanted = [share for name, share in proposal.shares.items() if name in cut]
    return not wanted or max(others, default=0.0) <= min(wanted)


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, and of updates, of one federation of a report."""
    steps, updates = places_of(
        r for r in report.whole if r.experiment == experiment and r.node not in report.servers
    )
    order = _order(report, steps.rows[0]) if steps.rows else {}
    return [dataclasses.replace(steps, order=order), updates]


def _protected(report: Report) -> bool:
    """Whether clients train by DP-SGD, or a server adds noise to their updates."""
    for node in report.servers:
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            text = (report.folder / node / "optimizer_config.json").read_text(encoding="utf-8")
            modules = json.loads(text)["modules"]
            if any(config.get("noise_multiplier") for _, config in modules):
                return True
    return bool(report.private)


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


def _case(found: Mapping[str, Seen], early: bool, result: Result) -> tuple[str, str]:
    """Return what decides, "" where nothing is unusual, and whom it is about."""
    single = result.single()
    for place, one in found.items():
        if odd := [name for name in one.odd if place == "step" or name not in single]:
            times = f"{'up to ' * (len(odd) > 1)}{number(max(one.odd[n] for n in odd))} times"
            return "two" if one.two else place, f"{listed(odd)} are {times}"
    if found and early:
        return "diverged", ""
    steps = found.get("step", Seen())
    if steps.spikes:
        return "spikes", listed([*steps.spikes])
    if odd := [name for one in found.values() for name in one.odd]:
        return "tune", f"the updates of {listed(odd)} are longer, and all of one class"
    if worse := result.worse():
        return "tune", f"{listed([*worse])} far worse than the others, with usual norms"
    if steps.small:
        return "tune", f"the norms of {listed([*steps.small])} are far smaller than the others'"
    return "", ""


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


# -- in lines of text, for a terminal ------------------------------------------------------------
def in_words(advice: Advice, use: str = "") -> Iterator[str]:
    """Yield the answer, what it rests on, and the first proposals in full, line by line.

    With the name of a proposal to `use`, yield that one.
    """
    if not use:
        yield from _wrapped(advice.answer, 0)
        for text in advice.findings:
            yield from _wrapped(f"- {text}", 2)
        yield "What each of these was worth in trials, by trouble: docs/study.md"
    for place, proposal in enumerate(advice.proposals):
        mark = " (start here)" if proposal.name == advice.start else ""
        if use in ("", proposal.name):
            yield ""
            yield from _wrapped(f"{proposal.name}{mark}: {proposal.what}", 0)
            yield from _wrapped(proposal.why, 2)
        if use == proposal.name or (not use and place < _FULL):
            yield from _rest(proposal)
        elif not use:
            yield f"  In full:  --use {proposal.name}"


def _rest(proposal: Proposal) -> Iterator[str]:
    if proposal.clipped:
        yield from _wrapped(f"It would have clipped {proposal.clipped}.", 2)
    yield from _wrapped(f"What it reveals: {proposal.reveals}", 2)
    for line in proposal.toml:
        yield f"    {line}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )
