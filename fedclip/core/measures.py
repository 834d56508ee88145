# SPDX-License-Identifier: Apache-2.0
r"""The size of a group of arrays, in any order; and of slices along dimensions.

==============  ==============================================  ======
``ord``         measure                                         degree
==============  ==============================================  ======
``p`` > 0       (sum of abs(x)^p)^(1/p); 2 is the L2 norm           1
``"inf"``       max abs(x)                                          1
``"rms"``       square root of the mean of x^2                      1
``"mad"``       mean of abs(x), not centred                         1
``"std"``       standard deviation, n - 1 in the denominator        1
``"var"``       variance, n - 1 in the denominator                  2
==============  ==============================================  ======

The degree says how scaling changes a measure: ``m(k x) = k^degree m(x)``. Multiplying an array by
``(limit / m)^(1 / degree)`` brings its measure to a limit.
Some packages also accept ``"sum"`` and ``0`` (number of non-zeros). They are missing here: a sum
may be negative and would flip the gradient, and scaling does not change a number of non-zeros.
The standard deviation of fewer than two elements counts as 0, so such arrays are not clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedclip.arrays import Array, Arrays, Backend, unit_of
from fedclip.core.parameters import number
from fedclip.core.scopes import Groups
from fedclip.errors import nearest

# What users write for `ord`.
Order = float | str

# Orders that are means over all elements, zeros included; and those of degree 2.
MEANS = ("rms", "mad", "std", "var")
SQUARED = ("var",)
_WORDS = ("inf", *MEANS)


def check_order(ord: Any) -> Order:
    """Return `ord` if it names a measure; infinity becomes "inf"."""
    allowed = "a number > 0 or one of " + ", ".join(repr(w) for w in _WORDS)
    if isinstance(ord, str):
        if ord not in _WORDS:
            raise ValueError(f"ord must be {allowed}, got {ord!r}{nearest(ord, _WORDS)}")
        return ord
    if isinstance(ord, float) and ord == math.inf:
        return "inf"
    result = number(allowed, 0.0, open_low=True, ord=ord)
    return ord if isinstance(ord, int) else result


def measure(arrays: Arrays, groups: Groups, ord: Order, xp: Backend) -> Array:
    """Return the measure of each group of arrays, which are dense for `MEANS`.

    NaN and infinity give a measure that is not finite.
    """
    if ord == 2:
        return xp.group_norms(arrays, groups.members)
    if ord == "rms":
        norms = xp.group_norms(arrays, groups.members)
        sizes = xp.asarray(sizes_of(arrays, groups, xp), like=norms)
        return norms / xp.sqrt(xp.maximum(sizes, 1.0))
    peaks = xp.group_max(xp.max_abs(arrays), groups.owners, len(groups))
    if ord == "inf":
        return peaks
    if ord in ("std", "var"):
        _, unit, _, variance = spread_of(arrays, groups, peaks, xp)
        return _found(ord, unit, variance, 1.0, xp)
    unit, sizes = unit_of(peaks, xp), xp.asarray(sizes_of(arrays, groups, xp), like=peaks)
    powers = total(lambda x, u: _power(x / u, ord), arrays, [unit], groups, xp)
    return _found(ord, unit, powers, xp.maximum(sizes, 1.0), xp)


def sizes_of(arrays: Arrays, groups: Groups, xp: Backend) -> list[Any]:
    """Return the number of elements of each group."""
    return [sum([xp.size(arrays[i]) for i in some]) for some in groups.members]


def total(
    call: Callable[..., Array], arrays: Arrays, numbers: Arrays, groups: Groups, xp: Backend
) -> Array:
    """Return for each group the sum of ``call(elements, ...)``, given numbers of the group."""
    columns = [arrays, *(xp.take(column, groups.owners) for column in numbers)]
    return xp.group_sum(xp.summed(call, columns), groups.owners, len(groups))


def spread_of(arrays: Arrays, groups: Groups, peaks: Array, xp: Backend) -> tuple[Array, ...]:
    """Return of each group number of elements, a unit, and in this unit mean and variance.

    In the unit nothing overflows; the variance has n - 1 in the denominator.
    """
    unit, sizes = unit_of(peaks, xp), xp.asarray(sizes_of(arrays, groups, xp), like=peaks)
    mean = total(lambda x, u: x / u, arrays, [unit], groups, xp) / xp.maximum(sizes, 1.0)
    squares = total(lambda x, u, m: (x / u - m) * (x / u - m), arrays, [unit, mean], groups, xp)
    return sizes, unit, mean, squares / xp.maximum(sizes - 1.0, 1.0)


def slice_measures(
    arrays: Arrays, axes: Sequence[tuple[int, ...]], ord: Order, xp: Backend, fast: bool = False
) -> Array:
    """Return the measures of the slices of dense arrays as one flat array, array by array.

    A slice spans the axes of its array, which has elements. `fast`: see `Backend.slice_norms`.
    """
    if ord == 2:
        return xp.slice_norms(arrays, axes, fast)
    return xp.joined([_slices(x, some, ord, xp) for x, some in zip(arrays, axes, strict=True)])


def _slices(array: Array, axes: tuple[int, ...], ord: Order, xp: Backend) -> Array:
    wide = xp.cast(array, "float64")
    size = math.prod([array.shape[a] for a in axes])
    peaks = xp.max(abs(wide), axes)
    if ord == "inf":
        return peaks
    unit = unit_of(peaks, xp)
    scaled = wide / unit
    if ord in ("std", "var"):
        scaled = scaled - xp.sum(scaled, axes) / size
        return _found(ord, unit, xp.sum(scaled * scaled, axes), max(size - 1.0, 1.0), xp)
    return _found(ord, unit, xp.sum(_power(scaled, ord), axes), size, xp)


def _power(scaled: Array, ord: Order) -> Array:
    """Return what is added up, of elements in a unit."""
    if ord == "rms":
        return scaled * scaled
    # The power 1 would have no second derivative at 0.
    return abs(scaled) if ord in ("mad", 1) else abs(scaled) ** float(ord)


def _found(ord: Order, unit: Array, total: Array, size: Any, xp: Backend) -> Array:
    """Return the measure, from a sum of powers, or of squared deviations."""
    if ord == "var":
        return unit * unit * (total / size)
    if ord in ("rms", "std"):
        return unit * xp.sqrt(total / size)
    if ord in ("mad", 1):
        return unit * (total / size if ord == "mad" else total)
    # A root of 0 has no derivative, though nothing may follow from the norm.
    root = xp.where(total == 0, 1.0, total) ** (1 / float(ord))
    return unit * xp.where(total == 0, 0.0, root)
