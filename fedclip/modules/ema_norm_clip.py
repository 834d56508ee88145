# SPDX-License-Identifier: Apache-2.0
"""`ema-norm-clip`: limit on a norm, the norm of the moving average of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.base import Clipper
from fedclip.modules.common import ORD_VAR, SCOPE_NORM, Measured, Parameter, Preset
from fedclip.privacy import kinds
from fedclip.transforms import Transform
from fedclip.transforms.average import AverageClipping


def _check_start(init: Any, debias: bool) -> float | None:
    """Return the first value of the averages; None for the first gradient."""
    if isinstance(init, str):
        parameters.choice(("first",), init=init)
    else:
        init = parameters.number("a finite number or 'first'", init=init)
    if debias and init != 0:
        raise ValueError(f"debias=True is for averages that start at 0; got init={init!r}")
    return None if init == "first" else init


class EmaNormClip(Clipper):
    """Limit on a norm: the norm of the moving average of the gradient itself.

    ::

        Init(decay, max_growth, init, min_norm):
            e = init, for every element
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

    Parameters
    ----------
    decay : float, default=0.99
        Weight of the past in the average, in (0, 1); 0.99 remembers some 100 steps.
    max_growth : float or None, default=1.5
        Largest factor by which the norm of the average may grow in a step, >= 1; None for no
        such limit.
    init : float or "first", default=0.0
        Where the average starts: with every element at this value, or at the first gradient.
        With 0.0 the first output is ``1 - decay`` times the gradient, and outputs grow from
        there; with "first" the first gradient passes.
    min_norm : float or None, default=None
        The average may always grow to this norm, > 0; None for no such floor. From 0 it may
        grow to any norm.
    debias : bool, default=False
        Divide the average by ``1 - decay^t``, so that it is not too short for having started
        at 0; the first gradient then passes. Needs ``init=0.0``.

    Notes
    -----
    {arrays}. Besides, for each group, the norm of the average, and the number of steps.

    Guarantees, with ``ord=2``: no output norm is above its limit; if nothing is clipped the
    very same Vector comes back; the direction of a clipped group is kept; NaN and infinity
    never reach the average, nor does an overflow. There is no bound known in advance. A zero
    gradient stays zero, and shrinks the average.

    References
    ----------
    ``ClipNormByEMA`` of torchzero.

    Examples
    --------
    >>> clip = EmaNormClip(decay=0.5, init="first")
    >>> for value in (1.0, 1.0, 2.0):
    ...     out = clip.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"].round(6)
    array([1.5])
    """

    name: ClassVar[str] = "ema-norm-clip"
    presets: ClassVar[Mapping[str, Preset]] = {"torchzero": Preset("torchzero", "ClipNormByEMA")}
    guarantee = kinds.present_values
    differs: ClassVar[Mapping[str, Parameter]] = {"scope": SCOPE_NORM, "ord": ORD_VAR}
    _rescale: ClassVar[bool] = False

    def __init__(
        self,
        decay: float = 0.99,
        *,
        max_growth: float | None = 1.5,
        init: float | str = 0.0,
        min_norm: float | None = None,
        debias: bool = False,
        **common: Unpack[Measured],
    ) -> None:
        self.decay = parameters.unit_interval(decay=decay)
        self.max_growth = parameters.optional(parameters.at_least_one, max_growth=max_growth)
        self.min_norm = parameters.optional(parameters.positive, min_norm=min_norm)
        self.debias = parameters.boolean(debias=debias)
        self._start = _check_start(init, self.debias)
        self.init = "first" if self._start is None else self._start
        super().__init__(**common)

    def build(self) -> Transform:
        names = ("decay", "ord", "max_growth", "min_norm", "debias")
        own = {name: getattr(self, name) for name in names}
        return AverageClipping(**own, start=self._start, rescale=self._rescale)
