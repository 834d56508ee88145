# SPDX-License-Identifier: Apache-2.0
"""What the norms of a run show that decides which limit is right; docs/suggest.md has the rules."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fedclip.report.place import Norms
from fedclip.report.rows import number

# A client is odd if its norms are so many times those of the median client. Label skew, noise, and
# few or many records come to 3.1 at most by steps, and 1.8 by updates for each step; other units to
# 7 at least by steps, and wrong labels to 1.8 by updates.
_ODD = {"step": 4.0, "update": 1.8}
# Without knowing the number of steps: a client with many of them comes to 4.5.
_ODD_ALONE = 5.0
# Shorter steps do no harm, and are often there where labels are unlike: this is only a note.
_SMALL = 10.0
# The largest norm of a round is a spike if it is so many times what it is in most rounds, and in
# those near it: noise comes to 30, bursts and broken records to 550 at least.
_SPIKE, _NEAR = 50.0, 2


@dataclass
class Seen:
    """What was seen in one place.

    Attributes
    ----------
    odd
        The clients with norms far above the others', and how many times.
    two
        Whether there are two clients, of which either may be the outlier.
    spikes
        The clients with spikes, and the rounds in which these were.
    small
        The clients with steps far below the others', and how many times.
    texts
        These findings, in sentences.
    """

    odd: dict[str, float] = field(default_factory=dict)
    two: bool = False
    spikes: dict[str, list[int]] = field(default_factory=dict)
    small: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


def seen(places: Iterable[Norms]) -> dict[str, Seen]:
    """Return what the norms of each place show, for those that have enough of them."""
    found: dict[str, Seen] = {}
    for norms in places:
        if not norms.lacking:
            found[norms.place] = _seen(norms, any(one.odd for one in found.values()))
    return found


def outliers_of(found: Mapping[str, Seen]) -> list[str]:
    """Return the clients with norms far above the others', by steps or updates; of two, none."""
    names = dict.fromkeys(name for one in found.values() for name in one.odd)
    return [] if any(one.two for one in found.values()) else [*names]


def told(found: Mapping[str, Seen]) -> list[str]:
    """Return one sentence on each client: the first, as its updates follow from its steps."""
    texts: dict[str, str] = {}
    for text in (text for one in found.values() for text in one.texts):
        texts.setdefault(text.partition(":")[0], text)
    return [*texts.values()]


def _seen(norms: Norms, beside: bool) -> Seen:
    result, ratios = Seen(), norms.ratios()
    alone = norms.place == "update" and not norms.effort
    # Sites that are odd by their steps pull the model to where others have longer updates: beside
    # them, a client is odd by its updates only if it would be so by steps.
    most = _ODD_ALONE if alone else _ODD["step" if beside else norms.place]
    odd = {name: times for name, times in ratios.items() if times >= most}
    result.two = len(ratios) == 2
    if 2 * len(odd) < len(ratios) or result.two:
        result.odd = dict(sorted(odd.items(), key=lambda item: -item[1]))
    others = {
        round_: statistics.median_low(record.norm_max or 0.0 for record in records.values())
        for round_, records in norms.by_round().items()
    }
    for name, records in norms.by_client().items():
        largest = [record.norm_max or 0.0 for record in records]
        for place, record in enumerate(records):
            near = statistics.median(largest[max(0, place - _NEAR) : place + _NEAR + 1])
            usual = max(near, statistics.median(largest))
            # Norms after a spike are no measure if it has spoilt the model.
            before = max(others.get(record.round, 0.0), statistics.median(largest[:place] or [0.0]))
            usual = min(usual, before) if place > 1 and len(ratios) > 2 and before else usual
            if usual and largest[place] >= _SPIKE * usual:
                result.spikes.setdefault(name, []).append(record.round)
    if norms.place == "step" and not result.two:
        result.small = {n: 1 / r for n, r in ratios.items() if 0 < r <= 1 / _SMALL}
    result.texts = [*_in_words(norms, result)]
    return result


def _in_words(norms: Norms, found: Seen) -> Iterator[str]:
    what = f"{norms.place}s"
    for name, times in found.odd.items():
        yield (
            f"{name}: the norms of its {what} are {number(times)} times the others': look at its "
            "units, its labels and its data."
        )
    for name, times in found.small.items():
        yield (
            f"{name}: the norms of its {what} are {number(times)} times smaller than the others'."
        )
    for name, rounds in [*found.spikes.items()][:5]:
        when = ", ".join(map(str, rounds[:5])) + ", …" * (len(rounds) > 5)
        yield (
            f"{name}: a norm of {what} of up to {number(norms.clients[name].norm_max)}, more than "
            f"{_SPIKE:g} times what is usual, in round {when}: look at the records of that time."
        )
