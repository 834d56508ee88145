# SPDX-License-Identifier: Apache-2.0
"""Counts the replies of a site, of any kind: whether and when one leaves says something, too.

::

    Admit(run):                           before an app sees a message
        lock the file; join its lines with those that this process knows
        refuse if the run, or all runs together, have had as many as the policy allows
        add a line; only then may there be a reply
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from fedclip.privacy.locks import locked

__all__ = ["Replies"]

_COUNTING = threading.Lock()
# What was counted under each path: a file that is put back takes nothing from it.
_OF_THIS_PROCESS: dict[Path, set[str]] = {}


class Replies:
    """A count of replies, in one file for all processes of a site.

    Parameters
    ----------
    per_run, most
        Largest number of replies in one run, and in all.
    path
        The file, made if needed; None: the count ends with this object.

    Examples
    --------
    >>> replies = Replies(2, 3)
    >>> [replies.admit(run) for run in ("a", "a", "a", "b", "b")]
    ['', '', 'max_replies_per_run = 2', '', 'max_replies = 3']
    """

    def __init__(self, per_run: int, most: int, path: Path | None = None) -> None:
        self.per_run, self.most = per_run, most
        self.path = None if path is None else Path(os.path.realpath(path))
        self._lines: set[str] = set()
        if self.path is not None:
            self._lines = _OF_THIS_PROCESS.setdefault(self.path, self._lines)

    def admit(self, run: str) -> str:
        """Count one more reply of a run; return the limit that forbids it, else "".

        Raises
        ------
        OSError
            If the file cannot be read or written; then nothing may leave.
        """
        line = f"{hashlib.sha256(run.encode()).hexdigest()[:32]} {uuid4().hex}"
        with self._joined() as lines:
            if len(lines) >= self.most:
                return f"max_replies = {self.most}"
            if sum(one.startswith(line[:33]) for one in lines) >= self.per_run:
                return f"max_replies_per_run = {self.per_run}"
            lines.add(line)
        return ""

    @contextmanager
    def _joined(self) -> Iterator[set[str]]:
        """Give the lines of file and process; those that are new go to the file at the end."""
        with _COUNTING:
            if self.path is None:
                yield self._lines
                return
            with locked(self.path.with_name(f"{self.path.name}.lock"), wait=True):
                text = self.path.read_bytes() if self.path.exists() else b""
                # A line that a crash has cut off counts, too.
                found = {*text.decode(errors="replace").split("\n")} - {""}
                self._lines |= found
                yield self._lines
                if fresh := sorted(self._lines - found):
                    with self.path.open("ab") as file:
                        file.write("\n".join(["", *fresh, ""]).encode())
                        file.flush()
                        os.fsync(file.fileno())
