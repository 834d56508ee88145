# SPDX-License-Identifier: Apache-2.0
"""The limits of an update, group by group; whether a reply is within them; and its arrays.

Also finds running statistics, such as those of BatchNorm, which must not get noise.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, mul
from typing import Any

import numpy as np

from fedclip.arrays import Array, Float64, backend_of, on_host
from fedclip.arrays.blocks import peak as peak_of
from fedclip.arrays.numpy import bits
from fedclip.core.measures import Order
from fedclip.core.scopes import Groups, Scope, in_table, resolve
from fedclip.rules import NoState
from fedclip.rules.constant import Constant
from fedclip.transforms import Gradient, NormClipping, NotFiniteError, Transform, prepare, take_step
from fedclip.transforms.base import Plan
from fedclip.updates.protocol import Arrays, Reply
from fedclip.updates.votes import COUNTS, is_one_of

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes, in the order of names."""

OTHER_TENSORS = "its tensors are not the model's"

# A clipped update is below its limit by more than float32 rounding adds to the norm.
_SLACK = 1.0 + 1e-5
_SHAPE = attrgetter("shape")


def signature(arrays: Arrays) -> Signature:
    """Return names and shapes.

    Dtypes do not count: if one client's dtype decided about the updates of others, that client
    could move the average by more than its share.
    """
    return tuple(sorted(zip(arrays, map(tuple, map(_SHAPE, arrays.values())), strict=True)))


def check_whole(scope: Scope) -> None:
    """Refuse a table that gives some tensors no part of a bound of the whole update."""
    if isinstance(scope, Mapping) and "*" not in scope:
        text = f'the table scope={dict(scope)!r} needs "*", a number for the other tensors'
        why = "a bound from update-clip-server is split in proportion to these numbers"
        raise ValueError(f"{text}: {why}")


