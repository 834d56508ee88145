# SPDX-License-Identifier: Apache-2.0
"""What the norms of a run show that decides which limit is right; docs/suggest.md has the rules.

A client's level is the median over the rounds of the 95 % quantile of its norms in a round. Where
units are wrong a model may saturate: then the median of its gradients is as that of the others, or
0, and the level is not. One burst does not move it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from fedclip.report import number
from fedclip.tools.suggest.norms import Norms

__all__ = ["Seen", "seen"]

# A client is odd if its level is so many times that of the median client. Label skew, noise and
# few records come to 2.2 at most in steps and 1.6 in updates; other units to 13 and 3 at least.
_ODD = {"step": 4.0, "update": 3.0, "aggregate": 4.0}
# A client's largest norm so many times its 95 % quantile is a spike: heavy tails come to 36, bursts
# and broken records to 60 at least.
_SPIKE = 40.0
# Norms have exploded if the last rounds are so many times above the first one.
_EXPLODED = 10.0
# A client with less than this share of the norms of the median client has few.
_FEW = 0.1


@dataclass
class Seen:
    """What was seen in one place.

    Attributes
    ----------
    odd
        The clients with norms far above the others', and how many times.
    two
        Whether there are two clients, of which nobody can say which one is odd.
    spikes
        The clients with spikes, and the rounds in which these were.
    exploding
        The clients whose norms have grown and grown.
    texts
        What is worth telling, in sentences.
    """

    odd: dict[str, float] = field(default_factory=dict)
    two: bool = False
    spikes: dict[str, list[int]] = field(default_factory=dict)
    exploding: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def seen(norms: Norms) -> Seen:
    """Return what the norms of one place show."""
    result, levels = Seen(), norms.levels()
    usual = statistics.median_low(levels.values() or [0.0])
    odd = {n: x / usual for n, x in levels.items() if usual and x >= _ODD[norms.place] * usual}
    result.two = len(levels) == 2
    if 2 * len(odd) < len(levels) or result.two:
        result.odd = dict(sorted(odd.items(), key=lambda item: -item[1]))
    for name, records in norms.by_client().items():
        most = _SPIKE * (norms.clients[name].norm_quantile(0.95) or 0.0)
        rounds = [r.round for r in records if most and (r.norm_max or 0.0) >= most]
        if rounds:
            result.spikes[name] = rounds
        medians = [m for r in records if (m := r.norm_median)]
        if len(medians) > 3 and min(medians[-3:]) >= _EXPLODED * medians[0]:
            result.exploding.append(name)
    result.texts = [*_in_words(norms, result, {n: x / usual for n, x in levels.items() if usual})]
    return result


def _in_words(norms: Norms, found: Seen, ratios: dict[str, float]) -> Iterator[str]:
    what = {"step": "steps", "update": "updates", "aggregate": "averages"}[norms.place]
    for name, times in found.odd.items():
        yield f"{name}: the norms of its {what} are {number(times)} times the others'{_LOOK}"
    for name, ratio in ratios.items():
        if len(ratios) > 2 and ratio and ratio <= 1 / _ODD[norms.place]:
            yield (
                f"{name}: the norms of its {what} are {number(1 / ratio)} times smaller than the "
                f"others'{_LOOK}"
            )
    for name, rounds in [*found.spikes.items()][:5]:
        when = ", ".join(map(str, rounds[:5])) + ", …" * (len(rounds) > 5)
        largest = number(norms.clients[name].norm_max)
        below = number(norms.clients[name].norm_quantile(0.95))
        yield (
            f"{name}: a norm of {what} of up to {largest}, where 95 % are below {below}; in round "
            f"{when}: look at the records of that time."
        )
    if found.exploding:
        grown = ", ".join(found.exploding[:5]) + ", …" * (len(found.exploding) > 5)
        yield f"The norms of {what} grew on and on, on {grown}."
    counts = {name: sum(record.counts) for name, record in norms.clients.items()}
    least = _FEW * statistics.median(counts.values())
    for name in (name for name, count in counts.items() if count < least):
        yield f"{name}: only {counts[name]} norms of {what}, which says little of it."


_LOOK = ": look at its units and its data."
