# SPDX-License-Identifier: Apache-2.0
"""The moments of smartclip's ``ZScoreClip``: moving averages of the norms and of their squares.

::

    mean     = u at first
    variance <- d (variance + (1-d) (u - mean)^2)
    mean     <- d mean + (1-d) u

In exact arithmetic the variance is that of smartclip, the average of u^2 without the square of
that of u; but nothing cancels.
"""

from __future__ import annotations

from typing import ClassVar

from fedclip.arrays import Array
from fedclip.rules.moments import Moments


class Smartclip(Moments):
    """The estimator without a start."""

    adds_eps: ClassVar[bool] = True

    @property
    def first(self) -> int:
        return 1

    def share(self, keep: Array) -> Array:
        return keep
