# SPDX-License-Identifier: Apache-2.0
r"""The ledger of what was spent of a budget: lines that are added to a file, and never changed.

::

    Join():                                      whenever the ledger is used
        lock the file; read its lines
        add to it the lines that this process knows and the file lacks
        know those of the file, too
    Reserve(steps):                              before the first step of a round
        join
        allowed = how many of the steps still fit into the budget
        add a line that charges them; unlock the file
    Charge():                                    before each step: one of those reserved

Each line stands alone: releases, delta, relation, a fingerprint of the data, time, version of
fedclip, and an id, by which no two are the same. So lines of a file that was put back, deleted or
replaced and those of this process are joined, without losing one or counting it twice.

DP-SGD on a client, the policy of a site and the noise of a server write the same file. A server
also writes the schedule and the round of each line, which its messages to the clients repeat.

A plan may have releases of two kinds, steps and evaluations; its first line says how many of each.
Several runs on the same records are several plans, of which a later one may follow from what the
first has released. Then all are counted at one of Rényi's orders, which the first plan fixes.

Nothing is given back. A round that breaks off has paid for all of its steps: whether one of them
was taken may depend on a record that raised, or took long, and is then nothing to account by.

A crash may cut a line off while it is written; what it was for has not begun then. The next
writer marks it (`CUT`), so that any other unreadable line is damage, and refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple
from uuid import uuid4

from fedclip.core import parameters
from fedclip.core.plugins import VERSION
from fedclip.privacy.accounting import RELATIONS, Accountant, Release, merged, order_for, state_of

_LOGGER = logging.getLogger("declearn.client.fedclip")

FILE = "privacy_spent.json"
"""The name of a ledger in a client's checkpoint folder."""

CUT = "<cut off>"
"""The end of a line that a crash has cut off, and that charges nothing."""


class Entry(NamedTuple):
    """One line of a ledger.

    Attributes
    ----------
    spent
        The releases that it charges; none in the line with which a ledger begins.
    delta, relation
        Those of the budget in force.
    order
        At which plans are counted together, if the line says so.
    data, time, fedclip
        Fingerprint of the data, time, and version of fedclip; "" where a line says nothing.
    plan
        The most of each release, of a plan with more than one kind that this line begins.
    evaluation
        Whether an evaluation is charged, and no steps.
    schedule, round
        Which round of a server is charged; "" and 0 for other releases.
    """

    spent: tuple[Release, ...]
    delta: float
    relation: str
    order: float | None = None
    data: str = ""
    time: str = ""
    fedclip: str = ""
    plan: tuple[Release, ...] = ()
    evaluation: bool = False
    schedule: str = ""
    round: int = 0


# What was spent under each path: a file that is put back takes nothing from it.
_OF_THIS_PROCESS: dict[Path, dict[str, Entry]] = {}


def read_entries(path: Path, known: Mapping[str, Entry] | None = None) -> dict[str, Entry]:
    """Return the entry of each complete line of a ledger; `known` ones are not read again.

    Raises
    ------
    ValueError
        If the file is not a ledger, or a line of it is damaged.
    """
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        text = path.read_bytes().decode()
        lines, known = text.splitlines(), known or {}
        # The last line may be cut off, but a ledger begins with a whole one.
        if lines[not known :] and not text.endswith(("}", "\n")):
            lines.pop()
        complete = [line for line in lines if line and not line.endswith(CUT)]
        entries = {line: known.get(line) or _entry(line) for line in complete}
        if not entries and not known:
            raise ValueError("it is empty")
    except (OSError, RecursionError, TypeError, ValueError) as exc:
        text = f"{path} is not a ledger of privacy spent, or is damaged ({exc!s:.200})"
        advice = "give the file of these records, or another name if they were never used"
        raise ValueError(f"{text}: {advice}") from exc
    return entries


def total(entries: Iterable[Entry]) -> Accountant:
    """Return what entries have spent together, at delta and relation of the last of them.

    Order and plan are those of the first that has one.
    """
    entries = [*entries]
    first = next((entry for entry in entries if entry.order is not None), entries[-1])
    accountant = Accountant(entries[-1].delta, entries[-1].relation, first.order)
    accountant.plan = first.plan
    accountant.spent = merged(release for entry in entries for release in entry.spent)
    return accountant


