# SPDX-License-Identifier: Apache-2.0
"""Propose what to clip first, by the norms of a run; docs/suggest.md has the rules."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from fedclip import MadClip, ZScoreClip
from fedclip.core.parameters import Config
from fedclip.core.toml import toml_line
from fedclip.report import Report, Row, number, printable
from fedclip.report.findings import Advice, Lines, Proposal
from fedclip.report.norms import (
    Norms,
    Unusual,
    client_findings,
    norms_by_stage,
    rounded,
    unusual_norms,
)
from fedclip.report.results import Result, result_of
from fedclip.report.rows import listed

# Clients whose numbers of steps in a round differ by less than this factor have the same weight.
_ALIKE = 1.2
# With more clients than this, only the lowest, the median and the highest are named.
_NAMED = 8
_CHOSEN = (
    "The limit depends on the norms of this run, and no privacy budget covers that. Afterwards it "
    "is fixed, and bounds the sensitivity."
)
_TEXTS = {
    "step.fixed": (
        "one fixed limit, from the norms of the median client",
        "Clips norms that are larger than usual for most clients.",
        _CHOSEN,
    ),
    "step.learnt": (
        "an adaptive limit for each client",
        "Clips spikes. Each client uses only its norms, so an outlier is not clipped.",
        "Nothing: norms stay at the client. The limit is not known in advance, so it bounds no "
        "sensitivity.",
    ),
    "step.shared": (
        "one adaptive limit for all clients",
        "Clips outliers, but not in the first rounds.",
        "In each round every client sends a histogram of its norms, unencrypted unless secure "
        "aggregation is on. The limit bounds no sensitivity.",
    ),
    "update.fixed": (
        "one fixed bound for updates, from the norms of the median client",
        "Limits the influence of each client. The bound stays the same when norms fall.",
        _CHOSEN,
    ),
    "update.adaptive": (
        "an adaptive bound at the median norm of the updates, starting at that of round 1",
        "Limits the influence of each client, whatever its steps were.",
        "The first bound depends on the norms of this run. In each round every client sends one "
        "bit: whether its update was below the bound. To cover it by a privacy budget, set "
        "noise_multiplier (`fedclip privacy plan`); all clients then have the same weight.",
    ),
}
"""What each proposal does, where it helps, and what it reveals about the data."""


def proposals(norms: Norms, early: bool = False, cut: Collection[str] = ()) -> Iterator[Proposal]:
    """Yield the proposals for one stage.

    Fixed limits are above about 95 % of the norms of the median client. If norms of later rounds
    are of no use (`early`), they are above half of those of the first round. If that would clip
    another client more than those to be clipped (`cut`), they are above the usual norms of all
    others.
    """
    if norms.lacking or not (limit := norms.middle(0.5 if early else 0.95, early)):
        return
    if cut and not early:
        limit = _spared(norms, limit, cut)
    limit, order = rounded(limit), norms.order
    shares, sections = norms.above(limit), ("client_opt", "server_opt")
    if norms.stage == "step":
        fixed = ("norm-clip", {"max_norm": limit, **order})
        mad, server = (MadClip.name, {"shared": True, **order}), (f"{MadClip.name}-server", order)
        yield _proposal(norms, "fixed", {"client_opt": fixed}, shares, limit)
        yield _proposal(norms, "learnt", {"client_opt": (ZScoreClip.name, order)})
        yield _proposal(norms, "shared", dict(zip(sections, (mad, server), strict=True)))
        return
    counts = norms.effort.values()
    # With equal weights, a few records would count as much as many.
    weights = {"weights": "steps"} if counts and max(counts) > _ALIKE * min(counts) else {}
    fixed = ("clipped-averaging", {"max_norm": limit, **weights})
    yield _proposal(norms, "fixed", {"aggregator": fixed}, shares, limit)
    # In 20 rounds this rate was 0 to 1 point of accuracy better than the default.
    follows = {"start_norm": rounded(norms.middle(0.5, first=True) or limit)}
    lines: Lines = {
        "aggregator": ("clipped-averaging", weights),
        "client_opt": ("update-clip-client", {}),
        "server_opt": ("update-clip-server", follows),
    }
    yield _proposal(norms, "adaptive", lines, norms.above_the_median())


def _spared(norms: Norms, limit: float, cut: Collection[str]) -> float:
    """Return a limit that clips no other client more than those in `cut`, if there is one."""
    others = [record for name, record in norms.clients.items() if name not in cut]
    tails = max((record.norm_quantile(0.95) or 0.0 for record in others), default=limit)
    usual = max((norms.usual(name) for name in norms.clients if name not in cut), default=limit)
    for higher in (limit, tails, usual, *(norms.usual(name) for name in cut if len(cut) == 1)):
        shares = norms.above(rounded(higher)) if higher > 0 else {}
        least = min((shares[name] for name in cut if name in shares), default=0.0)
        if higher >= limit and 0 < least >= max(s for n, s in shares.items() if n not in cut):
            return higher
    return limit


def _proposal(
    norms: Norms,
    kind: str,
    lines: Lines,
    shares: Mapping[str, float] | None = None,
    limit: float | None = None,
) -> Proposal:
    name, shares, module = f"{norms.stage}.{kind}", shares or {}, norms.rows[0].module
    toml, clipped = [*_toml(lines)], _in_words(shares)
    return Proposal(name, lines, shares, limit, module, *_TEXTS[name], toml, clipped)


def _toml(plugins: Lines) -> Iterator[str]:
    """Yield the lines of TOML of some plug-ins, section by section."""
    for section, (name, config) in plugins.items():
        if section == "aggregator":
            yield "[optim]"
            yield toml_line("aggregator", name, config)
        else:
            yield f"[optim.{section}]"
            yield toml_line("module", name, config)


def _in_words(shares: Mapping[str, float]) -> str:
    """Return the share of each client, or those of the lowest, the middle and the highest.

    Examples
    --------
    >>> _in_words({"a": 0.051, "b": 1.0})
    '5.1 % of a, 100 % of b'
    """
    shown = [*shares.items()]
    if len(shown) > _NAMED:
        order = sorted(shown, key=lambda item: item[1])
        shown = [order[0], order[len(order) // 2], order[-1]]
    text = ", ".join(f"{100 * share:.3g} % of {name}" for name, share in shown)
    if len(shares) <= _NAMED:
        return text
    return f"{text} (lowest, median and highest of {len(shares)} clients)"


# So many proposals are shown in full.
_FULL = 3

_ORDERS = {
    "update": ("update.adaptive", "step.fixed", "step.shared", "update.fixed", "step.learnt"),
    "step": ("step.fixed", "update.adaptive", "step.shared", "update.fixed", "step.learnt"),
}
_ORDER = ("step.fixed", "step.learnt", "update.adaptive", "step.shared", "update.fixed")
"""The order of the proposals, if clients are outliers at that stage, and otherwise."""
_ANSWERS = {
    "step": "The norms of the steps of {} those of the median client: limit the influence of each "
    "client with {}.",
    "update": "The norms of the updates of {} those of the median client: limit the influence of "
    "each client with {}.",
    "two": "The norms of {} those of the other client. With two clients, either may be the "
    "outlier: try {}.",
    "diverged": "The model has diverged. Start with {1}, chosen by the norms of the first round.",
    "spikes": "Some single norms are far above the usual, on {}: clip them with {}.",
    "tune": "To see whether a limit helps, run `fedclip tune`: {}.",
    "private": "This run adds noise for privacy, so no norms are recorded: plan the limit with "
    "`fedclip privacy`.",
    "none": "This run has no norms to choose a limit by.",
    "": "Clipping is unlikely to help here: no client and no single norm is far above the others. "
    "Norms do not show label noise at all sites: to test for it, run `fedclip tune`.",
}


def advised(report: Report, experiment: str) -> Advice:
    """Return what to clip first and why, by the norms and metrics of one federation of a report.

    Parameters
    ----------
    report
        The report of the run.
    experiment
        The folder of the federation, one of `report.experiments`.

    Raises
    ------
    ValueError
        If a node's configuration cannot be read, so that the order of its norms is unknown.
    """
    report = report.only([experiment])
    places = read_norms(report, experiment)
    unusual, result = unusual_norms(places), result_of(report, experiment)
    bad = {f.kind: f.text for f in report.findings()}
    lost = [bad[kind] for kind in ("diverged", "nonfinite") if kind in bad]
    findings = [*lost, *client_findings(unusual), *result.findings()]
    findings += [] if _protected(report) else _clipped(places)
    # Norms of later rounds are then of no use.
    early = "diverged" in bad
    case, who = _case(unusual, early, result)
    if not unusual:
        case = "private" if _protected(report) else "none"
    if case == "spikes":
        # A spike may spoil the model, and with it the norms of all clients from then on.
        first = min(min(rounds) for rounds in unusual["step"].spikes.values())
        places = [norms.until(first) for norms in places]
    ranked = sorted(
        (
            proposal
            for norms in places
            for proposal in proposals(norms, early, clients_to_clip(unusual))
        ),
        key=lambda proposal: _ORDERS.get(case, _ORDER).index(proposal.name),
    )
    fit = ranked if early else [p for p in ranked if spares_healthy(p, clients_to_clip(unusual))]
    if case in ("step", "update", "two", "diverged", "spikes"):
        ranked = [*fit, *(p for p in ranked if p not in fit)]
        if not fit:
            case, who = "tune", f"{who} the median, and each limit would clip the others more"
    start = ranked[0].name if case in ("step", "update", "two", "diverged", "spikes") else ""
    answer = _ANSWERS[case].format(who, start)
    odd = [*dict.fromkeys(name for stage in unusual.values() for name in stage.odd)]
    return Advice(printable(answer), [*map(printable, findings)], ranked, start, odd)


def clients_to_clip(unusual: Mapping[str, Unusual]) -> list[str]:
    """Return the clients that a limit is to clip: outliers, or without any those with spikes."""
    odd = dict.fromkeys(name for stage in unusual.values() for name in stage.odd)
    return [*(odd or unusual.get("step", Unusual()).spikes)]


def spares_healthy(proposal: Proposal, cut: Collection[str]) -> bool:
    """Whether it clips no other client more often than those that it is to clip, if known."""
    others = [share for name, share in proposal.shares.items() if name not in cut]
    cut_shares = [share for name, share in proposal.shares.items() if name in cut]
    return not cut_shares or max(others, default=0.0) <= min(cut_shares)


def read_norms(report: Report, experiment: str) -> list[Norms]:
    """Return the norms of steps, and of updates, of one federation of a report."""
    steps, updates = norms_by_stage(
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
        If the configuration cannot be read: the order of the norms is then unknown.
    """
    folder = report.folder if row.node == report.folder.resolve().name else report.folder / row.node
    file = folder / "optimizer_config.json"
    if not file.exists():
        return {}
    try:
        name, config = json.loads(file.read_text(encoding="utf-8"))["modules"][row.index]
        order = config.get("ord", 2) if name == row.name else 2
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f"cannot read {file}, which has the order of the norms") from exc
    return {} if order == 2 else {"ord": order}


