# SPDX-License-Identifier: Apache-2.0
"""`ema-norm-clip`: limit on a norm, the norm of the moving average of the gradient."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import ORD_VAR, Measured
from fedclip.core.parameters import (
    at_least_one,
    boolean,
    choice,
    number,
    parameter,
    positive,
    unit_interval,
)
from fedclip.privacy import guarantees as kinds
from fedclip.transforms import Transform
from fedclip.transforms.average import AverageClipping


def _check_init(init: object) -> float | str:
    """Return the first value of the averages, or "first"."""
    if isinstance(init, str):
        return choice(("first",), init=init)
    return number("a finite number or 'first'", init=init)


class EmaNormClip(Measured, Clipper):
    """Limit on a norm: that of the moving average of the gradient itself.

    ::

        Init(decay, max_growth, init, min_norm):
            e = the first group; or init, for every element
        Step(grads):
            for each group of tensors:
                e = decay * e + (1 - decay) * group
                limit = min(norm(e), max(max_growth * limit before, min_norm))
                e *= limit / norm(e)
                n = norm(group)
                if n > limit:
                    group *= limit / n

    Gradients that keep pointing the same way pass. Noise averages to a much shorter vector, and is
    clipped to the length of that average.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor, or its shape is not that of the state.

    Notes
    -----
    State: for each tensor, an array of its shape (float64 for float64, else float32) on its device,
    and its number of steps; as much memory as the model. A run that is saved and resumed gives the
    same outputs, bit for bit. Besides, for each group, the norm of the average, and the number of
    steps.

    Guarantees, with ``ord=2``: no output norm is above its limit; if nothing is clipped the
    very same Vector comes back; the direction of a clipped group is kept; NaN and infinity
    never reach the average, nor does an overflow. There is no bound known in advance. A zero
    gradient stays zero, and shrinks the average.

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
    guarantee = kinds.present_values
    _rescale = False

    decay: float = parameter(unit_interval, default=0.99, kw_only=False)
    """Weight of the past in the average, in (0, 1); 0.99 remembers some 100 steps."""
    max_growth: float | None = parameter(at_least_one, default=1.5)
    """Largest factor by which the norm of the average may grow in a step, >= 1; None for no
    such limit."""
    init: float | str = parameter(_check_init, default="first", kind='float or "first"')
    """Where the average starts: at the first gradient, which passes; or with every element at this
    value. With 0.0 the first output is ``1 - decay`` times the gradient, and outputs grow from
    there."""
    min_norm: float | None = parameter(positive, default=None)
    """The average may always grow to this norm, > 0; None for no such floor. From 0 it may grow
    to any norm."""
    debias: bool = parameter(boolean, default=False)
    """Divide the average by ``1 - decay^t``, so that it is not too short for having started at
    0: at first it is a plain mean. Needs ``init=0.0``."""
    scope = parameter()
    """Which tensors share a norm: all of them, each by itself, those of a layer, or those whose
    names match a pattern."""
    ord = ORD_VAR

    def build(self) -> Transform:
        if self.debias and self.init != 0:
            raise ValueError(
                f"debias=True is for averages that start at 0: give init=0.0, got {self.init!r}"
            )
        start = None if isinstance(self.init, str) else self.init
        names = ("decay", "ord", "max_growth", "min_norm", "debias")
        settings = {name: getattr(self, name) for name in names}
        return AverageClipping(**settings, start=start, rescale=self._rescale)
