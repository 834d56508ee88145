# SPDX-License-Identifier: Apache-2.0
"""ZClip: population moments that learn the square of the distance from the new mean.

Kumar et al., 2025, "ZClip: adaptive spike mitigation for LLM pre-training", arXiv:2504.02507.

::

    mean, variance = those of the first `warmup` norms; then for each u:
    mean     <- d mean + (1-d) u
    variance <- d variance + (1-d) (u - mean)^2                 with the new mean

The distance from the new mean is d times that from the old one. For the N norms of a round, their
mean m and population variance V: ``d^N`` for d, and ``V + (m - mean)^2`` for the square.
"""

from __future__ import annotations

from fedclip.arrays import Array
from fedclip.rules.moments import Moments


class ZClip(Moments):
    """The estimator of the paper's code."""

    def share(self, keep: Array) -> Array:
        return keep * keep
