# SPDX-License-Identifier: Apache-2.0
"""`ema-normalize`: bring a norm to the norm of the moving average of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fedclip.modules.common import Preset
from fedclip.modules.ema_norm_clip import EmaNormClip
from fedclip.privacy import kinds

__all__ = ["EmaNormalize"]


class EmaNormalize(EmaNormClip):
    """Rescale to the norm of the moving average of the gradient itself.

    ::

        Init(decay, max_growth, init, min_norm):
            e = init, for every element
        Step(grads):
            for each group of tensors:
                e = decay * e + (1 - decay) * group
                target = min(norm(e), max(max_growth * target before, min_norm))
                e *= target / norm(e)
                n = norm(group)
                if n > 0:
                    group *= target / n

    It works like `ema-norm-clip`, but also lengthens short gradients.

    Parameters
    ----------
    decay : float, default=0.99
        Weight of the past in the average, in (0, 1); 0.99 remembers some 100 steps.
    max_growth : float or None, default=1.5
        Largest factor by which the norm of the average may grow in a step, >= 1; None for no
        such limit.
    init : float or "first", default=0.0
        Where the average starts: with every element at this value, or at the first gradient.
        With 0.0 the first output is ``1 - decay`` times the gradient.
    min_norm : float or None, default=None
        The average may always grow to this norm, > 0; None for no such floor. From 0 it may
        grow to any norm.
    debias : bool, default=False
        Divide the average by ``1 - decay^t``, so that it is not too short for having started
        at 0. Needs ``init=0.0``.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a
        gradient, if a pattern matches no tensor, or its shape is not that of the state.

    Notes
    -----
    State: for each tensor, an array of its shape (float64 for float64, else float32), in host
    memory, and its number of steps; as much memory as the model. For each group, the norm of
    the average, and the number of steps. A run that is saved and resumed gives the same
    outputs, bit for bit.

    Guarantees, with ``ord=2``: no output norm is above its target, nor more than 2e-6 below
    (half precision: its own rounding); the direction is kept; NaN and infinity never reach the
    average, nor does an overflow. A zero gradient stays zero, and shrinks the average. There
    is no bound known in advance.

    References
    ----------
    ``NormalizeByEMA`` of torchzero.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> normalize = EmaNormalize(decay=0.5, init="first")
    >>> for value in (1.0, 1.0, 0.2):
    ...     out = normalize.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"].round(6)
    array([0.6])
    """

    name: ClassVar[str] = "ema-normalize"
    presets: ClassVar[Mapping[str, Preset]] = {"torchzero": Preset("torchzero", "NormalizeByEMA")}
    guarantee = kinds.divided_by_average
    _rescale: ClassVar[bool] = True
