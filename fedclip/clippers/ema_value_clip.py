# SPDX-License-Identifier: Apache-2.0
"""`ema-value-clip`: limit every element at the moving average of its absolute values."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.transforms.past import EmaValue


class EmaValueClip(own.Clipper):
    """Limit every element at the moving average of its absolute values.

    ::

        e = init * abs(first gradient)
        Step(grads):
            for each element x:
                e = decay * e + (1 - decay) * abs(x)
                x = min(e, max(-e, x))

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor, or its shape is not that of the state.

    Notes
    -----
    No element of the output exceeds its average in absolute value. Signs do not change. If nothing
    is clipped, the same object comes back. No bound is known in advance. NaN and infinity never
    enter the state.

    Of a single spike s, ``(1 - decay) * s`` passes on top of the average, which learns it first.
    Sparse gradients count as dense: the averages of absent rows fall. In records, norm and limit
    are the largest of all elements.

    The state has an array of each tensor's shape on its device (float64 for float64, else float32),
    and a step count. It needs as much memory as the model. A run that is saved and resumed gives
    the same outputs, bit for bit.

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
    guarantee = own.guarantees.present_values

    decay: float = own.parameter(own.unit_interval, default=0.99, kw_only=False)
    """Weight of the past, in (0, 1); 0.99 remembers about 100 steps."""
    init: float = own.parameter(own.non_negative, default=0.0)
    """Start of the average, as a multiple of the first gradient, >= 0. With 0 the first output is
    ``1 - decay`` times the gradient, and grows over ``1 / (1 - decay)`` steps."""
    debias: bool = own.parameter(own.boolean, default=False)
    """Divide the average by ``1 - decay^t``: the first output is then the gradient. Needs
    ``init=0``."""
    scope = own.parameter()
    """Which tensors share a record; every element has its own limit."""

    def build(self) -> own.Transform:
        if self.debias and self.init:
            raise ValueError(f"debias=True is for averages that start at 0; got init={self.init!r}")
        return EmaValue(self.decay, self.init, self.debias)
