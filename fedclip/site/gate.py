# SPDX-License-Identifier: Apache-2.0
"""The gate of a site: updates, numbers and votes pass it, and nothing else does.

::

    Message:  count it, before an app sees it; refuse it beyond max_replies
    Update:   names, shapes and dtypes are those of the model, or refuse
              zeros if it is not finite, else clipped to max_norm
              charge the ledger, or refuse
              + normal(0, noise_multiplier * max_norm), from the secure generator
    Numbers:  those that the policy names, if they are finite and plain
    Votes:    the bits that fedclip knows; none where the site adds noise
    Refusal:  one sentence, always the same; the site's log has the reason

It knows no engine. An engine must send nothing that has not passed the gate.
"""

from __future__ import annotations

import hashlib
import logging
import math
import numbers
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from fedclip.arrays import Array, HostView, backend_of
from fedclip.errors import shown
from fedclip.privacy.accounting import Accountant
from fedclip.privacy.ledger import Entry, Ledger, locked, read_entries, total
from fedclip.privacy.noise import add_noise, secure_normals
from fedclip.site.policy import Policy, check_owned
from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import refuse_statistics, signature, zeros
from fedclip.updates.protocol import Arrays
from fedclip.updates.votes import BINS, COUNTS, VOTES, is_one_of

_LOGGER = logging.getLogger("fedclip.site")
# A ledger's lock keeps other processes away, and this one other threads.
_ALONE = threading.Lock()

# The protected data in the ledger of a site, where other ledgers have a fingerprint of records.
UNIT = "the updates of a site"

# The largest whole number that is plain: others can hold any text.
_LARGEST = 2**63


# This text leaves instead of anything that must not leave, whatever the reason.
REFUSED = "refused by this site, whose log says why"


class Refused(RuntimeError):
    """Raised for anything that must not leave; the text is for the site's log only."""


def spent(policy: Policy) -> Accountant:
    """Return what a site has spent, from its ledger, which is only read.

    Raises
    ------
    ValueError
        If the file is no ledger, or one of records.
    """
    path = Path(policy.ledger or "")
    entries = [*read_entries(path).values()] if policy.ledger and path.exists() else []
    if any(entry.data != UNIT for entry in entries):
        raise ValueError(f"{path} is a ledger of records: give the site another path as ledger")
    # At the delta that is in force now.
    return total([*entries, Entry((), policy.delta or 0.5, policy.relation)])


def _stepped(array: HostView, step: HostView) -> HostView:
    """Return an array plus a step, in the array's dtype; rounding never makes the step longer.

    Examples
    --------
    >>> weights = np.array([2048.0], np.float16)  # where half precision has even numbers only
    >>> [float(_stepped(weights, np.array([step]))[0]) for step in (1.5, 2.5)]
    [2048.0, 2050.0]
    """
    with np.errstate(all="ignore"):
        result = (array + step).astype(array.dtype)
        longer = abs(result.astype(float) - array) > abs(step)
        return np.asarray(np.where(longer, np.nextafter(result, array), result))


# What was counted under each path: a file that is put back takes nothing from it.
_OF_THIS_PROCESS: dict[Path, list[str]] = {}


class Replies:
    """A count of replies of any kind: whether and when a reply leaves reveals something, too.

    ::

        Admit(run):                           before an app sees a message
            lock the file; read its lines, and those that this process knows and it lacks
            refuse if the run, or all runs together, have had as many as the policy allows
            add a line; only then may there be a reply

    Parameters
    ----------
    per_run, most
        Largest number of replies in one run, and in all.
    path
        The file, with a line for each reply, made if needed; None: the count ends with this object.

    Examples
    --------
    >>> replies = Replies(per_run=2, most=3)
    >>> for run in ("a", "a"):
    ...     replies.admit(run)
    >>> replies.admit("a")
    Traceback (most recent call last):
    fedclip.site.gate.Refused: the policy allows no more replies: max_replies_per_run = 2
    """

    def __init__(self, per_run: int, most: int, path: Path | None = None) -> None:
        self.per_run, self.most, self.path = per_run, most, path
        key = None if path is None else Path(os.path.realpath(path))
        self._known = _OF_THIS_PROCESS.setdefault(key, []) if key else list[str]()

    def admit(self, run: str) -> None:
        """Count one more reply of a run.

        Raises
        ------
        Refused
            If a limit forbids the reply.
        OSError
            If the file cannot be read or written; then nothing may leave.
        """
        name = hashlib.sha256(run.encode()).hexdigest()
        with _ALONE, ExitStack() as files:
            lines = list[str]()
            if self.path is not None:
                lock = self.path.with_name(f"{self.path.name}.lock")
                files.enter_context(locked(lock, wait=True))
                if self.path.exists():
                    lines = self.path.read_text("ascii", "replace").split()
            # A file is only added to: one that is shorter was put back.
            self._known.extend(lines[len(self._known) :])
            limit = ""
            if len(self._known) >= self.most:
                limit = f"max_replies = {self.most}"
            elif self._known.count(name) >= self.per_run:
                limit = f"max_replies_per_run = {self.per_run}"
            else:
                self._known.append(name)
            if self.path is not None and (lacking := self._known[len(lines) :]):
                with self.path.open("a", encoding="ascii") as file:
                    # After a line that a crash has cut off, and that counts, too.
                    file.write("\n".join(["", *lacking, ""]))
                    file.flush()
                    os.fsync(file.fileno())
        if limit:
            raise Refused(f"the policy allows no more replies: {limit}")


