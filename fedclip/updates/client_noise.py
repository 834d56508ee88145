# SPDX-License-Identifier: Apache-2.0
r"""Noise from the sites: each client adds its share of it, so that no server sees a sum without.

::

    n        = floor(honest * m)                 this number of m clients surely adds noise
    sigma    = z_delta * C / sqrt(n)             of one client, on each value
    update  -> norm <= C - step * sqrt(d) / 2    rounding adds no more to it than that
    k        = round(update / step) + discrete Gaussian of standard deviation sigma / step
    vote    -> A * (0 or 1) + discrete Gaussian of standard deviation 2 A bits_noise / sqrt(n)
                                                 for each bin

The integers k, and those of the votes, are summed exactly. The sum over n clients tells no
more than one Gaussian mechanism of multiplier z, for update and votes together
(`fedclip.privacy.discrete` has the proof). A value that is rounded *after* continuous noise has no
such proof, once others are added to it.

A client without secure aggregation refuses to share. declearn's sends integers: step is
``2 clipval / (2^bits - 1)``, and a client shares ``(k + 1/2) * step``, which declearn's quantizer
takes to k exactly. Whether it does is checked before anything leaves, with the quantizer that
encrypts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedclip.arrays import Array, Float64, backend_of, rounded
from fedclip.core import parameters
from fedclip.core.parameters import Configured, integer, limit, non_negative, parameter, positive
from fedclip.privacy.accounting import default_bits_noise, split_noise
from fedclip.privacy.discrete import draws, honest_sites, site_variance
from fedclip.updates.aggregation import host_values
from fedclip.updates.protocol import Arrays, SentBound
from fedclip.updates.votes import BINS

# A draw beyond this number of standard deviations has a probability of 1e-31.
_TAIL = 12
# The same of the votes, whose noise has up to 256 steps.
_VOTES, _VOTES_TAIL = 128, 16
# How wide integers may be for a dtype to hold them, and half of a step; in float64, for declearn's
# quantizer to add clipval to them.
_BITS = {"float64": 48, "float32": 24}


SITES_ELSEWHERE = (
    "noise_at='clients' is for federations of declearn, whose clients have update-clip-client with "
    "the table noise; here leave the noise to the server, or to a site's policy"
)
"""Why another engine does not take noise from the clients."""


UNENCRYPTED = (
    "noise is for a secure sum, and this client has no secure aggregation: set it up, or leave "
    "the noise to the server"
)
"""Why a client without secure aggregation adds no noise."""


UNSURE_MASKS = (
    "declearn's masks are drawn by NumPy's PCG64, which is no cryptographic generator: against a "
    "server that predicts it, only the noise of each client alone is left"
)
UNSURE_PEERS = (
    "with joye-libert, no client knows how many others are in a sum, or which bound they have: a "
    "server may be left with the noise of one client alone. With masking, clients count the others"
)
"""The assumptions under which the sums are safe."""


class SiteNoise(Configured):
    """The noise that clients add, as server and clients have to agree on it.

    Parameters
    ----------
    noise_multiplier, expected_clients, max_norm
        Those of `update-clip-server`: the noise that is accounted for, the number of clients in a
        round, and the largest bound.
    honest
        Share of these clients that surely add their noise, in (0, 1]: the others may collude with
        the server, or send none.
    bits_noise
        Standard deviation of the noise on the votes, as of `update-clip-server`; 0 without votes.

    Attributes
    ----------
    sure : int
        How many clients surely add their noise.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above, or there can be no such noise.

    Examples
    --------
    >>> noise = SiteNoise(noise_multiplier=2.0, expected_clients=10, honest=0.75, max_norm=1.0)
    >>> noise.sure, round(noise.std(1.0) * 7**0.5, 3)
    (7, 2.309)
    >>> round(noise.multiplier(silent=0), 3), round(noise.multiplier(silent=3), 3)
    (2.39, 2.0)
    """

    name: ClassVar[str] = "the table noise of update-clip-client"

    noise_multiplier: float = parameter(positive)
    expected_clients: int = parameter(integer, 1)
    honest: float = parameter(parameters.fraction)
    max_norm: float = parameter(limit)
    bits_noise: float | None = parameter(non_negative, default=None)

    def __post_init__(self) -> None:
        """Size the noise of one client."""
        z, clients = self.noise_multiplier, self.expected_clients
        self.sure = honest_sites(clients, self.honest)
        bits = default_bits_noise(z, clients) if self.bits_noise is None else self.bits_noise
        self.bits_noise = bits
        self._spread = (split_noise(z, bits) if bits else z) / math.sqrt(self.sure)
        # A vote in steps of its grid, the variance of its noise, and what makes it positive.
        self._vote = max(1, math.floor(_VOTES * math.sqrt(self.sure) / bits)) if bits else 1
        self._variance = site_variance(2 * self._vote * bits, self.sure) if bits else 1
        self._offset = self._vote + _VOTES_TAIL * math.ceil(math.sqrt(self._variance))

    def multiplier(self, silent: int) -> float:
        """Return the noise multiplier of a round in which a number of clients send no noise."""
        return self.noise_multiplier * math.sqrt((self.expected_clients - silent) / self.sure)

    def std(self, bound: float) -> float:
        """Return the standard deviation of a client's noise on each value."""
        return self._spread * bound

    def refusal(self, announced: object, sent: SentBound) -> str:
        """Return why a client takes no part in a round of a server; "" if it does."""
        config = self.get_config()
        if announced != config:
            return f"this client adds noise = {config}, and the server expects {announced!r:.300}"
        if not sent.private or sent.adaptive != bool(self.bits_noise):
            return "the server asks for what this client's noise does not cover"
        if sent.bound > self.max_norm or (sent.bound < self.max_norm and not sent.adaptive):
            return f"the server's bound, {sent.bound:g}, is not within max_norm={self.max_norm:g}"
        return ""

    def void(self, clients: int, counted: bool) -> str:
        """Return why a round must not be released; "" if it may.

        Noise has come from `clients`. A sum in which clients are `counted` as clipped is
        none: with noise they do not say so.
        """
        if counted or not 0 <= clients < 2**31:
            return "masks do not cancel: clients have been sent unlike bounds, ranges or noise"
        if clients < self.sure:
            return f"noise has come from {clients} clients, and {self.sure} were to be sure of it"
        return ""

    # -- votes ----------------------------------------------------------------------------------
    def vote(self, bins: Sequence[int]) -> list[int]:
        """Return a client's vote with noise: an integer >= 0 for each bin."""
        pairs = zip(bins, draws(self._variance, BINS).tolist(), strict=True)
        return [self._in_range(self._offset + self._vote * n + x) for n, x in pairs]

    def _in_range(self, vote: int, clients: int = 1) -> int:
        return min(max(vote, 0), 2 * self._offset * clients)

    def counts(self, votes: Sequence[Sequence[int]], clients: int) -> Float64:
        """Return the counts of the bins with their noise; the only vote may be a secure sum."""
        senders = max(clients, 1) if len(votes) == 1 else 1
        # Honest clients' votes are in that range; a float does not hold any integer.
        rows = [[self._in_range(int(n), senders) for n in vote] for vote in votes]
        if len(votes) != 1:
            clients = len(votes)
        sums = [sum(column) - clients * self._offset for column in zip(*rows, strict=True)]
        return np.array(sums or [0] * BINS, np.float64) / self._vote

    # -- updates --------------------------------------------------------------------------------
    def step(self, arrays: Arrays, bound: float, encrypter: Any) -> float:
        """Return the distance of the integers in which an update like these arrays is shared.

        Of the arrays, shapes and dtypes count; the `encrypter` is declearn's.

        Raises
        ------
        ValueError
            If its values with their noise cannot be such integers, or fewer clients than expected
            are in the sum.
        """
        clipval, integers = encrypter.quantizer.val_range, encrypter.quantizer.int_range
        why = self.unfit(int(integers).bit_length(), clipval, _bits(arrays))
        if why := why or self._few(encrypter):
            raise ValueError(why)
        step: float = 2 * clipval / integers
        self._room(sum(math.prod(array.shape) for array in arrays.values()), bound, step)
        self._variance_of(bound, step)
        return step

    def _room(self, size: int, bound: float, step: float) -> float:
        """Return how long an update of `size` values may be before it is rounded, in steps."""
        room = bound / step - math.sqrt(size) / 2
        if room < bound / step / 2:
            what = f"a bound of {bound:.3g} on {size:,} values"
            text = f"steps of {step:.3g} are too coarse for {what}"
            raise ValueError(f"{text}: raise bitsize or min_norm, or lower clipval and max_norm")
        return room

    def _variance_of(self, bound: float, step: float) -> int:
        """Return the variance of a client's noise on each integer."""
        return site_variance(self.std(bound) * math.sqrt(self.sure) / step, self.sure)

    def integers(self, arrays: Arrays, bound: float, step: float) -> dict[str, NDArray[np.int64]]:
        """Return an update within the bound, with its noise, in steps."""
        hosts = {n: np.asarray(host_values(array), np.float64) for n, array in arrays.items()}
        room = self._room(sum(values.size for values in hosts.values()), bound, step)
        variance = self._variance_of(bound, step)
        norm = math.sqrt(sum(float(np.vdot(v, v)) for v in hosts.values())) / step
        # Less by what adding up squares may round off.
        factor = min(1.0, room * (1 - 1e-9) / norm if norm else 1.0) / step
        return {
            name: np.rint(values * factor).astype(np.int64)
            + draws(variance, values.size).reshape(values.shape)
            for name, values in hosts.items()
        }

    def shared(self, arrays: Arrays, bound: float, step: float, encrypter: Any) -> dict[str, Array]:
        """Return an update within the bound with its noise, as arrays of its dtypes.

        Raises
        ------
        ValueError
            If the dtypes, or the quantizer of the `encrypter`, do not hold the integers.
        """
        drawn = self.integers(arrays, bound, step)
        quantizer = encrypter.quantizer
        if not hasattr(encrypter, "biprime"):
            self._agree(encrypter, [bound, quantizer.val_range, quantizer.int_range])
        middles = {name: np.asarray((k + 0.5) * step) for name, k in drawn.items()}
        shared, zero = rounded(middles, arrays), (int(quantizer.int_range) + 1) // 2
        for name, k in drawn.items():
            values = np.asarray(host_values(shared[name]), np.float64)
            arrived = quantizer.quantize_array(values).astype(np.int64) - zero
            if (arrived != k).any():
                raise ValueError(f"{name!r} would arrive as other integers than were drawn")
        return shared

    def reach(self, bound: float) -> float:
        """Return the largest value that a client shares, but for one draw in 10^31."""
        return bound + _TAIL * self.std(bound)

    def unfit(self, bits: int, clipval: float, most: int) -> str:
        """Return why integers of `bits` bits for each client cannot hold it; "" if they can.

        The dtypes hold `most` bits.
        """
        if bits > most:
            text = f"integers of {bits} bits for each client are not summed exactly"
            return f"{text}, as the model's dtypes hold {most}: lower bitsize"
        if clipval < (reach := self.reach(self.max_norm)):
            largest = self.max_norm * clipval / reach
            text = f"updates of norm {self.max_norm:g} with a client's noise reach ±{reach:.4g}"
            advice = f"set clipval to {reach:.4g} or more, or max_norm to {largest:.4g} or less"
            return f"{text}, beyond the range ±{clipval:g}: {advice}, in all places"
        return ""

    def unsafe(self, secagg: Mapping[str, Any], arrays: Arrays) -> str:
        """Return why declearn's secure aggregation with these settings cannot sum it; "" if it can.

        The `arrays` have the dtypes of the model, as far as known.

        Raises
        ------
        ValueError
            If a dtype is too coarse.
        """
        bits = int(secagg.get("bitsize", 64))
        if secagg.get("secagg_type", "masking") == "masking":
            bits -= math.ceil(math.log2(self.expected_clients))
        return self.unfit(bits, float(secagg.get("clipval", 1e5)), _bits(arrays))

    def _agree(self, encrypter: Any, terms: Sequence[float]) -> None:
        """Draw the masks anew from themselves, and from bound, range, bits and noise.

        They cancel among clients that have had the same ones in all rounds. A server that sends
        others to some, so that the noise of these is less in the sum, gets none from then on.
        """
        agreed = json.dumps([*terms, self.get_config()], sort_keys=True)
        for generator in (*encrypter._pos_rng, *encrypter._neg_rng):
            bits = generator.bit_generator
            terms_so_far = json.dumps(bits.state, sort_keys=True) + agreed
            seed = int.from_bytes(hashlib.sha256(terms_so_far.encode()).digest(), "big")
            bits.state = type(bits)(seed).state

    def _few(self, encrypter: Any) -> str:
        """Return why a sum has not the clients, or not the bits, that noise is sized on."""
        peers = self.expected_clients
        # Of Joye-Libert's protocol, only the server knows how many keys there are.
        if not hasattr(encrypter, "biprime"):
            peers = len(encrypter._pos_rng) + len(encrypter._neg_rng) + 1
        if peers < self.expected_clients:
            expected = f"noise is for expected_clients = {self.expected_clients}"
            return f"{peers} clients are in the secure sum, and {expected}: let as many take part"
        if 2 * self._offset * peers >= getattr(encrypter, "max_int", math.inf):
            return "votes with their noise do not fit into integers of this bitsize: raise it"
        return ""


def _bits(arrays: Arrays) -> int:
    """Return how wide integers may be for the dtypes to hold them; refuse coarse dtypes."""
    dtypes = {name: backend_of(array).dtype(array) for name, array in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in _BITS:
            raise ValueError(f"{name!r} is of {dtype}, too coarse for noise that clients add")
    return min((_BITS[dtype] for dtype in dtypes.values()), default=_BITS["float64"])
