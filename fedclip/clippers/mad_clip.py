# SPDX-License-Identifier: Apache-2.0
"""`mad-clip`: a limit from median and median absolute deviation of past norms."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit, Warmup
from fedclip.clippers.sharing import Sharing
from fedclip.core.parameters import choice, non_negative, parameter, positive, window_size
from fedclip.privacy import guarantees as kinds
from fedclip.rules.mad import Mad
from fedclip.rules.quantiles import Window
from fedclip.transforms import Transform


class MadClip(Warmup, Sharing, PastLimit, Clipper):
    """Limit three median absolute deviations above the median of norms.

    A burst of spikes that fills less than half of the window does not move the limit. If the norms
    rise for good, the limit follows within half a window.

    ::

        Init(mad_factor, window, min_mad, warmup, warmup_factor):
            history = empty
        Step(grads):
            for each group of tensors:
                n = norm(group)
                median = median of history
                spread = 1.4826 * median of abs(history - median)
                limit = warmup_factor * median of the last five norms, until there are `warmup`
                        median + mad_factor * max(spread, min_mad * median), afterwards
                append min(n, 2 * limit) to history, the last `window` norms
                group *= min(1, limit / n)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State: the last norms and the count of each group, and its last five norms once more; it goes on
    from one round of a client to the next, and a run that is saved and resumed gives the same
    outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics. For differential privacy
    only `max_norm` counts: the learnt limit depends on the data, and bounds no sensitivity.

    Norms that are all equal give a limit 30 % above them (``mad_factor * min_mad``); norms that
    are all 0 give none, and the group stays in warm-up.

    References
    ----------
    Hampel, 1974, "The influence curve and its role in robust estimation",
    doi:10.1080/01621459.1974.10482962.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = MadClip(warmup=3)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 1.2, 0.9, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 4)
    1.3336
    """

    name = "mad-clip"
    guarantee = kinds.learnt_limit

    mad_factor: float = parameter(positive, default=3.0, kw_only=False)
    """Number of deviations above the median, > 0; the deviation is scaled by 1.4826, so that it
    is the standard deviation of normal norms."""
    window: int = parameter(window_size, 3, default=64)
    """Number of norms that are remembered, from 3 to 65,536."""
    min_mad: float = parameter(non_negative, default=0.1)
    """Least deviation, as a multiple of the median, >= 0: norms that hardly vary can still grow."""
    feedback: str = parameter(choice, ("clipped", "raw", "none"), default="clipped")
    """What the history learns from a spike: twice its limit, its norm, or nothing."""

    def build(self) -> Transform:
        return self.with_rule(Mad, history=Window(0.5, self.window))
