# SPDX-License-Identifier: Apache-2.0
"""The noise on sums of clipped gradients: an object, so that the noise of steps may correlate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedclip.privacy.noise import Normals, noised, secure_normals

__all__ = ["IndependentNoise", "Noise", "Sums"]

Sums = Mapping[str, NDArray[np.float64]]
"""Float64 arrays by name."""


class Noise(Protocol):
    """What adds noise to each step's sum, in the order of the steps."""

    def add(self, sums: Sums, std: float) -> dict[str, NDArray[np.float64]]:
        """Return the sums of one step, with noise of this standard deviation."""


class IndependentNoise:
    """Gaussian noise, new for each element and step, on the grid of `fedclip.privacy.noise`.

    Parameters
    ----------
    normals
        The generator: computationally secure, keyed by the operating system, unless in a test.
    """

    def __init__(self, normals: Normals = secure_normals) -> None:
        self._normals = normals

    def add(self, sums: Sums, std: float) -> dict[str, NDArray[np.float64]]:
        """Return the sums of one step, with noise of this standard deviation."""
        return {name: noised(array, std, self._normals) for name, array in sums.items()}
