# SPDX-License-Identifier: Apache-2.0
"""Aggregates a round for any engine: each reply is vetted, weighed and added as it arrives.

::

    for each reply, when it arrives:
        fault = it has no valid weight, or no honest client can have sent it
        a secure sum of m clients: the nearest one of norm m * C
        sum += weight * update                       in float64; zeros if there is a fault
    average = sum / number of replies, or / sum of the weights

The sum is Kahan's: whatever the order of the replies, it is within 1e-15 of the sum of absolute
terms. A round then holds two arrays of the model's size, however many clients there are. Where all
replies are needed first, they are held until the end: with `max_share`, and to combine them so that
some malicious clients do little harm::

    "arc"       the mean, after the longest updates are shortened to the next longest
                    k = floor(2 (f / n) (n - f))           of n updates, f of them malicious
                    limit = norm of the (k + 1)-th longest update
                one client moves it by 2 f C / n, and no update stays longer than the longest of
                those that are not malicious
    "trimmed"   of each coordinate, the mean of all but the f smallest and the f largest values
                one client moves it by C / (n - 2 f), and in no coordinate beyond the values of
                those that are not malicious

That is against zeros as its update; the plain mean moves by C / n. The mean and "arc" are no longer
than C, and "trimmed" no longer than sqrt(n / (n - f)) C. A reply that is refused counts as zeros.

Allouah, Guerraoui, Gupta, Jellouli, Rizk & Stephan, 2024, "Adaptive gradient clipping for robust
federated learning", arXiv:2405.14432: their proof for ARC needs a robust mean to follow, not the
plain one here. Yin, Chen, Ramchandran & Bartlett, 2018, "Byzantine-robust distributed learning:
towards optimal statistical rates", arXiv:1803.01498.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedclip.arrays import Array, Float64, HostView, backend_of
from fedclip.core import parameters
from fedclip.updates.limits import Limits, norm_of
from fedclip.updates.protocol import Arrays, Reply
from fedclip.updates.weights import WITH_NOISE, Share, Shares

# Numbers of values that are added at once, in the cache, and of a table that is sorted at once.
_PIECE, _TABLE = 2**14, 2**20


def host_values(array: Array) -> HostView:
    """Return an array's values on the host, dense."""
    if isinstance(array, np.ndarray):
        return array
    backend = backend_of(array)
    return backend.to_host(backend.dense(array))


def finite_values(array: Array) -> Float64:
    """Return an array in float64, with the ends of its dtype instead of infinity."""
    return np.asarray(np.nan_to_num(host_values(array)), np.float64)


class ExactSum:
    """The sum of updates times factors, tensor by tensor, in float64.

    In float64: a sum in the dtype of the updates is rounded at each client, so that with noise
    one client could move it by more than the bound, and without noise many small updates in half
    precision would add up to too little.
    """

    def __init__(self) -> None:
        # Of each tensor, the sum, and what rounding has added too much so far.
        self._sums: dict[str, tuple[Float64, Float64]] = {}

    def add(self, update: Arrays, factor: float = 1.0) -> None:
        """Add an update times a factor; an update that cannot be read changes nothing."""
        rows = {name: host_values(array) for name, array in update.items()}
        if not self._sums:
            self._sums = {n: (np.zeros(row.shape), np.zeros(row.shape)) for n, row in rows.items()}
        for name, row in rows.items():
            _add(*self._sums[name], row, factor)

    def divided(self, divisor: float) -> dict[str, Float64]:
        """Return the sum divided by a number."""
        return {name: np.asarray(total / divisor) for name, (total, _) in self._sums.items()}


def _add(total: Float64, lost: Float64, row: HostView, factor: float) -> None:
    """Add values times a factor (Kahan)."""
    total, lost, values = total.reshape(-1), lost.reshape(-1), row.reshape(-1)
    for start in range(0, total.size, _PIECE):
        piece = slice(start, start + _PIECE)
        term = np.multiply(values[piece], factor, dtype=np.float64)
        term -= lost[piece]
        before = total[piece]
        after = before + term
        np.subtract(after, before, out=before)
        np.subtract(before, term, out=lost[piece])
        total[piece] = after


