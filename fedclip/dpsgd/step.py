# SPDX-License-Identifier: Apache-2.0
"""One private step of a plain loop: clip records, add noise, divide by what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fedclip.core import parameters
from fedclip.dpsgd import persample
from fedclip.dpsgd.clipping import MODES, SampleClipping
from fedclip.dpsgd.noise import IndependentNoise, Noise
from fedclip.dpsgd.persample.base import Float64, Stack

__all__ = ["PrivateMean"]

_INDEPENDENT = IndependentNoise()
_STATELESS = tuple(mode for mode in MODES if mode != "adaptive")


@dataclass(frozen=True)
class PrivateMean:
    """Returns the noisy mean of the clipped gradients of records, in float64, by name.

    Notes
    -----
    A record moves the sum by at most C, and the divisor is fixed. If each record is in a batch with
    probability q, independently of the others, a step is a Poisson-sampled Gaussian mechanism. Its
    privacy loss distribution, rounded upwards, is composed numerically.

    Neighbours are data sets of equal size, in one of which one record counts as zero (zero-out):
    q and the number of steps are then equal. The pair of distributions is that of adding or
    removing a record (``REPLACE_SPECIAL`` in dp-accounting). A replaced record costs more. The
    clipped mean of a person's records is such a record too, with q the probability of a person.
    """

    max_norm: float
    """Bound C on the norm of what a record adds, > 0."""
    noise_multiplier: float
    """Standard deviation of the noise on the sum, over C; >= 0."""
    expected_batch_size: float
    """By which the sum is divided: the sampling rate times the number of records, never the
    actual size of a batch; > 0."""
    mode: str | Sequence[str] = "flat"
    """The tensors that share a norm: "flat", "tensor", "layer", "automatic" or a list of patterns,
    as in `fedclip.dpsgd.clipping`."""
    noise: Noise = _INDEPENDENT
    """The object that adds noise: Gaussian, from a computationally secure generator, keyed by the
    operating system."""

    def __post_init__(self) -> None:
        """Check the parameters."""
        parameters.positive(max_norm=self.max_norm)
        parameters.non_negative(noise_multiplier=self.noise_multiplier)
        parameters.positive(expected_batch_size=self.expected_batch_size)
        if isinstance(self.mode, str):
            parameters.choice(_STATELESS, mode=self.mode)

    def __call__(
        self, stacks: Iterable[Stack], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Float64]:
        """Return the mean of the gradients of the records, some at a time; `shapes` by name."""
        bound, clipping = float(self.max_norm), SampleClipping(self.mode)
        factors = partial(clipping.factors, bound=bound)
        sums, _ = persample.add_up(stacks, shapes, factors, clipping.groups([*shapes]))
        scale = clipping.scale(bound) / self.expected_batch_size
        noised = self.noise.add(sums, self.noise_multiplier * bound)
        return {name: array * scale for name, array in noised.items()}
