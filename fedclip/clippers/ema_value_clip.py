# SPDX-License-Identifier: Apache-2.0
"""`ema-value-clip`: limit every element at the moving average of its absolute values."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.core.parameters import boolean, non_negative, parameter, unit_interval
from fedclip.privacy import guarantees as kinds
from fedclip.rules.elementwise import EmaValue
from fedclip.transforms import Transform
from fedclip.transforms.past import PastClipping


class EmaValueClip(Clipper):
    """Limit on every element: the moving average of its absolute values.

    ::

        Init(decay, init):
            assign decay
            e = init * abs(first gradient)
        Step(grads):
            for each element x:
                e = decay * e + (1 - decay) * abs(x)
                x = min(e, max(-e, x))

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

    The average learns an element before it limits that element: of a single spike of size s,
    ``(1 - decay) * s`` passes on top of the average.

    Guarantees: no element of the output is above its average in absolute value; signs are
    kept; NaN and infinity never reach the average; if nothing is clipped the very same Vector
    comes back. There is no bound known in advance.

    A sparse gradient (IndexedSlices, COO) is treated, and if clipped comes back, as the dense
    one that it stands for: the averages of the missing rows fall. In the record of a step,
    norm and limit are the largest of all elements.

    References
    ----------
    ``ClipValueByEMA`` of torchzero.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = EmaValueClip(decay=0.5, init=1.0)
    >>> for value in (1.0, 1.0, -9.0):
    ...     out = clip.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"]
    array([-5.])
    """

    name = "ema-value-clip"
    guarantee = kinds.present_values

    decay: float = parameter(unit_interval, default=0.99, kw_only=False)
    """Weight of the past, in (0, 1); 0.99 remembers some 100 steps."""
    init: float = parameter(non_negative, default=0.0)
    """Where the average starts, as a multiple of the first gradient, >= 0. With 0 the first
    output is ``1 - decay`` times the gradient, and grows to its full size over some ``1 / (1 -
    decay)`` steps; with 1 the first output is the gradient."""
    debias: bool = parameter(boolean, default=False)
    """Divide the average by ``1 - decay^t``, so that it is never too small for having started
    at 0; the first output is then the gradient. Needs ``init=0``."""
    scope = parameter()
    """Which tensors are reported on together; every element has its own limit."""

    def build(self) -> Transform:
        if self.debias and self.init:
            raise ValueError(f"debias=True is for averages that start at 0; got init={self.init!r}")
        return PastClipping(EmaValue(self.decay, self.init, self.debias))
