# SPDX-License-Identifier: Apache-2.0
"""Findings about the rounds of an experiment, in sentences, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fedclip.core.records import RoundRecord
from fedclip.report.norms import client_findings, norms_by_stage, unusual_norms
from fedclip.report.rows import (
    Curve,
    Limits,
    Row,
    experiment_of,
    grouped,
    known,
    listed,
    number,
    pooled,
)

# A limit binds nearly always, or one kind of limit rules, from this share of the steps on.
_NEARLY_ALL = 0.95


class Finding(NamedTuple):
    """One finding about a clipper of an experiment."""

    kind: str
    """One of "diverged", "private", "no-limit", "inert", "always", "clipped", "limits", "fixed",
    "warm-up", "unlike", "nonfinite".
    """
    experiment: str
    """Folder of the federation; "" if there is only one."""
    clipper: str
    """Its name; "" for what is about the model, or a client."""
    text: str


Said = Iterator[tuple[str, str]]
"""Kind and sentence."""


def clipper_findings(rows: Iterable[Row], limits: Limits, servers: frozenset[str]) -> list[Finding]:
    """Return the findings for each clipper, given rounds and limits of whole gradients."""
    # One folder of nodes is one experiment, with one configuration.
    runs = grouped(
        rows, lambda row: (row.experiment, row.module + " on the server" * (row.node in servers))
    )
    return [
        Finding(kind, experiment, clipper, text)
        for (experiment, clipper), chosen in runs.items()
        for kind, text in _all(chosen, limits)
    ]


def diverged(curves: Iterable[Curve], servers: frozenset[str]) -> list[Finding]:
    """Say from which round on the loss of a model was no number."""
    lost = [c for c in curves if c.metric == "loss" and c.nonfinite and c.node in servers]
    text = (
        "The loss of {} is NaN or infinite from round {} on: the model has diverged. Run `fedclip "
        "suggest` to find a limit."
    )
    return [
        Finding("diverged", c.experiment, "", text.format(c.node, c.nonfinite[0])) for c in lost
    ]


def unlike(rows: Iterable[Row]) -> list[Finding]:
    """Report clients whose norms differ much from those of other clients."""
    runs = grouped(rows, lambda row: row.experiment)
    return [
        Finding("unlike", experiment, "", text)
        for experiment, members in runs.items()
        for text in client_findings(unusual_norms(norms_by_stage(members)))
    ]


def unseen(private: Iterable[str]) -> list[Finding]:
    """Say why nothing is known of clients that train by DP-SGD but what they have spent."""
    nodes_by_experiment = grouped(private, experiment_of)
    text = (
        "DP-SGD on {}: norms of records, and how many were clipped, are never saved, because no "
        "noise covers them. You can see the noise and the spent budget."
    )
    return [
        Finding("private", experiment, "", text.format(listed(sorted(nodes))))
        for experiment, nodes in nodes_by_experiment.items()
    ]


def _all(rows: Sequence[Row], limits: Limits) -> Said:
    yield _clipped(rows, limits)
    yield from _setter(rows)
    bad = [row for row in rows if row.record.nonfinite]
    if bad:
        count = sum(row.record.nonfinite for row in bad)
        plural = "step had a gradient" if count == 1 else "steps had gradients"
        yield "nonfinite", f"{count} {plural} with NaN or infinity ({_named(bad)})."


def _clipped(rows: Sequence[Row], limits: Limits) -> tuple[str, str]:
    """Say how much was clipped."""
    records = [row.record for row in rows]
    total = pooled(records)
    steps, clipped, largest = total.steps, total.clipped, number(total.norm_max)
    held = known(rows, limits)
    # The module no-op counts what its limit would have clipped.
    was, were = ("would have been",) * 2 if rows[0].name == "no-op" else ("was", "were")
    step = "update" if rows[0].name.startswith("update-") else "step"
    if not held:
        return "no-limit", f"No limit was set. The largest norm of {steps:,} {step}s is {largest}."
    if not clipped and total.norm_max is None:
        return "inert", (
            f"No {step} {was} clipped; the last limit was {number(held[-1])}. The norms are "
            "unknown here."
        )
    if not clipped and (total.norm_max or 0.0) <= max(held):
        return "inert", (
            f"No {step} {was} clipped: the largest norm, {largest}, is below the limit, "
            f"{number(max(held))}."
        )
    if not clipped:
        return "inert", (
            f"No {step} {was} clipped: each norm was below the limit at that {step}. The largest "
            f"norm is {largest}; limits fell to {number(min(held))} later."
        )
    if clipped >= _NEARLY_ALL * steps:
        return "always", (
            f"{clipped / steps:.0%} of {steps:,} {step}s {were} clipped: the limit, not the "
            f"gradient, decides the size of nearly every {step}."
        )
    last = max(r.round for r in records if r.clipped)
    after = [row for row in rows if row.record.round > last]
    if not after:
        return "clipped", _share(rows, f"{step}s {were}")
    seen = pooled(row.record for row in after)
    ends = known(after, limits)
    parts = [f"No {step} {was} clipped after round {last}"]
    parts += [f"the last limit was {number(ends[-1])}"] * bool(ends)
    if seen.norm_median is not None:
        parts.append(f"the median norm was {number(seen.norm_median)}")
    return "inert", f"{parts[0]}{': ' * (len(parts) > 1)}{', '.join(parts[1:])}."


def _share(rows: Sequence[Row], steps_were: str) -> str:
    by_node = _by_node(rows)
    shares = {node: record.clipped_share for node, record in by_node.items() if record.steps}
    total = pooled(by_node.values())
    sentence = f"{total.clipped_share:.1%} of {total.steps:,} {steps_were} clipped"
    if len(shares) > 1:
        most = max(shares, key=shares.__getitem__)
        sentence += f", most often on {most} ({shares[most]:.1%})"
    return sentence + "."


def _setter(rows: Sequence[Row]) -> Said:
    """Say which limit binds, for a clipper whose limit should follow the norms."""
    total = pooled(row.record for row in rows)
    limited = total.fixed + total.learnt + total.warmup
    if not limited or not any(row.adaptive for row in rows):
        return
    if total.warmup >= _NEARLY_ALL * limited:
        text = (
            f"Still in warm-up: {total.warmup:,} of {total.steps:,} steps used the warm-up limit, "
            "because the clipper had too few norms for an adaptive limit."
        )
        yield "warm-up", text
    elif total.fixed >= _NEARLY_ALL * limited:
        text = (
            f"The fixed limit max_norm applied in {total.fixed / limited:.0%} of the limited "
            "steps, so the clipper does not adapt: raise max_norm, or remove it."
        )
        yield "fixed", text
    elif total.fixed or total.warmup:
        parts = {"adaptive": total.learnt, "fixed": total.fixed, "warm-up": total.warmup}
        shares = [f"{n / limited:.0%} {name}" for name, n in parts.items() if n]
        yield "limits", f"Limits: {', '.join(shares)}."


def _by_node(rows: Sequence[Row]) -> dict[str, RoundRecord]:
    nodes = grouped(rows, lambda row: row.node)
    return {node: pooled(row.record for row in members) for node, members in nodes.items()}


def _named(rows: Sequence[Row]) -> str:
    return listed([name for name, _ in Counter(row.node for row in rows).most_common()])


Lines: TypeAlias = Mapping[str, tuple[str, Mapping[str, object]]]
"""Name and parameters by section: of modules, or (section "aggregator") of the aggregator."""


@dataclass(frozen=True)
class Proposal:
    """Lines of configuration, and what they would have done to each client.

    Attributes
    ----------
    name
        Place and kind, as in "step.fixed".
    plugins
        Its lines.
    shares
        For each client, the share of its norms of this run, in [0, 1], that would have been
        clipped; empty if that is not known.
    limit
        The limit to draw, in the unit of the norms; None if it follows the norms or is not known.
    module
        The module whose norms it would have clipped; the page draws it there.
    what, why, reveals
        Effect, reason for the rank, and what it reveals about the data.
    toml, clipped
        Its lines as TOML, and its shares in words.
    """

    name: str
    plugins: Lines
    shares: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    module: str = ""
    what: str = ""
    why: str = ""
    reveals: str = ""
    toml: Sequence[str] = ()
    clipped: str = ""


@dataclass(frozen=True)
class Advice:
    """The answer to "which limit, and why?" for one federation.

    Attributes
    ----------
    answer
        One sentence: where to start and why, or that clipping will not help.
    findings
        The findings behind the answer, in sentences; the most important first.
    proposals
        The best first. Where clipping will not help, they are there to be compared with.
    start
        The name of the proposal to start with; "" if clipping will not help.
    odd
        The clients whose norms are far above those of the median client.
    """

    answer: str
    findings: Sequence[str] = ()
    proposals: Sequence[Proposal] = ()
    start: str = ""
    odd: Sequence[str] = ()
