# SPDX-License-Identifier: Apache-2.0
"""`mad-clip`: a limit from median and median absolute deviation of past norms."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.core.parameters import LARGEST_WINDOW
from fedclip.rules.mad import Mad
from fedclip.rules.quantiles import Window


class MadClip(own.Warmup, own.Sharing, own.PastLimit, own.Clipper):
    """Limit three median absolute deviations above the median of norms.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                median = median of history
                spread = 1.4826 * median of abs(history - median)
                limit = median + mad_factor * max(spread, min_mad * median)
                        (warm-up: warmup_factor * median of the last five norms)
                append min(n, 2 * limit) to history, the last `window` norms
                group *= min(1, limit / n)

    Spikes in less than half of the window do not move the limit. It follows rising norms within
    half a window.

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

    Equal norms give a limit 30 % above them (``mad_factor * min_mad``). If all norms are 0, the
    warm-up goes on.

    State of each group: the norms of the window, their count, the last five norms.

    References
    ----------
    Hampel, 1974, doi:10.1080/01621459.1974.10482962.

    Examples
    --------
    >>> clip = MadClip(warmup=3)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 1.2, 0.9, 20.0):
    ...     record = clip.observe(norm)
    >>> round(record.limit[0], 4)
    1.3336
    """

    name = "mad-clip"
    guarantee = own.guarantees.learnt_limit

    mad_factor: float = own.parameter(own.positive, default=3.0, kw_only=False)
    """Deviations from median to limit, > 0; 1.4826 makes them standard deviations of normal
    norms."""
    window: int = own.parameter(own.integer, 3, LARGEST_WINDOW, default=64)
    """Number of norms in the history, 3 to 65,536."""
    min_mad: float = own.parameter(own.non_negative, default=0.1)
    """Smallest deviation, as a multiple of the median, >= 0."""
    feedback: str = own.parameter(own.choice, ("clipped", "raw", "none"), default="clipped")
    """Learn twice the limit of a spike ("clipped"), its norm ("raw"), or nothing ("none")."""

    def build(self) -> own.Transform:
        return self.with_rule(Mad, history=Window(0.5, self.window))