class Gate:
    """Lets out what the policy of a site allows; safe in several threads and processes at once.

    Parameters
    ----------
    policy
        The site's.

    Raises
    ------
    OSError, ValueError
        If its ledger cannot be used, or others may change it.

    Notes
    -----
    Guarantees: what `update` returns has an L2 norm of at most `max_norm` before noise, in
    float64, and is finite. With a budget, all updates that have left are together (epsilon,
    delta)-private for any change of the site's data, unless the ledger is lost
    (`fedclip.privacy.ledger.Ledger`). The budget does not cover numbers that the policy names.

    Without noise, a norm does not keep an update from revealing the data, or a malicious job from
    writing them into its digits.

    Examples
    --------
    >>> import numpy as np
    >>> gate = Gate(Policy(max_norm=0.5, allow_metrics=["loss"]))
    >>> gate.update({"w": np.array([3.0, 4.0])})["w"].round(6)
    array([0.3, 0.4])
    >>> gate.metrics({"loss": 0.25, "patient": 17, "curve": [0.1, 0.2]})
    {'loss': 0.25}
    >>> gate.votes({"votes": 1, "within": 1})
    {'votes': 1, 'within': 1, 'clipped': 0, 'zeroed': 0}
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self._clipper = policy, UpdateClient()
        self._ledger: Ledger | None = None
        # Without a ledger, nothing counts the replies of other processes.
        self._replies = Replies(policy.max_replies_per_run, _LARGEST)
        if policy.ledger is None:
            return
        path = Path(policy.ledger)
        counted = path.with_name(f"{path.name}.replies")
        check_owned(path)
        check_owned(counted)
        self._replies = Replies(policy.max_replies_per_run, policy.max_replies or 10_000, counted)
        if policy.max_epsilon and policy.delta:
            spent(policy)
            if not path.exists():
                _LOGGER.warning("there is no ledger %s: it begins now, with nothing spent", path)
            limits = policy.max_epsilon, policy.delta
            self._ledger = Ledger(*limits, path, data=UNIT, relation=policy.relation)

    def admit(self, run: object) -> None:
        """Count a message of a run, before an app sees it: any reply reveals something.

        Raises
        ------
        Refused
            If the run, or all runs together, have had as many as the policy allows, or if they
            cannot be counted.
        """
        try:
            self._replies.admit(str(run))
        except OSError as exc:
            raise Refused(f"replies cannot be counted ({exc})") from None

    def update(self, arrays: Arrays, like: Arrays | None = None) -> Arrays:
        """Return the part of an update that may leave; the ledger charges it.

        Parameters
        ----------
        arrays
            The difference to the model that the round began with, by name; in any framework.
        like
            That model, as the server sent it, or any arrays of its names, shapes and dtypes. None
            only where the site trusts the code that named the arrays: a name can be anything.
            Arrays of whole numbers, which are counters, leave as zeros.

        Raises
        ------
        Refused
            If the arrays are not floats with the model's names, shapes and dtypes; if the policy
            has noise and the model running statistics; if the budget is spent, or the ledger
            cannot be written. Nothing may leave then.
        """
        with _read():
            if like is not None:
                arrays = _as_in(like, arrays)
            floats = _floats(arrays) if like is not None else arrays
            return {**zeros(arrays), **self._sent(floats, like or arrays)}

    def model(self, trained: Arrays, before: Arrays) -> Arrays:
        """Return the model before training, plus the part of the update that may leave.

        Rounding to the dtype of the model makes no update longer. Arrays of whole numbers are those
        of the model before training. Both are arrays of NumPy; it refuses what `update` refuses.
        """
        with _read():
            trained, floats = _as_in(before, trained), _floats(before)
            update = {n: np.asarray(trained[n], float) - floats[n] for n in floats}
            sent = self._sent(update, before)
            return {n: _stepped(x, sent[n]) if n in sent else x for n, x in before.items()}

    def _sent(self, update: Arrays, model: Arrays) -> Arrays:
        std = self.policy.noise_multiplier * self.policy.max_norm
        if std:
            refuse_statistics(model)
        sent = self._clipper.outcome(update, self.policy.max_norm, None).arrays
        with _ALONE:
            self._charge()
        if std:
            sent = add_noise(sent, std, secure_normals)
        return {name: _plainest(array) for name, array in sent.items()}

    def metrics(self, values: Mapping[str, object]) -> dict[str, float]:
        """Return the numbers that the policy names, as plain ones; the log names the others."""
        numbers_ = {name: plain(values.get(name)) for name in self.policy.allow_metrics}
        sent = {name: number for name, number in numbers_.items() if number is not None}
        if withheld := [name for name in values if name not in sent]:
            _LOGGER.info("not sent, as the policy does not name them: %s", shown(withheld))
        return sent

    def votes(self, found: Mapping[str, object]) -> dict[str, int]:
        """Return the bits of a reply, 0 or 1 by name; all 0 for what no honest client sends.

        Their names are those of `fedclip.updates.protocol.Reply`.
        """
        result = dict.fromkeys(("votes", "within", "clipped", "zeroed"), 0)
        if self.policy.noise_multiplier:
            # They are of the update before noise, and the budget does not count them.
            return result
        for names, known in ((("votes", "within"), VOTES), (("clipped", "zeroed"), COUNTS)):
            bits = [found.get(name, 0) for name in names]
            if is_one_of(known, bits):
                result |= {name: int(bool(bit)) for name, bit in zip(names, bits, strict=True)}
            else:
                _LOGGER.warning("not sent: %s, which is no vote", " and ".join(names))
        place = found.get("bin")
        if result["votes"] and type(place) is int and 0 <= place < BINS:
            result["bin"] = place
        return result

    def _charge(self) -> None:
        ledger, policy = self._ledger, self.policy
        if ledger is None:
            return
        try:
            # What was reserved is charged, in the file already.
            paid = ledger.reserve(policy.noise_multiplier, 1.0, 1)
        except (OSError, ValueError) as exc:
            raise Refused(f"this site's ledger cannot be used ({exc})") from None
        if not paid:
            cost, most = ledger.accountant.epsilon(policy.noise_multiplier, 1), ledger.epsilon
            digits = 4 if cost > 1.001 * most else 12
            more = f"one more update would make epsilon {cost:.{digits}g}"
            raise Refused(f"this site's budget is spent: {more}, above max_epsilon = {most:g}")


@contextmanager
def _read() -> Iterator[None]:
    """Refuse an update that cannot be read or clipped, whatever is raised."""
    try:
        yield
    except Refused:
        raise
    except Exception as exc:
        raise Refused(f"no update of the model: {exc!s:.300}") from None


def _as_in(like: Arrays, arrays: Arrays) -> Arrays:
    """Return the arrays in the order of others; raise if names, shapes or dtypes differ."""
    if signature(arrays) != signature(like):
        raise ValueError(f"names or shapes are {shown(signature(arrays))}")
    for name, array in like.items():
        expected, dtype = (backend_of(a).dtype(a) for a in (array, arrays[name]))
        if dtype != expected:
            raise ValueError(f"{name!r} is {dtype}, not {expected}")
    return {name: arrays[name] for name in like}


def _floats(arrays: Arrays) -> dict[str, Array]:
    """Return all arrays but those of whole numbers, which are counters."""
    counters = ("int", "uint", "bool")
    return {n: x for n, x in arrays.items() if not backend_of(x).dtype(x).startswith(counters)}


def _plainest(array: Array) -> Array:
    """Return an array of NumPy as nothing but its values, in this machine's order of bytes.

    Engines may send the bytes in the order of the array, and readers expect this machine's.
    """
    if isinstance(array, np.ndarray):
        return np.asarray(array, array.dtype.newbyteorder("="))
    return array


def plain(value: object) -> float | None:
    """Return a number as Python's own int or float, if it is one, and finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value) if abs(int(value)) < _LARGEST else None
    return float(value) if math.isfinite(value) else None
