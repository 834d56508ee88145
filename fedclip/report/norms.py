# SPDX-License-Identifier: Apache-2.0
"""The norms of steps, or of updates, by client and by round, and which of them are unusual."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median, median_low

from fedclip.core.records import RoundRecord
from fedclip.errors import Problem
from fedclip.report.rows import Row, grouped, listed, number, pooled, site_of

BY_NORM = {
    *("no-op", "norm-clip", "normalize", "zscore-clip", "ema-clip", "auto-clip", "mad-clip"),
    *("percentile-norm-clip", "adaptive-clip", "growth-clip", "ema-norm-clip", "ema-normalize"),
}
"""Clippers by the norm of the gradient, which have norms to choose a limit by."""
UPDATES = ("update-norms", "update-clip-client")
"""The modules that record norms of updates; in a simulation, the first knows the clients."""
FEW = {"step": 20, "update": 9}
"""Number of norms below which nothing is chosen by them; a client has one update in a round."""
ALONE = 10.0
"""A client whose largest norms are this many times the median is an outlier by these alone."""


@dataclass(frozen=True)
class Norms:
    """The norms at one stage.

    Attributes
    ----------
    stage
        "step" or "update".
    rows
        The rounds of the first clipper by norm on each node.
    order
        The order of the norms as a parameter, if it is another than 2.
    effort
        Of updates: the number of steps that each client took in each round, if that is known.
    """

    stage: str
    rows: Sequence[Row]
    order: Mapping[str, object] = field(default_factory=dict)
    effort: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @cached_property
    def clients(self) -> dict[str, RoundRecord]:
        """All norms of each client, by its name within the federation."""
        return {name: pooled(records) for name, records in self.by_client().items()}

    @cached_property
    def whole(self) -> RoundRecord:
        """All norms of all clients."""
        return pooled(self.clients.values())

    def by_client(self) -> dict[str, list[RoundRecord]]:
        """Return the rounds of each client, in order."""
        clients = grouped(self.rows, lambda row: site_of(row.node))
        return {name: [row.record for row in rows] for name, rows in clients.items()}

    def by_round(self) -> dict[int, dict[str, RoundRecord]]:
        """Return the records of those with norms, by round, and in a round by client."""
        counted = (row for row in self.rows if row.record.counts)
        rounds = grouped(counted, lambda row: row.record.round)
        return {r: {site_of(row.node): row.record for row in rounds[r]} for r in sorted(rounds)}

    def ratios(self) -> dict[str, float]:
        """Return how many times the norms of the median client each one's are.

        In a round a client has the 95 % quantile of its norms, and its largest one. Where a model
        saturates, gradients are 0 but for a few: the largest one decides if its ratio is
        `ALONE` or more. Otherwise both have to be above 1, or below, and the ratio is the one
        nearer to 1. An update is judged both whole and divided by its steps: many steps
        make a longer update, and few one that is long for a step. A ratio is the median over the
        rounds, or that of the first round if it is larger.
        """
        if self.stage == "update":
            plain, each = (self._ratios(1.0, per_step=per_step) for per_step in (False, True))
            return {name: min(ratio, each.get(name, ratio)) for name, ratio in plain.items()}
        typical, largest = self._ratios(0.95), self._ratios(1.0)
        return {
            name: ratio if ratio >= ALONE else median((1.0, ratio, typical.get(name, 1)))
            for name, ratio in largest.items()
        }

    def _ratios(self, q: float, per_step: bool = False) -> dict[str, float]:
        by_name: dict[str, list[float]] = {}
        for round_, records in self.by_round().items():
            levels = {}
            for name, record in records.items():
                level = record.norm_max if q == 1.0 else record.norm_quantile(q)
                steps = self.effort.get((name, round_), 1) if per_step else 1
                levels[name] = (level or 0.0) / steps
            if middle := median_low(levels.values()):
                for name, level in levels.items():
                    by_name.setdefault(name, []).append(level / middle)
        return {name: max(ratios[0], median(ratios)) for name, ratios in by_name.items()}

    def middle(self, q: float, first: bool = False) -> float:
        """Return the median over the clients of each one's q-quantile; of two, the lower one.

        A few clients unlike the others do not move it, however many norms they have. In the first
        round all begin with the same weights: no client has changed the norms of others yet.
        """
        records = next(iter(self.by_round().values())) if first else self.clients
        quantiles = [record.norm_quantile(q) for record in records.values()]
        return median_low([norm for norm in quantiles if norm is not None] or [0.0])

    def until(self, round_: int) -> Norms:
        """Return the norms of the rounds up to one, or all, if those are too few."""
        earlier = dataclasses.replace(self, rows=[r for r in self.rows if r.record.round <= round_])
        return self if earlier.lacking else earlier

    def usual(self, name: str) -> float:
        """Return the largest norm of a client in the median round."""
        return median(record.norm_max or 0.0 for record in self.by_client()[name])

    def above(self, limit: float) -> dict[str, float]:
        """Return the share of each client's norms that is above a limit."""
        return {name: _above(record, limit) for name, record in self.clients.items()}

    def above_the_median(self) -> dict[str, float]:
        """Return the share of each client's norms that is above the median of their round.

        It is for updates, of which a client has one in a round.
        """
        shares_by_name: dict[str, list[float]] = {}
        for records in self.by_round().values():
            bound = median_low(norm for r in records.values() for norm in r.norms())
            for name, record in records.items():
                shares_by_name.setdefault(name, []).append(_above(record, bound))
        return {name: sum(shares) / len(shares) for name, shares in shares_by_name.items()}

    @property
    def lacking(self) -> list[Problem]:
        """Return why no norms can set a limit, and what to do; empty if they can."""
        count, few = sum(self.whole.counts), FEW[self.stage]
        if not self.rows:
            hint = ': add "no-op" to the modules of the clients' if self.stage == "step" else ""
            return [Problem(f"the norms of {self.stage}s were not measured{hint}")]
        if count < few:
            return [Problem(f"{count} norms are too few to choose a limit; {few} are needed")]
        return [] if self.middle(0.95) else [Problem("norms are 0: no limit can be chosen")]


