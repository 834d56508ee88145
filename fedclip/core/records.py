# SPDX-License-Identifier: Apache-2.0
"""Records of single steps, and of rounds.

During training, a recorder only notes the numbers of each step. It adds them up when a round ends
or when somebody reads the records. A round keeps counts, extremes and a sketch of the norms
(`Sketch`), which gives every quantile within 1 % and does not grow with the
number of steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Array, Float64, HostView, on_host
from fedclip.errors import StateError, Unchecked

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Sketch:
    """The buckets that count numbers > 0, and the number that stands for each bucket.

    ::

        gamma         = (1 + error) / (1 - error)
        bucket of x   = the k with  lowest * gamma^(k-1) < x <= lowest * gamma^k
        stands for    = 2 * lowest * gamma^k / (gamma + 1)        within `error` of all in it

    Add the counts of two sketches to get the sketch of all numbers. Masson, Rim & Lee, 2019,
    "DDSketch: a fast and fully-mergeable quantile sketch with relative-error guarantees",
    arXiv:1908.10693.

    Attributes
    ----------
    error
        Relative error of a quantile, in (0, 1).
    lowest
        Upper edge of bucket 0.
    """

    error: float
    lowest: float = 1.0

    @property
    def gamma(self) -> float:
        """Factor by which each bucket is wider than the one before."""
        return (1 + self.error) / (1 - self.error)

    def bucket(self, numbers: Float64) -> Integers:
        """Return the bucket of each number; it may be negative, and has no upper end."""
        steps = np.log(numbers / self.lowest) / math.log(self.gamma)
        return np.ceil(steps).astype(np.int64)

    def edges(self, size: int) -> Float64:
        """Return the upper edges of the buckets 0 to ``size - 1``."""
        return np.multiply(self.lowest, self.gamma ** np.arange(float(size)))

    def middle(self, edge: Array) -> Array:
        """Return the number that stands for the bucket with this upper edge."""
        return 2.0 * edge / (self.gamma + 1.0)


def holder(counts: Sequence[int] | Integers, rank: float) -> int:
    """Return the bucket that holds the number of a rank (counted from 0, rounded down)."""
    return int(np.searchsorted(np.cumsum(counts), math.floor(rank), side="right"))


ALL = "all"
_SKETCH = Sketch(error=0.01)
_ROUNDS = 100
# Keep only the last rounds of the groups of a scope: hundreds of tensors × hundreds of rounds are
# too much for a checkpoint.
_GROUP_ROUNDS = 2
_BUFFER = 256
_LAZY_BUFFER = 4096

Bools = NDArray[np.bool_]
# Where limits come from: a `fedclip.rules.Basis`.
Basis = tuple[float, str, float]


@dataclass(eq=False, repr=False, slots=True)
class StepRecord:
    """What one step did to each group; numbers stay on their device until you look at them.

    Attributes
    ----------
    groups : tuple of str
        Labels of the groups of the scope.
    norms : array
        Norms before clipping, where they are: a number, or an array of the framework.
    nonfinite : tuple of str
        Names of the tensors that held NaN or infinity, if known.
    """

    groups: tuple[str, ...]
    norms: Array = ()
    _limit: Array = ()
    _clipped: Array = ()
    nonfinite: tuple[str, ...] = ()

    @property
    def norm_before(self) -> tuple[float, ...]:
        """Norms before clipping; empty if the step held NaN or infinity."""
        return _plain(self.norms)

    @property
    def limit(self) -> tuple[float, ...]:
        """Limits of this step."""
        return _plain(self._limit)

    @property
    def clipped(self) -> tuple[bool, ...]:
        """Which groups were over their limit."""
        return _plain(self._clipped)

    @property
    def is_finite(self) -> bool:
        """Whether the gradient held neither NaN nor infinity."""
        return not math.isnan(self.norm)

    @property
    def norm(self) -> float:
        """Norm of the whole gradient, from the norms of its groups; NaN if it was not finite."""
        norms = self.norm_before
        are_finite = not self.nonfinite and all(map(math.isfinite, norms))
        return math.hypot(*norms) if are_finite else math.nan

    def __float__(self) -> float:
        return self.norm

    def as_dict(self, prefix: str = "", *, groups: bool = True) -> dict[str, float]:
        """Return plain numbers under names that do not change, for any logger.

        ``norm``
            Norm of the whole gradient, before clipping.
        ``limit``
            The limit; of several groups, of the one that is furthest over its limit, or nearest.
        ``clipped``
            1 if a group was over its limit, else 0.
        ``nonfinite``
            1 if the gradient held NaN or infinity, else 0.
        ``g/norm``, ``g/limit``, ``g/clipped``
            The same of group ``g``, if there are several and `groups` is true.

        A number that is not finite, such as the limit before there is one, is left out.

        Parameters
        ----------
        prefix
            Put before each name, such as ``"clip/"``.
        groups
            Whether to give the numbers of single groups too.

        Examples
        --------
        >>> StepRecord(("all",), (5.0,), (1.0,), (True,)).as_dict("clip/")
        {'clip/norm': 5.0, 'clip/clipped': 1, 'clip/nonfinite': 0, 'clip/limit': 1.0}
        """
        norms, total = self.norm_before, self.norm
        finite = not math.isnan(total)
        numbers: dict[str, float] = {"norm": total, "clipped": 0, "nonfinite": int(not finite)}
        if finite and norms:
            rows = list(zip(self.groups, norms, self.limit, self.clipped, strict=True))
            tightest = max(rows, key=lambda row: row[1] / row[2] if row[2] else math.inf)
            numbers |= {"limit": tightest[2], "clipped": int(any(row[3] for row in rows))}
            for label, norm, limit, over in rows if groups and len(rows) > 1 else ():
                numbers[f"{label}/norm"] = norm
                numbers |= {f"{label}/limit": limit, f"{label}/clipped": int(over)}
        return _finite(numbers, prefix)

    def __repr__(self) -> str:
        fields = ("groups", "norm_before", "limit", "clipped", "nonfinite")
        return f"StepRecord({', '.join(f'{k}={getattr(self, k)!r}' for k in fields)})"


def _finite(numbers: Mapping[str, float | None], prefix: str) -> dict[str, float]:
    """Return the numbers that are known and finite, with a prefix before their names."""
    return {prefix + k: x for k, x in numbers.items() if x is not None and math.isfinite(x)}


def _plain(numbers: object) -> tuple[Any, ...]:
    if isinstance(numbers, tuple):
        return numbers
    # Loops may read them at each step.
    return tuple((numbers if isinstance(numbers, np.ndarray) else on_host(numbers)).tolist())


# The name of the file that a server of update clipping keeps, on any engine but declearn.
SERVED = "update_clip.json"


@dataclass
class RoundRecord:
    """What one group ("all": the whole gradient) did in one round.

    Attributes
    ----------
    round
        Number of the round, from 1; 0 for steps outside any round.
    group
        "all", or the label of a group of the scope.
    steps, clipped, nonfinite
        Number of steps, of those that were clipped, of those that held NaN or infinity
        (which are among the steps, and are never clipped).
    norm_min, norm_max
        Extremes of the norm before clipping; None before the first finite step.
    limit, limit_min, limit_max
        The last finite limit of the round, and the extremes; None if there was none.
    fixed, learnt, warmup
        Number of steps by what set their limit: a number that was fixed before the run (such as
        `max_norm`), the norms of earlier steps, or the start of a clipper that has not seen
        enough norms. The other steps had no limit. Of several groups, the least settled counts.
    """

    round: int
    group: str = ALL
    steps: int = 0
    clipped: int = 0
    nonfinite: int = 0
    norm_min: float | None = None
    norm_max: float | None = None
    limit: float | None = None
    limit_min: float | None = None
    limit_max: float | None = None
    fixed: int = 0
    learnt: int = 0
    warmup: int = 0
    buckets: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def clipped_share(self) -> float:
        """Share of the steps that were clipped."""
        return self.clipped / self.steps if self.steps else 0.0

    @property
    def limited_by(self) -> str:
        """What set the limit of most steps: "fixed", "learnt" or "warmup"; "" for nothing."""
        most = max(("learnt", "fixed", "warmup"), key=lambda name: int(getattr(self, name)))
        return most if getattr(self, most) else ""

    def norm_quantile(self, q: float) -> float | None:
        """Return the q-quantile of the norms before clipping, within 1 %."""
        total = sum(self.counts)
        if not total or self.norm_min is None or self.norm_max is None:
            return None
        place = holder(self.counts, q * (total - 1))
        return self.norm_max if place == len(self.counts) else self._norm(self.buckets[place])

    def norms(self) -> list[float]:
        """Return all norms before clipping, from the smallest on, each within 1 %."""
        pairs = zip(self.buckets, self.counts, strict=True)
        return [norm for b, count in pairs for norm in [self._norm(b)] * count]

    def _norm(self, bucket: int) -> float:
        value = 0.0 if bucket == _ZERO else _SKETCH.middle(_SKETCH.gamma**bucket)
        low, high = self.norm_min or 0.0, math.inf if self.norm_max is None else self.norm_max
        return float(min(max(value, low), high))

    @property
    def norm_median(self) -> float | None:
        """Median of the norms before clipping, within 1 %."""
        return self.norm_quantile(0.5)

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers under names that do not change, for any logger.

        They are ``round``, ``steps``, ``clipped``, ``nonfinite``, ``fixed``, ``learnt``,
        ``warmup``, ``norm_min``, ``norm_max``, ``limit``, ``limit_min`` and ``limit_max``, as
        above, ``clipped_share`` and ``norm_median``. Unknown numbers are left out.

        Parameters
        ----------
        prefix
            Put before each name, such as ``"clip_round/"``.

        Examples
        --------
        >>> RoundRecord(round=2, steps=4, clipped=1, norm_min=0.5).as_dict()["clipped_share"]
        0.25
        """
        fields = (*_INTS, *_FLOATS, "clipped_share", "norm_median")
        return _finite({name: getattr(self, name) for name in fields}, prefix)

    def add(self, other: RoundRecord) -> None:
        """Add the steps of another record; the limit is that of the other, if it has one."""
        for name in ("steps", "clipped", "nonfinite", "fixed", "learnt", "warmup"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for end, choose in (("min", min), ("max", max)):
            for name in (f"norm_{end}", f"limit_{end}"):
                known, new = getattr(self, name), getattr(other, name)
                if new is not None:
                    setattr(self, name, new if known is None else choose(known, new))
        self.limit = self.limit if other.limit is None else other.limit
        merged = Counter(dict(zip(self.buckets, self.counts, strict=True)))
        merged.update(dict(zip(other.buckets, other.counts, strict=True)))
        self.buckets = sorted(merged)
        self.counts = [merged[bucket] for bucket in self.buckets]


# What set a limit, from the most settled to the least.
_NOTHING, _FIXED, _LEARNT, _WARMUP = range(4)
# A limit that went through float32 may be this much below the fixed one.
_SAME = 1 - 1e-6


def _batches(
    norms: Float64, limits: Float64, clipped: Bools, setters: Float64
) -> Iterator[RoundRecord]:
    """Yield a record for each column of arrays of (steps, groups), computed for all at once."""
    steps = len(norms)
    finite = np.isfinite(limits)
    # The last finite limit of each group, or infinity.
    last = steps - 1 - np.argmax(finite[::-1], axis=0)
    buckets = np.full(norms.shape, _ZERO)
    positive = norms > 0
    buckets[positive] = _SKETCH.bucket(norms[positive])
    columns = {
        "clipped": clipped.sum(axis=0),
        "norm_min": norms.min(axis=0),
        "norm_max": norms.max(axis=0),
        "limit": limits[last, np.arange(limits.shape[1])],
        "limit_min": np.where(finite, limits, np.inf).min(axis=0),
        "limit_max": np.where(finite, limits, -np.inf).max(axis=0),
        "fixed": (setters == _FIXED).sum(axis=0),
        "learnt": (setters == _LEARNT).sum(axis=0),
        "warmup": (setters == _WARMUP).sum(axis=0),
        "buckets": buckets.T,
    }
    for numbers in zip(*[column.tolist() for column in columns.values()], strict=True):
        row: dict[str, Any] = dict(zip(columns, numbers, strict=True))
        if not math.isfinite(row["limit"]):
            row |= dict.fromkeys(("limit", "limit_min", "limit_max"))
        counts = Counter(row.pop("buckets"))
        yield RoundRecord(0, steps=steps, **row, buckets=[*counts], counts=[*counts.values()])


# The bucket of a norm of exactly 0, below that of the smallest float.
_ZERO = -100_000


class Recorder:
    """Notes the numbers of each step, and adds them up on demand."""

    def __init__(self) -> None:
        self.round = 0
        self._labels: tuple[str, ...] = ()
        self._basis: Basis | None = None
        self._buffer: list[tuple[object, object, object, object]] = []
        self._done: dict[tuple[int, str], RoundRecord] = {}

    def start_round(self) -> None:
        """Begin the next round."""
        self._flush()
        self.round += 1
        for round_, group in list(self._done):
            if round_ <= self.round - (_ROUNDS if group == ALL else _GROUP_ROUNDS):
                del self._done[round_, group]

    def add(
        self,
        labels: tuple[str, ...],
        norms: float | Float64,
        limits: float | Float64,
        clipped: bool | Bools,
        *,
        basis: Basis,
        warm: float | Float64 = 0.0,
    ) -> None:
        """Note one step: one number for each label.

        `warm` says how far the warm-up was before the step, in the terms of the `basis`.
        Numbers on a device stay there until somebody looks (or for thousands of
        steps), and may turn out to belong to a step that was not finite.
        """
        if labels != self._labels or basis is not self._basis:
            self._flush()
            self._labels, self._basis = labels, basis
        self._buffer.append((norms, limits, clipped, warm))
        host = isinstance(norms, (float, np.ndarray))
        if len(self._buffer) >= (_BUFFER if host else _LAZY_BUFFER):
            self._flush()

    def add_nonfinite(self, steps: int = 1) -> None:
        """Count steps that held NaN or infinity."""
        self._record(ALL).add(RoundRecord(self.round, steps=steps, nonfinite=steps))

    def rounds(self) -> list[RoundRecord]:
        """Return the records of the last rounds, oldest first, "all" before the groups."""
        self._flush()
        return sorted(self._done.values(), key=lambda r: (r.round, r.group != ALL))

    def get_state(self) -> dict[str, object]:
        """Return the records as plain numbers, strings and lists."""
        return {"round": self.round, "rounds": [asdict(r) for r in self.rounds()]}

    def set_state(self, round_: int, rounds: list[RoundRecord]) -> None:
        """Take over records that `read_rounds` has checked."""
        self._buffer.clear()
        self.round = round_
        self._done = {(record.round, record.group): record for record in rounds}

    def _record(self, group: str) -> RoundRecord:
        return self._done.setdefault((self.round, group), RoundRecord(self.round, group))

    def _flush(self) -> None:
        if not self._buffer or self._basis is None:
            return
        norms, limits, clipped, warm = map(_table, zip(*self._buffer, strict=True))
        self._buffer.clear()
        # What set each limit; `warm` says how far the warm-up is.
        learnt = np.where(warm < self._basis[2], _WARMUP, _LEARNT)
        setters = np.where(limits >= self._basis[0] * _SAME, _FIXED, learnt)
        setters = np.where(np.isfinite(limits), setters, _NOTHING)
        finite = np.isfinite(norms).all(axis=1)
        if not finite.all():
            self.add_nonfinite(int((~finite).sum()))
        if not finite.any():
            return
        rows: list[Any] = [column[finite] for column in (norms, limits, clipped, setters)]
        norms, limits, clipped, setters = rows
        labels = self._labels if len(self._labels) > 1 else (ALL,)
        batches = _batches(norms, limits, clipped, setters)
        for label, batch in zip(labels, batches, strict=True):
            self._record(label).add(batch)
        if labels == (ALL,):
            return
        # The whole gradient has no single limit; its norm is the L2 norm of the groups' norms.
        peak = np.maximum(norms.max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        total = np.sqrt(np.square(norms / peak).sum(axis=1, keepdims=True))
        # Norms near the largest float may have one beyond it; a rounding must not bring that back.
        largest = np.nextafter(np.finfo(np.float64).max, 0.0) / np.maximum(total, 1.0)
        total = np.minimum(peak, largest) * total
        unlimited = np.full(total.shape, np.inf)
        any_clipped: Bools = np.any(clipped, axis=1, keepdims=True)
        settled = setters.max(axis=1, keepdims=True)
        self._record(ALL).add(*_batches(total, unlimited, any_clipped, settled))


def _table(column: Sequence[object]) -> HostView:
    """Return numbers, or arrays of numbers, of some steps as an array of (steps, groups)."""
    if isinstance(column[0], (bool, float, np.ndarray)):
        return np.array(column).reshape(len(column), -1)
    return np.stack([on_host(numbers) for numbers in column])


_INTS = ("round", "steps", "clipped", "nonfinite", "fixed", "learnt", "warmup")
_FLOATS = ("norm_min", "norm_max", "limit", "limit_min", "limit_max")


def read_rounds(state: Mapping[str, object]) -> list[RoundRecord]:
    """Return the round records in the state of any fedclip clipper; none in other states.

    Raises
    ------
    StateError
        If there are records that are not what a clipper writes.
    """
    rows = state.get("rounds", [])
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise StateError(f"'rounds' must be a list of records, got {type(rows).__name__}")
    return [_read(row) for row in rows]


def _read(row: object) -> RoundRecord:
    if not isinstance(row, Mapping) or set(row) != set(RoundRecord.__dataclass_fields__):
        raise StateError(f"a record must have the fields of RoundRecord, got {row!r:.200}")
    for allowed, fits, names in _FIELDS:
        for name in names:
            if not fits(row[name]):
                raise StateError(f"{name!r} of a record must be {allowed}, got {row[name]!r:.200}")
    if len(row["buckets"]) != len(row["counts"]):
        raise StateError(f"a record must have as many buckets as counts, got {row!r:.200}")
    return RoundRecord(**{**row, "buckets": [*row["buckets"]], "counts": [*row["counts"]]})


def _is_count(value: Unchecked) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: Unchecked) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(x, int) for x in value)


def _is_known(value: Unchecked) -> bool:
    return value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf)


# What fields of a record must be.
_FIELDS: tuple[tuple[str, Callable[[Unchecked], bool], Sequence[str]], ...] = (
    ("an int >= 0", _is_count, _INTS),
    ("None or finite and >= 0", _is_known, _FLOATS),
    ("a string", lambda value: isinstance(value, str), ("group",)),
    ("a list of ints", _is_list, ("buckets",)),
    ("a list of ints >= 0", lambda v: _is_list(v) and all(map(_is_count, v)), ("counts",)),
)
