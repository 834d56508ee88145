# SPDX-License-Identifier: Apache-2.0
"""`standardize`: subtract the mean, divide by the standard deviation."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.transforms.moment import Standardizing


class Standardize(own.Clipper):
    """Bring each tensor to mean 0 and standard deviation 1 (z-score).

    ::

        Step(grads):
            for each group of tensors with two elements or more:
                group = (group - mean(group)) / (std(group) + eps)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    No output is NaN. No element of d exceeds ``sqrt(d)`` in absolute value, except by its rounding.
    With ``eps=0`` the output does not depend on the gradient's scale.

    Mean and standard deviation (unbiased, n - 1) are taken in float64. A constant tensor becomes
    zero. Tensors of one element or none do not change. Sparse tensors become dense. In records, the
    norm is the standard deviation, and the limit 1. The state has only records.

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
    guarantee = own.guarantees.standardised

    eps: float = own.parameter(own.non_negative, default=0.0, kw_only=False)
    """Added to the standard deviation, >= 0, in units of the gradient: gradients that vary less do
    not reach a deviation of 1. 0 is exact."""
    scope = own.parameter(default="tensor")
    """Which tensors share mean and standard deviation."""

    def build(self) -> own.Transform:
        return Standardizing(self.eps)
