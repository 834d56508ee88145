# SPDX-License-Identifier: Apache-2.0
"""Counts the replies of a site, of any kind: whether and when one leaves says something, too.

::

    Admit(run):                           before an app sees a message
        lock the file; read its lines, and those that this process knows and it lacks
        refuse if the run, or all runs together, have had as many as the policy allows
        add a line; only then may there be a reply
"""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import ExitStack
from pathlib import Path

from fedclip.privacy.locks import locked

_COUNTING = threading.Lock()
# What was counted under each path: a file that is put back takes nothing from it.
_OF_THIS_PROCESS: dict[Path, list[str]] = {}


class Replies:
    """A count of replies, in one file for all processes of a site.

    Parameters
    ----------
    per_run, most
        Largest number of replies in one run, and in all.
    path
        The file, with a line for each reply, made if needed; None: the count ends with this object.

    Examples
    --------
    >>> replies = Replies(2, 3)
    >>> [replies.admit(run) for run in ("a", "a", "a", "b", "b")]
    ['', '', 'max_replies_per_run = 2', '', 'max_replies = 3']
    """

    def __init__(self, per_run: int, most: int, path: Path | None = None) -> None:
        self.per_run, self.most, self.path = per_run, most, path
        key = None if path is None else Path(os.path.realpath(path))
        self._known = _OF_THIS_PROCESS.setdefault(key, []) if key else list[str]()

    def admit(self, run: str) -> str:
        """Count one more reply of a run; return the limit that forbids it, else "".

        Raises
        ------
        OSError
            If the file cannot be read or written; then nothing may leave.
        """
        name = hashlib.sha256(run.encode()).hexdigest()
        with _COUNTING, ExitStack() as files:
            if self.path is not None:
                lock = self.path.with_name(f"{self.path.name}.lock")
                files.enter_context(locked(lock, wait=True))
            there = self._read()
            # A file is only added to: one that is shorter was put back.
            self._known.extend(there[len(self._known) :])
            limit = ""
            if len(self._known) >= self.most:
                limit = f"max_replies = {self.most}"
            elif self._known.count(name) >= self.per_run:
                limit = f"max_replies_per_run = {self.per_run}"
            else:
                self._known.append(name)
            if self.path is not None and (lacking := self._known[len(there) :]):
                with self.path.open("a", encoding="ascii") as file:
                    # After a line that a crash has cut off, and that counts, too.
                    file.write("\n".join(["", *lacking, ""]))
                    file.flush()
                    os.fsync(file.fileno())
        return limit

    def _read(self) -> list[str]:
        there = self.path is not None and self.path.exists()
        return self.path.read_text("ascii", "replace").split() if self.path and there else []
