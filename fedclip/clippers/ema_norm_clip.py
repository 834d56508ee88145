# SPDX-License-Identifier: Apache-2.0
"""`ema-norm-clip`: limit on a norm, the norm of the moving average of the gradient."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.clippers.families import ORD_VAR
from fedclip.transforms.past import AverageClipping


def _check_init(init: object) -> float | str:
    """Return the first value of the averages, or "first"."""
    if isinstance(init, str):
        return own.choice(("first",), init=init)
    return own.number("a finite number or 'first'", init=init)


class EmaNormClip(own.Measured, own.Clipper):
    """Limit at the norm of the moving average of the gradient itself.

    ::

        e = first gradient; or init, for every element
        Step(grads):
            for each group of tensors:
                e = decay * e + (1 - decay) * group
                limit = min(norm(e), max(max_growth * limit before, min_norm))
                e *= limit / norm(e)
                group *= min(1, limit / norm(group))

    A gradient that keeps its direction passes. Noise is clipped to the shorter norm of its average.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor, or its shape is not that of the state.

    Notes
    -----
    With ``ord=2`` no output norm is above its limit, and directions do not change. If nothing is
    clipped, the same object comes back. No bound is known in advance. NaN and infinity never enter
    the state. A zero gradient stays zero, and shrinks the average.

    The state has an array of each tensor's shape on its device (float64 for float64, else float32),
    and a step count. It needs as much memory as the model. A run that is saved and resumed gives
    the same outputs, bit for bit.

    References
    ----------
    ``ClipNormByEMA`` of torchzero.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = EmaNormClip(decay=0.5)
    >>> for value in (1.0, 1.0, 2.0):
    ...     out = clip.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"].round(6)
    array([1.5])
    """

    name = "ema-norm-clip"
    guarantee = own.guarantees.present_values
    _rescale = False

    decay: float = own.parameter(own.unit_interval, default=0.99, kw_only=False)
    """Weight of the past, in (0, 1); 0.99 remembers about 100 steps."""
    max_growth: float | None = own.parameter(own.at_least_one, default=1.5)
    """Largest growth of the average's norm in a step, a factor >= 1; None for any."""
    init: float | str = own.parameter(_check_init, default="first", kind='float or "first"')
    """Start at the first gradient, which passes ("first"), or at this value in every element. From
    0.0 the first output is ``1 - decay`` times the gradient."""
    min_norm: float | None = own.parameter(own.positive, default=None)
    """Norm to which the average may always grow, > 0. From 0 it may grow to any norm."""
    debias: bool = own.parameter(own.boolean, default=False)
    """Divide the average by ``1 - decay^t``, which corrects its start at 0; needs ``init=0.0``."""
    scope = own.parameter()
    ord = ORD_VAR

    def build(self) -> own.Transform:
        if self.debias and self.init != 0:
            got = f"give init=0.0, got {self.init!r}"
            raise ValueError(f"debias=True is for averages that start at 0: {got}")
        start = None if isinstance(self.init, str) else self.init
        names = ("decay", "ord", "max_growth", "min_norm", "debias")
        settings = {name: getattr(self, name) for name in names}
        return AverageClipping(**settings, start=start, rescale=self._rescale)
