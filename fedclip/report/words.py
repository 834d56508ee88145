# SPDX-License-Identifier: Apache-2.0
"""What the rounds of an experiment show, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fedclip.core.records import RoundRecord
from fedclip.report.curves import Curve
from fedclip.report.place import places_of
from fedclip.report.rows import Limits, Row, experiment_of, grouped, known, listed, number, pooled
from fedclip.report.seeing import seen, told

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


def findings(rows: Iterable[Row], limits: Limits, servers: frozenset[str]) -> list[Finding]:
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
    found = [c for c in curves if c.metric == "loss" and c.nonfinite and c.node in servers]
    said = (
        "The loss that {} measured was NaN or infinite after round {}: the model has diverged; "
        "see `fedclip suggest`."
    )
    return [
        Finding("diverged", c.experiment, "", said.format(c.node, c.nonfinite[0])) for c in found
    ]


def unlike(rows: Iterable[Row]) -> list[Finding]:
    """Say which clients have norms unlike the others'."""
    runs = grouped(rows, lambda row: row.experiment)
    return [
        Finding("unlike", experiment, "", text)
        for experiment, own in runs.items()
        for text in told(seen(places_of(own)))
    ]


def unseen(private: Iterable[str]) -> list[Finding]:
    """Say why nothing is known of clients that train by DP-SGD but what they have spent."""
    found = grouped(private, experiment_of)
    said = (
        "DP-SGD on {}: the norms of records, and how many were clipped, follow from the records "
        "without noise, so they are never kept. What may be seen is the noise, and the budget "
        "that was spent."
    )
    return [
        Finding("private", experiment, "", said.format(listed(sorted(nodes))))
        for experiment, nodes in found.items()
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
    whole = pooled(records)
    steps, clipped, largest = whole.steps, whole.clipped, number(whole.norm_max)
    held = known(rows, limits)
    # The module no-op counts what its limit would have clipped.
    was, were = ("would have been",) * 2 if rows[0].name == "no-op" else ("was", "were")
    step = "update" if rows[0].name.startswith("update-") else "step"
    if not held:
        return "no-limit", f"No limit was set; of {steps:,} {step}s, the largest norm is {largest}."
    if not clipped and whole.norm_max is None:
        return "inert", (
            f"No {step} {was} clipped; the limit was {number(held[-1])} in the end. The norms are "
            "not known here."
        )
    if not clipped and (whole.norm_max or 0.0) <= max(held):
        return "inert", (
            f"No {step} {was} clipped: the largest norm, {largest}, is below the limit, "
            f"{number(max(held))}."
        )
    if not clipped:
        return "inert", (
            f"No {step} {was} clipped: each norm was within the limit of its own {step}, even the "
            f"largest, {largest}. Limits have fallen to {number(min(held))} since."
        )
    if clipped >= _NEARLY_ALL * steps:
        return "always", (
            f"{clipped / steps:.0%} of {steps:,} {step}s {were} clipped: the limit, not the "
            f"gradient, sets the length of nearly every {step}."
        )
    last = max(r.round for r in records if r.clipped)
    after = [row for row in rows if row.record.round > last]
    if not after:
        return "clipped", _share(rows, f"{step}s {were}")
    seen = pooled(row.record for row in after)
    ends = known(after, limits)
    said = [f"No {step} {was} clipped after round {last}"]
    said += [f"the limit was {number(ends[-1])} in the end"] * bool(ends)
    if seen.norm_median is not None:
        said.append(f"the median norm was {number(seen.norm_median)}")
    return "inert", f"{said[0]}{': ' * (len(said) > 1)}{', '.join(said[1:])}."


def _share(rows: Sequence[Row], steps_were: str) -> str:
    whole = _by_node(rows)
    shares = {node: record.clipped_share for node, record in whole.items() if record.steps}
    total = pooled(whole.values())
    sentence = f"{total.clipped_share:.1%} of {total.steps:,} {steps_were} clipped"
    if len(shares) > 1:
        most = max(shares, key=shares.__getitem__)
        sentence += f", most often on {most} ({shares[most]:.1%})"
    return sentence + "."


def _setter(rows: Sequence[Row]) -> Said:
    """Say which limit binds, for a clipper whose limit should follow the norms."""
    whole = pooled(row.record for row in rows)
    limited = whole.fixed + whole.learnt + whole.warmup
    if not limited or not any(row.adaptive for row in rows):
        return
    if whole.warmup >= _NEARLY_ALL * limited:
        text = (
            f"Not yet warmed up: at {whole.warmup:,} of {whole.steps:,} steps the limit was that "
            "of the warm-up, because the clipper had not seen enough norms for one of its own."
        )
        yield "warm-up", text
    elif whole.fixed >= _NEARLY_ALL * limited:
        text = (
            f"The fixed limit held in {whole.fixed / limited:.0%} of the limited steps, so the "
            "clipper does not adapt: raise max_norm, or leave it out."
        )
        yield "fixed", text
    elif whole.fixed or whole.warmup:
        parts = {"learnt": whole.learnt, "fixed": whole.fixed, "from the warm-up": whole.warmup}
        shares = [f"{n / limited:.0%} {name}" for name, n in parts.items() if n]
        yield "limits", f"Where the limits came from: {', '.join(shares)}."


def _by_node(rows: Sequence[Row]) -> dict[str, RoundRecord]:
    nodes = grouped(rows, lambda row: row.node)
    return {node: pooled(row.record for row in own) for node, own in nodes.items()}


def _named(rows: Sequence[Row]) -> str:
    return listed([name for name, _ in Counter(row.node for row in rows).most_common()])
