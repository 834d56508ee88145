# SPDX-License-Identifier: Apache-2.0
"""`normalize`: bring a norm to a fixed value."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import FixedLimit
from fedclip.core.parameters import limit, parameter
from fedclip.core.scopes import Groups
from fedclip.privacy import guarantees as kinds
from fedclip.transforms import Action, Transform


class Normalize(FixedLimit, Clipper):
    """Rescale to a fixed norm: global, by tensor, layer, pattern or slice.

    ::

        Init(norm, eps):
            assign norm, eps
        Step(grads):
            for each group of tensors:
                n = norm(group)
                if n > 0:
                    group *= norm / (n + eps)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    Guarantees, with ``ord=2``: the norm of each group of the output, in float64, is at most
    `norm` and, with ``eps=0``, not more than 2e-6 below (half precision: its own rounding); the
    direction is kept. The output does not depend on the scale of the gradient (``eps=0``).

    ====================  ======================================================
    input                 output
    ====================  ======================================================
    zero gradient         the same object; a zero slice stays zero
    empty tensor, 0-d     as any other tensor; dtype and shape are kept
    1e20 in float32       rescaled right: what overflows is measured scaled
    NaN or infinity       as `on_nonfinite` says
    ====================  ======================================================

    The record of a step counts groups whose norm was above `norm` as clipped.
    There is no state but the records of past rounds.

    References
    ----------
    Hazan, Levy & Shalev-Shwartz, 2015, "Beyond convexity: stochastic quasi-convex
    optimization", arXiv:1507.02030.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> normalize = Normalize(norm=1.0)
    >>> normalize.run(NumpyVector({"w": np.array([0.03, 0.04])})).coefs["w"].round(6)
    array([0.6, 0.8])
    """

    name = "normalize"
    guarantee = kinds.brought_to_norm

    norm: float = parameter(limit, default=1.0, kw_only=False)
    """Norm that each group is brought to, > 0, in the units of the output."""
    scope = parameter()
    """Which tensors share a norm. A table ``{"head.*" = 0.1}`` gives groups their own norm;
    tensors that no pattern names form one more group, brought to `norm`."""
    ord = parameter()
    """What is measured (see `fedclip.core.measures`). The standard deviation or variance of fewer
    than two elements is not defined; they are left alone."""
    eps = parameter()
    """Added to the measure in the factor, >= 0: groups whose norm is not much larger than `eps`
    stay smaller than `norm`, instead of being blown up."""

    def build(self) -> Transform:
        return self.with_limit(self.norm, Action(self.eps, rescale=True))

    def transform(self, groups: Groups) -> Transform:
        return self.with_table(self._transform, groups, self.norm)
