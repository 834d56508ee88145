# SPDX-License-Identifier: Apache-2.0
"""`percentile-clip`: limit every element at a percentile of the same gradient."""

from __future__ import annotations

from fractions import Fraction

from fedclip.clippers import own
from fedclip.transforms.value import PercentileClipping


class PercentileClip(own.Clipper):
    """Limit every element at a percentile of the same gradient's values.

    ::

        Step(grads):
            for each group of tensors:
                a = sorted absolute values of all n elements
                limit = a[floor(percentile * (n - 1) / 100)]
                for each element x:
                    x = min(limit, max(-limit, x))

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    No element of the output exceeds the limit in absolute value. Signs do not change. With "lower",
    clipping twice equals clipping once. Scaling a gradient by a power of two scales the output. The
    limit depends on the data, and bounds no sensitivity.

    The position is exact; in floating point, 29 % of 101 elements would give 28, not 29. Zero,
    constant, empty and 0-d tensors do not change. Of a sparse tensor, only the rows that it holds
    count, repeated rows added up. In records, the norm is the largest absolute element. The state
    has only records.

    References
    ----------
    ``clipByPercentileSpec`` of TorchLean.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = PercentileClip(percentile=50)
    >>> clip.run(NumpyVector({"w": np.array([-5.0, 1.0, 2.0])})).coefs["w"]
    array([-2.,  1.,  2.])
    """

    name = "percentile-clip"
    guarantee = own.guarantees.own_percentile

    percentile: float = own.parameter(
        own.number, "a number in [0, 100]", 0, 100, default=95, kw_only=False
    )
    """Percentage of elements that do not change, in [0, 100]. 100 changes nothing; 0 gives every
    element the size of the smallest."""
    method: str = own.parameter(own.choice, ("lower", "linear"), default="lower")
    """Between two elements, take the smaller one ("lower") or interpolate ("linear")."""
    scope = own.parameter(default="tensor")
    """Which tensors share a limit."""

    def build(self) -> own.Transform:
        # Use the decimal number as written, not the nearest binary one.
        return PercentileClipping(Fraction(repr(self.percentile)), self.method == "linear")
