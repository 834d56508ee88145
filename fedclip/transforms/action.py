# SPDX-License-Identifier: Apache-2.0
"""From norm and limit to a factor, and from factors to new arrays.

::

    over   = n + eps > limit
    moved  = over; or every n > 0 (rescale); or 0 < n < min_norm as well
    target = limit; or min(limit, min_norm) where n < min_norm; or 0 (skip)
    k      = target / (n + eps)  where moved, else 1
    output = the array itself where not moved, else  k (1 - margin) * array

The margin covers the uncertainty of the norm, and the rounding of factor and products. Where
products may become subnormal, rounding adds to the norm what does not shrink with it, and the
target is lowered by as much; where they may become too large for the dtype, the factor is held.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fedclip.arrays import Arena, Arithmetic, Array, Backend

__all__ = [
    "FLOOR",
    "LARGEST",
    "MARGIN",
    "SCALE_DOWN",
    "SUBNORMAL",
    "Action",
    "Decision",
    "multiplied",
    "replaced",
    "scaled",
    "split",
]

Key = TypeVar("Key", bound=Hashable)

MARGIN = {
    # Uncertainty of the norm + rounding of the products (one unit roundoff) + of the factor.
    "float16": 2.0**-20 + 2.0**-11,
    "bfloat16": 2.0**-20 + 2.0**-8,
    "float32": 2.0**-20 + 2.0**-23,
    "float64": 2.0**-45,
}
"""By how much, relatively, a clipped array is scaled below the limit."""

SUBNORMAL = {
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
    "float32": 2.0**-150,
    "float64": 2.0**-1074,
}
"""By how much, absolutely, an element that becomes subnormal may be rounded up."""

FLOOR = {"float16": math.inf, "bfloat16": 2.0**-90, "float32": 2.0**-100, "float64": 2.0**-990}
"""A target from which on the margin covers that, for any number of elements."""

LARGEST = {
    "float16": 65504.0,
    "bfloat16": 0xFF * 2.0**120,
    "float32": (2.0**24 - 1) * 2.0**104,
    "float64": sys.float_info.max,
}
"""The largest number of each dtype."""


class Decision(NamedTuple):
    """What becomes of each group."""

    over: Any
    """Whether it is over its limit."""
    moved: Any
    """Whether it is scaled; if so, by ``target / base``."""
    target: Any
    base: Any

    def factors(self, norms: Any, sizes: Sequence[Any], dtype: str, xp: Backend) -> Any:
        """Return a factor for each group on a device: 1 where not moved.

        `sizes`, numbers of elements, are needed for float16.
        """
        k = self.ratio(xp) * (1.0 - MARGIN[dtype])
        if dtype == "float16":
            # What rounding adds where products become subnormal.
            spread = SUBNORMAL[dtype] * xp.sqrt(xp.asarray(sizes, like=norms))
            k = xp.maximum(k - spread / xp.where(norms > 0, norms, 1.0), 0.0)
        else:
            # Devices differ in what they do about subnormals: there are none.
            k = xp.where(self.target < FLOOR[dtype], 0.0 * k, k)
        return xp.where(self.moved, k, 1.0)

    def ratio(self, xp: Arithmetic) -> Any:
        """Return by what to scale where `moved`; elsewhere it means nothing."""
        return self.target / xp.where(self.moved, self.base, 1.0)


@dataclass(frozen=True)
class Action:
    """What becomes of a group, or slice, of some norm under some limit.

    Attributes
    ----------
    eps
        Added to the norm; 1e-6 does what torch does, 0 is exact.
    min_norm
        What is below this norm, but not zero, is scaled up to it.
    rescale
        Bring everything to its limit, what is below it too (normalisation).
    skip
        Zero what is over its limit instead of scaling it.
    """

    eps: float = 0.0
    min_norm: float | None = None
    rescale: bool = False
    skip: bool = False

    @property
    def raises(self) -> bool:
        """Whether something may be scaled up."""
        return self.rescale or self.min_norm is not None

    def decide(self, norms: Any, limits: Any, xp: Arithmetic) -> Decision:
        """Decide on finite norms, in host or device arithmetic."""
        base = norms + self.eps
        over = base > limits
        moved, target = over, limits
        if self.rescale:
            moved = norms > 0
        elif self.min_norm is not None:
            low = (norms < self.min_norm) & (norms > 0)
            moved, target = over | low, xp.where(low, xp.minimum(limits, self.min_norm), limits)
        if self.skip:
            target = 0.0 * norms
        return Decision(over, moved, target, base)


SCALE_DOWN = Action()
"""Scale down what is over its limit, and leave the rest alone."""


def split(numerator: float, denominator: float, power: float = 1.0) -> tuple[float, ...]:
    """Return factors whose product is ``(numerator / denominator) ** power``.

    Several where one would leave the normal range of float32, which a product with an array in
    as many steps does not: a norm of 1e42 in float32 can be clipped to 1.
    """
    if not numerator:
        return (0.0,)
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
    pieces = 1 + abs(exponent) // 120
    first = exponent // pieces
    rest = [(exponent - first) // (pieces - 1)] * (pieces - 1)
    rest[-1] += exponent - first - sum(rest)
    return math.ldexp(ratio, first), *(math.ldexp(1.0, e) for e in rest)


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
