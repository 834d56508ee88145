# SPDX-License-Identifier: Apache-2.0
"""How far runs are, and how long they still take."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeAlias

from fedclip.report import printable

Tell: TypeAlias = Callable[[str, int, str], None]
"""Takes the name of a task, how many rounds of it are done, and what to say of it."""


def progress(tasks: Mapping[str, int], quiet: bool = False) -> Tell:
    """Return what says how far tasks are, given how many rounds each has; or says nothing.

    On a terminal each line is written over the one before; elsewhere there is one for each
    twentieth of a task.
    """
    over = sys.stderr.isatty()
    begun = dict.fromkeys(tasks, time.monotonic())
    said = dict.fromkeys(tasks, 0)

    def tell(task: str, done: int, text: str) -> None:
        total = tasks[task]
        if not done:
            begun[task] = time.monotonic()
        early = done < total and not over and done < said[task] + total / 20
        if quiet or early or done <= said[task]:
            return
        said[task] = done
        line = f"{task}: {done} of {total} rounds done"
        # A narrow terminal cuts off what comes last.
        if done < total:
            each = (time.monotonic() - begun[task]) / done
            line += f", about {timedelta(seconds=round(each * (total - done)))} left"
        line = printable(f"{line}, {text}" if text else line)
        if over:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        end = "" if over and done < total else "\n"
        print(line, end=end, file=sys.stderr, flush=True)

    return tell
