# SPDX-License-Identifier: Apache-2.0
r"""The way of a gradient: groups, norms, limits, and a new gradient only where it is clipped.

::

    n      = measure of each group                                    (fedclip.measures.l2)
    limit  = rule(n, state)                                           (fedclip.rules)
    k      = limit / (n + eps)  where n + eps > limit, else 1
    output = the array itself where k = 1, else  k (1 - margin) * array

Guarantees, for the L2 norm with ``eps = 0``
--------------------------------------------
- A group whose norm, in float64 arithmetic, is at most the limit comes back as the very same
  objects. Close to the limit, where the fast measurement could decide wrongly, the norm is
  measured again in float64.
- What is clipped has a norm of at most the limit, and not more than ``2 * margin`` below it:
  the margin covers the uncertainty of the norm, and the rounding of factor and products.
- The inputs are never changed; dtype and shape are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from fedclip.arrays import NUMBER, NUMPY, Arena, Array, Backend, Views
from fedclip.measures import Order, degree, measure
from fedclip.measures.l2 import UNCERTAINTY, Numbers, exact_norm, l2_norms
from fedclip.rules import Rule, State
from fedclip.scopes import Groups
from fedclip.states import Statistics

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Key = TypeVar("Key", bound=Hashable)

__all__ = [
    "CLOSE",
    "MARGIN",
    "NormClipping",
    "Outcome",
    "multiplied",
    "replaced",
    "scaled",
    "split",
]

MARGIN = {
    # Uncertainty of the norm + rounding of the products (one unit roundoff) + of the factor.
    "float16": 2.0**-20 + 2.0**-11,
    "bfloat16": 2.0**-20 + 2.0**-8,
    "float32": 2.0**-20 + 2.0**-23,
    "float64": 2.0**-45,
}
"""By how much, relatively, a clipped array is scaled below the limit."""

CLOSE = 2 * UNCERTAINTY["float32"]
"""How near to a limit, relatively, a norm has to be measured in float64."""
_MEANS = ("rms", "mad", "std", "var")


class Outcome(NamedTuple):
    """What one step did: new arrays (None: unchanged), state, and one number a group."""

    outputs: list[Array] | None
    state: State
    norms: Numbers
    limits: Numbers
    clipped: bool | Bools


def split(numerator: float, denominator: float, power: float = 1.0) -> tuple[float, ...]:
    """Return factors, one or two, whose product is ``(numerator / denominator) ** power``.

    Two where one would leave the normal range of float32, which a product with an array in
    two steps does not: a norm of 1e42 in float32 can be clipped to 1.
    """
    if power == 1.0 and 1e-30 < numerator < 1e30 and 1e-5 < denominator < 1e5:
        return (numerator / denominator,)
    m, e = math.frexp(numerator)
    n, f = math.frexp(denominator)
    ratio, exponent = m / n, e - f
    if power != 1.0:
        # An even exponent, so that its root is a power of two.
        if exponent % 2:
            ratio, exponent = 2 * ratio, exponent - 1
        ratio, exponent = math.sqrt(ratio), exponent // 2
    if abs(exponent) < 120:
        return (math.ldexp(ratio, exponent),)
    half = exponent // 2
    return math.ldexp(ratio, half), math.ldexp(1.0, exponent - half)


def scaled(
    arrays: Sequence[Array],
    factors: Mapping[int, tuple[float, ...]],
    backend: Backend,
    arena: Arena,
) -> list[Array]:
    """Return the arrays, those with factors times them and shrunk by the margin of the dtype."""
    return replaced(
        arrays,
        {i: (arrays[i].dtype, factor) for i, factor in factors.items()},
        lambda chosen, key: multiplied(chosen, key[1], backend, arena),
    )


def replaced(
    arrays: Sequence[Array],
    keys: Mapping[int, Key],
    call: Callable[[list[Array], Key], Sequence[Array]],
) -> list[Array]:
    """Return the arrays, those at a position with a key replaced; one call for all with that key.

    The key has to tell dtypes apart, if the call needs arrays of one.
    """
    outputs = list(arrays)
    alike: dict[Key, list[int]] = {}
    for i, key in keys.items():
        alike.setdefault(key, []).append(i)
    for key, chosen in alike.items():
        results = call([arrays[i] for i in chosen], key)
        for i, result in zip(chosen, results, strict=True):
            outputs[i] = result
    return outputs


def multiplied(
    arrays: Sequence[Array], factor: tuple[float, ...], backend: Backend, arena: Arena
) -> list[Array]:
    """Return arrays of one dtype times a factor, shrunk by the margin of the dtype."""
    outputs = backend.scale(arrays, factor[0] * (1.0 - MARGIN[backend.dtype(arrays[0])]), arena)
    for k in factor[1:]:
        outputs = backend.scale(outputs, k, arena)
    return outputs


@dataclass(frozen=True)
class NormClipping:
    """Rule × measure × action; the scope comes with the groups of each call.

    Attributes
    ----------
    rule
        Gives each group its limit.
    ord
        What is measured.
    eps
        Added to the norm in the factor; 1e-6 does what torch does, 0 is exact.
    min_norm
        Groups below this norm are scaled up to it, unless they are zero.
    rescale
        Bring every group to its limit, those below it too (normalisation).
    skip
        Zero a group that is over its limit instead of scaling it.
    dry
        Measure and decide, and change nothing.
    """

    array_fields: ClassVar[tuple[str, ...]] = ()

    rule: Rule
    ord: Order = 2
    eps: float = 0.0
    min_norm: float | None = None
    rescale: bool = False
    skip: bool = False
    dry: bool = False

    def init(self, groups: Groups) -> State:
        """Return the state before the first step."""
        return self.rule.init(len(groups), NUMPY)

    def measure(
        self,
        arrays: Sequence[Array],
        views: Views,
        groups: Groups,
        backend: Backend,
    ) -> Numbers:
        """Return the norm of each group."""
        if self.ord == 2:
            return l2_norms(arrays, views, groups, backend)
        local = []
        for array, view in zip(arrays, views, strict=True):
            # A mean is over all elements of a sparse array, those that it does not hold too.
            whole = backend.dense(array) if self.ord in _MEANS else array
            local.append(backend.to_host(whole) if view is None or whole is not array else view)
        norms = [measure([local[i] for i in m], self.ord) for m in groups.members]
        return norms[0] if len(norms) == 1 else np.array(norms)

    def step(
        self,
        arrays: Sequence[Array],
        groups: Groups,
        backend: Backend,
        measured: Numbers,
        state: State,
        views: Views,
        kept: Statistics,
    ) -> Outcome:
        """Clip one gradient whose norms, all finite, have been measured."""
        norms, limits, over, after = self.decide(groups, measured, state, views)
        moved = over
        if self.rescale:
            moved = norms > 0
        elif self.min_norm is not None:
            moved = over | ((norms < self.min_norm) & (norms > 0))
        outputs = None
        if not self.dry and (moved if isinstance(moved, bool) else moved.any()):
            outputs = self._apply(arrays, views, groups, backend, norms, limits, moved)
        return Outcome(outputs, after, norms, limits, over)

    def decide(
        self,
        groups: Groups,
        norms: Numbers,
        state: State,
        views: Views,
    ) -> tuple[Numbers, Numbers, bool | Bools, State]:
        """Return norms, limits, which groups are over theirs, and the state after."""
        limits, after = self._ask(norms, state)
        if self.ord == 2 and not self.rescale:
            close = abs(norms - limits) <= CLOSE * limits
            if close if isinstance(close, bool) else close.any():
                refined = self._measure_again(np.atleast_1d(close), views, groups, norms)
                if refined is not None:
                    norms = refined
                    limits, after = self._ask(norms, state)
        return norms, limits, norms + self.eps > limits, after

    def _ask(self, norms: Numbers, state: State) -> tuple[Array, State]:
        """Return the rule's limits, and the state after."""
        if isinstance(norms, np.ndarray):
            return self.rule(norms, state, NUMPY)
        if not state or not isinstance(state[0], np.ndarray):
            return self.rule(norms, state, NUMBER)
        # The state of the only group is of several numbers: a column of an array.
        limits, after = self.rule(np.array([norms]), state, NUMPY)
        return float(limits[0]), after

    @staticmethod
    def _measure_again(
        close: Bools, views: Views, groups: Groups, norms: Numbers
    ) -> Numbers | None:
        """Return the norms with those close to their limit measured in float64; None if none."""
        refined = np.array(norms, ndmin=1)
        changed = False
        for group in np.flatnonzero(close):
            local = [views[i] for i in groups.members[group]]
            narrow = any(view is not None and view.itemsize < 8 for view in local)
            # float64 data has been measured in float64; a device measures in float64 too.
            if narrow and all(view is not None for view in local):
                refined[group] = exact_norm(local)  # type: ignore[arg-type]
                changed = True
        if not changed:
            return None
        return float(refined[0]) if len(groups) == 1 else refined

    def _apply(
        self,
        arrays: Sequence[Array],
        views: Views,
        groups: Groups,
        backend: Backend,
        norms: Numbers,
        limits: Numbers,
        moved: bool | Bools,
    ) -> list[Array]:
        power, arena = 1.0 / degree(self.ord), Arena(views.sizes)
        if len(groups) == 1 and not views.remote and len(views.dtypes) == 1:
            factor = self._factor(float(norms), float(limits), power)
            return multiplied(arrays, factor, backend, arena)
        factors: dict[int, tuple[float, ...]] = {}
        columns = (np.atleast_1d(column).tolist() for column in (norms, limits, moved))
        for members, norm, limit, chosen in zip(groups.members, *columns, strict=True):
            if chosen:
                factors.update(dict.fromkeys(members, self._factor(norm, limit, power)))
        return scaled(arrays, factors, backend, arena)

    def _factor(self, norm: float, limit: float, power: float) -> tuple[float, ...]:
        if self.skip:
            return (0.0,)
        if self.min_norm is not None and norm < self.min_norm:
            limit = min(self.min_norm, limit)
        return split(limit, norm + self.eps, power)
