# SPDX-License-Identifier: Apache-2.0
"""ZClip's targets: what a spike is clipped to is the lower, the larger the spike.

Kumar et al., 2025, "ZClip: adaptive spike mitigation for LLM pre-training", arXiv:2504.02507.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedclip.arrays import Arithmetic, Array, Float64
from fedclip.rules import TINY, State
from fedclip.rules.zscore import ZScore


@dataclass(frozen=True, kw_only=True)
class Reciprocal(ZScore):
    """Spikes are clipped to less than the threshold.

    ::

        z         = (x - mean) / (std + std_eps)
        threshold = mean + z_max * (std + std_eps)
        limit     = mean + z_max * std                        of a spike, action "max"
                    mean                                      action "mean"
                    factor * (mean + z_max^2/z * std)         action "reciprocal"
    """

    action: str
    factor: float
    std_eps: float

    def threshold(self, state: State, xp: Arithmetic) -> Array:
        return state.mean + self.z_max * (self.std(state, xp) + self.std_eps)

    def target(self, norms: Array, threshold: Array, state: State, xp: Arithmetic) -> Array:
        mean, std = state.mean, self.std(state, xp)
        if self.action == "mean":
            return mean
        if self.action == "max":
            return mean + self.z_max * std
        # Of a norm that is no spike, the z-score may be 0 or negative, and is not used.
        excess = xp.maximum(norms - mean, TINY)
        return self.factor * (mean + self.z_max**2 * (std + self.std_eps) / excess * std)

    def ceiling(self, state: State) -> Float64:
        ceiling: Float64 = np.multiply(max(self.factor, 1.0), super().ceiling(state))
        return ceiling