@dataclass
class Limits:
    """Limits for the groups of a scope; `called` is what messages call this kind of clipping.

    Attributes
    ----------
    noise
        Standard deviation of the noise that each client adds to each value, in bounds.
    """

    scope: Scope
    exclude: Sequence[str] | None
    called: str
    noise: float = 0.0
    # Names and groups of the last update, and what it has in common with others like it.
    _last: tuple[tuple[str, ...], Groups] | None = field(default=None, init=False, compare=False)
    _plan: Plan | None = field(default=None, init=False, compare=False)

    def groups(self, arrays: Arrays) -> Groups:
        """Return the groups of an update."""
        names, last = tuple(arrays), self._last
        if last is None or last[0] != names:
            # Both at once: threads may share a client.
            last = self._last = names, resolve(self.scope, self.exclude, names)
        return last[1]

    def prepared(
        self, arrays: Arrays, groups: Groups, limits: tuple[float, ...], only_measures: bool = False
    ) -> tuple[Transform, Gradient]:
        """Return what brings each group of an update within its limit, and the update."""
        transform = NormClipping(Constant(limits), only_measures=only_measures)
        gradient = prepare(self.called, arrays, groups, transform, plan=self._plan)
        self._plan = gradient.plan
        return transform, gradient

    def of(self, groups: Groups, bound: float, whole: bool) -> tuple[float, ...]:
        """Return the limit of each group.

        A bound C of the `whole` update gives each of k groups C / sqrt(k); a group that has t in
        the table, ``C * t / sqrt(sum of t^2)``. Together they are C, which noise is scaled to.
        """
        labels, table = groups.labels, self.scope
        if not isinstance(table, Mapping):
            return (bound / math.sqrt(len(labels) or 1) if whole else bound,) * len(labels)
        if not whole:
            return tuple([in_table(table, label, bound) for label in labels])
        parts = [in_table(table, label, 0.0) for label in labels]
        length = math.sqrt(sum(map(mul, parts, parts)))
        return tuple([bound / (length / part) if part else 0.0 for part in parts])

    def fault(self, reply: Reply, like: Arrays, bound: float, whole: bool = True) -> str:
        """Return why no honest client can have sent a reply; "" if one can.

        It must have the names and shapes of `like`, and be within its bound, unless it is a sum of
        several clients: `projected` brings that within theirs. What clients send may be anything.
        """
        if reply.fault:
            return reply.fault
        counts = reply.clipped, reply.zeroed
        if reply.clients == 1 and any(counts) and not is_one_of(COUNTS, counts):
            return "its counts are not of one client"
        try:
            if signature(reply.arrays) != signature(like):
                return OTHER_TENSORS
            return self.excess(reply.arrays, bound, whole, reply.clients)
        except Exception as exc:
            return f"it cannot be measured ({exc!r:.200})"

    def excess(self, arrays: Arrays, bound: float, whole: bool = True, clients: int = 1) -> str:
        """Return by how much an update is beyond its limit; of a sum, only what its dtypes are."""
        groups = self.groups(arrays)
        # Those that are measured are of floats.
        for name in arrays if clients > 1 else groups.excluded:
            dtype = backend_of(arrays[name]).dtype(arrays[name])
            if not dtype.startswith(("float", "bfloat", "int", "uint")):
                return f"its tensor {name!r:.60} is of {dtype}"
        if clients > 1:
            return ""
        limits = self.of(groups, bound, whole)
        transform, gradient = self.prepared(arrays, groups, limits, only_measures=True)
        try:
            norms = take_step(transform, gradient, NoState(), "raise").norms
        except NotFiniteError:
            return "it holds NaN or infinity"
        noise = self._noise(arrays, bound, 1) if self.noise else 0.0
        columns = gradient.groups.labels, on_host(norms).tolist(), limits
        for label, norm, limit in zip(*columns, strict=True):
            if norm > limit * _SLACK + noise:
                return f"its norm of {label!r} is {norm:.4g}, beyond the limit of {limit:.4g}"
        return ""

    def _noise(self, arrays: Arrays, bound: float, clients: int) -> float:
        """Return the length that the noise of clients has at most, but for once in 10^31 times."""
        size = sum(math.prod(array.shape) for array in arrays.values())
        return self.noise * bound * math.sqrt(clients) * (math.sqrt(size) + 12)

    def projected(
        self, sums: Mapping[str, Float64], bound: float, whole: bool, clients: int, mass: float
    ) -> dict[str, Float64]:
        """Return the nearest sum within `mass` bounds, group by group.

        No two sums are further apart after it than before, whatever some of the clients sent. To
        refuse a sum would move it by the updates of all clients where that of one is beyond.
        """
        noise = self._noise(sums, bound, clients)
        groups = self.groups(sums)
        limits = tuple([limit * mass + noise for limit in self.of(groups, bound, whole)])
        transform, gradient = self.prepared(sums, groups, limits)
        outcome = take_step(transform, gradient, NoState(), "raise")
        return dict(gradient.result(sums, outcome.outputs))


def norm_of(arrays: Arrays, called: str, ord: Order = 2) -> float | None:
    """Return the norm of a whole update; None if an array holds NaN or infinity."""
    transform = NormClipping(Constant((math.inf,)), ord, only_measures=True)
    gradient = prepare(called, arrays, resolve("global", None, tuple(arrays)), transform)
    try:
        norms = take_step(transform, gradient, NoState(), "raise").norms
    except NotFiniteError:
        return None
    return sum(on_host(norms).tolist(), 0.0)


# -- arrays of updates --------------------------------------------------------------------------


def zeros(arrays: Arrays) -> dict[str, Array]:
    """Return zeros of the same shapes, whatever the arrays hold."""
    return {name: backend_of(array).keep_if(False, [array])[0] for name, array in arrays.items()}


def peaks(arrays: Arrays, limit: float) -> dict[str, float]:
    """Return the tensors that hold a value beyond ±limit, or NaN, and their largest values."""
    tops = {n: peak_of(bits(backend_of(a).to_host(a))) for n, a in arrays.items()}
    return {name: peak for name, peak in tops.items() if not peak <= limit}


