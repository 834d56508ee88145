# SPDX-License-Identifier: Apache-2.0
"""`ema-clip`: a limit from the moving average of past norms."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.rules.ema import Ema


class EmaClip(own.Warmup, own.Sharing, own.PastLimit, own.Clipper):
    """Limit at a multiple of the moving average of past norms (AdaGC).

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = ratio * mean
                        (warm-up: warmup_factor * median of the last five norms)
                u = min(n, limit)
                mean = decay * mean + (1 - decay) * u
                group *= min(1, limit / n)

    ``EmaClip.preset("adagc")`` has the paper's defaults, ``preset("drytorch")`` those of drytorch's
    ``EMACriterion``.

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

    With clipped feedback, a step raises the mean by at most a factor ``1 + (1 - decay) * (ratio -
    1)``: 1.02, or 1.001 with the paper's ratio. With `warmup_factor`, norms of 0 are not learnt.

    State of each group: mean, count, last five norms.

    References
    ----------
    AdaGC: Wang et al., 2025, arXiv:2502.11034.

    Examples
    --------
    >>> clip = EmaClip(warmup=1)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 20.0):
    ...     record = clip.observe(norm)
    >>> round(record.limit[0], 3)
    2.002
    """

    name = "ema-clip"
    guarantee = own.guarantees.learnt_limit
    _client_settings = ("action", "warmup_scope")

    ratio: float = own.parameter(own.positive, default=2.0, kw_only=False)
    """A norm above this multiple of the mean is a spike, > 0; below 1 it needs
    ``feedback="raw"``."""
    decay: float = own.parameter(own.unit_interval, default=0.98)
    """Weight of the past, in (0, 1); 0.98 remembers about 50 steps."""
    action: str = own.parameter(own.choice, ("max", "mean", "reciprocal"), default="max")
    """Clip a spike to ``ratio * mean`` ("max"), ``mean`` ("mean"), or ``(ratio * mean)^2 / n``
    ("reciprocal")."""
    feedback: str = own.parameter(own.choice, ("clipped", "raw", "none"), default="clipped")
    """Learn a spike at its limit ("clipped"), at its norm ("raw"; a burst then raises the limit
    soon), or not ("none")."""
    warmup_scope: str = own.parameter(own.choice, ("group", "global"), default="group")
    """`warmup_norm` limits each group ("group"), or all together ("global", as AdaGC does with the
    scope "tensor"; needs ``ord=2``)."""
    estimator: str = own.parameter(own.choice, ("adagc", "drytorch"), default="drytorch")
    """Start at the mean of the warm-up's norms ("drytorch"; without warm-up at 0, far too low), or
    at the smallest ("adagc")."""

    def build(self) -> own.Transform:
        if self.ratio < 1 and self.feedback != "raw":
            got = f"got ratio={self.ratio!r} with feedback={self.feedback!r}"
            raise ValueError(f"ratio < 1 needs feedback='raw', {got}: the mean would fall to 0")
        if self.warmup_scope == "global" and self.ord != 2:
            raise ValueError(f"warmup_scope='global' needs ord=2, got ord={self.ord!r}")
        return self.with_rule(Ema)
