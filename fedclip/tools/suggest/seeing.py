# SPDX-License-Identifier: Apache-2.0
"""What the norms of a run show that decides which limit is right."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedclip.report import number
from fedclip.report.words import unlike
from fedclip.tools.suggest.norms import Norms

__all__ = ["Seen", "seen"]

# A spike is so many times the usual norm of its client in the rounds around it.
_SPIKE = 10.0
# So many rounds before and after say what is usual.
_AROUND = 2
# Norms that end so many times above their lowest level have exploded.
_EXPLODED = 10.0
# A client with less than this share of the norms of the median client has few.
_SMALL = 0.1


@dataclass
class Seen:
    """What was seen in one place.

    Attributes
    ----------
    odd
        Clients whose median norm is far above the others', and how many times.
    spikes
        Rounds with norms far above the usual ones of the client, by client.
    exploding
        Clients whose norms grow and grow.
    texts
        All of it in sentences.
    """

    odd: dict[str, float] = field(default_factory=dict)
    spikes: dict[str, list[int]] = field(default_factory=dict)
    exploding: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def seen(norms: Norms) -> Seen:
    """Return what the norms of one place show."""
    result, rounds = Seen(), norms.rounds()
    medians = {n: m for n, r in norms.clients.items() if (m := r.norm_median)}
    for name, others in unlike(medians).items():
        if medians[name] > others:
            result.odd[name] = medians[name] / others
    for name in norms.clients:
        levels = [(r, c[name]) for r, c in rounds.items() if name in c and c[name].counts]
        usual = [record.norm_median or 0.0 for _, record in levels]
        for place, (round_, record) in enumerate(levels):
            around = usual[max(0, place - _AROUND) : place + _AROUND + 1]
            if (record.norm_max or 0.0) > _SPIKE * statistics.median(around) > 0:
                result.spikes.setdefault(name, []).append(round_)
        if len(usual) > 4 and statistics.median(usual[-3:]) > _EXPLODED * min(usual) > 0:
            result.exploding.append(name)
    result.texts.extend(_in_words(norms, result))
    return result


def _in_words(norms: Norms, found: Seen) -> Iterator[str]:
    what = {"step": "steps", "update": "updates", "aggregate": "averages"}[norms.place]
    for name, times in sorted(found.odd.items(), key=lambda item: -item[1]):
        yield (
            f"{name}: the median norm of its {what} is {times:.3g} times that of the others "
            f"({number(norms.clients[name].norm_median)}): look at its units and its data."
        )
    if found.exploding:
        yield f"The norms of {what} grow on and on ({_listed(found.exploding)})."
    for name, rounds in [*found.spikes.items()][:3]:
        when = f"round {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds"
        yield (f"{name}: {what} with norms of more than {_SPIKE:g} times its usual one in {when}.")
    if len(found.spikes) > 3:
        yield f"So it is on {len(found.spikes) - 3} more."
    counts = {name: sum(record.counts) for name, record in norms.clients.items()}
    least = _SMALL * statistics.median(counts.values() or [0])
    for name in (name for name, count in counts.items() if count < least):
        yield f"{name}: only {counts[name]} norms of {what}, too few to judge it by."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
