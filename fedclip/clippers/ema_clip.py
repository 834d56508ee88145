# SPDX-License-Identifier: Apache-2.0
"""`ema-clip`: a limit from the moving average of past norms."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit, Warmup
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import choice, parameter, positive, unit_interval
from fedclip.privacy import guarantees as kinds
from fedclip.rules.adagc import JointEma, Smallest
from fedclip.rules.ema import Average, Ema
from fedclip.transforms import Transform


class EmaClip(Warmup, Sharing, PastLimit, Clipper):
    """Limit at a multiple of the moving average of past norms (AdaGC).

    The defaults need no scale, protect from the second step on and follow norms that rise;
    ``EmaClip.preset("adagc")`` has the defaults of the paper's code, ``EmaClip.preset("drytorch")``
    those of drytorch's ``EMACriterion``.

    ::

        Init(ratio, decay, warmup, warmup_factor):
            mean = mean of the first `warmup` norms, as they are learnt
        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = warmup_factor * median of the last five norms, until there are `warmup`
                        ratio * mean, afterwards
                u = min(n, limit)
                mean = decay * mean + (1 - decay) * u
                group *= min(1, limit / n)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State: mean and count of each group, and its last five norms; it goes on from one round of a
    client to the next, and a run that is saved and resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics. For differential privacy
    only `max_norm` counts: the learnt limit depends on the data, and bounds no sensitivity; during
    the warm-up `warmup_norm` does.

    With clipped feedback the mean grows by at most a factor
    ``1 + (1 - decay) * (ratio - 1)`` a step: 1.02 by default, and 1.001 with the paper's ratio
    of 1.05, which holds back norms that rise for a good reason. With `warmup_factor` the mean does
    not learn a norm of 0; a group whose norms have all been 0 stays in warm-up.

    References
    ----------
    Wang et al., 2025, "AdaGC: improving training stability for large language model
    pretraining", arXiv:2502.11034.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = EmaClip(warmup=1)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 3)
    2.002
    """

    name = "ema-clip"
    guarantee = kinds.learnt_limit
    _client_settings = ("action", "warmup_scope")

    ratio: float = parameter(positive, default=2.0, kw_only=False)
    """A norm above this multiple of the mean is a spike, > 0; less than 1 needs
    ``feedback="raw"``."""
    decay: float = parameter(unit_interval, default=0.98)
    """Weight of the past in the moving average, in (0, 1); 0.98 remembers some 50 steps."""
    action: str = parameter(choice, ("max", "mean", "reciprocal"), default="max")
    """What a spike is clipped to: ``ratio * mean``, ``mean``, or ``(ratio * mean)^2 / n`` (the
    larger the spike, the lower)."""
    feedback: str = parameter(choice, ("clipped", "raw", "none"), default="clipped")
    """What the mean learns from a spike: the norm after clipping, that before it, or nothing.
    With "raw" a burst of spikes pulls the limit up within a few steps."""
    warmup_scope: str = parameter(choice, ("group", "global"), default="group")
    """What `warmup_norm` bounds: the norm of each group, or that of all groups together (so
    AdaGC, with the scope "tensor"); "global" needs ``ord=2``."""
    estimator: str = parameter(choice, ("adagc", "drytorch"), default="drytorch")
    """What the mean starts from: the mean of the norms of the warm-up, or the smallest of them.
    "drytorch" without warm-up starts from 0, and is far too low for a while."""

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
        rule = JointEma if self.warmup_scope == "global" else Ema
        average = Smallest if self.estimator == "adagc" else Average
        return self.with_rule(rule, average=average(self.decay, self.warmup))
