# SPDX-License-Identifier: Apache-2.0
"""A limit from the mean and the standard deviation of the norms seen so far.

Kumar et al., 2025, "ZClip: adaptive spike mitigation for LLM pre-training", arXiv:2504.02507.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array, Float64
from fedclip.rules import TINY, State
from fedclip.rules.history import History
from fedclip.rules.moments import Moments, one
from fedclip.rules.sharing import Counted


@dataclass(frozen=True, kw_only=True)
class ZScore(History):
    """Limits at a number of standard deviations above the running mean.

    ::

        std       = max(sqrt(variance), min_std * mean)
        z         = (x - mean) / (std + std_eps)
        threshold = mean + z_max * (std + std_eps)
        limit     = mean + z_max * std                        of a spike, action "max"
                    mean                                      action "mean"
                    factor * (mean + z_max^2/z * std)         action "reciprocal"

    Mean and variance are those of `moments`: of ZClip, drytorch or smartclip. The last one takes
    x + eps for x in the comparison.
    """

    counters = ("moments",)

    z_max: float
    min_std: float
    std_eps: float
    action: str
    factor: float
    moments: Moments

    def begin(self, groups: int, xp: Arithmetic) -> State:
        return self.moments.begin(groups, xp)

    def std(self, state: State, xp: Arithmetic) -> Array:
        """Return the standard deviation, at its floor or above."""
        return xp.maximum(xp.sqrt(state.variance), self.min_std * state.mean)

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return state.mean + self.z_max * (self.std(state, xp) + self.std_eps)

    def target(self, norms: Array, threshold: Array, state: State, xp: Arithmetic) -> Array:
        if self.action == "max" and not self.std_eps:
            return threshold
        mean, std = state.mean, self.std(state, xp)
        if self.action == "mean":
            return mean
        if self.action == "max":
            return mean + self.z_max * std
        # Of a norm that is no spike, the z-score may be 0 or negative, and is not used.
        excess = xp.maximum(norms - mean, TINY)
        return self.factor * (mean + self.z_max**2 * (std + self.std_eps) / excess * std)

    def ready(self, state: State, threshold: Array) -> Array:
        # A mean of 0 is one to judge by.
        return state.count >= self.needed

    def compared(self, norms: Array) -> Array:
        return super().compared(norms) if self.moments.adds_eps else norms

    def observe(self, observed: Array, state: State, xp: Arithmetic) -> State:
        return self.moments.update(state, one(observed), xp)

    def merge(self, state: State, counted: Counted) -> State:
        return self.moments.update(state, counted, NUMPY)

    def ceiling(self, state: State) -> Float64:
        return np.multiply(max(self.factor, 1.0), super().ceiling(state))
