# SPDX-License-Identifier: Apache-2.0
"""`auto-clip`: a limit from median and standard deviation of past norms."""

from __future__ import annotations

from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.common import Remembering
from fedclip.modules.sharing import SharedClipper
from fedclip.privacy import kinds
from fedclip.rules.auto import Auto
from fedclip.rules.quantiles import Markers, Window, check_window
from fedclip.transforms import Transform

__all__ = ["AutoClip"]


class AutoClip(SharedClipper):
    """Limit at three standard deviations above the running median of past norms.

    Needs no tuning: the limit follows from the norms alone, and protects from the sixth step on;
    before, `warmup_norm` does.

    ::

        Init():
            median, std of the norms of the first 5 steps
        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = median + std_factor * max(std, 0.001 * median)
                u = min(n, limit)
                update median, mean and variance with u
                group *= min(1, min(limit, max_norm) / n)

    Parameters
    ----------
    std_factor : float, default=3.0
        Number of standard deviations above the median, > 0.
    median : {"p2", "window"}, default="p2"
        How the median is known: by the P2 algorithm, of all norms, from five numbers; or
        exactly, of the last `window` norms. The standard deviation is of all norms.
    window : int or None, default=None
        Number of norms that the median is of, from 5 to 65,536; with ``median="window"`` only,
        where None is 256.
    feedback : {"clipped", "raw", "none"}, default="clipped"
        What the statistics learn from a spike: its limit, its norm, or nothing. With "raw" a
        single spike pulls the limit up for long.
    warmup : int, default=5
        Number of steps that only fill the statistics, >= 0; less than 5 counts as 5.
    warmup_norm : float or None, default=1.0
        Fixed limit during these steps; None for none. The statistics learn the norms as they
        are, so that a limit that is too low is forgotten with the warm-up.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at the first
        gradient, if a pattern matches no tensor.

    Notes
    -----
    State: median (five markers and their positions, or the last norms), mean, variance and
    count of each group; a client's rounds continue each other, and a run that is saved and
    resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes the very
    same Vector comes back; NaN and infinity never reach the statistics; no group is judged
    before its fifth norm. Only `max_norm` bounds a sensitivity.

    Norms that are all equal give a limit 0.3 % above them, so that they can grow; norms that
    are all 0 give none, and the group stays in warm-up.

    References
    ----------
    Jain & Chlamtac, 1985, "The P2 algorithm for dynamic calculation of quantiles and histograms
    without storing observations", doi:10.1145/4372.4378.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = AutoClip(warmup_norm=None)
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.05, 20.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    >>> round(float(out.coefs["w"][0]), 4)
    1.2225
    """

    name: ClassVar[str] = "auto-clip"
    guarantee = kinds.learnt_limit
    shared_settings: ClassVar[tuple[str, ...]] = (
        "std_factor",
        "median",
        "window",
        "feedback",
        "warmup",
        "scope",
        "exclude",
        "ord",
    )

    def __init__(
        self,
        std_factor: float = 3.0,
        *,
        median: str = "p2",
        window: int | None = None,
        feedback: str = "clipped",
        warmup: int = 5,
        warmup_norm: float | None = 1.0,
        **common: Unpack[Remembering],
    ) -> None:
        self.std_factor = parameters.positive(std_factor=std_factor)
        self.median = parameters.choice(("p2", "window"), median=median)
        self.window = None if window is None else check_window(5, window)
        self.feedback = parameters.choice(("clipped", "raw", "none"), feedback=feedback)
        self.warmup = parameters.integer(0, warmup=warmup)
        self.warmup_norm = parameters.optional(parameters.positive, warmup_norm=warmup_norm)
        if self.window is not None and self.median != "window":
            raise ValueError(
                f"window goes with median='window' only, got window={window!r} "
                f"with median={median!r}"
            )
        super().__init__(**common)

    def build(self) -> Transform:
        """Return what the clipper is made of."""
        parameters.raw_if_current(self.include_current, self.feedback)
        exact = self.median == "window"
        median = Window(0.5, self.window or 256) if exact else Markers(0.5)
        return self._clipping(Auto, median=median)
