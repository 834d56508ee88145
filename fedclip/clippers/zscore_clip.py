# SPDX-License-Identifier: Apache-2.0
"""`zscore-clip`: a limit from mean and standard deviation of past norms."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.rules.moments import ESTIMATORS
from fedclip.rules.zscore import ZScore


class ZScoreClip(own.Warmup, own.Sharing, own.PastLimit, own.Clipper):
    """Limit some standard deviations above the mean of past norms (ZClip).

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = mean + z_max * max(sqrt(variance), min_std * mean)
                        (warm-up: warmup_factor * median of the last five norms)
                u = min(n, limit)
                mean = decay * mean + (1 - decay) * u
                variance = decay * variance + (1 - decay) * (u - mean)^2
                group *= min(1, limit / n)

    ``ZScoreClip.preset("zclip")`` has the paper's defaults.

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

    Equal norms give a limit 25 % above them (``z_max * min_std``). One to three spikes in the
    warm-up hardly move the statistics. Clippers never share statistics by accident.

    State of each group: mean, variance, count, last five norms.

    References
    ----------
    ZClip: Kumar, Owen, Chowdhury & Güra, 2025, arXiv:2504.02507.

    Examples
    --------
    >>> clip = ZScoreClip()
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 20.0):
    ...     record = clip.observe(norm)
    >>> record.limit, record.clipped
    ((2.25,), (True,))
    """

    name = "zscore-clip"
    guarantee = own.guarantees.learnt_limit
    _client_settings = ("action",)

    z_max: float = own.parameter(own.positive, default=2.5, kw_only=False)
    """Standard deviations from mean to limit, > 0."""
    decay: float = own.parameter(own.unit_interval, default=0.97)
    """Weight of the past, in (0, 1); 0.97 remembers about 33 steps."""
    action: str = own.parameter(own.choice, ("reciprocal", "max", "mean"), default="max")
    """Clip spikes to the limit ("max"), ``mean + z_max^2 / z * std`` ("reciprocal") or ``mean``
    ("mean"). With the last two, rising norms hardly raise the limit."""
    feedback: str = own.parameter(own.choice, ("clipped", "raw", "none"), default="clipped")
    """Learn a spike at its limit ("clipped"), at its norm ("raw"; a burst then raises the limit
    soon), or not ("none")."""
    factor: float = own.parameter(own.positive, default=1.0)
    """Factor on the "reciprocal" limit, > 0."""
    estimator: str = own.parameter(own.choice, ("zclip", "drytorch", "smartclip"), default="zclip")
    """Moments as in "zclip", "drytorch" or "smartclip" (`fedclip.rules.moments`)."""
    std_eps: float = own.parameter(own.non_negative, default=0.0)
    """Added to the standard deviation in the z-score, >= 0."""
    min_std: float = own.parameter(own.non_negative, default=0.1)
    """Smallest standard deviation, as a multiple of the mean, >= 0."""

    def build(self) -> own.Transform:
        self.check_goes_with("factor", "action", "reciprocal")
        moments = ESTIMATORS[self.estimator](self.decay, self.warmup)
        return self.with_rule(ZScore, moments=moments)
