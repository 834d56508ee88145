# SPDX-License-Identifier: Apache-2.0
"""Turns norms and limits into factors, and factors into new arrays.

::

    over   = n + eps > limit
    moved  = over; or n > 0 (rescale); or over or 0 < n < min_norm
    target = limit; or min(limit, min_norm) where n < min_norm; or 0 (skip)
    k      = target / (n + eps)  where moved, else 1
    output = the array itself where not moved, else  k (1 - margin) * array

The margin covers the uncertainty of the norm, and the rounding of factor and products. If
products may become subnormal, rounding may lengthen them by an absolute amount, and the target is
lowered by that amount. If products may exceed the dtype's range, the factor is capped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from fedclip.arrays import LARGEST, Arithmetic, Array, Backend, Host
from fedclip.measures import FEW, UNCERTAINTY, Order, degree, lowered

Key = TypeVar("Key", bound=Hashable)

ROUNDING = {
    # Four times in float32 (norm, limit / norm, factor, product), and the product in its dtype.
    "float16": 2.0**-22 + 2.0**-11,
    "bfloat16": 2.0**-22 + 2.0**-8,
    "float32": 2.0**-22,
    "float64": 2.0**-46,
}
"""Relative amount by which rounding may raise a clipped array whose norm is exact."""

DTYPES = tuple(ROUNDING)
"""The dtypes that are clipped."""

SUBNORMAL = {
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
    "float32": 2.0**-150,
    "float64": 2.0**-1074,
}
"""Largest absolute amount by which rounding raises an element that becomes subnormal."""

FLOOR = {"float16": math.inf, "bfloat16": 2.0**-90, "float32": 2.0**-100, "float64": 2.0**-990}
"""From this target on, the margin covers `SUBNORMAL`, for any number of elements."""

NORMAL = {"float32": 2.0**-126, "float64": 2.0**-1022}
"""Smallest number with all digits, of the dtypes in which devices multiply."""

GRID = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}
"""Number of binary digits of each dtype, and the exponent of its smallest number."""


def margin(dtype: str, exact: bool) -> float:
    """Return the distance that a clipped array keeps below its limit, relatively.

    It is smaller if the norm is `exact`: added up in float64.
    """
    return ROUNDING[dtype] + (0.0 if exact else UNCERTAINTY[dtype])


def margin_on_device(dtype: str, ord: Order, size: Any) -> Any:
    """Return that distance for a group of so many elements on a device."""
    if dtype == "float64":
        # Nothing is wider, and a framework may add up one number after the other.
        return margin(dtype, exact=False) + size * 2.0**-54
    return margin(dtype, exact=ord == 2 and isinstance(size, int) and size < FEW)


class Decision(NamedTuple):
    """What happens to each group."""

    over: Any
    """Whether the group is over its limit."""
    moved: Any
    """Whether the group is scaled, by ``target / base``."""
    target: Any
    base: Any

    def factors(
        self,
        norms: Any,
        sizes: Sequence[Any],
        dtype: str,
        xp: Backend,
        ord: Order = 2,
        half: Any = False,
    ) -> Any:
        """Return a factor for each group on a device: 1 where not moved.

        `sizes` are the numbers of elements: one for each group, or one for all. `half` says which
        groups hold float16: none, all, or a condition for each.
        """
        target = self.target
        if dtype != "float16":
            # Devices treat subnormals differently, so make none: return zeros.
            target = xp.zero_below(target, FLOOR[dtype])
        ratio = xp.ratio(target, self.base, self.moved)
        if half is not False:
            # Subtract what rounding may add if products in float16 become subnormal. It adds to the
            # norm of the whole group, so all dtypes in it make room for it, and for the roundings
            # of these lines, which float32 notices.
            size = xp.asarray(sizes, like=norms)
            unit = xp.where(norms > 0, norms, 1.0)
            low = lowered(ord, ratio * unit, size, SUBNORMAL["float16"], xp) / unit
            low = low * (1.0 - 2.0**-22)
            ratio = low if half is True else xp.where(half, low, ratio)
        kept: Any = [1.0 - margin_on_device(dtype, ord, size) for size in sizes]
        alike = all(isinstance(one, float) and one == kept[0] for one in kept)
        kept = kept[0] if alike else xp.asarray(kept, like=norms)
        k = (xp.sqrt(ratio) if degree(ord) == 2 else ratio) * kept
        # A factor that is subnormal where it is multiplied has too few digits for any margin.
        k = xp.zero_below(k, NORMAL["float64" if dtype == "float64" else "float32"])
        return xp.where(self.moved, k, 1.0)

    def ratio(self, xp: Arithmetic) -> Any:
        """Return the factor of each group; it has no meaning where not `moved`."""
        return self.target / xp.where(self.moved, self.base, 1.0)


def most_factor(peaks: Any, dtype: str, xp: Arithmetic) -> Any:
    """Return the factors that bring the largest elements, on a device, to the dtype's end."""
    # No factor may leave the range of float32 either, in which devices multiply narrower dtypes.
    most = LARGEST[dtype] if dtype == "float64" else 2.0**127
    return LARGEST[dtype] / xp.maximum(peaks, LARGEST[dtype] / most)


