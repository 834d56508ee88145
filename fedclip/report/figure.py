# SPDX-License-Identifier: Apache-2.0
"""The report as a plot: one panel per node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedclip.report.rows import Row, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_panels(panels: Mapping[str, Iterable[Row]]) -> Figure:
    """Return a figure of panels by title."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for ax, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        _draw_norms(ax, rows)
        ax.set_title(printable(title), fontsize="medium", parse_math=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("round")
    for ax in axes[:, 0]:
        ax.set_ylabel("norm before clipping")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_norms(ax: Any, rows: Iterable[Row]) -> None:
    """Draw one node's rounds on matplotlib axes, always in the same colours.

    With several groups, draw the one with the largest norm in each round.
    """
    measured = [row.record for row in rows if row.record.norm_max is not None]
    worst = {record.round: record for record in sorted(measured, key=lambda r: r.norm_max or 0.0)}
    records = [worst[key] for key in sorted(worst)]
    rounds = [record.round for record in records]
    share = ax.twinx()
    share.bar(rounds, [r.clipped_share for r in records], color="tab:orange", alpha=0.25)
    share.set_ylim(0, 1)
    share.set_yticks([])
    # The legend is made from `ax`, but the bars are on another axes: add an entry for them.
    ax.fill_between(
        [], [], color="tab:orange", alpha=0.25, label="clipped share (full height: all)"
    )
    ax.fill_between(
        rounds,
        [_drawn(r.norm_min) for r in records],
        [_drawn(r.norm_max) for r in records],
        color="tab:blue",
        alpha=0.2,
        label="norms, smallest to largest",
    )
    medians = [_drawn(r.norm_median) for r in records]
    ax.plot(rounds, medians, color="tab:blue", marker=".", label="median norm")
    limits = [float("nan") if r.limit is None else r.limit for r in records]
    ax.plot(rounds, limits, color="tab:red", linestyle="--", label="limit")
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3)
    # Draw the lines above the bars, although the axes of the bars were made later.
    ax.set_zorder(share.get_zorder() + 1)
    ax.patch.set_visible(False)


def _drawn(value: float | None) -> float:
    """Return a value that a logarithmic axis can show."""
    return value if value is not None and value > 0 else float("nan")
