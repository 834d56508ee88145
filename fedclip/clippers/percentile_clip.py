# SPDX-License-Identifier: Apache-2.0
"""`percentile-clip`: limit every element at a percentile of the same gradient."""

from __future__ import annotations

from fractions import Fraction

from fedclip.clippers.base import Clipper
from fedclip.core.parameters import choice, number, parameter
from fedclip.privacy import guarantees as kinds
from fedclip.transforms import Transform
from fedclip.transforms.value import PercentileClipping


class PercentileClip(Clipper):
    """Limit on every element: a percentile of the same gradient's values.

    ::

        Init(percentile):
            assign percentile
        Step(grads):
            for each group of tensors:
                a = sorted absolute values of all n elements
                limit = a[floor(percentile * (n - 1) / 100)]
                for each element x:
                    x = min(limit, max(-limit, x))

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    The position is computed exactly. A product in floating point, as NumPy takes it, misses it for
    some sizes: 28 instead of 29 for 29 % of 101 elements.

    Guarantees: no element of the output is above the limit in absolute value; signs are kept;
    with "lower", applying it twice is applying it once; scaling the gradient by a power of two
    scales the output. The limit depends on the data, and bounds no sensitivity.

    ======================  ======================================================
    input                   output
    ======================  ======================================================
    zero gradient           the same object
    0-d, empty, constant    the same object
    sparse tensor           percentile of the rows that it holds, added up if they
                            repeat; its zeros do not count
    NaN or infinity         as `on_nonfinite` says
    ======================  ======================================================

    In the record of a step, the norm is the largest absolute element.
    There is no state but the records of past rounds.

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
    guarantee = kinds.own_percentile

    percentile: float = parameter(number, "a number in [0, 100]", 0, 100, default=95, kw_only=False)
    """Percentage of the elements that stay unchanged, in [0, 100]. 100 changes nothing, 0
    brings every element to the size of the smallest."""
    method: str = parameter(choice, ("lower", "linear"), default="lower")
    """If the position is between two elements, take the smaller one, or interpolate."""
    scope = parameter(default="tensor")
    """Which tensors share a limit."""

    def build(self) -> Transform:
        # Use the decimal number as written, not the nearest binary one.
        return PercentileClipping(Fraction(repr(self.percentile)), self.method == "linear")
