# SPDX-License-Identifier: Apache-2.0
"""`growth-clip`: a limit on how fast a norm may grow."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.core.parameters import limit
from fedclip.rules.growth import Growth


class GrowthClip(own.PastLimit, own.Clipper):
    """Limit how fast a norm may grow from one step to the next.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = min(previous * mul, previous + add)
                        (first step: warmup_norm)
                u = min(n, limit)
                previous = max(u, previous / max_decay, min_norm)
                group *= min(1, limit / n)

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

    `min_norm` also applies to the first norm. Without it, the step after a norm of 0 is a first
    step again.

    State of each group: its last norm after clipping.

    References
    ----------
    `ClipNormGrowth` of torchzero, whose `min_value` also divides every update; here it does not.

    Examples
    --------
    >>> clip = GrowthClip()
    >>> [clip.observe(norm).limit[0] for norm in (1.0, 10.0, 10.0)]
    [inf, 1.5, 2.25]
    """

    name = "growth-clip"
    guarantee = own.guarantees.learnt_limit

    mul: float | None = own.parameter(own.at_least_one, default=1.5, kw_only=False)
    """Factor by which a norm may grow in a step, >= 1; None for no such limit."""
    add: float | None = own.parameter(own.positive, default=None)
    """Amount by which a norm may grow in a step, > 0, in units of the gradient. With `mul`, the
    lower limit applies; without both, only `warmup_norm` and `max_norm`."""
    min_norm: float | None = own.parameter(own.positive, default=None)
    """Past norms count as at least this, > 0, and can grow again from 0; None for none."""
    max_decay: float | None = own.parameter(own.at_least_one, default=2.0)
    """Factor by which the past norm may fall in a step, >= 1: one small gradient does not turn the
    next ones into spikes. None: any."""
    warmup_norm: float | None = own.parameter(limit, default=None)
    """Limit of the first step, > 0; None for none."""

    def build(self) -> own.Transform:
        return self.with_rule(Growth)
