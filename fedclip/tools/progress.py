# SPDX-License-Identifier: Apache-2.0
"""How far runs are, and how long they still take: bars on a terminal, lines anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from fedclip.report import number
from fedclip.report.curves import read_curves
from fedclip.tools.output import say

__all__ = ["Tell", "latest", "progress", "seconds"]

Tell: TypeAlias = Callable[[str, int, str], None]
"""Takes the name of a task, how much of it is done, and what to say of it."""


def latest(file: Path) -> str:
    """Return the last loss and metrics in a file of declearn's, in words; "" without any."""
    curves = read_curves("", file, 0, {})
    named = {curve.metric: number(curve.last[1]) for curve in curves}
    first = [name for name in ("loss", "accuracy") if name in named]
    return ", ".join(f"{name} {named[name]}" for name in first or list(named)[:1])


def seconds(time_left: float) -> str:
    """Return a duration in words.

    Examples
    --------
    >>> seconds(4.2), seconds(75), seconds(7300)
    ('4 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(time_left)
    minutes, rest = divmod(whole, 60)
    hours = minutes // 60
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def progress(tasks: Mapping[str, int | None], quiet: bool = False) -> Iterator[Tell]:
    """Show the progress of tasks, given how much there is to do of each; `quiet` shows none."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if quiet:
        yield lambda task, done, text: None
        return
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield _lines(tasks)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        # Of several tasks, each begins when it is first told of.
        alone = len(tasks) == 1
        known = {
            task: bars.add_task(task, start=alone, total=total, text="")
            for task, total in tasks.items()
        }

        def tell(task: str, done: int, text: str) -> None:
            bars.start_task(known[task])
            bars.update(known[task], completed=done, text=text)

        yield tell


def _lines(tasks: Mapping[str, int | None]) -> Tell:
    """Return what prints a line whenever another twentieth of a task is done."""
    begun = dict.fromkeys(tasks, time.monotonic())
    said = dict.fromkeys(tasks, 0)

    def tell(task: str, done: int, text: str) -> None:
        total = tasks[task]
        if not done:
            begun[task] = time.monotonic()
        if done <= said[task] or (total and done < total and done < said[task] + total / 20):
            return
        said[task] = done
        left = ""
        if total and done < total:
            left = (
                f", about {seconds((time.monotonic() - begun[task]) / done * (total - done))} left"
            )
        of = f" of {total}" if total else ""
        say(f"{task}: {done}{of} done{f', {text}' if text else ''}{left}", err=True)
        sys.stderr.flush()

    return tell
