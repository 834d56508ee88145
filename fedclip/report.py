# SPDX-License-Identifier: Apache-2.0
"""What the clippers of an experiment did: read from declearn's checkpoints, while it runs or after.

The state of a clipper holds a record of each round, and declearn's `Checkpointer` saves the state
of every node's optimizer. So there is nothing to switch on, send or log:

1. Every folder below the given one that holds ``optimizer_state_*.mpk`` is a node.
2. The state files of a node are read in the order in which they were written. A later file
   replaces the rounds that an earlier one has too, as the earlier may be incomplete.
3. The rest is presentation: a table, a CSV file, a plot, sentences.

A damaged file is skipped, and the report names it. Names of nodes, clippers and groups are other
people's text: they are shown as they are, never read as markup.
"""

from __future__ import annotations

import csv
import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgpack

from fedclip.records import RoundRecord, read_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["Report", "ReportError", "Row", "printable", "read_report"]

ALL = "all"
"""The group that stands for the whole gradient."""

STATES = "optimizer_state_*.mpk"

COLUMNS = (
    "node",
    "module",
    "group",
    "round",
    "steps",
    "clipped",
    "clipped_share",
    "norm_min",
    "norm_median",
    "norm_max",
    "limit",
    "limit_min",
    "limit_max",
    "nonfinite",
)


class ReportError(ValueError):
    """There is nothing to report on; the message says what was looked for and what to do."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One round of one clipper on one node."""

    node: str
    position: int
    """Place of the clipper among the optimizer's modules, from 0."""
    name: str
    """Registered name of the clipper."""
    record: RoundRecord

    @property
    def module(self) -> str:
        """Name of the clipper, numbered if there are two of a kind, as in ``norm-clip#2``."""
        return self.name if self.position == 0 else f"{self.name}#{self.position + 1}"

    def as_dict(self) -> dict[str, Any]:
        """Return the row by column name, as in the CSV file."""
        own = {"node": self.node, "module": self.module}
        return {c: own[c] if c in own else getattr(self.record, c) for c in COLUMNS}


@dataclasses.dataclass(frozen=True)
class Report:
    """The rows of an experiment, sorted by node, clipper, group and round.

    Attributes
    ----------
    folder
        The folder that was read.
    rows
        The rows found; never empty.
    skipped
        State files that could not be read, normally because they are being written.
    """

    folder: Path
    rows: tuple[Row, ...]
    skipped: tuple[Path, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes: their folders, relative to the report's."""
        return tuple(dict.fromkeys(row.node for row in self.rows))

    def select(self, node: str | None = None, module: str | None = None) -> tuple[Row, ...]:
        """Return the rows of one node, of one clipper, or of both."""
        return tuple(
            row
            for row in self.rows
            if node in (None, row.node) and module in (None, row.module, row.name)
        )

    def table(self, groups: bool = False) -> Table:
        """Return the report as a table for a terminal, without columns that carry no information.

        Parameters
        ----------
        groups
            Show each group of a scope, not only the whole gradient.
        """
        from rich import box
        from rich.table import Table
        from rich.text import Text

        rows = [row for row in self.rows if groups or row.record.group == ALL]
        pairs = {(row.node, row.module) for row in rows}
        modules = len(pairs) > len({node for node, _ in pairs})
        title = Text(f"Clipping in {printable(self.folder.name or str(self.folder))}")
        table = Table(
            title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
        )
        # In a narrow terminal, fold names and keep numbers whole.
        for head in ["node", *["clipper"] * modules, *["group"] * groups]:
            table.add_column(head, overflow="fold", min_width=4)
        bad = any(row.record.nonfinite for row in rows)
        heads = ["round", "steps", "clipped", "median\nnorm", "max\nnorm", "limit"]
        for head in heads + ["non-finite"] * bad:
            table.add_column(head, justify="right", no_wrap=True)
        previous = ""
        for row in rows:
            if previous and row.node != previous:
                table.add_section()
            record = row.record
            names = [row.node if row.node != previous else ""]
            names += [row.module] if modules else []
            names += [record.group] if groups else []
            limit = record.limit if groups else self._limit(row)
            table.add_row(
                *(Text(printable(name)) for name in names),
                str(record.round) if record.round else "all",
                str(record.steps),
                f"{record.clipped_share:.0%}" if record.steps else "-",
                _number(record.norm_median),
                _number(record.norm_max),
                _number(limit),
                *([str(record.nonfinite)] if bad else []),
            )
            previous = row.node
        return table

    def _limit(self, row: Row) -> float | None:
        """Return the limit to show for a whole gradient: the smallest of its groups."""
        if row.record.limit is not None or row.record.group != ALL:
            return row.record.limit
        same = (
            other.record.limit
            for other in self.select(row.node, row.module)
            if (other.position, other.record.round) == (row.position, row.record.round)
        )
        return min((limit for limit in same if limit is not None), default=None)

    def write_csv(self, file: TextIO) -> None:
        """Write every row and every column as CSV; a missing number is an empty cell."""
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.as_dict() for row in self.rows)

    def figure(self) -> Figure:
        """Return one panel per node: norms as a band, limits as a line, clipped share as bars.

        Needs matplotlib, the extra ``fedclip[plot]``.
        """
        panels = {node: self.select(node) for node in self.nodes}
        return draw_panels(panels, columns=min(3, len(panels)))

    def in_words(self) -> list[str]:
        """Return the most important findings, one or two sentences for each clipper."""
        runs: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.record.group == ALL:
                # One folder of nodes is one experiment, with one configuration.
                runs.setdefault((row.node.rpartition("/")[0], row.module), []).append(row)
        sentences: list[str] = []
        for (folder, module), rows in runs.items():
            names = [folder] if len({key[0] for key in runs}) > 1 else []
            names += [module] if len({key[1] for key in runs}) > 1 else []
            limits = [limit for row in rows if (limit := self._limit(row)) is not None]
            prefix = f"{', '.join(names)}: " if names else ""
            sentences.extend(printable(prefix + text) for text in _sentences(rows, limits))
        return sentences


def read_report(folder: str | Path) -> Report:
    """Read what the clippers recorded in an experiment's checkpoints.

    Parameters
    ----------
    folder
        The ``checkpoint`` folder of an experiment, of one of its nodes, or one that holds
        several experiments: any folder with declearn checkpoints somewhere below.

    Raises
    ------
    ReportError
        If there is no such folder, no checkpoint in it, or no clipper of fedclip in those.
    """
    # `Path.is_dir` raises where a path is too long for the system.
    if not os.path.isdir(folder):
        what = "is a file" if os.path.isfile(folder) else "does not exist"
        raise ReportError(f"{folder} {what}; give the folder with the experiment's checkpoints")
    folder = Path(folder)
    found: list[Row] = []
    skipped: list[Path] = []
    others: set[str] = set()
    nodes = sorted({path.parent for path in folder.rglob(STATES)}, key=str)
    if not nodes:
        raise ReportError(
            f"{folder} holds no {STATES}: declearn writes them where a checkpoint folder is set "
            "(checkpoint = … in [experiment], or checkpoint=… for FederatedClient and "
            "FederatedServer)"
        )
    files = 0
    for node in nodes:
        label = node.relative_to(folder).as_posix() if node != folder else node.resolve().name
        rows: dict[tuple[int, str, str, int], Row] = {}
        last = 0
        for path in sorted(node.glob(STATES)):
            files += 1
            try:
                read = list(_read(path, label, others))
            except Exception:  # a file cut short or damaged may hold anything in any place
                skipped.append(path)
                continue
            # Rounds only go up within a run: a lower round starts another run in this folder.
            reached = max((row.record.round for row in read), default=0)
            if reached < last:
                rows.clear()
            last = reached
            for row in read:
                rows[row.position, row.name, row.record.group, row.record.round] = row
        found.extend(rows.values())
    if not found:
        if len(skipped) == files:
            raise ReportError(f"none of the {files} state files in {folder} can be read")
        names = ", ".join(sorted(others)) or "no module at all"
        raise ReportError(
            f"no records: no optimizer in {folder} uses a fedclip clipper (they use: {names}), or "
            "none has taken a step yet; the module 'no-op' measures without changing anything"
            + (f"; {len(skipped)} of its {files} state files can not be read" if skipped else "")
        )
    found.sort(key=lambda row: (row.node, row.position, row.name, row.record.round))
    return Report(folder, tuple(found), tuple(skipped))


def draw_panels(
    panels: Mapping[str, Iterable[Row]], columns: int, sharey: bool | Literal["row"] = True
) -> Figure:
    """Return a figure of panels by title, so many in a line."""
    from matplotlib.figure import Figure

    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=sharey)
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


def _read(path: Path, node: str, others: set[str]) -> Iterator[Row]:
    """Yield the rows of one optimizer state file, and add the names of modules without records.

    The place counts only modules of the same name, so that a clipper keeps its label when you
    put another kind of module in front of it.
    """
    # Values that declearn wraps, such as the vectors of other modules, stay wrapped.
    if not path.is_file():  # a pipe would be waited for
        raise OSError(f"{path} is no file")
    modules = msgpack.unpackb(path.read_bytes())["modules"]
    seen: Counter[str] = Counter()
    for name, state in modules:
        if not isinstance(name, str):
            raise TypeError(f"a module's name must be a string, got {name!r}")
        position = seen[name]
        seen[name] += 1
        if not isinstance(state, dict) or "rounds" not in state:
            others.add(name)
            continue
        for record in read_rounds(state):
            row = Row(node, position, name, record)
            row.as_dict()  # Computing the quantiles reveals damaged counts.
            yield row


def printable(text: str) -> str:
    r"""Return other people's text in a form that is safe to show: control characters escaped.

    Examples
    --------
    >>> print(printable("a\x1b[31mb\nc [red]"))
    a\x1b[31mb\nc [red]
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _drawn(value: float | None) -> float:
    """Return a value that a logarithmic axis can show."""
    return value if value is not None and value > 0 else float("nan")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1e5 else f"{value:.2e}"


def _sentences(rows: Sequence[Row], limits: Sequence[float]) -> list[str]:
    """Say in words what the rows of one clipper show."""
    records = [row.record for row in rows]
    steps, clipped = sum(r.steps for r in records), sum(r.clipped for r in records)
    largest = _number(max((r.norm_max for r in records if r.norm_max is not None), default=None))
    # The module no-op counts what its limit would have clipped.
    was, were = ("would have been",) * 2 if rows[0].name == "no-op" else ("was", "were")
    if not limits:
        said = [f"No limit was set; of {steps} steps, the largest norm is {largest}."]
    elif not clipped:
        limit = _number(max(limits))
        said = [f"No step {was} clipped: the largest norm, {largest}, is below the limit, {limit}."]
    elif clipped >= 0.95 * steps:
        said = [
            f"{clipped / steps:.0%} of {steps} steps {were} clipped: the limit, not the gradient, "
            "sets the length of nearly every step."
        ]
    else:
        last_clipped = max(r.round for r in records if r.clipped)
        after = [r for r in records if r.round > last_clipped]
        said = [_inert(last_clipped, after, was) if after else _share(rows, were)]
    bad = [row for row in rows if row.record.nonfinite]
    if bad:
        count = sum(row.record.nonfinite for row in bad)
        where = ", ".join(dict.fromkeys(row.node for row in bad))
        plural = "step had a gradient" if count == 1 else "steps had gradients"
        said.append(f"{count} {plural} with NaN or infinity ({where}).")
    return said


def _inert(last_clipped: int, after: Sequence[RoundRecord], was: str) -> str:
    limits = [r.limit for r in after if r.limit is not None]
    medians = sorted(r.norm_median for r in after if r.norm_median is not None)
    inert = f"the limit {_number(limits[-1])} is inert from there" if limits else "it is inert"
    middle = f"; the median norm is {_number(medians[len(medians) // 2])}" if medians else ""
    return f"No step {was} clipped after round {last_clipped}: {inert}{middle}."


def _share(rows: Sequence[Row], were: str) -> str:
    steps: Counter[str] = Counter()
    clipped: Counter[str] = Counter()
    for row in rows:
        steps[row.node] += row.record.steps
        clipped[row.node] += row.record.clipped
    shares = {node: clipped[node] / count for node, count in steps.items() if count}
    total = steps.total()
    sentence = f"{clipped.total() / total:.1%} of {total} steps {were} clipped"
    if len(shares) > 1:
        most = max(shares, key=shares.__getitem__)
        sentence += f", most often on {most} ({shares[most]:.1%})"
    return sentence + "."