class Combining:
    """How updates are combined; the parameters are those of `clipped-averaging`."""

    def __init__(self, combine: str = "mean", n_hostile: int | None = None) -> None:
        self.kind = parameters.choice(("mean", "arc", "trimmed"), combine=combine)
        hostile = parameters.optional(parameters.integer, 1, n_hostile=n_hostile)
        if (self.kind == "mean") != (hostile is None):
            got = f"combine={combine!r} does not go with n_hostile={n_hostile!r}"
            raise ValueError(f"{got}: set both")
        self.n_hostile = hostile or 0

    @property
    def pull(self) -> str:
        """By how much one client moves the average, as a multiple of the bound, of n replies."""
        f = self.n_hostile
        return {"mean": "1 / n", "arc": f"{2 * f} / n", "trimmed": f"1 / (n - {2 * f})"}[self.kind]

    def unfit(self, *, weights: bool = False, noise: bool = False, secure: bool = False) -> str:
        """Return why updates cannot be combined like this; "" if they can."""
        reasons = {
            "secure aggregation: the server sees the sum of the updates, and none of them": secure,
            f"noise: that is sized on 1 / n of the bound, not on {self.pull}": noise,
            "weights: n_hostile counts clients, and one may have most of the weight": weights,
        }
        why = next((why for why, applies in reasons.items() if applies and self.n_hostile), "")
        return why and f"combine = {self.kind!r} does not go with {why}; take the mean"

    def too_few(self, clients: int) -> str:
        """Return a message if a round has too few clients; "" if it has enough."""
        if not self.n_hostile or clients > 2 * self.n_hostile:
            return ""
        text = f"combine = {self.kind!r} with n_hostile = {self.n_hostile} needs more than"
        return f"{text} {2 * self.n_hostile} replies in a round, and there are {clients}"

    def of(
        self, updates: Sequence[Arrays], clients: int, factors: Sequence[float], divisor: float
    ) -> dict[str, Float64]:
        """Return one update for a number of clients; those without an update count as zeros.

        The mean, and that of "arc", is the sum of updates times factors, over the `divisor`.
        """
        if self.kind == "trimmed":
            return trimmed_mean(updates, clients, self.n_hostile)
        if self.kind == "arc":
            norms = [norm_of(update, "arc") or 0.0 for update in updates]
            norms += [0.0] * (clients - len(updates))
            factors = arc_factors(norms, self.n_hostile)[: len(updates)]
        return averaged(updates, divisor, factors)


def averaged(
    updates: Sequence[Arrays], divisor: float, factors: Sequence[float]
) -> dict[str, Float64]:
    """Return the sum of updates times factors, divided by a number, in float64."""
    total = ExactSum()
    for update, factor in zip(updates, factors, strict=True):
        total.add(update, factor)
    return total.divided(divisor)


def num_shortened(clients: int, n_hostile: int) -> int:
    """Return how many updates are shortened to the length of the next longest: k."""
    return 2 * n_hostile * (clients - n_hostile) // clients