def _case(unusual: Mapping[str, Unusual], early: bool, result: Result) -> tuple[str, str]:
    """Return what decides, "" where nothing is unusual, and whom it is about."""
    single = result.single()
    for place, stage in unusual.items():
        if odd := [name for name in stage.odd if place == "step" or name not in single]:
            times = f"{'up to ' * (len(odd) > 1)}{number(max(stage.odd[n] for n in odd))} times"
            return "two" if stage.two else place, f"{listed(odd)} are {times}"
    if unusual and early:
        return "diverged", ""
    steps = unusual.get("step", Unusual())
    if steps.spikes:
        return "spikes", listed([*steps.spikes])
    if odd := [name for stage in unusual.values() for name in stage.odd]:
        return "tune", f"the updates of {listed(odd)} are longer, and its data has only one class"
    if worse := result.worse():
        return "tune", f"{listed([*worse])} far worse than other clients, with usual norms"
    if steps.small:
        return "tune", f"the norms of {listed([*steps.small])} are far below those of other clients"
    return "", ""


def _clipped(places: list[Norms]) -> Iterator[str]:
    for norms in places:
        share = norms.whole.clipped_share
        if norms.lacking:
            yield f"{norms.stage.capitalize()}s: {norms.lacking[0]}."
        elif share and norms.rows[0].name != "no-op":
            yield (
                f"{norms.stage.capitalize()}s: {share:.0%} were clipped in this run, so later "
                "norms may be smaller than without clipping."
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
        yield "How much each proposal helped in experiments: docs/study.md"
    for place, proposal in enumerate(advice.proposals):
        mark = " (start here)" if proposal.name == advice.start else ""
        if use in ("", proposal.name):
            yield ""
            yield from _wrapped(f"{proposal.name}{mark}: {proposal.what}", 0)
            yield from _wrapped(proposal.why, 2)
        if use == proposal.name or (not use and place < _FULL):
            yield from _rest(proposal)
        elif not use:
            yield f"  To see it in full:  --use {proposal.name}"


def _rest(proposal: Proposal) -> Iterator[str]:
    if proposal.clipped:
        yield from _wrapped(f"It would have clipped {proposal.clipped}.", 2)
    yield from _wrapped(f"Reveals: {proposal.reveals}", 2)
    for line in proposal.toml:
        yield f"    {line}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )
