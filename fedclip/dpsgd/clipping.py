# SPDX-License-Identifier: Apache-2.0
r"""How records are clipped: norms become factors, and a bound may follow the norms.

=============================  ==========================================  =================
mode                           factor of a record, or group of its tensors  sum is divided by
=============================  ==========================================  =================
``"flat"``                     min(1, C / n)                               1
``"tensor"``, ``"layer"``,     min(1, C / √k / n) for each of k groups     1
patterns
``"automatic"``                C / (n + gamma) (Bu et al., 2022)           C
``"adaptive"``                 min(1, C / n), and C follows a quantile     C
                               of the norms (Andrew et al., 2021)
=============================  ==========================================  =================

In each mode the norm of what a record adds is at most C. A step divided by C needs no other
learning rate when C changes.

The adaptive bound learns from one bit of each record, recentred to ±1/2, so that a record moves
the sum of the bits by 1/2; that sum has separate noise, which the budget pays for
(`fedclip.privacy.accounting.split_noise`)::

    fraction = clamp(1/2 + (sum of bits + noise) / expected batch size, 0, 1)
    C       <- C exp(-rate (fraction - quantile))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedclip.core.scopes import Groups, resolve
from fedclip.dpsgd.persample.base import Float64
from fedclip.privacy.accounting import default_bits_noise, split_noise
from fedclip.privacy.noise import Normals, noised
from fedclip.rules.adaptive import geometric_update

__all__ = ["MODES", "SampleClipping"]

MODES = ("flat", "tensor", "layer", "automatic", "adaptive")


@dataclass(frozen=True)
class SampleClipping:
    """What becomes of each record, given its norms.

    Attributes
    ----------
    mode
        One of `MODES`, or a list of patterns.
    gamma
        Stability constant of "automatic", in the units of the gradient.
    quantile, rate
        Fraction of records that the adaptive bound leaves alone, and the size of its steps.
    """

    mode: str | Sequence[str] = "flat"
    gamma: float = 0.01
    quantile: float = 0.5
    rate: float = 0.2

    def groups(self, names: Sequence[str]) -> Groups:
        """Return which tensors share a norm."""
        one_norm = self.mode in ("flat", "automatic", "adaptive")
        return resolve("global" if one_norm else self.mode, None, tuple(names))

    def factors(self, norms: Float64, bound: float) -> Float64:
        """Return by what to multiply each group of each record; norms are finite.

        >>> SampleClipping().factors(np.array([[0.5], [4.0]]), 1.0).tolist()
        [[1.0], [0.25]]
        """
        if self.mode == "automatic":
            return np.asarray(bound / (norms + self.gamma))
        limit = bound / math.sqrt(norms.shape[1])
        # Where a norm is 0 the quotient is of no consequence.
        return np.asarray(np.where(norms > limit, limit / np.where(norms > 0, norms, 1.0), 1.0))

    def scale(self, bound: float) -> float:
        """Return what the noisy sum is multiplied by."""
        return 1.0 / bound if self.mode in ("automatic", "adaptive") else 1.0

    def noise_multiplier(self, noise_multiplier: float, expected: float) -> float:
        """Return the multiplier of the noise on the gradients; the bits' share is taken off."""
        if self.mode != "adaptive":
            return noise_multiplier
        bits = default_bits_noise(noise_multiplier, math.ceil(expected))
        return split_noise(noise_multiplier, bits)

    def next_bound(
        self,
        bound: float,
        norms: Float64,
        noise_multiplier: float,
        expected: float,
        normals: Normals,
    ) -> float:
        """Return the bound of the next step.

        Parameters
        ----------
        bound
            The one that these norms were compared with.
        norms
            Of all records of the batch; NaN where a record was none, which votes for neither.
        noise_multiplier, expected
            The whole budget's z, and the expected size of a batch.
        normals
            Where the noise on the votes comes from; their sum lies on its grid.
        """
        if self.mode != "adaptive":
            return bound
        seen = norms[~np.isnan(norms)]
        bits = np.where(seen <= bound, 0.5, -0.5).sum(keepdims=True)
        std = default_bits_noise(noise_multiplier, math.ceil(expected))
        noisy = float(noised(bits, std, normals)[0])
        fraction = min(max(0.5 + noisy / expected, 0.0), 1.0)
        following = geometric_update(bound, fraction, quantile=self.quantile, rate=self.rate)
        return float(min(max(following, 1e-30), 1e30))
