# SPDX-License-Identifier: Apache-2.0
"""`ema-clip`: a limit from the moving average of past norms."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit, Warmup
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import choice, parameter, positive, unit_interval
from fedclip.privacy import guarantees as kinds
from fedclip.rules.ema import Ema
from fedclip.transforms import Transform


class EmaClip(Warmup, Sharing, PastLimit, Clipper):
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
    guarantee = kinds.learnt_limit
    _client_settings = ("action", "warmup_scope")

    ratio: float = parameter(positive, default=2.0, kw_only=False)
    """A norm above this multiple of the mean is a spike, > 0; below 1 it needs
    ``feedback="raw"``."""
    decay: float = parameter(unit_interval, default=0.98)
    """Weight of the past, in (0, 1); 0.98 remembers about 50 steps."""
    action: str = parameter(choice, ("max", "mean", "reciprocal"), default="max")
    """Clip a spike to ``ratio * mean`` ("max"), ``mean`` ("mean"), or ``(ratio * mean)^2 / n``
    ("reciprocal")."""
    feedback: str = parameter(choice, ("clipped", "raw", "none"), default="clipped")
    """Learn a spike at its limit ("clipped"), at its norm ("raw"; a burst then raises the limit
    soon), or not ("none")."""
    warmup_scope: str = parameter(choice, ("group", "global"), default="group")
    """`warmup_norm` limits each group ("group"), or all together ("global", as AdaGC does with the
    scope "tensor"; needs ``ord=2``)."""
    estimator: str = parameter(choice, ("adagc", "drytorch"), default="drytorch")
    """Start at the mean of the warm-up's norms ("drytorch"; without warm-up at 0, far too low), or
    at the smallest ("adagc")."""

    def build(self) -> Transform:
        if self.ratio < 1 and self.feedback != "raw":
            raise ValueError(
                "ratio < 1 needs feedback='raw': a mean that learns clipped norms only would fall "
                f"to 0; got ratio={self.ratio!r} with feedback={self.feedback!r}"
            )
        if self.warmup_scope == "global" and self.ord != 2:
            raise ValueError(
                "warmup_scope='global' needs ord=2: only L2 norms of groups add up to the norm of "
                f"all; got ord={self.ord!r}"
            )
        return self.with_rule(Ema)
