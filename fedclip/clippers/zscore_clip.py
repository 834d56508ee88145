# SPDX-License-Identifier: Apache-2.0
"""`zscore-clip`: a limit from mean and standard deviation of past norms."""

from __future__ import annotations

from typing import Any

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit, Warmup
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import choice, non_negative, parameter, positive, unit_interval
from fedclip.privacy import guarantees as kinds
from fedclip.rules.drytorch import Drytorch
from fedclip.rules.reciprocal import Reciprocal
from fedclip.rules.smartclip import Smartclip
from fedclip.rules.zclip import ZClip
from fedclip.rules.zscore import ZScore
from fedclip.transforms import Transform


class ZScoreClip(Warmup, Sharing, PastLimit, Clipper):
    """Limit some standard deviations above the mean of past norms (ZClip).

    The defaults need no scale, protect from the second step on and follow norms that rise;
    ``ZScoreClip.preset("zclip")`` has the defaults of the paper's code.

    ::

        Init(z_max, decay, min_std, warmup, warmup_factor):
            mean, variance of the first `warmup` norms, as they are learnt
        Step(grads):
            for each group of tensors:
                n = norm(group)
                std = max(sqrt(variance), min_std * mean)
                limit = warmup_factor * median of the last five norms, until there are `warmup`
                        mean + z_max * std, afterwards
                u = min(n, limit)
                mean = decay * mean + (1 - decay) * u
                variance = decay * variance + (1 - decay) * (u - mean)^2
                group *= min(1, limit / n)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State: mean, variance and count of each group, and its last five norms; it goes on from one
    round of a client to the next, and a run that is saved and resumed gives the same outputs, bit
    for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics; clippers never share
    statistics by accident. Without `max_norm` there is no bound known in advance, and with it the
    limit still depends on the data: only `max_norm` bounds a sensitivity.

    Norms that are all equal give a limit 25 % above them (``z_max * min_std``). A spike during
    the warm-up hardly moves the statistics, and neither do two or three.

    References
    ----------
    Kumar, Owen, Chowdhury & Güra, 2025, "ZClip: adaptive spike mitigation for LLM
    pre-training", arXiv:2504.02507.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = ZScoreClip()
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 3)
    2.25
    >>> clip.last.clipped
    (True,)
    """

    name = "zscore-clip"
    guarantee = kinds.learnt_limit
    _client_settings = ("action",)

    z_max: float = parameter(positive, default=2.5, kw_only=False)
    """Number of standard deviations above which a norm is a spike, > 0."""
    decay: float = parameter(unit_interval, default=0.97)
    """Weight of the past in the moving averages, in (0, 1); 0.97 remembers some 33 steps."""
    action: str = parameter(choice, ("reciprocal", "max", "mean"), default="max")
    """What a spike is clipped to: ``mean + z_max * std``, ``mean + z_max^2 / z * std`` (the
    larger the spike, the lower), or ``mean``. With the last two and clipped feedback, norms
    that have risen for good hardly lift the limit."""
    feedback: str = parameter(choice, ("clipped", "raw", "none"), default="clipped")
    """What the statistics learn from a spike: its limit, its norm, or nothing. With "raw" a
    burst of spikes pulls the limit up within a few steps."""
    factor: float = parameter(positive, default=1.0)
    """Multiplies the limit of the action "reciprocal", > 0."""
    estimator: str = parameter(choice, ("zclip", "drytorch", "smartclip"), default="zclip")
    """How to update mean and variance: as in the paper's code, or as in the package drytorch or
    smartclip (see `fedclip.rules.moments`)."""
    std_eps: float = parameter(non_negative, default=0.0)
    """Added to the standard deviation in the z-score, >= 0, in the units of the gradient."""
    min_std: float = parameter(non_negative, default=0.1)
    """Least standard deviation, as a multiple of the mean, >= 0: norms that hardly vary can
    still grow."""

    def build(self) -> Transform:
        self.check_goes_with("factor", "action", "reciprocal")
        estimators: Any = {"zclip": ZClip, "drytorch": Drytorch, "smartclip": Smartclip}
        rule = ZScore if self.action == "max" and not self.std_eps else Reciprocal
        moments = estimators[self.estimator](self.decay, self.warmup)
        return self.with_rule(rule, moments=moments)