def arc_factors(norms: Sequence[float], n_hostile: int) -> list[float]:
    """Return by what each update is multiplied; of n norms, 2 `n_hostile` < n.

    Examples
    --------
    >>> arc_factors([1.0, 4.0, 2.0], 1)
    [1.0, 0.5, 1.0]
    """
    limit = sorted(norms, reverse=True)[num_shortened(len(norms), n_hostile)]
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def trimmed_mean(updates: Sequence[Arrays], clients: int, n_hostile: int) -> dict[str, Float64]:
    """Return the trimmed mean of updates, tensor by tensor, in float64.

    If there are fewer than `clients`, of which there are more than 2 `n_hostile`, the others count
    as zeros.

    Examples
    --------
    >>> trimmed_mean([{"w": np.array([w, 1.0])} for w in (1.0, -99.0, 3.0)], 3, 1)
    {'w': array([1., 1.])}
    """
    means = {}
    for name, first in updates[0].items():
        rows = [np.asarray(host_values(update[name])).reshape(-1) for update in updates]
        mean = np.zeros(rows[0].size)
        # Narrower dtypes are sorted as float32, which is exact.
        dtype, step = np.result_type(np.float32, *rows), max(1, _TABLE // clients)
        for start in range(0, mean.size, step):
            piece = slice(start, start + step)
            table = np.zeros((mean[piece].size, clients), dtype)
            for column, row in enumerate(rows):
                table[:, column] = row[piece]
            table.sort(axis=1)
            middle = table[:, n_hostile : clients - n_hostile]
            mean[piece] = middle.mean(axis=1, dtype=np.float64)
        means[name] = mean.reshape(tuple(first.shape))
    return means


@dataclass(frozen=True)
class Aggregation:
    """How the replies of a round become one update: limits, weights, and combining."""

    limits: Limits
    shares: Shares
    combining: Combining

    def __post_init__(self) -> None:
        """Refuse weights and combining that do not go together."""
        if why := self.combining.unfit(weights=self.shares.kind != "equal"):
            raise ValueError(why)

    def unfit_for_noise(self) -> str:
        """Return why no noise can be sized on this average; "" if it can."""
        if self.limits.exclude:
            return f"noise cannot be sized on exclude={[*self.limits.exclude]}, which has no bound"
        return WITH_NOISE if self.shares.kind != "equal" else self.combining.unfit(noise=True)

    @property
    def holds(self) -> str:
        """The replies that a round holds beyond two arrays of the model's size; "" if nothing."""
        if self.combining.n_hostile:
            return f"all replies, as combine = {self.combining.kind!r} compares them"
        weighed = self.shares.max_share is not None
        return "all replies, as max_share takes the weights of all of them" if weighed else ""


class RunningAverage:
    """The average of the replies that have come so far.

    Parameters
    ----------
    like
        What has the names and shapes of the model.
    bound
        Of the `whole` update, or of each group.
    warn
        Is called with which replies count as zeros.
    clients
        By how many to divide; None: by as many as reply.

    Attributes
    ----------
    faults
        Why each reply counts as zeros, in the order of arrival; "" if it does not.
    clients
        How many clients have replied.
    valid
        Of how many clients the updates count.
    clipped, zeroed
        How many of these have clipped their update, or replaced it by zeros.
    """

    def __init__(
        self,
        aggregation: Aggregation,
        like: Arrays,
        bound: float,
        warn: Callable[[str], None],
        *,
        whole: bool = True,
        clients: int | None = None,
    ) -> None:
        self.aggregation, self.like, self.bound = aggregation, like, bound
        self._warn, self._whole, self._divisor = warn, whole, clients
        self.faults: list[str] = []
        self.clients = self.valid = self.clipped = self.zeroed = 0
        self._total, self._mass = ExactSum(), 0.0
        # Replies with their places, if all are needed first.
        self._held: dict[int, Reply] | None = {} if aggregation.holds else None
        self._senders: set[str] = set()
        self._equal = aggregation.shares.kind == "equal"

    def add(self, reply: Reply) -> str:
        """Add a reply; return why it counts as zeros, as far as that is known, or "".

        A second reply of a sender, and one that cannot be read, changes nothing.
        """
        place, fault = len(self.faults), ""
        self.faults.append(fault)
        if reply.sender and reply.sender in self._senders:
            return self._refused(place, reply, "its sender has replied already")
        if self._held is not None:
            self._held[place] = reply
        else:
            share = Share(1.0, reply.clients)
            if not self._equal:
                # Whether this reply, or one before it, is a secure sum next to others.
                mixed = self.clients > 0 and (reply.clients > 1 or self.clients > place)
                share = self.aggregation.shares.weight_of(reply, alone=not mixed)
            fault = self._counted(place, reply, share, self._total.add)
            self._mass += 1.0 if reply.clients > 1 and not share.fault else share.factor
        self._senders.add(reply.sender)
        self.clients += reply.clients
        return fault

    def _counted(
        self, place: int, reply: Reply, share: Share, use: Callable[[Arrays, float], None]
    ) -> str:
        """Use the update of a reply, or return why it counts as zeros."""
        limits, arrays = self.aggregation.limits, reply.arrays
        try:
            fault = share.fault or limits.fault(reply, self.like, self.bound, self._whole)
            if not fault and reply.clients > 1:
                sums = {name: finite_values(array) for name, array in arrays.items()}
                arrays = limits.projected(sums, self.bound, self._whole, reply.clients, share.mass)
            if not fault:
                use(arrays, share.factor)
        except Exception as exc:  # a client may have sent anything
            fault = f"it cannot be read ({exc!r:.200})"
        if fault:
            return self._refused(place, reply, fault)
        self.valid += reply.clients
        self.clipped += reply.clipped
        self.zeroed += reply.zeroed
        return ""

    def _refused(self, place: int, reply: Reply, fault: str) -> str:
        self.faults[place] = fault
        who = repr(reply.sender) if reply.sender else "one of the replies"
        self._warn(f"the update of {who} counts as zero: {fault}")
        return fault

    def finish(self) -> dict[str, Float64] | None:
        """Return the average in float64; None if no reply counts, so that it is zeros."""
        divisor = (self._divisor or self.clients) if self._equal else None
        if self._held is not None:
            return self._combined(self._held, divisor or 1)
        # All weights may be 0.
        return self._total.divided(divisor or self._mass or 1.0) if self.valid else None

    def _combined(self, held: dict[int, Reply], divisor: int) -> dict[str, Float64] | None:
        """Combine the replies that were held; shares that are not equal add up to 1 already."""
        combining, replies = self.aggregation.combining, [*held.values()]
        unfit = combining.unfit(secure=any(reply.clients > 1 for reply in replies))
        unfit = unfit or combining.too_few(len(held))
        arrays, factors = list[Arrays](), list[float]()

        def keep(update: Arrays, factor: float) -> None:
            arrays.append(update)
            factors.append(factor)

        shares = self.aggregation.shares.of(replies)
        for (place, reply), share in zip(held.items(), shares, strict=True):
            self._counted(place, reply, share._replace(fault=unfit or share.fault), keep)
        return combining.of(arrays, self.clients, factors, divisor) if arrays else None

    @property
    def void(self) -> str:
        """Why the average holds no update; "" if it holds some."""
        if self.valid:
            return ""
        why = self.faults[0] if self.faults else "nobody has replied"
        return f"none of the {len(self.faults)} replies of the round can be used: {why}"
