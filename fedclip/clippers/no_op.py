# SPDX-License-Identifier: Apache-2.0
"""`no-op`: changes nothing, measures everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedclip.clippers import own
from fedclip.clippers.families import ORD_VAR
from fedclip.core.parameters import limit
from fedclip.rules.constant import Constant


class NoOp(own.Measured, own.Clipper):
    """Change nothing, and count what a limit would have clipped.

    ::

        Step(grads):
            record the norm of each group, and whether it is above max_norm
            return grads

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    The same object always comes back.

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

    name = "no-op"
    guarantee = own.guarantees.unchanged

    max_norm: float | None = own.parameter(limit, default=None, kw_only=False)
    """A limit to try out, > 0: records count the steps above it."""
    scope = own.parameter()
    ord = ORD_VAR
    exclude = own.parameter()
    """Tensors that are not measured."""
    on_nonfinite = own.parameter(own.choice, ("propagate", "raise"), default="propagate")
    """Pass NaN and infinity on, count them and warn once a round ("propagate"), or raise an error
    ("raise")."""

    def build(self) -> own.Transform:
        limit = math.inf if self.max_norm is None else self.max_norm
        return own.NormClipping(Constant((limit,)), self.ord, dry=True)

    def _replaced(self, gradient: own.Gradient) -> Sequence[own.Array]:
        return gradient.inputs
