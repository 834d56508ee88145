# SPDX-License-Identifier: Apache-2.0
r"""What each map does to the L2 norm: one small function per kind of map, in one table.

====================================  ===============================  ========================
map                                   largest L2 norm of its output    stretches distances by
====================================  ===============================  ========================
L2 limit C                            C, or C √k for k groups          1
order p <= 2                          C √k                             d^(1/p - 1/2), p >= 1
order p > 2, of d elements            C d^(1/2 - 1/p)                  d^(1/2 - 1/p)
maximum, root mean square             C √d                             √d; 1
mean of absolute values               C d                              √d
standard deviation, variance          none: the mean is left alone     without limit
values in [-c, c]                     c √d                             1
slices, units: r each, u of them      r √u                             1
brought to a norm N (+ eps)           as a limit at N                  N / eps
mean 0, deviation 1                   √(d - k)                         1 / eps
mean taken away                       none                             1
limit learnt from gradients           that of max_norm                 without limit
====================================  ===============================  ========================

The bound of several groups is the root of the sum of their squared bounds. Bounds are rounded up,
and never too low. Those of fedclip's clippers hold in every dtype, because they scale to
a little below the limit; those of declearn's clippers hold in float32 and wider. The stretching of
distances is that of exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Context", "Guarantee", "Map", "Shapes"]

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor, by name."""


@dataclass(frozen=True)
class Context:
    """Facts about the gradients that a map receives.

    Attributes
    ----------
    shapes
        Shape of each tensor; None if unknown.
    finite
        Whether the gradients have no NaN and no infinity, and no norm is beyond float64.
    """

    shapes: Shapes | None = None
    finite: bool = False


@dataclass(frozen=True)
class Map:
    """The guarantee of one map, and the reasons why it is not stronger.

    Attributes
    ----------
    name
        Registered name of the plug-in.
    bound
        Largest L2 norm of the output for any input; infinity if unknown.
    formula
        The bound in words. If `bound` is infinite and there is a formula, the bound needs shapes.
    lipschitz
        Largest factor on the distance of two inputs, or of two histories of inputs if the map has a
        memory; infinity if unbounded.
    growth
        Largest factor on the norm of the input.
    finite
        Whether the output is finite.
    noise
        Whether it adds noise.
    unbounded
        Why it has no bound; empty if it has one.
    shared
        Why its output depends on more than its input record and public values; empty if it does
        not.
    expands
        Why it may increase distances; empty if it does not.
    """

    name: str
    bound: float = math.inf
    formula: str = ""
    lipschitz: float = math.inf
    growth: float = math.inf
    finite: bool = False
    noise: bool = False
    unbounded: str = ""
    shared: str = ""
    expands: str = ""


Plugin: TypeAlias = Any
"""A clipper, module or regularizer of whatever class, by the names of its parameters."""
Guarantee: TypeAlias = Callable[[Plugin, Context], Map]
"""A function that returns what a plug-in guarantees."""