def norms_by_stage(rows: Iterable[Row]) -> list[Norms]:
    """Return the norms of steps, and of updates, of the clients of one federation."""
    rows = [*rows]
    modules = grouped(rows, lambda row: row.name)
    updates = next((modules[name] for name in UPDATES if name in modules), [])
    steps = [row for row in rows if row.name in BY_NORM]
    # The first clipper on each node, as later ones see what it has clipped.
    first = {row.node: row.index for row in sorted(steps, key=lambda row: -row.index)}
    steps = [row for row in steps if row.index == first[row.node]]
    effort = {(site_of(row.node), row.record.round): row.record.steps or 1 for row in steps}
    return [Norms("step", steps), Norms("update", updates, effort=effort)]


def _above(record: RoundRecord, limit: float) -> float:
    norms = record.norms()
    return sum(norm > limit for norm in norms) / max(1, len(norms))


def rounded(value: float) -> float:
    """Return a number > 0 with two digits, not below the value.

    Examples
    --------
    >>> rounded(1.234), rounded(0.0301), rounded(57.0)
    (1.3, 0.031, 57.0)
    """
    digits = 1 - math.floor(math.log10(value))
    near = round(value, digits)
    return near if near >= value else round(near + 10.0**-digits, digits)


# A client is odd if its norms are this many times those of the median client. Label skew, noise and
# few or many records give at most 3.1 by steps, and 1.8 by updates for each step. Other units give
# at least 7 by steps, and wrong labels 1.8 by updates.
_ODD = {"step": 4.0, "update": 1.8}
# Without knowing the number of steps: a client with many of them comes to 4.5.
_ODD_ALONE = 5.0
# Shorter steps do no harm, and are often there where labels are unlike: this is only a note.
_SMALL = 10.0
# The largest norm of a round is a spike if it is this many times that of most rounds, and of
# those near it: noise comes to 30, bursts and broken records to 550 at least.
_SPIKE, _NEAR = 50.0, 2


