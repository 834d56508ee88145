# SPDX-License-Identifier: Apache-2.0
r"""The counts of a client in a round, as non-negative whole numbers that only need adding up.

Secure aggregation adds whole numbers exactly, but rounds fractions and limits their range. So a
client sends only whole numbers below about 2^16, and the sum over all clients is the same to the
bit in cleartext, under masking and under Joye-Libert, in any order.

========= ======= ============================================================================
counter    rows    what it is
========= ======= ============================================================================
moments   44      ``sum(u - c)``, its positive and its negative part, and ``sum((u - c)^2)``,
                  each a fixed-point number in digits of 16 bits; c is the mean that the server
                  has sent, so that nothing cancels
sketch    512     number of u in each bucket (`fedclip.core.records`), which gives a quantile
                  between 1e-8 and 2e5 within 3 %; smaller norms count as 0
bits      1       number of norms that were at most the limit
all       1       number of norms that were learnt
========= ======= ============================================================================
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Arithmetic, Array, Float64
from fedclip.core.messages import FromServer, Message
from fedclip.core.records import Integers, Sketch, holder
from fedclip.core.states import Fields
from fedclip.errors import Unchecked
from fedclip.rules import State
from fedclip.rules.sharing import Judgement

# Whole numbers, of shape (rows, groups).
Counts: TypeAlias = NDArray[np.uint64]

# The centres of the sums of each group, and the largest norm that can have been learnt.
Bounds: TypeAlias = tuple[Float64, Float64]

# Norms from here on are not learnt: their squares do not fit into the digits.
LARGEST = 2.0**60

# Relative error of a quantile of the sketch.
ERROR = 0.03

BUCKETS = 512

_SKETCH = Sketch(ERROR, lowest=1e-8)
_EDGES = _SKETCH.edges(BUCKETS - 1)
# The number that stands for each bucket: 0 for the first; the lower edge for the last, open one.
_VALUES = np.concatenate([[0.0], _SKETCH.middle(_EDGES[1:]), _EDGES[-1:]])

_BITS, _DIGITS, _SQUARE_DIGITS = 16, 12, 20
# The last digit is worth 2^-100, and 2^-160: far below the rounding of any norm above 1e-14.
_SCALE, _SQUARE_SCALE = 100, 160
_MOMENT_ROWS = 2 * _DIGITS + _SQUARE_DIGITS


class Round(NamedTuple):
    """The counts of one or more clients for one group.

    Attributes
    ----------
    first
        Sum of ``u - c``.
    second
        Sum of ``(u - c)^2``.
    """

    n: int
    unclipped: int = 0
    first: Fraction = Fraction(0)
    second: Fraction = Fraction(0)
    buckets: Integers | None = None

    def moments(self, centre: float) -> tuple[float, float]:
        """Return mean and population variance of the u, in exact arithmetic, rounded once."""
        if not self.n:
            return 0.0, 0.0
        shift = self.first / self.n
        variance = self.second / self.n - shift * shift
        # Each client has rounded its own sums.
        return max(float(Fraction(centre) + shift), 0.0), max(float(variance), 0.0)


_NUMBERS = {"bits": ("new_unclipped",), "moments": ("new_mean", "new_squares")}


class Tally:
    """The counters of one rule, some of "moments", "sketch" and "bits", wherever they are."""

    def __init__(self, counters: Sequence[str]) -> None:
        self.parts: dict[str, slice] = {}
        self.rows = 1
        for name, size in (("bits", 1), ("moments", _MOMENT_ROWS), ("sketch", BUCKETS)):
            if name in counters:
                self.parts[name] = slice(self.rows, self.rows + size)
                self.rows += size

    # -- on a client, in any framework's arithmetic -----------------------------------------
    def init(self, groups: int, xp: Arithmetic) -> dict[str, Array]:
        """Return the fields at the start of a round, with all counts 0."""
        names = ["new", *(name for part in self.parts for name in _NUMBERS.get(part, ()))]
        fields = dict.fromkeys(names, xp.asarray([0.0] * groups))
        if "sketch" in self.parts:
            fields["new_above"] = xp.asarray(np.zeros((BUCKETS - 1, groups)))
        return fields

    def add(self, judged: Judgement, most: int, state: State, xp: Arithmetic) -> State:
        """Return the state after counting one step; count at most `most` norms."""
        observed, unclipped = judged.observed, judged.unclipped
        weight = xp.where(judged.learns & (observed < LARGEST) & (state.new < most), 1.0, 0.0)
        fields: dict[str, Array] = {"new": state.new + weight}
        if "bits" in self.parts:
            fields["new_unclipped"] = state.new_unclipped + weight * unclipped
        if "moments" in self.parts:
            # Welford's update.
            observed = xp.where(weight > 0, observed, state.new_mean)
            delta = observed - state.new_mean
            mean = state.new_mean + delta / xp.maximum(fields["new"], 1.0)
            fields["new_mean"] = mean
            fields["new_squares"] = state.new_squares + delta * (observed - mean)
        if "sketch" in self.parts:
            edges = xp.asarray(_EDGES[:, None], like=observed)
            fields["new_above"] = state.new_above + xp.where(observed > edges, weight, 0.0 * weight)
        return state._replace(**fields)

    # -- on the wire ------------------------------------------------------------------------
    def encode(self, fields: Fields, centre: float) -> list[int]:
        """Return the fields of one group as one column of whole numbers."""
        n = round(fields["new"])
        column = [n]
        if "bits" in self.parts:
            column.append(round(fields["new_unclipped"]))
        if "moments" in self.parts:
            shift = n * (fields["new_mean"] - centre)
            squares = fields["new_squares"] + shift * (fields["new_mean"] - centre)
            column += _digits(max(shift, 0.0), _SCALE, _DIGITS)
            column += _digits(max(-shift, 0.0), _SCALE, _DIGITS)
            column += _digits(max(squares, 0.0), _SQUARE_SCALE, _SQUARE_DIGITS)
        if "sketch" in self.parts:
            above = [n, *(round(count) for count in fields["new_above"]), 0]
            column += [a - b for a, b in itertools.pairwise(above)]
        return column

    # -- on the server ----------------------------------------------------------------------
    def decode(self, column: Counts) -> Round:
        """Return the counts that a column of sums encodes."""
        parts = {name: column[place] for name, place in self.parts.items()}
        first, second, buckets = Fraction(0), Fraction(0), None
        if "moments" in parts:
            up, down, squares = np.split(parts["moments"], [_DIGITS, 2 * _DIGITS])
            first = _number(up, _SCALE) - _number(down, _SCALE)
            second = _number(squares, _SQUARE_SCALE)
        if "sketch" in parts:
            buckets = parts["sketch"].astype(np.int64)
        unclipped = int(parts["bits"][0]) if "bits" in parts else 0
        return Round(int(column[0]), unclipped, first, second, buckets)

    def fault(self, counts: Counts, members: int, most: int, bounds: Bounds) -> str:
        """Return why these `members` clients cannot have made these counts; "" if they can.

        Each of them counts at most `most` norms of a group; the counts have the right shape.
        """
        totals = counts[0]
        parts = {name: counts[place] for name, place in self.parts.items()}
        if totals.max(initial=0) > members * most:
            return f"{int(totals.max()):,} norms of one group, of {members * most:,} at most"
        if "bits" in parts and (parts["bits"] > totals).any():
            return "more unclipped norms than norms"
        if (digits := parts.get("moments")) is not None:
            if digits.max(initial=0) >= members * 2**_BITS:
                return "digits out of range"
            if fault := _implausible(totals.astype(np.float64), digits, bounds):
                return fault
        if (buckets := parts.get("sketch")) is not None:
            # Compare one by one first: a sum of huge numbers could overflow to the right one.
            if (buckets > totals).any() or (buckets.sum(axis=0) != totals).any():
                return "buckets that do not add up to the number of norms"
            last = np.searchsorted(_EDGES, bounds[1] * _SINGLE)
            if buckets[np.arange(BUCKETS)[:, None] > last].any():
                return _OUTSIDE
        return ""


_SLACK = 1.0 + 1e-9
# Clients compute the highest norm, on some devices in single precision.
_SINGLE = 1.0 + 1e-5
# The most that sums lose for each norm, because the digits end.
_LOST, _LOST_SQUARE = 2.0 ** (1 - _SCALE), 2.0 ** (1 - _SQUARE_SCALE)
_OUTSIDE = "norms below 0, or above the most that there can be"


# What a digit is worth, lowest first.
_WORTH = 2.0 ** (_BITS * np.arange(_DIGITS) - _SCALE)
_SQUARE_WORTH = 2.0 ** (_BITS * np.arange(_SQUARE_DIGITS) - _SQUARE_SCALE)


def _implausible(n: Float64, digits: Counts, bounds: Bounds) -> str:
    """Return why no norms in [0, highest] can give these sums; "" if some can. Uses floats."""
    values = digits.astype(np.float64)
    up, down = _WORTH @ values[:_DIGITS], _WORTH @ values[_DIGITS : 2 * _DIGITS]
    second = _SQUARE_WORTH @ values[2 * _DIGITS :]
    (centre, limits), first = bounds, up - down
    if (first * first > _SLACK * n * (second + n * _LOST_SQUARE)).any():
        return "a negative variance"
    highest = np.where(np.isfinite(limits), limits, LARGEST) * _SINGLE
    # No norm is further from the centre. Parts that are larger cancel, and hide in rounding errors.
    reach = n * np.maximum(highest, centre)
    squares = second + 2 * centre * first + n * centre * centre
    error = 1e-9 * (n * centre + up + down) + n * _LOST
    size = second + 2 * centre * (up + down) + n * centre * centre
    # The square of a norm is at most the norm times the highest one, and of no other number.
    most = highest * (n * centre + first + error) + 1e-9 * size
    return _OUTSIDE if ((up + down > _SLACK * reach) | (squares > most)).any() else ""


def _digits(value: float, scale: int, size: int) -> list[int]:
    """Return a number >= 0 in fixed point, lowest digit first; further bits are cut off."""
    integer = int(math.ldexp(value, scale))
    return [(integer >> (_BITS * place)) & (2**_BITS - 1) for place in range(size)]


def _number(digits: Counts, scale: int) -> Fraction:
    """Return the number with these digits, which may be sums of digits."""
    integer = sum(digit << (_BITS * place) for place, digit in enumerate(digits.tolist()))
    return Fraction(integer, 2**scale)


def counts_of(members: object, counts: object, shape: tuple[int, int]) -> tuple[Counts | None, str]:
    """Return the counts of several clients as an array, or None and what is wrong with them.

    A client may have sent anything, of any size: this never raises.
    """
    if type(members) is not int or not 0 < members < 2**24:
        return None, f"from {members!r:.30} clients"
    if isinstance(counts, list):
        # Check this before NumPy makes an array of any size or kind.
        if len(counts) != shape[0] * shape[1]:
            return None, f"not {shape[0]} rows of {shape[1]} numbers"
        try:
            # This takes whole numbers from 0 to 2^64 only, and a tenth of the time of NumPy.
            counts = np.frombuffer(array("Q", counts), dtype=np.uint64).reshape(shape)
        except (TypeError, OverflowError):
            return None, "numbers that are no counts"
        if counts.max(initial=0) >= 2**48:
            return None, "numbers that are no counts"
    if not isinstance(counts, np.ndarray) or counts.dtype != np.uint64 or counts.shape != shape:
        return None, f"no counts of shape {shape}"
    return counts, ""


def quantile_of(buckets: Integers, quantile: float, centre: float = 0.0) -> float:
    """Return a quantile of the distances of a sketch's norms from a centre.

    Interpolate between neighbours, as NumPy does. The distance of a norm x is exact to within
    ``ERROR * x``.
    """
    total = int(buckets.sum())
    if not total:
        return 0.0
    distances = abs(_VALUES - centre)
    order = np.argsort(distances, kind="stable")
    place = quantile * (total - 1)
    low, high = (
        float(distances[order[holder(buckets[order], rank)]]) for rank in (place, math.ceil(place))
    )
    return low + (place - math.floor(place)) * (high - low)


# -- messages; their names are global in declearn, so they begin with the name of the package -----


@dataclass
class FedclipSharedState(FromServer):
    """The message from the server to every client, at the start of each round.

    Attributes
    ----------
    version
        How many times the state has been updated.
    settings
        The parameters that clipper and counterpart must have in common.
    max_steps
        Largest number of norms of a group that a client counts in a round.
    labels
        The groups, in the order of the counts; empty while the server does not know them.
    state
        The numbers of each field of the state, one for each label.
    """

    kinds = MappingProxyType(
        {"version": int, "settings": Mapping, "max_steps": int, "labels": list, "state": Mapping}
    )

    version: Unchecked
    settings: Unchecked
    max_steps: Unchecked
    labels: Unchecked
    state: Unchecked


@dataclass
class FedclipSharedCounts(Message):
    """The message from a client to the server, at the end of each round, or a secure sum.

    Nothing here raises, whatever a client may have sent. `counts_of` finds invalid messages later,
    and the server leaves them out.

    Attributes
    ----------
    members
        Number of clients in the message.
    counts
        Whole numbers >= 0, of shape (rows, groups); see `fedclip.statistics.counts`.
    """

    members: Unchecked
    counts: Unchecked

    def to_dict(self) -> dict[str, object]:
        """Return the message in cleartext: small integers, most of them of one byte."""
        return {"counts": np.asarray(self.counts).ravel().tolist()}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Make the message of one client from what came over the wire, unchecked."""
        return cls(1, data.get("counts") if isinstance(data, Mapping) else None)

    def prepare_for_secagg(self) -> tuple[dict[str, object], dict[str, object] | None]:
        """Return all fields, for encryption: `Tally` makes no number above 2^31."""
        return {"members": self.members, "counts": self.counts}, None
