# SPDX-License-Identifier: Apache-2.0
"""`auto-clip`: a limit from median and standard deviation of past norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fedclip import parameters
from fedclip.measures import Order, check_order
from fedclip.modules.sharing import SharedClipper
from fedclip.privacy import kinds
from fedclip.rules.auto import Auto
from fedclip.rules.quantiles import Markers, Window, check_window
from fedclip.scopes import Scope
from fedclip.transforms import Action, NormClipping

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
    include_current : bool, default=False
        Let the statistics see a norm before it is judged by them; needs ``feedback="raw"``.
    warmup : int, default=5
        Number of steps that only fill the statistics, >= 0; less than 5 counts as 5.
    warmup_norm : float or None, default=1.0
        Fixed limit during these steps; None for none. The statistics learn the norms as they
        are, so that a limit that is too low is forgotten with the warm-up.
    max_norm : float or None, default=None
        Fixed limit at every step, above which no adaptive limit goes.
    on_spike : {"clip", "skip"}, default="clip"
        "skip" zeroes a group that is over its limit instead of clipping it.
    scope : {"global", "tensor", "layer"} or list of patterns, default="global"
        Which tensors share a norm, and statistics.
    ord : float or {"inf", "rms", "mad", "std"}, default=2
        What is measured (see `fedclip.measures`).
    eps : float, default=0.0
        Added to the norm in the factor ``limit / (n + eps)``; 0 is exact.
    exclude : pattern, list of patterns or None, default=None
        Tensors left alone.
    on_nonfinite : {"skip", "raise", "propagate"}, default="skip"
        What becomes of a gradient with NaN or infinity (see `fedclip.modules.Clipper`).
    shared : bool, default=False
        Whether all clients of a federation have one state, and so one limit; `auto-clip-server`
        must then be in the server's optimizer. The state stays as it is during a round.
    shared_name : str or None, default=None
        Name of this pair of clipper and counterpart, where there are several of a kind.

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
        include_current: bool = False,
        warmup: int = 5,
        warmup_norm: float | None = 1.0,
        max_norm: float | None = None,
        on_spike: str = "clip",
        scope: Scope = "global",
        ord: Order = 2,
        eps: float = 0.0,
        exclude: str | Sequence[str] | None = None,
        on_nonfinite: str = "skip",
        shared: bool = False,
        shared_name: str | None = None,
    ) -> None:
        self.std_factor = parameters.positive(std_factor=std_factor)
        self.median = parameters.choice(("p2", "window"), median=median)
        self.window = None if window is None else check_window(5, window)
        self.feedback = parameters.choice(("clipped", "raw", "none"), feedback=feedback)
        self.include_current = parameters.boolean(include_current=include_current)
        self.warmup = parameters.integer(0, warmup=warmup)
        self.warmup_norm = parameters.optional(parameters.positive, warmup_norm=warmup_norm)
        self.max_norm = parameters.optional(parameters.positive, max_norm=max_norm)
        self.on_spike = parameters.choice(("clip", "skip"), on_spike=on_spike)
        self.ord = check_order(ord)
        self.eps = parameters.non_negative(eps=eps)
        if self.window is not None and self.median != "window":
            raise ValueError(
                f"window goes with median='window' only, got window={window!r} "
                f"with median={median!r}"
            )
        parameters.raw_if_current(self.include_current, self.feedback)
        rule = Auto(
            median=Markers(0.5) if self.median == "p2" else Window(0.5, self.window or 256),
            std_factor=self.std_factor,
            feedback=self.feedback,
            include_current=self.include_current,
            warmup=self.warmup,
            warmup_norm=self.warmup_norm,
            max_norm=self.max_norm,
            eps=self.eps,
        )
        super().__init__(
            NormClipping(rule, self.ord, Action(self.eps, skip=self.on_spike == "skip")),
            scope=scope,
            exclude=exclude,
            on_nonfinite=on_nonfinite,
            shared=shared,
            shared_name=shared_name,
        )
