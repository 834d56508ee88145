# SPDX-License-Identifier: Apache-2.0
"""`growth-value-clip`: limit how fast every element may grow."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.transforms.past import GrowthValue


class GrowthValueClip(own.Clipper):
    """Limit how much every element may grow in one step.

    ::

        p = first gradient, which is not clipped
        Step(grads):
            for each element x:
                limit = min(abs(p) + add, max(abs(p), min_value) * mul)
                y = min(limit, max(-limit, x))
                p = y, or p / max_decay if x has fallen by more than that
                x = y

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor, or its shape is not that of the state.

    Notes
    -----
    No element of the output exceeds its limit in absolute value. Signs do not change. If nothing is
    clipped, the same object comes back. No bound is known in advance, and the first step has none.
    NaN and infinity never enter the state.

    Sparse gradients count as dense. In records, norm and limit are the largest of all elements.

    The state has an array of each tensor's shape on its device (float64 for float64, else float32),
    and a step count. It needs as much memory as the model. A run that is saved and resumed gives
    the same outputs, bit for bit.

    References
    ----------
    ``ClipValueGrowth`` of torchzero.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = GrowthValueClip(mul=1.5)
    >>> for value in (1.0, 8.0, -8.0):
    ...     out = clip.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"]
    array([-2.25])
    """

    name = "growth-value-clip"
    guarantee = own.guarantees.past_values

    mul: float | None = own.parameter(own.positive, default=1.5, kw_only=False)
    """Largest factor from one output to the next, > 0; None for no such limit."""
    add: float | None = own.parameter(own.non_negative, default=None)
    """Largest difference from one output to the next, >= 0, in gradient units. With `mul`, the
    tighter one applies; without both, nothing is clipped."""
    min_value: float | None = own.parameter(own.positive, default=None)
    """Smaller past outputs count as this, > 0. None: after an output of exactly 0, `mul` does not
    limit the element."""
    max_decay: float | None = own.parameter(own.at_least_one, default=2.0)
    """Largest factor by which the past output may fall in a step, >= 1; None for any."""
    scope = own.parameter()
    """Which tensors share a record; every element has its own limit."""

    def build(self) -> own.Transform:
        return GrowthValue(self.mul, self.add, self.min_value, self.max_decay)
