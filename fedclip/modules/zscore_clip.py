# SPDX-License-Identifier: Apache-2.0
"""`zscore-clip`: a limit from mean and standard deviation of past norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.common import COMMON, Parameter, Remembering
from fedclip.modules.sharing import SharedClipper
from fedclip.privacy import kinds
from fedclip.rules.zscore import ZScore
from fedclip.transforms import Transform

__all__ = ["ZScoreClip"]


class ZScoreClip(SharedClipper):
    """Limit at so many standard deviations above the running mean of past norms (ZClip).

    ::

        Init(z_max, decay, warmup, max_norm):
            mean, variance of the norms of the first `warmup` steps
        Step(grads):
            for each group of tensors:
                n = norm(group)
                z = (n - mean) / (sqrt(variance) + std_eps)
                if z > z_max:
                    limit = mean + z_max^2 / z * sqrt(variance)
                u = min(n, limit)
                mean = decay * mean + (1 - decay) * u
                variance = decay * variance + (1 - decay) * (u - mean)^2
                group *= min(1, min(limit, max_norm) / n)

    Parameters
    ----------
    z_max : float, default=2.5
        Number of standard deviations above which a norm is a spike, > 0.
    decay : float, default=0.97
        Weight of the past in the moving averages, in (0, 1); 0.97 remembers some 33 steps.
    action : {"reciprocal", "max", "mean"}, default="reciprocal"
        What a spike is clipped to: ``mean + z_max^2 / z * std`` (the larger the spike, the
        lower), ``mean + z_max * std``, or ``mean``.
    feedback : {"clipped", "raw", "none"}, default="clipped"
        What the statistics learn from a spike: its limit, its norm, or nothing. With "raw" a
        burst of spikes pulls the limit up within a few steps.
    warmup : int, default=25
        Number of steps that only fill the statistics, >= 0. The first step always does.
    warmup_norm : float or None, default=None
        Fixed limit during these steps, besides `max_norm`.
    factor : float, default=1.0
        Multiplies the limit of the action "reciprocal", > 0.
    estimator : {"zclip", "drytorch", "smartclip"}, default="zclip"
        How mean and variance are updated (see `fedclip.rules.zscore`): that of the paper's
        code, or of the two packages.
    std_eps : float, default=1e-6
        Added to the standard deviation in the z-score, >= 0.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at the first
        gradient, if a pattern matches no tensor.

    Notes
    -----
    State: mean, variance and count of each group; a client's rounds continue each other, and a
    run that is saved and resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics; clippers never share
    statistics by accident. Without `max_norm` there is no bound known in advance, and with it
    the limit still depends on the data: only `max_norm` bounds a sensitivity.

    A constant warm-up gives a variance of 0, and the first norm above the mean by more than
    ``z_max * std_eps`` is clipped to it.

    References
    ----------
    Kumar, Owen, Chowdhury & Güra, 2025, "ZClip: adaptive spike mitigation for LLM
    pre-training", arXiv:2504.02507.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = ZScoreClip(warmup=4, max_norm=None)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 3)
    1.003
    >>> clip.last.clipped
    (True,)
    """

    name: ClassVar[str] = "zscore-clip"
    guarantee = kinds.learnt_limit
    differs: ClassVar[Mapping[str, Parameter]] = {
        "max_norm": COMMON["max_norm"].but(
            default=1.0,
            meaning="Fixed limit at every step, above which no adaptive limit goes; None for "
            "none. The default protects from the first step on.",
        )
    }
    shared_settings: ClassVar[tuple[str, ...]] = (
        "z_max",
        "decay",
        "feedback",
        "warmup",
        "factor",
        "estimator",
        "std_eps",
        "scope",
        "exclude",
        "ord",
    )

    def __init__(
        self,
        z_max: float = 2.5,
        *,
        decay: float = 0.97,
        action: str = "reciprocal",
        feedback: str = "clipped",
        warmup: int = 25,
        warmup_norm: float | None = None,
        factor: float = 1.0,
        estimator: str = "zclip",
        std_eps: float = 1e-6,
        **common: Unpack[Remembering],
    ) -> None:
        self.z_max = parameters.positive(z_max=z_max)
        self.decay = parameters.unit_interval(decay=decay)
        self.action = parameters.choice(("reciprocal", "max", "mean"), action=action)
        self.feedback = parameters.choice(("clipped", "raw", "none"), feedback=feedback)
        self.warmup = parameters.integer(0, warmup=warmup)
        self.warmup_norm = parameters.optional(parameters.positive, warmup_norm=warmup_norm)
        self.factor = parameters.positive(factor=factor)
        self.estimator = parameters.choice(("zclip", "drytorch", "smartclip"), estimator=estimator)
        self.std_eps = parameters.non_negative(std_eps=std_eps)
        if self.factor != 1.0 and self.action != "reciprocal":
            raise ValueError(
                f"factor goes with action='reciprocal' only, got factor={factor!r} "
                f"with action={action!r}"
            )
        super().__init__(**common)

    def build(self) -> Transform:
        """Return what the clipper is made of."""
        parameters.raw_if_current(self.include_current, self.feedback)
        return self._clipping(ZScore)
