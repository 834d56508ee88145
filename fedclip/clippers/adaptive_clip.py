# SPDX-License-Identifier: Apache-2.0
"""`adaptive-clip`: a limit that tracks a quantile of the norms."""

from __future__ import annotations

import math

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import (
    at_least_one,
    integer,
    limit,
    parameter,
    positive,
    unit_interval,
    up_to,
)
from fedclip.privacy import guarantees as kinds
from fedclip.rules.adaptive import Adaptive
from fedclip.transforms import Transform


class AdaptiveClip(Sharing, PastLimit, Clipper):
    """Limit that moves until a given fraction of norms is at most the limit.

    ::

        Init(quantile, rate, start_norm, every):
            limit = start_norm, or the median of the first five norms
        Step(grads):
            for each group of tensors:
                n = norm(group)
                group *= min(1, limit / n)
                unclipped += 1 if n <= limit else 0
                after `every` steps:
                    b = unclipped / every;  unclipped = 0
                    limit = clamp(limit * exp(-rate * (b - quantile)), min_norm, max_norm)

    This clipper applies the rule to gradients on one machine, without noise. For the updates of a
    federation and for privacy, see `update-clip-client` and `update-clip-server`.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State: limit, unclipped and count since the last update, of each group, and its last five norms;
    it goes on from one round of a client to the next, and a run that is saved and resumed gives the
    same outputs, bit for bit.

    Guarantees: no output norm is above its limit, which is known before the gradient is, nor above
    `max_norm`; where no norm is over its limit the very same Vector comes back; NaN and infinity
    are not counted. A spike, however large, moves the limit by one step. For differential privacy
    only `max_norm` counts: the learnt limit depends on the data, and bounds no sensitivity.

    A norm equal to the limit counts as unclipped, and a norm of 0 is not counted. If norms are
    tiny for a long time, they pull the limit down, and from 1e-6 it takes 115 steps up to 0.1:
    set a `min_norm` if that can happen.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
    clipping", arXiv:1905.03871.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = AdaptiveClip(start_norm=0.1)
    >>> for _ in range(100):
    ...     out = clip.run(NumpyVector({"w": np.array([1.0])}))
    >>> 0.9 <= clip.last.limit[0] <= 1.1
    True
    """

    name = "adaptive-clip"
    guarantee = kinds.learnt_limit
    _client_settings = ("warmup_factor",)
    _common_settings = ("max_norm", *Sharing._common_settings)

    quantile: float = parameter(unit_interval, default=0.5, kw_only=False)
    """Target for the fraction of the norms that are at most the limit, in (0, 1)."""
    rate: float = parameter(up_to, 10, default=0.2)
    """Size of the steps, in (0, 10]: the limit moves by a factor of at most ``exp(rate)``."""
    start_norm: float | None = parameter(limit, default=None)
    """Limit at first, > 0. None: the median of the first five norms; before the fifth norm,
    `warmup_factor` times the median so far."""
    every: int = parameter(integer, 1, default=1)
    """Number of steps between two updates of the limit, >= 1."""
    min_norm: float | None = parameter(positive, default=None)
    """The limit never falls below this, > 0; None for no such floor."""
    warmup_factor: float = parameter(at_least_one, default=2.25)
    """Limit before the first five norms, as a multiple of their median, >= 1; without
    `start_norm`."""

    def build(self) -> Transform:
        low = 0.0 if self.min_norm is None else self.min_norm
        high = math.inf if self.max_norm is None else self.max_norm
        start = max(low, min(1.0, high)) if self.start_norm is None else self.start_norm
        if not low <= start <= high:
            raise ValueError(
                "start_norm must be between min_norm and max_norm, got "
                f"start_norm={self.start_norm!r} with min_norm={self.min_norm!r} and "
                f"max_norm={self.max_norm!r}"
            )
        return self.with_rule(Adaptive)
