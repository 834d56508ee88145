# SPDX-License-Identifier: Apache-2.0
"""`percentile-norm-clip`: a limit at a percentile of past norms."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.core.parameters import LARGEST_WINDOW
from fedclip.rules.percentile import Percentile
from fedclip.rules.quantiles import Markers, Stream, Window


class PercentileNormClip(own.Warmup, own.Sharing, own.PastLimit, own.Clipper):
    """Limit at a percentile of past norms (AutoClip).

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = percentile of the last `window` norms in history
                        (warm-up: warmup_factor * median of the last five norms)
                append min(n, 2 * limit) to history
                group *= min(1, limit / n)

    ``PercentileNormClip.preset("autoclip")`` has the paper's defaults.

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

    A limit that learns itself cannot rise, so spikes are learnt at twice the limit. A burst of ``(1
    - percentile / 100) * window`` spikes at most doubles it (with "raw", sets it); lasting ones
    double it repeatedly.

    The largest history is half a megabyte a group; the paper's has no end. If all norms are 0, the
    warm-up goes on.

    State of each group: history (with "stream" two numbers, with "p2" five markers and positions),
    count.

    References
    ----------
    AutoClip: Seetharaman, Wichern, Pardo & Le Roux, 2020, arXiv:2007.14469.

    Examples
    --------
    >>> clip = PercentileNormClip(50.0, warmup=1)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 20.0):
    ...     record = clip.observe(norm)
    >>> record.limit
    (1.0,)
    """

    name = "percentile-norm-clip"
    guarantee = own.guarantees.learnt_limit
    _client_settings = ("rate", "decay")

    percentile: float = own.parameter(own.up_to, 100, default=95.0, kw_only=False)
    """Percentage of past norms at most the limit, in (0, 100]."""
    history: str = own.parameter(own.choice, ("window", "stream", "p2"), default="window")
    """The last `window` norms, interpolated ("window"); an estimate that follows them ("stream");
    or all norms, by five numbers ("p2")."""
    window: int | None = own.parameter(own.integer, 1, LARGEST_WINDOW, default=256)
    """Norms in the "window", 1 to 65,536; None for 65,536."""
    rate: float = own.parameter(own.up_to, 1, default=0.02)
    """Step size of "stream", in (0, 1]."""
    decay: float = own.parameter(own.unit_interval, default=0.99)
    """Weight of the past in the step scale of "stream", in (0, 1)."""
    feedback: str = own.parameter(own.choice, ("clipped", "raw"), default="clipped")
    """Learn twice the limit of a spike ("clipped"), or its norm ("raw")."""
    warmup = own.parameter()
    """Norms that only fill the history, >= 0; at least 1, or 5 with "p2"."""

    def build(self) -> own.Transform:
        if self.percentile == 100.0 and self.history != "window":
            got = f"got history={self.history!r}, which never falls"
            raise ValueError(f"percentile=100 needs history='window', {got}")
        for name, history in (("window", "window"), ("rate", "stream"), ("decay", "stream")):
            self.check_goes_with(name, "history", history)
        if self.shared and self.history == "stream":
            raise ValueError("shared=True does not go with history='stream': use 'window' or 'p2'")
        quantile = self.percentile / 100.0
        histories = {
            "window": Window(quantile, self.window or LARGEST_WINDOW),
            "stream": Stream(quantile, rate=self.rate, decay=self.decay),
            "p2": Markers(quantile),
        }
        return self.with_rule(Percentile, history=histories[self.history])
