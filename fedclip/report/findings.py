# SPDX-License-Identifier: Apache-2.0
"""Findings about the rounds of an experiment, in sentences, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fedclip.report.norms import client_findings, norms_by_stage, unusual_norms
from fedclip.report.rows import Curve, Row, experiment_of, grouped, limits, listed, number, pooled

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


def findings_of(
    rows: Sequence[Row], curves: Iterable[Curve], servers: frozenset[str], private: Iterable[str]
) -> Iterator[Finding]:
    """Yield what the rounds of whole gradients show: first what is about the model.

    Parameters
    ----------
    rows, curves
        The rounds of whole gradients, and the metrics.
    servers, private
        The nodes that are servers, and the clients that train by DP-SGD.
    """
    for curve in (c for c in curves if c.metric == "loss" and c.nonfinite and c.node in servers):
        text = f"The loss of {curve.node} is NaN or infinite from round {curve.nonfinite[0]} on"
        yield Finding("diverged", experiment_of(curve.node), "", f"{text}: the model has diverged.")
    clients = (row for row in rows if row.node not in servers)
    for experiment, members in grouped(clients, lambda row: experiment_of(row.node)).items():
        for text in client_findings(unusual_norms(norms_by_stage(members))):
            yield Finding("unlike", experiment, "", text)
    for experiment, nodes in grouped(private, experiment_of).items():
        text = f"DP-SGD on {listed(sorted(nodes))}: norms of records are never saved, because no"
        yield Finding("private", experiment, "", f"{text} noise covers them.")
    # One folder of nodes is one experiment, with one configuration.
    for experiment, members in grouped(rows, lambda row: experiment_of(row.node)).items():
        runs = grouped(members, lambda row: row.module + " on the server" * (row.node in servers))
        for clipper, chosen in runs.items():
            for kind, text in (_clipped(chosen), *_setter(chosen), *_nonfinite(chosen)):
                yield Finding(kind, experiment, clipper, text)


def _nonfinite(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    if bad := [row for row in rows if row.record.nonfinite]:
        count = sum(row.record.nonfinite for row in bad)
        names = [*grouped(bad, lambda row: row.node)]
        yield "nonfinite", f"Steps with NaN or infinity: {count} ({listed(names)})."


def _clipped(rows: Sequence[Row]) -> tuple[str, str]:
    """Return how much was clipped."""
    total, held = pooled(row.record for row in rows), limits(rows)
    steps, largest = total.steps, number(total.norm_max)
    # The module no-op counts what its limit would have clipped.
    was, were = ("would have been",) * 2 if rows[0].name == "no-op" else ("was", "were")
    step = "update" if rows[0].name.startswith("update-") else "step"
    if not held:
        return "no-limit", f"No limit was set. The largest norm of {steps:,} {step}s is {largest}."
    if not total.clipped:
        text = f"the largest norm, {largest}, is below the limit, {number(max(held))}"
        if total.norm_max is None or total.norm_max > max(held):
            text = f"each norm was below the limit at that {step}. The largest norm is {largest}; "
            text += f"the last limit was {number(held[-1])}"
        return "inert", f"No {step} {was} clipped: {text}."
    if total.clipped >= _NEARLY_ALL * steps:
        text = f"{total.clipped_share:.0%} of {steps:,} {step}s {were} clipped: the limit, not the "
        return "always", f"{text}gradient, decides the size of nearly every {step}."
    last = max(row.record.round for row in rows if row.record.clipped)
    if after := [row for row in rows if row.record.round > last]:
        ends, norm = limits(after), pooled(row.record for row in after).norm_median
        text = f"No {step} {was} clipped after round {last}: the last limit was"
        end = ends[-1] if ends else None
        return "inert", f"{text} {number(end)}, the median norm {number(norm)}."
    nodes = grouped(rows, lambda row: row.node)
    shares = {node: pooled(r.record for r in some).clipped_share for node, some in nodes.items()}
    most = max(shares, key=shares.__getitem__)
    often = f", most often on {most} ({shares[most]:.1%})" if len(shares) > 1 else ""
    return "clipped", f"{total.clipped_share:.1%} of {steps:,} {step}s {were} clipped{often}."


def _setter(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield which limit binds, for a clipper whose limit should follow the norms."""
    total = pooled(row.record for row in rows)
    limited = total.fixed + total.learnt + total.warmup
    if not limited or not any(row.adaptive for row in rows):
        return
    if total.warmup >= _NEARLY_ALL * limited:
        yield "warm-up", f"Still in warm-up: {total.warmup:,} of {total.steps:,} steps."
    elif total.fixed >= _NEARLY_ALL * limited:
        text = f"The fixed limit max_norm applied in {total.fixed / limited:.0%} of the limited "
        yield "fixed", f"{text}steps, so the clipper does not adapt: raise max_norm, or remove it."
    elif total.fixed or total.warmup:
        parts = {"adaptive": total.learnt, "fixed": total.fixed, "warm-up": total.warmup}
        shares = [f"{n / limited:.0%} {name}" for name, n in parts.items() if n]
        yield "limits", f"Limits: {', '.join(shares)}."


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
        The best first; if clipping will not help, `fedclip tune` can compare them.
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
