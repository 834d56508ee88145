# SPDX-License-Identifier: Apache-2.0
"""`no-op`: changes nothing, measures everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.base import Clipper
from fedclip.modules.common import COMMON, ORD_VAR, SCOPE_NORM, Measured, Parameter
from fedclip.privacy import kinds
from fedclip.rules.constant import Constant
from fedclip.transforms import Gradient, NormClipping, Transform


class NoOp(Clipper):
    """Changes nothing, measures everything, and counts what a limit would have clipped.

    ::

        Step(grads):
            note the norm of each group, and whether it is above max_norm
            return grads

    Parameters
    ----------
    max_norm : float or None, default=None
        A limit to try out, > 0: steps above it are counted as clipped in the records.

    Notes
    -----
    Guarantee: the very same Vector comes back, always.

    Examples
    --------
    >>> look = NoOp(max_norm=1.0)
    >>> grads = NumpyVector({"w": np.array([3.0, 4.0])})
    >>> look.run(grads) is grads
    True
    >>> look.rounds[0].norm_max, look.rounds[0].clipped
    (5.0, 1)
    """

    name: ClassVar[str] = "no-op"
    guarantee = kinds.unchanged
    differs: ClassVar[Mapping[str, Parameter]] = {
        "scope": SCOPE_NORM,
        "ord": ORD_VAR,
        "exclude": COMMON["exclude"]._replace(meaning="Tensors that are not measured."),
        "on_nonfinite": Parameter(
            "propagate",
            partial(parameters.choice, ("propagate", "raise")),
            '{"propagate", "raise"}',
            "Let NaN and infinity through, counted and warned of once a round, or raise. "
            '"skip" would change the gradient.',
        ),
    }

    def __init__(self, max_norm: float | None = None, **common: Unpack[Measured]) -> None:
        self.max_norm = parameters.optional(parameters.positive, max_norm=max_norm)
        super().__init__(**common)

    def build(self) -> Transform:
        limit = math.inf if self.max_norm is None else self.max_norm
        return NormClipping(Constant((limit,)), self.ord, dry=True)

    def _replace_nonfinite(self, gradient: Gradient, bad: tuple[int, ...]) -> tuple[None, Any]:
        return None, {}
