# SPDX-License-Identifier: Apache-2.0
"""`auto-clip`: a limit from median and standard deviation of past norms."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.core.parameters import LARGEST_WINDOW
from fedclip.rules.auto import Auto
from fedclip.rules.quantiles import Markers, Window


class AutoClip(own.Warmup, own.Sharing, own.PastLimit, own.Clipper):
    """Limit three standard deviations above the running median of norms.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = median + std_factor * max(std, min_std * median)
                        (warm-up: warmup_factor * median of the last five norms)
                u = min(n, limit)
                update median, mean and variance with u
                group *= min(1, limit / n)

    ``AutoClip.preset("smartclip")`` has the defaults of smartclip.

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

    No group is judged before its fifth norm. Equal norms give a limit 30 % above them (``std_factor
    * min_std``). If all norms are 0, the warm-up goes on.

    State of each group: the last norms (with "p2", five markers and their positions), mean,
    variance, count.

    References
    ----------
    The P2 algorithm: Jain & Chlamtac, 1985, doi:10.1145/4372.4378.

    Examples
    --------
    >>> clip = AutoClip()
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 20.0):
    ...     record = clip.observe(norm)
    >>> record.limit
    (2.25,)
    """

    name = "auto-clip"
    guarantee = own.guarantees.learnt_limit

    std_factor: float = own.parameter(own.positive, default=3.0, kw_only=False)
    """Standard deviations from median to limit, > 0."""
    median: str = own.parameter(own.choice, ("p2", "window"), default="window")
    """Median of the last `window` norms ("window"), or of all norms, estimated from five numbers
    ("p2"), which does not follow rising norms."""
    window: int | None = own.parameter(own.integer, 5, LARGEST_WINDOW, default=None)
    """Norms in the median, 5 to 65,536; None for 64. Only with "window"."""
    decay: float | None = own.parameter(own.unit_interval, default=0.97)
    """Weight of the past in mean and variance, in (0, 1); 0.97 remembers about 33 steps. None: all
    norms count equally."""
    min_std: float = own.parameter(own.non_negative, default=0.1)
    """Smallest standard deviation, as a multiple of the median, >= 0."""
    feedback: str = own.parameter(own.choice, ("clipped", "raw", "none"), default="clipped")
    """Learn a spike at its limit ("clipped"), at its norm ("raw"; a burst then raises the limit
    soon), or not ("none")."""
    warmup = own.parameter()
    """Norms that only fill the statistics, >= 0; fewer than 5 count as 5."""

    def build(self) -> own.Transform:
        self.check_goes_with("window", "median", "window")
        exact = self.median == "window"
        # The P2 algorithm needs five norms, and the deviation of fewer says little.
        median = Window(0.5, self.window or 64, least=5) if exact else Markers(0.5)
        return self.with_rule(Auto, history=median)
