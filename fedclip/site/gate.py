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
    Refusal:  one sentence, the same for all; the site's log says why

It knows no engine. What an engine would send besides, it must not send.
"""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Array, backend_of
from fedclip.errors import shown
from fedclip.privacy.accounting import Accountant
from fedclip.privacy.ledger import Entry, Ledger, read_entries, total
from fedclip.privacy.noise import add_noise, secure_normals
from fedclip.site.policy import Policy, check_owned
from fedclip.site.replies import Replies
from fedclip.updates.averaging import zeros
from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import alike, signature
from fedclip.updates.protocol import COUNTS, VOTES, Arrays, is_one_of
from fedclip.updates.running import refuse_statistics

AnyArray: TypeAlias = NDArray[Any]

_LOGGER = logging.getLogger("fedclip.site")
# A ledger's lock keeps other processes away, and this one other threads.
_CHARGING = threading.Lock()

UNIT = "the updates of a site"
"""What a ledger of a site says that it protects, where others have a fingerprint of records."""

# Without a ledger, nothing counts the replies of other processes.
_MOST_PROCESS = 2**63
# The largest whole number that is plain: others can hold any text.
_LARGEST = 2**63


REFUSED = "refused by this site, whose log says why"
"""What leaves in the place of all that does not, whatever the reason."""


class Refused(RuntimeError):
    """What does not leave; the text is for the site's own log."""


def spent(policy: Policy) -> Accountant:
    """Return what a site has spent, as its ledger says, which is only read.

    Raises
    ------
    ValueError
        If the file is no ledger, or one of records.
    """
    path = Path(policy.ledger or "")
    entries = [*read_entries(path).values()] if policy.ledger and path.exists() else []
    if any(entry.data != UNIT for entry in entries):
        raise ValueError(f"{path} is a ledger of records: a site needs a ledger of its own")
    # At the delta that is in force now.
    return total([*entries, Entry((), policy.delta or 0.5, policy.relation)])


def _beside(array: AnyArray, step: AnyArray) -> AnyArray:
    """Return an array plus a step, in the array's dtype; rounding makes no step longer.

    Examples
    --------
    >>> weights = np.array([2048.0], np.float16)  # where half precision has even numbers only
    >>> [float(_beside(weights, np.array([step]))[0]) for step in (1.5, 2.5)]
    [2048.0, 2050.0]
    """
    with np.errstate(all="ignore"):
        moved = (array + step).astype(array.dtype)
        longer = abs(moved.astype(float) - array) > abs(step)
        return np.asarray(np.where(longer, np.nextafter(moved, array), moved))


