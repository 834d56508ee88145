# SPDX-License-Identifier: Apache-2.0
"""`adaptive-clip`: a limit that tracks a quantile of the norms."""

from __future__ import annotations

import math

from fedclip.clippers import own
from fedclip.core.parameters import limit
from fedclip.rules.adaptive import Adaptive


class AdaptiveClip(own.Sharing, own.PastLimit, own.Clipper):
    """Clip to a limit that adapts until a given share of norms is below it.

    ::

        limit = start_norm, or the median of the first five norms
        Step(grads):
            for each group of tensors:
                n = norm(group)
                group *= min(1, limit / n)
                unclipped += 1 if n <= limit else 0
                after `every` steps:
                    b = unclipped / every;  unclipped = 0
                    limit *= exp(-rate * (b - quantile)), within [min_norm, max_norm]

    It clips gradients, without noise. For updates, and for privacy, use `update-clip-server`.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    No output norm is above its limit or above `max_norm`. If nothing is clipped, the same object
    comes back. NaN and infinity never enter the state. The state continues from round to round; a
    run that is saved and resumed gives the same outputs, bit for bit. The limit depends on the
    data: only `max_norm` bounds a sensitivity.

    A spike of any size moves the limit by one step. A norm of 0 does not count. Tiny norms pull the
    limit down: from 1e-6 it needs 115 steps to reach 0.1. Prevent that with `min_norm`.

    State of each group: limit, counts since its last change, last five norms.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, arXiv:1905.03871.

    Examples
    --------
    >>> clip = AdaptiveClip(start_norm=0.1)
    >>> for _ in range(100):
    ...     record = clip.observe(1.0)
    >>> 0.9 <= record.limit[0] <= 1.1
    True
    """

    name = "adaptive-clip"
    guarantee = own.guarantees.learnt_limit
    _client_settings = ("warmup_factor",)
    _common_settings = ("max_norm", *own.Sharing._common_settings)

    quantile: float = own.parameter(own.unit_interval, default=0.5, kw_only=False)
    """Share of norms that should be at most the limit, in (0, 1)."""
    rate: float = own.parameter(own.up_to, 10, default=0.2)
    """Step size, in (0, 10]: a limit changes by at most a factor ``exp(rate)``."""
    start_norm: float | None = own.parameter(limit, default=None)
    """First limit, > 0. None: the median of the first five norms."""
    every: int = own.parameter(own.integer, 1, default=1)
    """Steps between two changes of the limit, >= 1."""
    min_norm: float | None = own.parameter(own.positive, default=None)
    """Smallest limit, > 0."""
    warmup_factor: float = own.parameter(own.at_least_one, default=2.25)
    """Without `start_norm`: limit before the fifth norm, in medians so far, >= 1."""

    def build(self) -> own.Transform:
        low = 0.0 if self.min_norm is None else self.min_norm
        high = math.inf if self.max_norm is None else self.max_norm
        start = max(low, min(1.0, high)) if self.start_norm is None else self.start_norm
        if not low <= start <= high:
            names = ("start_norm", "min_norm", "max_norm")
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            raise ValueError(f"start_norm must be between min_norm and max_norm, got {got}")
        return self.with_rule(Adaptive)
