"""How fast the bound of updates follows, and how quiet it is: ``python -m benchmarks.bound_speed``.

The rule of `update-clip-server` alone, with the votes of clients whose norms are log-normal:

- rounds until the bound is within a factor of 1.5 of the quantile, in the mean and in 95 % of the
  plays, from 10 and from 300 times off, and after the norms have jumped by a factor of 8;
- root mean square of log(bound / quantile) in rounds 20 to 40;
- the same while the median falls from 0.9 to 0.07 over 30 rounds, as in the demo;
- the same with drop-outs, and with malicious clients that always vote for one end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from fedclip.updates.votes import BINS, EDGES, FIRST_VARIANCE, BoundRule

RULE = BoundRule(0.5, 1e-9, 1e9)
NEAR = math.log2(1.5)


class Federation(NamedTuple):
    """Clients whose update norms are log-normal, with median 1."""

    clients: int
    z: float = 0.0
    """Noise multiplier."""
    absent: float = 0.0
    """Probability with which a client does not reply."""
    malicious: float = 0.0
    """Share of the clients that vote for one end, whatever they have."""
    lie: int = 0
    """The bin that they vote for."""
    spread: float = 0.3
    """Standard deviation of the logarithms of the norms."""

    @property
    def noise(self) -> float:
        """That on each bin, as `update-clip-server` takes it by default."""
        return 2.0 * max(self.clients / 20, self.z) if self.z else 0.0

    @property
    def target(self) -> float:
        """Where half of all votes are within, in octaves."""
        within = self.malicious * (self.lie == 0)
        honest = (0.5 - within) / (1 - self.malicious)
        return self.spread * NormalDist().inv_cdf(honest) / math.log(2)

    def play(
        self,
        start: float,
        rounds: int,
        plays: int = 100,
        median: Callable[[int], float] = lambda round_: 0.0,
        variance: float = FIRST_VARIANCE,
    ) -> np.ndarray[Any, Any]:
        """Return how many octaves the bound is above its target, by round and play."""
        rng = np.random.default_rng(5)
        octaves, variances = np.full(plays, self.target + start), np.full(plays, variance)
        lying, rows = round(self.malicious * self.clients), []
        for round_ in range(rounds):
            rows.append(octaves - self.target - median(round_))
            norms = rng.normal(size=(plays, self.clients)) * self.spread / math.log(2)
            bins = np.searchsorted(EDGES, norms + median(round_) - octaves[:, None])
            bins[:, :lying] = self.lie
            there = rng.random(bins.shape) >= self.absent
            counts = np.array([((bins == k) & there).sum(axis=1) for k in range(BINS)]).T
            noisy = counts + self.noise * rng.normal(size=counts.shape)
            for i in range(plays):
                divisor = self.clients if self.z else None
                bound, variances[i], _ = RULE.after(
                    2.0 ** octaves[i], variances[i], noisy[i], divisor, self.noise
                )
                octaves[i] = math.log2(bound)
        return np.array(rows)

    def rounds(self, octaves: float, plays: int = 100) -> tuple[float, int]:
        """Return the rounds from so far off, from the slower side: mean, and 95 % of the plays."""
        ends = ((1, BINS - 1), (-1, 0))
        found = [_first(self._replace(lie=e).play(s * octaves, 30, plays)) for s, e in ends]
        return max(found)

    def after_jump(self, octaves: float = 3.0, plays: int = 100) -> tuple[float, int]:
        """Return the rounds after the norms have jumped, up or down."""
        found = []
        for jump in (octaves, -octaves):
            told = self.play(0.0, 40, plays, lambda t, to=jump: to * (t >= 20), 0.03)
            found.append(_first(told[20:]))
        return max(found)

    def steady(self, plays: int = 100) -> float:
        """Return the rms of log(bound / quantile) in rounds 20 to 40."""
        return _rms(self.play(0.0, 41, plays, variance=0.03)[20:])

    def falling(self, plays: int = 100) -> float:
        """Return the same while the median falls as in the demo."""
        fall = math.log2(0.07 / 0.9) / 29
        return _rms(self.play(0.0, 30, plays, lambda round_: fall * round_, 0.03))


def _first(off: np.ndarray[Any, Any]) -> tuple[float, int]:
    near = np.abs(off) <= NEAR
    first = np.where(near.any(axis=0), near.argmax(axis=0), len(off))
    return float(first.mean()), int(np.quantile(first, 0.95, method="higher"))


def _rms(octaves: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean(np.square(octaves)))) * math.log(2)


def main() -> None:
    """Print the table."""
    print("| clients, z | ×10 | ×300 | jump ×8 | rms | falling | drop-outs | malicious | both |")
    print("|---|---|---|---|---|---|---|---|---|")
    for clients, z in (
        *((n, 0.0) for n in (3, 5, 20, 100, 300)),
        *((n, 1.0) for n in (10, 20, 100, 300)),
    ):
        told = Federation(clients, z)
        hard = [
            told._replace(absent=absent, malicious=malicious).rounds(math.log2(10))
            for absent, malicious in ((0.3, 0.0), (0.0, 0.2), (0.3, 0.2))
        ]
        rounds = [told.rounds(math.log2(10)), told.rounds(math.log2(300)), told.after_jump()]
        cells = [f"{mean:.1f}, {most}" for mean, most in rounds]
        cells += [f"{told.steady():.3f}", f"{told.falling():.3f}"]
        cells += [f"{mean:.1f}, {most}" for mean, most in hard]
        print(f"| {clients}, {z:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
