# SPDX-License-Identifier: Apache-2.0
"""`norm-clip`: a fixed limit on a norm."""

from __future__ import annotations

import math

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import FixedLimit
from fedclip.core.parameters import limit, parameter
from fedclip.core.scopes import Groups
from fedclip.privacy import guarantees as kinds
from fedclip.transforms import Action, Transform


class NormClip(FixedLimit, Clipper):
    """Clip to a fixed norm: global, by tensor, layer, pattern, or slice.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                if n > max_norm:
                    group *= max_norm / n

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    With ``ord=2, eps=0``, in float64: no output norm is above `max_norm`, and a clipped one is at
    most 2e-6 below (half precision: its rounding). Directions do not change. If nothing is clipped,
    the same object comes back. Clipping twice equals clipping once.

    Dtype and shape never change, also of empty and 0-d tensors. Values that overflow when squared,
    such as 1e20 in float32, are clipped correctly. The state has only records.

    References
    ----------
    Pascanu, Mikolov & Bengio, 2013, arXiv:1211.5063.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = NormClip(max_norm=1.0)
    >>> clip.run(NumpyVector({"w": np.array([3.0, 4.0])})).coefs["w"].round(6)
    array([0.6, 0.8])
    >>> clip.last.norm_before
    (5.0,)
    """

    name = "norm-clip"
    guarantee = kinds.fixed_limit

    max_norm: float | None = parameter(limit, default=1.0, kw_only=False)
    """Largest norm of a group, > 0, in units of the gradient. None needs `min_norm`."""
    min_norm: float | None = parameter(limit, default=None)
    """Scale smaller groups up to this norm, > 0, unless they are zero."""
    scope = parameter()
    """Which tensors share a norm. A table ``{"head.*" = 0.1}`` gives groups other limits; the other
    tensors are one group."""
    eps = parameter()
    """Added to the norm in ``max_norm / (n + eps)``, >= 0; 0 is exact, 1e-6 as in torch's
    `clip_grad_norm_`."""

    def build(self) -> Transform:
        if self.min_norm is None:
            limit(max_norm=self.max_norm)
        most = math.inf if self.max_norm is None else self.max_norm
        if self.min_norm is not None and self.min_norm > most:
            got = f"{self.min_norm!r} > {self.max_norm!r}"
            raise ValueError(f"min_norm must be <= max_norm, got {got}")
        return self.with_limit(most, Action(self.eps, self.min_norm))

    def transform(self, groups: Groups) -> Transform:
        return self.with_table(self._transform, groups, self.max_norm or math.inf)
