# SPDX-License-Identifier: Apache-2.0
"""`ema-normalize`: bring a norm to the norm of the moving average of the gradient."""

from __future__ import annotations

from fedclip.clippers.ema_norm_clip import EmaNormClip
from fedclip.privacy import guarantees as kinds


class EmaNormalize(EmaNormClip):
    """Rescale to the norm of the moving average of the gradient itself.

    ::

        Init(decay, max_growth, init, min_norm):
            e = the first group; or init, for every element
        Step(grads):
            for each group of tensors:
                e = decay * e + (1 - decay) * group
                target = min(norm(e), max(max_growth * target before, min_norm))
                e *= target / norm(e)
                n = norm(group)
                if n > 0:
                    group *= target / n

    It works like `ema-norm-clip`, with the same parameters, but also lengthens short gradients.

    Notes
    -----
    State: for each tensor, an array of its shape (float64 for float64, else float32) on its device,
    and its number of steps; as much memory as the model. A run that is saved and resumed gives the
    same outputs, bit for bit. Besides, for each group, the norm of the average, and the number of
    steps.

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
    >>> normalize = EmaNormalize(decay=0.5)
    >>> for value in (1.0, 1.0, 0.2):
    ...     out = normalize.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"].round(6)
    array([0.6])
    """

    name = "ema-normalize"
    guarantee = kinds.divided_by_average
    _rescale = True
