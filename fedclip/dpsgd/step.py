# SPDX-License-Identifier: Apache-2.0
"""One private step of a plain loop: clip records, add noise, divide by what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from fedclip import parameters
from fedclip.dpsgd import persample
from fedclip.dpsgd.clipping import MODES, SampleClipping
from fedclip.dpsgd.noise import IndependentNoise, Noise
from fedclip.dpsgd.persample.base import Float64, Stack

__all__ = ["private_mean"]

_INDEPENDENT = IndependentNoise()
_STATELESS = tuple(mode for mode in MODES if mode != "adaptive")


def private_mean(
    stacks: Iterable[Stack],
    shapes: Mapping[str, tuple[int, ...]],
    max_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    mode: str | Sequence[str] = "flat",
    noise: Noise = _INDEPENDENT,
) -> dict[str, Float64]:
    """Return the noisy mean of the clipped gradients, in float64, by name.

    Parameters
    ----------
    stacks
        The gradients of the records, some at a time.
    shapes
        Of all tensors, by name.
    max_norm
        Bound C on the norm of what a record adds, > 0.
    noise_multiplier
        Standard deviation of the noise on the sum, over C; >= 0.
    expected_batch_size
        By which the sum is divided: the sampling rate times the number of records, never the
        actual size of a batch; > 0.
    mode
        What a norm is taken over: "flat", "tensor", "layer", "automatic" or a list of patterns,
        as in `fedclip.dpsgd.clipping`.
    noise
        The object that adds noise: Gaussian, from the operating system's secure generator.
    """
    bound = parameters.positive(max_norm=max_norm)
    std = parameters.non_negative(noise_multiplier=noise_multiplier) * bound
    expected = parameters.positive(expected_batch_size=expected_batch_size)
    clipping = SampleClipping(
        parameters.choice(_STATELESS, mode=mode) if isinstance(mode, str) else mode
    )
    groups = clipping.groups([*shapes])
    factors = partial(clipping.factors, bound=bound)
    sums, _ = persample.add_up(stacks, shapes, factors, groups)
    scale = clipping.scale(bound) / expected
    return {name: array * scale for name, array in noise.add(sums, std).items()}
