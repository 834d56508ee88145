# SPDX-License-Identifier: Apache-2.0
"""`standardize`: subtract the mean, divide by the standard deviation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.base import Clipper
from fedclip.modules.common import COMMON, Common, Parameter, Preset
from fedclip.privacy import kinds
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

    Parameters
    ----------
    eps : float, default=0.0
        Added to the standard deviation, >= 0, in the units of the gradient: gradients that
        vary by less are not blown up to a deviation of 1. 0 for an output that does not depend
        on the scale of the gradient.

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
    >>> standardize = Standardize()
    >>> standardize.run(NumpyVector({"w": np.array([1.0, 2.0, 3.0])})).coefs["w"].round(6)
    array([-1.,  0.,  1.])
    """

    name: ClassVar[str] = "standardize"
    presets: ClassVar[Mapping[str, Preset]] = {
        "drytorch": Preset("drytorch", "GradZScoreNormalizer")
    }
    guarantee = kinds.standardised
    differs: ClassVar[Mapping[str, Parameter]] = {
        "scope": COMMON["scope"]._replace(
            default="tensor", meaning="Which tensors share mean and standard deviation."
        )
    }

    def __init__(self, eps: float = 0.0, **common: Unpack[Common]) -> None:
        self.eps = parameters.non_negative(eps=eps)
        super().__init__(**common)

    def build(self) -> Transform:
        return Standardizing(self.eps)
