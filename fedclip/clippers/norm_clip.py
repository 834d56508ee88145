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
    """Fixed limit on a norm: global, by tensor, layer, pattern, or slice.

    ::

        Init(max_norm):
            assign max_norm
        Step(grads):
            for each group of tensors:
                n = norm(group)
                if n > max_norm:
                    group *= max_norm / n

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    Guarantees, with ``ord=2, eps=0``: the output's norm, in float64, is at most `max_norm` and,
    where it was above, not more than 2e-6 below (half precision: its own rounding); below the
    limit the very same Vector comes back; the direction of a clipped group is kept; applying
    it twice is applying it once.

    ====================  ======================================================
    input                 output
    ====================  ======================================================
    zero gradient         the same object
    norm equal to limit   the same object
    empty tensor, 0-d     as any other tensor; dtype and shape are kept
    1e20 in float32       clipped right: what overflows is measured scaled
    NaN or infinity       as `on_nonfinite` says
    ====================  ======================================================

    There is no state but the records of past rounds.

    References
    ----------
    Pascanu, Mikolov & Bengio, 2013, "On the difficulty of training recurrent neural networks",
    arXiv:1211.5063.

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
    """Largest norm of a group, > 0, in the units of the gradient. None (no upper limit) needs
    `min_norm`."""
    min_norm: float | None = parameter(limit, default=None)
    """Groups below this norm, unless they are zero, are scaled up to it."""
    scope = parameter()
    """Which tensors share a norm. A table ``{"head.*" = 0.1}`` gives groups their own limit;
    tensors that no pattern names form one more group, limited by `max_norm`."""
    eps = parameter()
    """Added to the norm in the factor ``max_norm / (n + eps)``; 1e-6 gives what
    `torch.nn.utils.clip_grad_norm_` gives, 0 is exact."""

    def build(self) -> Transform:
        if self.min_norm is None:
            limit(max_norm=self.max_norm)
        most = math.inf if self.max_norm is None else self.max_norm
        if self.min_norm is not None and self.min_norm > most:
            raise ValueError(
                f"min_norm must be <= max_norm, got {self.min_norm!r} > {self.max_norm!r}"
            )
        return self.with_limit(most, Action(self.eps, self.min_norm))

    def transform(self, groups: Groups) -> Transform:
        return self.with_table(self._transform, groups, self.max_norm or math.inf)