class Gate:
    """Lets out what the policy of a site allows; safe in several threads and processes at once.

    Parameters
    ----------
    policy
        The site's.

    Raises
    ------
    OSError, ValueError
        If its ledger can not be used, or others may change it.

    Notes
    -----
    Guarantees: what `update` returns has an L2 norm of at most `max_norm` before noise, in
    float64, and is finite. With a budget, all updates that have left are together (epsilon,
    delta)-private for any change of the site's data, as far as the ledger is kept
    (`fedclip.privacy.ledger.Ledger`). Numbers that the policy names have no part in that.

    Without noise, a norm alone does not keep an update from telling of the data, or a hostile job
    from writing them into its digits.

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
        self.policy = policy
        self._clipper = UpdateClient()
        self._ledger: Ledger | None = None
        self._replies = Replies(policy.max_replies_per_run, _MOST_PROCESS)
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
        """Count a message of a run, before an app sees it: whatever is replied says something.

        Raises
        ------
        Refused
            If the run, or all runs together, have had as many as the policy allows, or if they
            cannot be counted.
        """
        try:
            limit = self._replies.admit(str(run))
        except OSError as exc:
            raise Refused(f"replies cannot be counted ({exc})") from None
        if limit:
            raise Refused(f"the policy allows no more replies: {limit}")

    def update(self, arrays: Arrays, like: Arrays | None = None) -> Arrays:
        """Return what may leave of an update; each that has the model's form is charged.

        Parameters
        ----------
        arrays
            The difference to the model that the round began with, by name; in any framework.
        like
            That model, as the server sent it, or any arrays of its names, shapes and dtypes. None
            only where the site trusts the code that has named the arrays: a name can be anything.
            Arrays of whole numbers, which count something, leave as zeros.

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
        """Return what may leave of a trained model: the one before, moved by what may leave.

        Rounding to the dtype of the model makes no update longer. Arrays of whole numbers are those
        of the model before. Both are arrays of NumPy; see `update` for what is refused.
        """
        with _read():
            trained, floats = _as_in(before, trained), _floats(before)
            moves = {n: np.asarray(trained[n], float) - floats[n] for n in floats}
            left = self._sent(moves, before)
            return {n: _beside(x, left[n]) if n in left else x for n, x in before.items()}

    def _sent(self, update: Arrays, model: Arrays) -> Arrays:
        std = self.policy.noise_multiplier * self.policy.max_norm
        if std:
            refuse_statistics(model)
        sent = self._clipper.outcome(update, self.policy.max_norm, None).arrays
        with _CHARGING:
            self._charge()
        if std:
            sent = add_noise(sent, std, secure_normals)
        return {name: _plainest(array) for name, array in sent.items()}

    def metrics(self, found: Mapping[str, object]) -> dict[str, float]:
        """Return those numbers that the policy names, as plain ones; the log names the others."""
        sent = {}
        for name in self.policy.allow_metrics:
            if (number := plain(found.get(name))) is not None:
                sent[name] = number
        if kept := [name for name in found if name not in sent]:
            _LOGGER.info("not sent, as the policy does not name them: %s", shown(kept))
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
        return result

    def _charge(self) -> None:
        ledger, policy = self._ledger, self.policy
        if ledger is None:
            return
        try:
            # What was reserved is charged, in the file already.
            paid = ledger.reserve(policy.noise_multiplier, 1.0, 1)
        except (OSError, ValueError) as exc:
            raise Refused(f"this site's ledger can not be used ({exc})") from None
        if not paid:
            cost, most = ledger.accountant.epsilon(policy.noise_multiplier, 1), ledger.epsilon
            digits = 4 if cost > 1.001 * most else 12
            more = f"one more update would make epsilon {cost:.{digits}g}"
            raise Refused(f"this site's budget is spent: {more}, above max_epsilon = {most:g}")


@contextmanager
def _read() -> Iterator[None]:
    """Refuse what can not be read or clipped, whatever is raised."""
    try:
        yield
    except Refused:
        raise
    except Exception as exc:
        raise Refused(f"no update of the model: {exc!s:.300}") from None


def _as_in(like: Arrays, arrays: Arrays) -> Arrays:
    """Return the arrays in the order of others; raise if they have not the same form."""
    if not alike(arrays, like):
        raise ValueError(f"names or shapes are {shown(signature(arrays))}")
    for name, array in like.items():
        wanted, found = (backend_of(a).dtype(a) for a in (array, arrays[name]))
        if found != wanted:
            raise ValueError(f"{name!r} is {found}, not {wanted}")
    return {name: arrays[name] for name in like}


def _floats(arrays: Arrays) -> dict[str, Array]:
    """Return all arrays but those of whole numbers, which count something."""
    whole = ("int", "uint", "bool")
    return {n: x for n, x in arrays.items() if not backend_of(x).dtype(x).startswith(whole)}


def _plainest(array: Array) -> Array:
    """Return an array of NumPy as nothing but its values, in this machine's order of bytes.

    Engines may send the bytes as they lie, and be read the other way round.
    """
    if isinstance(array, np.ndarray):
        return np.asarray(array, array.dtype.newbyteorder("="))
    return array


def plain(value: object) -> float | None:
    """Return a number as Python's own int or float, if it is one, and finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if abs(whole) < _LARGEST else None
    number = float(value)
    return number if math.isfinite(number) else None