def protected(data: str) -> tuple[int, str]:
    """Return the number and the unit of what a fingerprint protects; 0 and "" if unknown.

    >>> protected("9 records, features (4,)"), protected("the updates of a client")
    ((9, 'record'), (0, 'client'))
    """
    match = re.match(r"(?:(\d+) |the updates of a )(record|person|site|client)", data)
    return (int(match[1] or 0), match[2]) if match else (0, "")


def fingerprint(dataset: object, units: int, unit: str = "record") -> str:
    """Return names and sizes of a declearn `Dataset`, and nothing that follows a record.

    That leaves out its own specifications: a single record can change types and classes.

    >>> import numpy as np
    >>> from declearn.dataset import InMemoryDataset
    >>> fingerprint(InMemoryDataset(np.ones((9, 4)), target=np.ones(9)), 9)
    '9 records, features (4,)'
    """
    parts = [f"{units} {unit}s"]
    features = getattr(dataset, "feats", None)
    if features is not None:
        parts.append(f"features {tuple(map(int, features.shape[1:]))}")
        if hasattr(features, "columns"):
            names = hashlib.sha256(repr([*features.columns]).encode()).hexdigest()
            parts.append(f"names {names[:16]}")
    return ", ".join(parts)


class Ledger:
    """What was spent of a budget, and whether another step fits; kept in a file over restarts.

    Parameters
    ----------
    epsilon, delta
        The budget; without an epsilon, charges are counted and never refused.
    path
        A file of lines of JSON, made if it is not there; None: the ledger ends with the process.
    spent
        What was spent before, if no file says so.
    data
        The `fingerprint` of the records, or a name of what else is protected.
    relation
        The neighbouring data sets, one of `RELATIONS`.

    Attributes
    ----------
    plan
        The most of each release of this run, if it has more than one kind; of one kind, none.

    Raises
    ------
    OSError
        If the file is not writable.
    ValueError
        If the file is not a ledger, or one that protects records where these are persons, or the
        other way round. (It is not touched: what it says was spent, was.)

    Notes
    -----
    Guarantee: `spent` is never less than what this process has charged under this path, and what
    the file has held whenever it was used, whatever becomes of the file in between. What becomes
    of it while no process uses it cannot be seen.

    Lines that are of other data are counted like all others, and a warning names them: the same
    people may be in both, after records were added, or with other features.
    """

    def __init__(
        self,
        epsilon: float | None,
        delta: float,
        path: Path | None = None,
        spent: Sequence[Release] = (),
        data: str = "",
        relation: str = RELATIONS[0],
    ) -> None:
        self.epsilon = parameters.optional(parameters.positive, epsilon=epsilon) or math.inf
        self.delta = parameters.unit_interval(delta=delta)
        self.relation = parameters.choice(RELATIONS, relation=relation)
        # The same file by another name has the same lock.
        self.path = None if path is None else Path(os.path.realpath(path))
        self.data = data
        self.plan: tuple[Release, ...] = ()
        self._entries: dict[str, Entry] = {}
        if self.path is not None:
            self._entries = _OF_THIS_PROCESS.setdefault(self.path, self._entries)
        else:
            self._know([self._line(spent)])
        self._seen = 0
        self._free = self._paid = Release(0.0, 0, 0.0)
        # An unusable file fails now, and not in a round.
        with self._joined():
            pass

    @property
    def accountant(self) -> Accountant:
        """All that was spent, at the budget's delta and for its relation; a copy."""
        return total([*self._entries.values(), Entry((), self.delta, self.relation)])

    @property
    def spent(self) -> float:
        """Epsilon of all steps so far, at the budget's delta, those reserved included."""
        return self.accountant.epsilon()

    @property
    def identity(self) -> str:
        """By which `knows` finds the file again."""
        return _digest(next(iter(self._entries)))

    def knows(self, name: str) -> bool:
        """Whether this is the ledger of an `identity`, or holds a schedule of that name."""
        return any(name in (_digest(line), e.schedule) for line, e in self._entries.items())

    def join(self, other: Ledger) -> None:
        """Count together with another ledger; neither has a file."""
        other._entries |= self._entries
        self._entries = other._entries

    def add(self, spent: Sequence[Release], schedule: str) -> None:
        """Charge what was released by a server that kept no ledger, whatever the budget is."""
        with self._joined():
            self._add([self._line(spent, schedule=schedule, round=0)])

    def reserve(
        self,
        noise_multiplier: float,
        rate: float,
        steps: int,
        planned: int = 0,
        evaluation: bool = False,
        schedule: str = "",
        round_: int = 0,
    ) -> int:
        """Pay for steps (or evaluations), as far as they fit; return for how many.

        A server names the `schedule` and the round; then a line is written for no steps, too.

        To account takes long: what is found out for the `planned` steps of the whole run holds
        until noise or rate change, or somebody else charges something.
        """
        steps = parameters.integer(0, steps=steps)
        paid = Release(noise_multiplier, 0, rate)
        # Steps of before that were not taken are lost, and so are those that cannot be written.
        self._paid = paid
        with self._joined():
            allowed = self._left(noise_multiplier, rate, steps, planned)
            paid = paid._replace(steps=min(steps, allowed))
            if paid.steps or (schedule and not steps):
                more: dict[str, object] = {"evaluation": True} if evaluation else {}
                if schedule:
                    more |= {"schedule": schedule, "round": round_}
                spent = [paid] if paid.steps else []
                self._add([self._line(spent, self._order(paid, planned), **more)])
            self._free, self._paid = paid._replace(steps=allowed - paid.steps), paid
        return paid.steps

    def charge(self, noise_multiplier: float, rate: float) -> None:
        """Count one step, before it is taken: one that was reserved, or else a new one.

        Raises
        ------
        StopIteration
            If it does not fit; nothing is counted then.
        """
        paid = self._paid.steps and self._paid.kind == Release(noise_multiplier, 1, rate)
        if not paid and not self.reserve(noise_multiplier, rate, 1):
            epsilons = f"epsilon {self.spent:.4g} of {self.epsilon:.4g} at delta {self.delta:.3g}"
            raise StopIteration(f"the privacy budget is spent: {epsilons}")
        self._paid = self._paid._replace(steps=self._paid.steps - 1)

    def _left(self, noise_multiplier: float, rate: float, steps: int, planned: int) -> int:
        release = Release(noise_multiplier, max(steps, planned), rate)
        if self._free.kind == release.kind and self._free.steps >= steps:
            return self._free.steps
        accountant = self.accountant
        if accountant.epsilon(*release) <= self.epsilon:
            return release.steps
        return accountant.affordable(noise_multiplier, self.epsilon, release.steps, rate)

    def _order(self, paid: Release, planned: int) -> float | None:
        """Return the order for this plan and all later ones, if it is the first on samples."""
        known = any(entry.order is not None for entry in self._entries.values())
        plan = [paid._replace(steps=max(paid.steps, planned)), *self.plan]
        sampled = [release for release in plan if release.sampling < 1.0]
        return None if known or not sampled else order_for(sampled[-1], self.delta)

    def _line(
        self, spent: Sequence[Release] = (), order: float | None = None, **more: object
    ) -> str:
        """Return a line that no other is like; `more` is added unchanged."""
        content = {
            "spent": state_of(spent),
            "delta": self.delta,
            "relation": self.relation,
            "order": order,
            **({"plan": self.plan} if order is not None and self.plan else {}),
            **more,
            "sampling": "Poisson",
            "data": self.data,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "fedclip": VERSION,
            "id": uuid4().hex,
        }
        return json.dumps(content)

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Keep other processes from the file, and know the same as it does."""
        if self.path is None:
            yield
            return
        # The file may be replaced by others, so the lock is on one next to it.
        try:
            lock = locked(self.path.with_name(f"{self.path.name}.lock"), wait=True)
        except OSError as exc:
            text = f"no ledger can be kept at {self.path} ({exc})"
            advice = "name a file that this process may write, on a file system with locks"
            raise OSError(f"{text}: {advice}") from exc
        with lock:
            self._join(self.path)
            yield

    def _join(self, path: Path) -> None:
        entries = read_entries(path, self._entries) if path.exists() else {}
        others = {entry.data for line, entry in entries.items() if line not in self._entries}
        others -= {self.data, ""}
        unit = protected(self.data)[1]
        known = {entry.data for entry in [*entries.values(), *self._entries.values()]}
        if unit and (units := {protected(data)[1] for data in known} - {unit, ""}):
            text = f"the ledger {path} does not protect each {unit}: its entries for each"
            text = f"{text} {max(units)} cannot be composed with these"
            raise ValueError(f"{text}. Give each {unit} another ledger")
        if others:
            text = f"the ledger {path} is of other data ({'; '.join(sorted(others))}) than these"
            advice = "Stop if these are other people, and name a ledger for each set of records"
            _LOGGER.warning(f"{text} ({self.data}), and all is counted together. {advice}")
        lost = [line for line in self._entries if line not in entries]
        if lost:
            text = f"the ledger {path} lacked {len(lost)} of the charges of this process"
            why = "it was put back, or is another file; they are in it again"
            _LOGGER.warning(f"{text}: {why}")
        self._entries |= entries
        if len(self._entries) != self._seen:
            self._free = self._free._replace(steps=0)
        self._seen = len(self._entries)
        if not path.exists():
            self._begin(path, lost or [self._line()])
        elif lost:
            self._add(lost)

    def _begin(self, path: Path, lines: Sequence[str]) -> None:
        """Make the file, so that a crash leaves none or one with all lines."""
        fresh = path.with_name(f"{path.name}.new")
        fresh.unlink(missing_ok=True)
        write_out(fresh, "".join(f"{line}\n" for line in lines))
        fresh.replace(path)
        # Its name is kept in the folder, which not all systems let one write out.
        with suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        self._know(lines)

    def _add(self, lines: Sequence[str]) -> None:
        """Write lines at the end of the file, if there is one; then they are known."""
        if self.path is not None:
            # The last line may lack its end, or be cut off.
            end = self.path.read_bytes()[-1:]
            start = {b"": "", b"\n": "", b"}": "\n"}.get(end, f"{CUT}\n")
            write_out(self.path, start + "".join(f"{line}\n" for line in lines))
        self._know(lines)

    def _know(self, lines: Iterable[str]) -> None:
        self._entries |= {line: _entry(line) for line in lines}
        self._seen = len(self._entries)


def _entry(line: str) -> Entry:
    """Return what a line says, if it is well formed."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError(f"a line must be an object of JSON, got {line[:50]!r}")
    parameters.choice(("Poisson",), sampling=content.get("sampling"))
    texts = {name: content.get(name) for name in ("data", "time", "fedclip", "schedule")}
    order = content.get("order")
    return Entry(
        tuple(Accountant.check_state(content.get("spent"))),
        parameters.unit_interval(delta=content.get("delta")),
        parameters.choice(RELATIONS, relation=content.get("relation")),
        parameters.optional(parameters.number, "a number > 1", 1.0, open_low=True, order=order),
        plan=tuple(Accountant.check_state(content.get("plan", ()))),
        evaluation=parameters.boolean(evaluation=content.get("evaluation", False)),
        round=parameters.integer(0, round=content.get("round", 0)),
        **{name: text[:500] for name, text in texts.items() if isinstance(text, str)},
    )


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:32]


def write_out(path: Path, text: str) -> None:
    """Add text to a file, so that it is on the disk when this returns."""
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def locked(path: Path, *, wait: bool) -> IO[str]:
    """Return a file that no other process has locked, made if needed; closing it ends the lock.

    Raises
    ------
    OSError
        If it cannot be locked; or, without `wait`, at once if somebody else has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whoever may read it could hold it, too.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        raise
    return file
