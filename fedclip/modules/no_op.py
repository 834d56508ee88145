# SPDX-License-Identifier: Apache-2.0
"""`no-op`: changes nothing, measures everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from fedclip import parameters
from fedclip.measures import Order, check_order
from fedclip.modules.base import Clipper
from fedclip.privacy import kinds
from fedclip.rules.constant import Constant
from fedclip.scopes import Scope
from fedclip.transforms import Gradient, NormClipping

__all__ = ["NoOp"]


class NoOp(Clipper):
    """Changes nothing, measures everything; tells what a limit would have clipped.

    ::

        Step(grads):
            note the norm of each group, and whether it is above max_norm
            return grads

    Parameters
    ----------
    max_norm : float or None, default=None
        A limit to try out, > 0: steps above it are counted as clipped in the records.
    scope : {"global", "tensor", "layer"} or list of patterns, default="global"
        Which tensors share a norm.
    ord : float or {"inf", "rms", "mad", "std", "var"}, default=2
        What is measured (see `fedclip.measures`).
    exclude : pattern, list of patterns or None, default=None
        Tensors that are not measured.
    on_nonfinite : {"propagate", "raise"}, default="propagate"
        Let NaN and infinity through, counted and warned of once a round, or raise. "skip" would
        change the gradient.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above; at the first gradient, if a pattern
        matches no tensor.

    Notes
    -----
    Guarantee: the very same Vector comes back, always.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> look = NoOp(max_norm=1.0)
    >>> grads = NumpyVector({"w": np.array([3.0, 4.0])})
    >>> look.run(grads) is grads
    True
    >>> look.rounds[0].norm_max, look.rounds[0].clipped
    (5.0, 1)
    """

    name: ClassVar[str] = "no-op"
    guarantee = kinds.unchanged

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        scope: Scope = "global",
        ord: Order = 2,
        exclude: str | Sequence[str] | None = None,
        on_nonfinite: str = "propagate",
    ) -> None:
        parameters.choice(("propagate", "raise"), on_nonfinite=on_nonfinite)
        self.max_norm = parameters.optional(parameters.positive, max_norm=max_norm)
        self.ord = check_order(ord)
        limit = math.inf if self.max_norm is None else self.max_norm
        super().__init__(
            NormClipping(Constant((limit,)), self.ord, dry=True),
            scope=scope,
            exclude=exclude,
            on_nonfinite=on_nonfinite,
        )

    def _replace_nonfinite(self, gradient: Gradient, bad: tuple[int, ...]) -> None:
        return None
