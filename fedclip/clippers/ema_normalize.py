# SPDX-License-Identifier: Apache-2.0
"""`ema-normalize`: bring a norm to the norm of the moving average of the gradient."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.clippers.ema_norm_clip import EmaNormClip


class EmaNormalize(EmaNormClip):
    """Rescale to the norm of the moving average of the gradient itself.

    ::

        e = first gradient; or init, for every element
        Step(grads):
            for each group of tensors:
                e = decay * e + (1 - decay) * group
                target = min(norm(e), max(max_growth * target before, min_norm))
                e *= target / norm(e)
                if norm(group) > 0:
                    group *= target / norm(group)

    It has the parameters of `ema-norm-clip`, and also lengthens short gradients.

    Notes
    -----
    With ``ord=2`` no output norm is above its target, or more than 2e-6 below (half precision: its
    rounding). Directions do not change. No bound is known in advance. NaN and infinity never enter
    the state. A zero gradient stays zero, and shrinks the average.

    The state has an array of each tensor's shape on its device (float64 for float64, else float32),
    and a step count. It needs as much memory as the model. A run that is saved and resumed gives
    the same outputs, bit for bit.

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
    guarantee = own.guarantees.divided_by_average
    _rescale = True