@dataclass(frozen=True)
class Action:
    """What happens to a group, or slice, with a given norm and limit.

    Attributes
    ----------
    eps
        Added to the norm; 1e-6 does what torch does, 0 is exact.
    min_norm
        Scale a group below this norm, but not zero, up to it.
    rescale
        Bring every group to its limit, those below it too (normalisation).
    skip
        Set a group over its limit to zero, instead of scaling it.
    """

    eps: float = 0.0
    min_norm: float | None = None
    rescale: bool = False
    skip: bool = False

    @property
    def raises(self) -> bool:
        """Whether a group may be scaled up."""
        return self.rescale or self.min_norm is not None

    def decide(self, norms: Any, limits: Any, xp: Arithmetic, over: Any = None) -> Decision:
        """Decide on finite norms, in host or device arithmetic; `over` if it is known already."""
        base = norms + self.eps if self.eps else norms
        over = base > limits if over is None else over
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
"""Scale down groups over their limit, and leave the others alone."""


def split(numerator: float, denominator: float, power: float = 1.0) -> tuple[float, ...]:
    """Return factors whose product is ``(numerator / denominator) ** power``.

    There are several factors if a single one would leave the normal range of float32. So a norm
    of 1e42 in float32 can be clipped to 1, in several steps.
    """
    if not numerator:
        return (0.0,)
    m, e = math.frexp(numerator)
    n, f = math.frexp(denominator)
    ratio, exponent = m / n, e - f
    if power != 1.0:
        # Make the exponent even, so that the square root of its power of two is exact.
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


def replaced(
    arrays: Sequence[Array],
    keys: Mapping[int, Key],
    call: Callable[[list[Array], list[int], Key], Sequence[Array]],
) -> list[Array]:
    """Return the arrays, with those that have a key replaced; one call for all with the same key.

    The call gets these arrays and their positions.

    If the call needs arrays of one dtype, the key has to contain the dtype.
    """
    outputs = list(arrays)
    alike: dict[Key, list[int]] = {}
    for i, key in keys.items():
        alike.setdefault(key, []).append(i)
    for key, chosen in alike.items():
        results = call([arrays[i] for i in chosen], chosen, key)
        for i, result in zip(chosen, results, strict=True):
            outputs[i] = result
    return outputs


def multiplied(
    arrays: Sequence[Array], factor: tuple[float, ...], exact: bool, backend: Backend, host: Host
) -> list[Array]:
    """Return arrays of one dtype times a factor, shrunk by the margin."""
    kept = 1.0 - margin(backend.dtype(arrays[0]), exact)
    outputs = backend.scale(arrays, factor[0] * kept, host)
    for k in factor[1:]:
        if host.views:
            host = Host(cast(Any, backend.host(outputs)), host.outs)
        outputs = backend.scale(outputs, k, host)
    return outputs
