# SPDX-License-Identifier: Apache-2.0
r"""The ledger of what was spent of a budget, in a file that survives crashes and can be shared.

::

    Reserve(steps):                              before the first step of a round
        lock the file; read it
        allowed = how many of the steps still fit into the budget
        add them to what was spent; write the file; unlock it
    Charge():                                    before each step: one of those reserved
    Release():                                   after the last: give back those not taken

A process that is killed has thus paid for all steps of its round. Processes that share a file
see what the others have reserved.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from fedclip import parameters
from fedclip.privacy.accounting import Accountant, Release

__all__ = ["FILE", "Ledger", "read_ledger"]

FILE = "privacy_spent.json"
"""The name of a ledger in a client's checkpoint folder."""


def read_ledger(path: Path) -> Accountant:
    """Return what a file says was spent, at its delta.

    Raises
    ------
    ValueError
        If the file is not a ledger.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        accountant = Accountant(parameters.unit_interval(delta=content["delta"]))
        accountant.set_state(content["spent"])
    except (KeyError, OSError, TypeError, ValueError) as exc:
        raise ValueError(
            f"{path} is not a ledger of privacy spent ({exc}): give the file that belongs "
            "to these records, or another name if they were never used"
        ) from exc
    return accountant


class Ledger:
    """What was spent of a budget, and whether another step fits; kept in a file over restarts.

    Parameters
    ----------
    epsilon, delta
        The budget.
    path
        A file of JSON, made if it is not there; None: the ledger ends with the process.
    spent
        What was spent before, if there is no file that says so.

    Raises
    ------
    OSError
        If the file can not be written.
    ValueError
        If the file is not a ledger. (It is not overwritten: what it says was spent, was.)
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        path: Path | None = None,
        spent: Sequence[Release] = (),
    ) -> None:
        self.epsilon = parameters.positive(epsilon=epsilon)
        self.accountant = Accountant(parameters.unit_interval(delta=delta))
        self.accountant.spent = [*spent]
        self.path = path
        self._free = self._paid = Release(0.0, 0, 0.0)
        # A file that can not be had is found out now, and not in a round.
        with self._locked():
            pass

    @property
    def spent(self) -> float:
        """Epsilon of all steps so far, at the budget's delta, those reserved included."""
        return self.accountant.epsilon()

    def reserve(self, noise_multiplier: float, rate: float, steps: int, planned: int = 0) -> int:
        """Pay for so many steps, as far as they fit; return for how many.

        To account takes long: what is found out for the `planned` steps of the whole run holds
        until noise or rate change, or somebody else writes the file.
        """
        self.release()
        with self._locked():
            left = self._left(noise_multiplier, rate, steps, planned)
            allowed = min(steps, left)
            paid = Release(noise_multiplier, allowed, rate)
            if allowed:
                self.accountant.add(*paid)
                self._write()
            # What could not be written is not paid, and never given back.
            self._free, self._paid = paid._replace(steps=left - allowed), paid
        return allowed

    def charge(self, noise_multiplier: float, rate: float) -> None:
        """Count one step, before it is taken: one that was reserved, or else a new one.

        Raises
        ------
        StopIteration
            If it does not fit; nothing is counted then.
        """
        paid = self._paid.steps and _alike(self._paid, Release(noise_multiplier, 1, rate))
        if not paid and not self.reserve(noise_multiplier, rate, 1):
            raise StopIteration(
                f"the privacy budget is spent: epsilon {self.spent:.4g} of {self.epsilon:.4g} "
                f"at delta {self.accountant.delta:.3g}; another step would pass it"
            )
        self._paid = self._paid._replace(steps=self._paid.steps - 1)

    def release(self) -> None:
        """Give back the steps that were reserved and not taken."""
        unused, self._paid = self._paid, self._paid._replace(steps=0)
        if not unused.steps:
            return
        with self._locked():
            spent = self.accountant.spent
            for i, entry in enumerate(spent):
                left = entry.steps - unused.steps
                if _alike(entry, unused) and left >= 0:
                    spent[i : i + 1] = [entry._replace(steps=left)] if left else []
                    self._free = self._free._replace(steps=self._free.steps + unused.steps)
                    self._write()
                    break

    def _left(self, noise_multiplier: float, rate: float, steps: int, planned: int) -> int:
        wanted = Release(noise_multiplier, max(steps, planned), rate)
        if _alike(self._free, wanted) and self._free.steps >= steps:
            return self._free.steps
        if self.accountant.epsilon(*wanted) <= self.epsilon:
            return wanted.steps
        return self.accountant.affordable(noise_multiplier, self.epsilon, wanted.steps, rate)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from the file, and read what they have written."""
        if self.path is None:
            yield
            return
        # The ledger itself is replaced by each writer, so the lock is on a file beside it.
        with ExitStack() as files:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                name = f"{self.path.name}.lock"
                _lock(files.enter_context(self.path.with_name(name).open("a")))
            except OSError as exc:
                raise OSError(
                    f"no ledger can be kept at {self.path} ({exc}): name a file in a folder that "
                    "this process may write to, on a file system with locks"
                ) from exc
            # The lock ends when its file is closed.
            self._read()
            yield

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        spent = read_ledger(self.path).spent
        if spent != self.accountant.spent:
            self._free = self._free._replace(steps=0)
            self.accountant.spent = spent

    def _write(self) -> None:
        """Write the file, if there is one, so that a crash leaves the old one or the new one."""
        if self.path is None:
            return
        text = json.dumps(
            {
                "spent": self.accountant.get_state(),
                "delta": self.accountant.delta,
                "relation": self.accountant.relation,
                "sampling": "Poisson",
            }
        )
        fresh = self.path.with_name(f"{self.path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _alike(one: Release, other: Release) -> bool:
    """Whether two releases differ at most in their number of steps."""
    return one._replace(steps=other.steps) == other
