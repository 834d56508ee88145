# SPDX-License-Identifier: Apache-2.0
"""A limit that never moves (Pascanu, Mikolov & Bengio, 2013, arXiv:1211.5063).

::

    limit = max_norm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedclip.arrays import Arithmetic, Array
from fedclip.rules import FIXED, Basis, NoState


@dataclass(frozen=True)
class Constant:
    """The same limits at every step: one for all groups, or one for each."""

    basis: ClassVar[Basis] = FIXED

    limits: tuple[float, ...]

    def init(self, groups: int, xp: Arithmetic) -> NoState:
        return NoState()

    def threshold(self, state: NoState, xp: Arithmetic) -> Array:
        """Return the limits."""
        return xp.asarray(self.limits)

    def ready(self, state: NoState, threshold: Array) -> Array:
        """Return that all groups have one."""
        return threshold > 0

    def __call__(self, norms: Array, state: NoState, xp: Arithmetic) -> tuple[Array, NoState]:
        # One number needs no copy to a device.
        is_one = len(self.limits) == 1
        limits = self.limits[0] if is_one else xp.asarray(self.limits, like=norms)
        return limits + 0.0 * norms, state


@dataclass(frozen=True)
class Given:
    """Limits that are known in advance, as an array of the framework of the norms."""

    limits: Array

    def init(self, groups: int, xp: Arithmetic) -> NoState:
        return NoState()

    def __call__(self, norms: Array, state: NoState, xp: Arithmetic) -> tuple[Array, NoState]:
        return self.limits, state
