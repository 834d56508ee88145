# SPDX-License-Identifier: Apache-2.0
"""`growth-value-clip`: limit how fast every element may grow."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.core.parameters import at_least_one, non_negative, parameter, positive
from fedclip.privacy import guarantees as kinds
from fedclip.rules.elementwise import GrowthValue
from fedclip.transforms import Transform
from fedclip.transforms.past import PastClipping


class GrowthValueClip(Clipper):
    """Limit on every element: by how much it may grow in one step.

    ::

        Init(mul, add, min_value, max_decay):
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
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor, or its shape is not that of the state.

    Notes
    -----
    State: for each tensor, an array of its shape (float64 for float64, else float32) on its device,
    and its number of steps; as much memory as the model. A run that is saved and resumed gives the
    same outputs, bit for bit.

    Guarantees: no element of the output is above its limit; signs are kept; NaN and infinity
    never reach the state; if nothing is clipped the very same Vector comes back. There is no
    bound known in advance, and none on the first step.

    A sparse gradient (IndexedSlices, COO) is treated, and if clipped comes back, as the dense
    one that it stands for. In the record of a step, norm and limit are the largest of all
    elements.

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
    guarantee = kinds.past_values

    mul: float | None = parameter(positive, default=1.5, kw_only=False)
    """Largest factor from one output to the next, > 0; None for no such limit."""
    add: float | None = parameter(non_negative, default=None)
    """Largest difference from one output to the next, >= 0, in the units of the gradient; None
    for no such limit. With both, the tighter one counts; with none, nothing is clipped."""
    min_value: float | None = parameter(positive, default=None)
    """Past outputs below count as this, > 0, so that an element that was once small can grow
    again at once. With None an element whose last output was exactly 0 is not limited by
    `mul`."""
    max_decay: float | None = parameter(at_least_one, default=2.0)
    """Largest factor by which the past output may fall in a step, >= 1, so that a single small
    gradient does not hold back those after it; None for no such limit."""
    scope = parameter()
    """Which tensors are reported on together; every element has its own limit."""

    def build(self) -> Transform:
        return PastClipping(GrowthValue(self.mul, self.add, self.min_value, self.max_decay))
