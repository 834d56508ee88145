# SPDX-License-Identifier: Apache-2.0
"""`adaptive-clip`: a limit that tracks a quantile of the norms."""

from __future__ import annotations

from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.common import Shared
from fedclip.modules.sharing import SharedClipper
from fedclip.privacy import kinds
from fedclip.rules.adaptive import Adaptive
from fedclip.transforms import Transform

__all__ = ["AdaptiveClip"]


class AdaptiveClip(SharedClipper):
    """Limit that moves until a given fraction of the norms is at most the limit.

    ::

        Init(quantile, rate, start_norm, every):
            limit = start_norm
        Step(grads):
            for each group of tensors:
                n = norm(group)
                group *= min(1, limit / n)
                unclipped += 1 if n <= limit else 0
                after `every` steps:
                    b = unclipped / every;  unclipped = 0
                    limit = clamp(limit * exp(-rate * (b - quantile)), min_norm, max_norm)

    This is the rule by itself, in one place and without noise; for the norms of a federation's
    updates and for privacy, see `update-clip-client` and `update-clip-server`.

    Parameters
    ----------
    quantile : float, default=0.5
        Fraction of the norms that shall be at most the limit, in (0, 1).
    rate : float, default=0.2
        Size of the steps, in (0, 10]: the limit moves by a factor ``exp(rate)`` at most.
    start_norm : float, default=0.1
        Limit at first, > 0. Low is safe: the limit doubles in some seven steps.
    every : int, default=1
        Number of steps that an update is made from, >= 1.
    min_norm : float, default=1e-6
        The limit never falls below this, > 0.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at the first
        gradient, if a pattern matches no tensor.

    Notes
    -----
    State: limit, unclipped and count since the last update, of each group; a client's rounds
    continue each other, and a run that is saved and resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, which is known before the gradient is, nor
    above `max_norm`; where no norm is over its limit the very same Vector comes back; NaN and
    infinity are not counted. A spike, however large, moves the limit by one step. The limit
    depends on past data, so that only `max_norm` bounds a sensitivity without a further
    argument.

    A norm equal to the limit counts as unclipped. Norms that are all 0 pull the limit down to
    `min_norm`, and from 1e-6 it takes 115 steps up to 0.1: give a `min_norm` where that can be.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
    clipping", arXiv:1905.03871.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = AdaptiveClip()
    >>> for _ in range(100):
    ...     out = clip.run(NumpyVector({"w": np.array([1.0])}))
    >>> 0.9 <= clip.last.limit[0] <= 1.1
    True
    """

    name: ClassVar[str] = "adaptive-clip"
    guarantee = kinds.learnt_limit
    shared_settings: ClassVar[tuple[str, ...]] = (
        "quantile",
        "rate",
        "start_norm",
        "every",
        "min_norm",
        "max_norm",
        "scope",
        "exclude",
        "ord",
    )

    def __init__(
        self,
        quantile: float = 0.5,
        *,
        rate: float = 0.2,
        start_norm: float = 0.1,
        every: int = 1,
        min_norm: float = 1e-6,
        **common: Unpack[Shared],
    ) -> None:
        self.quantile = parameters.unit_interval(quantile=quantile)
        self.rate = parameters.number("a number > 0 and <= 10", 0.0, 10.0, open_low=True, rate=rate)
        self.start_norm = parameters.positive(start_norm=start_norm)
        self.every = parameters.integer(1, every=every)
        self.min_norm = parameters.positive(min_norm=min_norm)
        super().__init__(**common)

    def build(self) -> Transform:
        """Return what the clipper is made of."""
        high = self.start_norm if self.max_norm is None else self.max_norm
        if not self.min_norm <= self.start_norm <= high:
            raise ValueError(
                f"start_norm must be between min_norm and max_norm, "
                f"got start_norm={self.start_norm!r} "
                f"with min_norm={self.min_norm!r} and max_norm={self.max_norm!r}"
            )
        return self._clipping(Adaptive)
