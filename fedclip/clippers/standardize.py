# SPDX-License-Identifier: Apache-2.0
"""`standardize`: subtract the mean, divide by the standard deviation."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.core.parameters import non_negative, parameter
from fedclip.privacy import guarantees as kinds
from fedclip.transforms import Transform
from fedclip.transforms.moment import Standardizing


class Standardize(Clipper):
    """Bring each tensor to mean 0 and standard deviation 1 (z-score).

    ::

        Init(eps):
            assign eps
        Step(grads):
            for each group of tensors with two elements or more:
                group = (group - mean(group)) / (std(group) + eps)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    The standard deviation is the unbiased one (n - 1). Mean and deviation are taken in float64.

    Guarantees: no output is NaN; for d elements none is above ``sqrt(d)`` in absolute value
    (but for its rounding); the output does not depend on the scale of the gradient (``eps=0``).

    ======================  ======================================================
    input                   output
    ======================  ======================================================
    zero gradient           the same object
    constant tensor         zero
    one element, empty      left alone
    sparse tensor           a dense one, as its zeros do not stay zeros
    NaN or infinity         as `on_nonfinite` says
    ======================  ======================================================

    In the record of a step, the norm is the standard deviation, and the limit 1.
    There is no state but the records of past rounds.

    References
    ----------
    ``GradZScoreNormalizer`` of drytorch.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> standardize = Standardize()
    >>> standardize.run(NumpyVector({"w": np.array([1.0, 2.0, 3.0])})).coefs["w"].round(6)
    array([-1.,  0.,  1.])
    """

    name = "standardize"
    guarantee = kinds.standardised

    eps: float = parameter(non_negative, default=0.0, kw_only=False)
    """Added to the standard deviation, >= 0, in the units of the gradient: gradients that vary
    by less are not blown up to a deviation of 1. 0 for an output that does not depend on the
    scale of the gradient."""
    scope = parameter(default="tensor")
    """Which tensors share mean and standard deviation."""

    def build(self) -> Transform:
        return Standardizing(self.eps)