@dataclass
class Unusual:
    """Unusual norms at one stage.

    Attributes
    ----------
    odd
        The clients with norms far above the median client's, and by which factor.
    two
        Whether there are two clients, of which either may be the outlier.
    spikes
        The clients with spikes, and the rounds in which these were.
    small
        The clients with steps far below the median client's, and by which factor.
    texts
        These findings, in sentences.
    """

    odd: dict[str, float] = field(default_factory=dict)
    two: bool = False
    spikes: dict[str, list[int]] = field(default_factory=dict)
    small: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


def unusual_norms(places: Iterable[Norms]) -> dict[str, Unusual]:
    """Return the unusual norms of each stage that has enough norms."""
    result: dict[str, Unusual] = {}
    for norms in (norms for norms in places if not norms.lacking):
        result[norms.stage] = _unusual_in(norms, any(stage.odd for stage in result.values()))
    return result


def outliers_of(unusual: Mapping[str, Unusual]) -> list[str]:
    """Return the outliers, by steps or updates; of two clients, none."""
    names = dict.fromkeys(name for stage in unusual.values() for name in stage.odd)
    return [] if any(stage.two for stage in unusual.values()) else [*names]


def client_findings(unusual: Mapping[str, Unusual]) -> list[str]:
    """Return one sentence on each client: the first, as its updates follow from its steps."""
    texts = (text for stage in unusual.values() for text in stage.texts)
    return [some[0] for some in grouped(texts, lambda text: text.partition(":")[0]).values()]


def _unusual_in(norms: Norms, beside: bool) -> Unusual:
    result, ratios = Unusual(), norms.ratios()
    without_effort = norms.stage == "update" and not norms.effort
    # Sites that are odd by their steps pull the model to where others have longer updates: beside
    # them, a client is odd by its updates only if it would be so by steps.
    most = _ODD_ALONE if without_effort else _ODD["step" if beside else norms.stage]
    odd = {name: times for name, times in ratios.items() if times >= most}
    result.two = len(ratios) == 2
    if 2 * len(odd) < len(ratios) or result.two:
        result.odd = dict(sorted(odd.items(), key=lambda item: -item[1]))
    rounds = norms.by_round()
    others = {r: median_low(c.norm_max or 0.0 for c in by.values()) for r, by in rounds.items()}
    for name, records in norms.by_client().items():
        largest = [record.norm_max or 0.0 for record in records]
        for place, record in enumerate(records):
            usual = max(median(largest), median(largest[max(0, place - _NEAR) : place + _NEAR + 1]))
            # Norms after a spike are no measure if it has spoilt the model.
            before = max(others.get(record.round, 0.0), median(largest[:place] or [0.0]))
            usual = min(usual, before) if place > 1 and len(ratios) > 2 and before else usual
            if usual and largest[place] >= _SPIKE * usual:
                result.spikes.setdefault(name, []).append(record.round)
    if norms.stage == "step" and not result.two:
        result.small = {n: 1 / r for n, r in ratios.items() if 0 < r <= 1 / _SMALL}
    result.texts = [*_in_words(norms, result)]
    return result


def _in_words(norms: Norms, unusual: Unusual) -> Iterator[str]:
    for name, times in unusual.odd.items():
        text = f"{name}: the norms of its {norms.stage}s are {number(times)} times those of the"
        yield f"{text} median client: check its units, labels and data."
    for name, times in unusual.small.items():
        text = f"{name}: the norms of its {norms.stage}s are {number(times)} times smaller than"
        yield f"{text} those of the median client."
    for name, rounds in [*unusual.spikes.items()][:5]:
        text = f"{name}: a norm of up to {number(norms.clients[name].norm_max)} in round"
        text += f" {listed([*map(str, rounds)])}, more than {_SPIKE:g} times the usual"
        yield f"{text}: check the records of that time."
