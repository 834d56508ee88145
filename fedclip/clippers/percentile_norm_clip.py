# SPDX-License-Identifier: Apache-2.0
"""`percentile-norm-clip`: a limit at a percentile of past norms."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit, Warmup
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import (
    LARGEST_WINDOW,
    choice,
    parameter,
    unit_interval,
    up_to,
    window_size,
)
from fedclip.privacy import guarantees as kinds
from fedclip.rules.percentile import Percentile
from fedclip.rules.quantiles import Markers, Quantile, Stream, Window
from fedclip.transforms import Transform


class PercentileNormClip(Warmup, Sharing, PastLimit, Clipper):
    """Limit at a percentile of past norms (AutoClip).

    The defaults need no scale, protect from the second step on and follow norms that rise;
    ``PercentileNormClip.preset("autoclip")`` has the defaults of the paper's code.

    ::

        Init(percentile, window):
            history = empty
        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = warmup_factor * median of the last five norms, until there are `warmup`
                        percentile of the last `window` norms in history, afterwards
                append min(n, 2 * limit) to history
                group *= min(1, limit / n)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State, for each group: the last norms (with "stream" two numbers, with "p2" five markers and
    their positions) and their count; it goes on from one round of a client to the next, and a run
    that is saved and resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics. For differential privacy
    only `max_norm` counts: the learnt limit depends on the data, and bounds no sensitivity.

    Clipped feedback is twice the limit, not the limit itself, so that the limit can rise: if
    spikes were learnt at the limit, no norm in the history would be above it. A percentile only
    depends on how many norms are above it, so this changes little until there is a burst of
    spikes. A burst of ``(1 - percentile / 100) * window`` spikes at most doubles the limit; norms
    that have grown for good double it again and again.

    The paper's history has no end; here it is that of the last 65,536 steps at most (the preset
    is the paper's code until then). It takes half a megabyte for each group, in the state too.
    A history that is all 0 gives no limit, and the group stays in warm-up.

    References
    ----------
    Seetharaman, Wichern, Pardo & Le Roux, 2020, "AutoClip: adaptive gradient clipping for
    source separation networks", arXiv:2007.14469.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = PercentileNormClip(50.0, warmup=1)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 4)
    1.0
    """

    name = "percentile-norm-clip"
    guarantee = kinds.learnt_limit
    _client_settings = ("rate", "decay")

    percentile: float = parameter(up_to, 100, default=95.0, kw_only=False)
    """Percentage of the past norms that are at most the limit, in (0, 100]. The lower, the more
    is clipped; the paper suggests 10."""
    history: str = parameter(choice, ("window", "stream", "p2"), default="window")
    """How to estimate the percentile. "window" takes the last `window` norms, exactly, and
    interpolates linearly. "stream" is an estimate that each norm moves a little, and that
    follows norms that rise or fall. "p2" estimates it of all norms, from five numbers."""
    window: int | None = parameter(window_size, 1, default=256)
    """Number of norms to remember, from 1 to 65,536; None for the largest. Only with
    ``history="window"``."""
    rate: float = parameter(up_to, 1, default=0.02)
    """Size of the steps of the estimate, in (0, 1]. Only with ``history="stream"``."""
    decay: float = parameter(unit_interval, default=0.99)
    """Weight of the past in the mean distance that scales these steps, in (0, 1). Only with
    ``history="stream"``."""
    feedback: str = parameter(choice, ("clipped", "raw"), default="clipped")
    """What the history learns from a spike: twice its limit, or its norm. With "raw" a burst of
    ``(1 - percentile / 100) * window`` spikes is the new limit."""
    warmup = parameter()
    """Number of norms that only fill the history, >= 0. The first one always does, with "p2"
    the first five."""

    def build(self) -> Transform:
        if self.percentile == 100.0 and self.history != "window":
            raise ValueError(
                "percentile=100, the largest norm, needs history='window': an estimate that only "
                f"ever rises is no limit; got history={self.history!r}"
            )
        for name, history in (("window", "window"), ("rate", "stream"), ("decay", "stream")):
            self.check_goes_with(name, "history", history)
        if self.shared and self.history == "stream":
            raise ValueError(
                "shared=True does not go with history='stream', which depends on the order of the "
                "norms: take 'window' or 'p2'"
            )
        return self.with_rule(Percentile, history=self._quantile())

    def _quantile(self) -> Quantile:
        quantile = self.percentile / 100.0
        if self.history == "window":
            return Window(quantile, self.window or LARGEST_WINDOW)
        if self.history == "stream":
            return Stream(quantile, rate=self.rate, decay=self.decay)
        return Markers(quantile)
