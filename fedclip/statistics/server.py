# SPDX-License-Identifier: Apache-2.0
"""One state of a clipper for a whole federation: the server's part, round by round."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from fedclip.arrays import NUMPY
from fedclip.core import parameters, states
from fedclip.core.records import Integers
from fedclip.errors import StateError, Unchecked
from fedclip.rules import State
from fedclip.rules.sharing import Counted, Learning
from fedclip.statistics.client import centre_of
from fedclip.statistics.counts import BUCKETS, Bounds, Round, Tally, counts_of, quantile_of


class History:
    """The sketch of the last rounds, which hold at least `size` norms.

    A round is only forgotten as a whole, once the younger rounds hold `size` norms. With one norm
    a round, these are the last `size` norms.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.total = np.zeros(BUCKETS, dtype=np.int64)
        # For each round: the buckets that were not empty, and their counts.
        self._rounds: deque[tuple[list[int], list[int]]] = deque()

    def add(self, buckets: Integers) -> None:
        """Add a round, and forget what is no longer needed."""
        self.total = self.total + buckets
        if self.size is None:
            return
        places = np.flatnonzero(buckets)
        self._rounds.append((places.tolist(), buckets[places].tolist()))
        held = int(self.total.sum())
        while held - sum(self._rounds[0][1]) >= self.size:
            places_, counts = self._rounds.popleft()
            self.total[places_] -= counts
            held -= sum(counts)

    def quantile(self, p: float) -> float:
        """Return a quantile of the norms."""
        return quantile_of(self.total, p)

    def deviation(self, p: float, centre: float) -> float:
        """Return a quantile of the distances of the norms from a centre."""
        return quantile_of(self.total, p, centre)

    def get_state(self) -> list[list[list[int]]]:
        """Return, for each round, the buckets that are not empty and their counts."""
        if self.size is not None:
            return [[list(places), list(counts)] for places, counts in self._rounds]
        places = np.flatnonzero(self.total)
        return [[places.tolist(), self.total[places].tolist()]]

    @classmethod
    def from_state(cls, size: int | None, rounds: Unchecked) -> History:
        """Return the history for a result of `get_state`."""
        history = cls(size)
        try:
            for places, counts in rounds:
                buckets = np.zeros(BUCKETS, dtype=np.int64)
                for place, count in zip(places, counts, strict=True):
                    buckets[parameters.integer(0, place=place)] = parameters.integer(1, count=count)
                history.add(buckets)
        except (TypeError, ValueError, IndexError, OverflowError) as exc:
            allowed = "for each group, a list of [buckets, counts]"
            raise StateError(f"'history' must be, {allowed}, got {rounds!r:.100}") from exc
        return history


class SharedState:
    """The state that a rule shares with all clients, and its updates.

    A client counts at most `max_steps` norms of a group in a round.

    Notes
    -----
    Counts that no norms have are excluded, so a malicious client can only choose norms. If it has
    a share p of the norms, and all its norms lie on one side of the quantile q of all, that is the
    quantile ``(q - p) / (1 - p)`` or ``q / (1 - p)`` of the others. Any other choice lies between.
    """

    def __init__(self, rule: Learning, max_steps: int) -> None:
        self.rule, self.max_steps = rule, max_steps
        self.tally = Tally(rule.counters)
        self.labels: tuple[str, ...] = ()
        self.version = 0
        self.state: State = None
        self._histories: list[History] = []

    def begin(self, labels: tuple[str, ...]) -> None:
        """Start with groups of these labels, and no norms."""
        self.labels = labels
        self.state = _columns(self.rule.begin(len(labels), NUMPY))
        self._histories = [History(self.rule.remembered) for _ in labels]

    def fields(self) -> dict[str, list[float]]:
        """Return the numbers of each field, one for each label."""
        groups = states.dump(self.state, self.labels) if self.labels else {}
        names = self.state._fields if groups else ()
        return {name: [group[name] for group in groups.values()] for name in names}

    def merge(self, messages: Sequence[tuple[Unchecked, Unchecked] | str]) -> list[str]:
        """Update the state with the clients' counts; return why each message is left out, or "".

        A message is a number of clients (a sum has several) and their counts, or why it is invalid.
        """
        shape, faults = (self.tally.rows, len(self.labels)), list[str]()
        if not self.labels:
            # In this round the clients keep their counts.
            return [""] * len(messages)
        total, members, bounds = np.zeros(shape, dtype=np.uint64), 0, self._bounds()
        for message in messages:
            n, counts, fault = 0, None, str(message)
            if not isinstance(message, str):
                n, (counts, fault) = message[0], counts_of(*message, shape)
            if counts is not None:
                fault = self.tally.fault(counts, n, self.max_steps, bounds)
            if counts is not None and not fault:
                total += counts
                members += n
            faults.append(fault)
        if members:
            self._move([self.tally.decode(total[:, group]) for group in range(len(self.labels))])
            self.version += 1
        return faults

    def _bounds(self) -> Bounds:
        with np.errstate(all="ignore"):
            highest = self.rule.ceiling(self.state)
        return np.array(self._centres()), highest

    def _centres(self) -> list[float]:
        fields = states.dump(self.state, self.labels)
        return [centre_of(fields[label]) for label in self.labels]

    def _move(self, rounds: Sequence[Round]) -> None:
        centres, rows, levels = self._centres(), [], []
        for centre, history, round_ in zip(centres, self._histories, rounds, strict=True):
            if round_.buckets is not None and round_.n:
                history.add(round_.buckets)
            levels.append(self.rule.levels(history))
            rows.append((round_.n, *round_.moments(centre), round_.unclipped))
        n, means, variances, unclipped = np.array(rows, dtype=np.float64).T
        counted = Counted(n, means, variances, np.array(levels).T, unclipped)
        with np.errstate(all="ignore"):
            after = self.rule.merge(self.state, counted)
        valid = (counted.n > 0) & np.all([np.isfinite(column) for column in after], axis=0)
        pairs = zip(self.state, after, strict=True)
        self.state = type(after)(*(np.where(valid, new, old) for old, new in pairs))

    def get_state(self) -> dict[str, object]:
        """Return the state by group, as plain numbers, strings and lists."""
        groups = {} if self.state is None else states.dump(self.state, self.labels)
        pairs = zip(self.labels, self._histories, strict=True)
        history = {label: past.get_state() for label, past in pairs if "sketch" in self.tally.parts}
        return {"groups": groups, "history": history, "version": self.version}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over what `get_state` returned.

        Raises
        ------
        StateError
            If the state is not valid. The old state then stays in place.
        """
        version = states.check_count("version", state["version"])
        groups = states.check_groups(state["groups"], self.rule.begin(1, NUMPY))
        labels, history = tuple(groups), state["history"]
        expected = set(labels) if "sketch" in self.tally.parts else set()
        if not isinstance(history, Mapping) or set(history) != expected:
            raise StateError(f"'history' must have {sorted(expected)}, got {history!r:.100}")
        size = self.rule.remembered
        histories = [History.from_state(size, history.get(label, ())) for label in labels]
        fresh = self.rule.begin(len(labels), NUMPY)
        self.state = _columns(states.load(fresh, groups, labels)) if labels else None
        self.labels, self._histories = labels, histories
        self.version = version


def _columns(state: State) -> State:
    """Return a state as one array of float64 for each field."""
    return type(state)(*(np.array(column, dtype=np.float64, ndmin=1) for column in state))