# -- running statistics, such as those of BatchNorm ---------------------------------------------
#
#     by name       running_mean, moving_variance, mean_ema, batch_stats, num_batches_tracked
#     by siblings   mean and var of one layer; with a counter in it, any two of one shape that are
#                   not called like weights
#     by form       arrays without names: of three vectors in a row of one length, only the last is
#                   positive everywhere, like BatchNorm's beta, mean, variance; or a counter follows
#
# Noise belongs on free numbers. A variance with noise turns negative, and a mean or variance is
# often many times longer than all weights together, so that it uses up the bound.
_MOMENT = "(?:mean|var|variance|std|avg|average)"
_NAMED = re.compile(
    rf"(?:running|moving|ema|population|tracked)_?(?:{_MOMENT}|stats?)(?![a-z])"
    rf"|(?<![a-z]){_MOMENT}_ema(?![a-z])|batch_?stats|num_batches_tracked"
)
_LEARNT = {"weight", "bias", "scale", "offset", "gamma", "beta", "kernel", "w", "b"}


def refuse_statistics(model: Arrays) -> None:
    """Refuse noise on a model that holds running statistics.

    Raises
    ------
    ValueError
        The message names them, and says what to do.
    """
    if names := statistics_of(model):
        named = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" * (len(names) > 4))
        text = f"the model holds running statistics ({named:.300}), and noise is for weights only"
        advice = "keep them at the clients (personal layers), or use GroupNorm"
        raise ValueError(f"{text}: {advice}")


def statistics_of(model: Arrays) -> list[str]:
    """Return the names of the arrays that are running statistics, in the model's order.

    Parameters
    ----------
    model
        Arrays by name, of any framework; their values are looked at only if they have no names.

    Examples
    --------
    >>> ones = np.ones(2)
    >>> statistics_of({"bn.weight": ones, "bn.running_var": ones, "fc.weight": np.ones((2, 2))})
    ['bn.running_var']
    """
    layers: dict[str, dict[str, str]] = {}
    for name in model:
        *above, last = re.split(r"[/.:|]+|==", re.sub(r":\d+$", "", name.lower()))
        layers.setdefault("/".join(above), {})[last] = name
    matches = {name for name in model if _NAMED.search(name.lower())}
    for prefix, layer in layers.items():
        matches |= _siblings(layer, model) if prefix else set()
        matches |= set(_in_rows(layer, model))
    return [name for name in model if name in matches and not _is_whole(model[name])]


def _siblings(layer: Mapping[str, str], model: Arrays) -> set[str]:
    """Return the statistics of a layer that its other arrays give away."""
    matches = {last for last in ("var", "variance", "std") if {last, "mean"} <= layer.keys()}
    matches |= {"mean"} if matches else set()
    if any(_is_counter(model[name]) for name in layer.values()):
        unknown = [last for last in layer if not (last in _LEARNT or last.isdecimal())]
        shapes = Counter(tuple(model[layer[last]].shape) for last in unknown)
        matches |= {last for last in unknown if shapes[tuple(model[layer[last]].shape)] > 1}
    return {layer[last] for last in matches}


def _in_rows(layer: Mapping[str, str], model: Arrays) -> Iterator[str]:
    """Yield the variances among arrays whose names are numbers."""
    names = [layer[last] for last in sorted(filter(str.isdecimal, layer), key=int)]
    for name, after in itertools.pairwise(names):
        if len(model[name].shape) == 1 and _is_counter(model[after]) and _is_positive(model[name]):
            yield name
    for shape, group in itertools.groupby(names, lambda name: tuple(model[name].shape)):
        row = [(name, _is_positive(model[name])) for name in group if len(shape) == 1 < shape[0]]
        for (_, beta), (_, mean), (name, variance) in zip(row, row[1:], row[2:], strict=False):
            if variance and not (beta or mean):
                yield name


def _is_counter(array: Any) -> bool:
    return bool(np.prod(array.shape) == 1 and _is_whole(array))


def _is_whole(array: object) -> bool:
    return "int" in backend_of(array).dtype(array)


def _is_positive(array: object) -> bool:
    return bool(np.all(np.asarray(backend_of(array).to_host(array)) > 0))
