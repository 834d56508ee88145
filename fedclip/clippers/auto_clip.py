# SPDX-License-Identifier: Apache-2.0
"""`auto-clip`: a limit from median and standard deviation of past norms."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit, Warmup
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import (
    choice,
    non_negative,
    parameter,
    positive,
    unit_interval,
    window_size,
)
from fedclip.privacy import guarantees as kinds
from fedclip.rules.auto import Auto
from fedclip.rules.quantiles import Markers, Window
from fedclip.transforms import Transform


class AutoClip(Warmup, Sharing, PastLimit, Clipper):
    """Limit three standard deviations above the running median of norms.

    It needs no tuning: the limit comes from the norms alone, protects from the second step on, and
    follows norms that rise. ``AutoClip.preset("smartclip")`` has the defaults of smartclip.

    ::

        Init(std_factor, window, decay, min_std, warmup, warmup_factor):
            median, mean, variance of the first `warmup` norms, as they are learnt
        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = warmup_factor * median of the last five norms, until there are `warmup`
                        median + std_factor * max(std, min_std * median), afterwards
                u = min(n, limit)
                update median, mean and variance with u
                group *= min(1, limit / n)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State, for each group: the last norms (with "p2", five markers and their positions), their mean,
    variance and count; it goes on from one round of a client to the next, and a run that is saved
    and resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics; no group is judged before
    its fifth norm. For differential privacy only `max_norm` counts: the learnt limit depends on the
    data, and bounds no sensitivity.

    Norms that are all equal give a limit 30 % above them (``std_factor * min_std``); norms that
    are all 0 give none, and the group stays in warm-up.

    References
    ----------
    Jain & Chlamtac, 1985, "The P2 algorithm for dynamic calculation of quantiles and histograms
    without storing observations", doi:10.1145/4372.4378.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = AutoClip()
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 3)
    2.25
    """

    name = "auto-clip"
    guarantee = kinds.learnt_limit

    std_factor: float = parameter(positive, default=3.0, kw_only=False)
    """Number of standard deviations above the median, > 0."""
    median: str = parameter(choice, ("p2", "window"), default="window")
    """How to estimate the median. "window" takes the last `window` norms, exactly. "p2"
    estimates the median of all norms from five numbers, and does not follow norms that rise."""
    window: int | None = parameter(window_size, 5, default=None)
    """Number of norms in the median, from 5 to 65,536; None for 64. Only with
    ``median="window"``."""
    decay: float | None = parameter(unit_interval, default=0.97)
    """Weight of the past in mean and variance, in (0, 1); 0.97 remembers some 33 steps. None
    gives all norms the same weight."""
    min_std: float = parameter(non_negative, default=0.1)
    """Least standard deviation, as a multiple of the median, >= 0: norms that hardly vary can
    still grow."""
    feedback: str = parameter(choice, ("clipped", "raw", "none"), default="clipped")
    """What the statistics learn from a spike: its limit, its norm, or nothing. With "raw" a
    single spike pulls the limit up for long."""
    warmup = parameter()
    """Number of norms that only fill the statistics, >= 0; less than 5 counts as 5."""

    def build(self) -> Transform:
        self.check_goes_with("window", "median", "window")
        exact = self.median == "window"
        median = Window(0.5, self.window or 64) if exact else Markers(0.5)
        return self.with_rule(Auto, median=median)
