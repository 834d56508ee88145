# SPDX-License-Identifier: Apache-2.0
"""The gate of a site: updates, numbers and votes pass it, and nothing else does.

::

    Update:   charge the ledger, or refuse
              names, shapes and dtypes are those of the model, or refuse
              zeros if it is not finite, else clipped to max_norm
              + normal(0, noise_multiplier * max_norm), from the secure generator
    Numbers:  those that the policy names, if they are finite and plain
    Votes:    the bits that fedclip knows; none where the site adds noise

It knows no engine. What an engine would send besides, it must not send.
"""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Array, backend_of
from fedclip.errors import shown
from fedclip.federation.site.policy import Policy
from fedclip.federation.update.clipping import UpdateClient
from fedclip.federation.update.exchange import COUNTS, VOTES, Arrays, is_one_of
from fedclip.federation.update.limits import alike, signature
from fedclip.privacy.accounting import Accountant
from fedclip.privacy.ledger import Entry, Ledger, read_entries, total
from fedclip.privacy.noise import add_noise, secure_normals

__all__ = ["UNIT", "Gate", "Refused", "beside", "plain", "spent"]

AnyArray: TypeAlias = NDArray[Any]

_LOGGER = logging.getLogger("fedclip.site")
# A ledger's lock keeps other processes away, and this one other threads.
_CHARGING = threading.Lock()

UNIT = "the updates of a site"
"""What a ledger of a site says that it protects, where others have a fingerprint of records."""

# The largest whole number that is plain: others can hold any text.
_LARGEST = 2**63


class Refused(RuntimeError):
    """What does not leave; the text holds nothing of the data, and may be sent in its place."""


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
        raise ValueError(
            f"{path} is the ledger of records, of which each has a budget: a site, which shares "
            "updates made of all of them, needs a ledger of its own"
        )
    # At the delta that is in force now.
    return total([*entries, Entry((), policy.delta or 0.5, policy.relation)])


def beside(array: AnyArray, step: AnyArray) -> AnyArray:
    """Return an array plus a step, in the array's dtype; rounding makes no step longer.

    Examples
    --------
    >>> weights = np.array([2048.0], np.float16)  # where half precision has even numbers only
    >>> [float(beside(weights, np.array([step]))[0]) for step in (1.5, 2.5)]
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
        If its ledger can not be used.

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
        if policy.max_epsilon and policy.delta and policy.ledger:
            path = Path(policy.ledger)
            spent(policy)
            if not path.exists():
                _LOGGER.warning("there is no ledger %s: it begins now, with nothing spent", path)
            limits = policy.max_epsilon, policy.delta
            self._ledger = Ledger(*limits, path, data=UNIT, relation=policy.relation)

    def update(self, arrays: Arrays, like: Arrays | None = None) -> Arrays:
        """Return what may leave of an update; each call is charged, whatever becomes of it.

        Parameters
        ----------
        arrays
            The difference to the model that the round began with, by name; in any framework.
        like
            That model, as the server sent it, or any arrays of its names, shapes and dtypes. None
            only where the site trusts the code that has named the arrays: a name can be anything.

        Raises
        ------
        Refused
            If the budget is spent, the ledger can not be written, or the arrays are not floats
            with the model's names, shapes and dtypes. Nothing may leave then.
        """
        with _CHARGING:
            self._charge()
        try:
            if like is not None:
                arrays = _as_in(like, arrays)
            clipped = self._clipper.outcome(arrays, self.policy.max_norm, None).arrays
            std = self.policy.noise_multiplier * self.policy.max_norm
            sent = add_noise(clipped, std, secure_normals) if std else clipped
            return {name: _plainest(array) for name, array in sent.items()}
        except Exception as exc:  # its text may hold data
            _LOGGER.error("an update that can not be clipped: %r", exc)
            raise Refused(
                "the update must be arrays of floats with names, shapes and dtypes of the model; "
                "the site's log says what it is"
            ) from None

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

        Their names are those of `fedclip.federation.update.exchange.Reply`.
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
            _LOGGER.error("%s", exc)
            raise Refused("this site's ledger can not be used; nothing is shared") from None
        if not paid:
            cost, most = ledger.accountant.epsilon(policy.noise_multiplier, 1), ledger.epsilon
            digits = 4 if cost > 1.001 * most else 12
            raise Refused(
                f"this site's budget is spent: one more update would make epsilon "
                f"{cost:.{digits}g}, above max_epsilon = {most:g}; nothing is shared"
            )


def _as_in(like: Arrays, arrays: Arrays) -> Arrays:
    """Return the arrays in the order of others; raise if they have not the same form."""
    if not alike(arrays, like):
        raise ValueError(f"names or shapes are {shown(signature(arrays))}")
    for name, array in like.items():
        wanted, found = (backend_of(a).dtype(a) for a in (array, arrays[name]))
        if found != wanted:
            raise ValueError(f"{name!r} is {found}, not {wanted}")
    return {name: arrays[name] for name in like}


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
