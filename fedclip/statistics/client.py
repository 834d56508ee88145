# SPDX-License-Identifier: Apache-2.0
"""One state of a clipper for a whole federation: the client's part.

::

    server   broadcasts the state                                      (`SharedState`)
    client   judges each step by the state of the round's start,
             and counts the norms                                      (`SharedRule`)
    client   sends its counts, whole numbers                           (`Tally`)
    server   adds up the counts, and updates the state                 (`Learning.merge`)

A client sends nothing until it has heard from a counterpart, because declearn's server would wait
for ever after a message without a receiver. Until then, and in loops without a server, the
clipper is an ordinary one with its own statistics.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array
from fedclip.core import states
from fedclip.core.parameters import Config
from fedclip.core.plugins import other
from fedclip.core.states import Fields, Statistics
from fedclip.errors import FedclipWarning, shown
from fedclip.rules import Basis, State, state_of, updated
from fedclip.rules.sharing import Learning
from fedclip.rules.warmup import WarmupGuard
from fedclip.statistics.counts import Counts, FedclipSharedState, Tally

# Largest number of norms of a group that a client counts in a round, by default.
MAX_STEPS = 10_000


def _plain(fields: Mapping[str, object]) -> Fields:
    """Return the fields of one group as plain values."""
    return {name: np.asarray(column)[..., 0].tolist() for name, column in fields.items()}


def centre_of(fields: Fields) -> float:
    """Return the centre of the moments: the shared mean, so that nothing cancels."""
    return float(fields.get("mean", 0.0))


@dataclass(frozen=True)
class SharedRule:
    """A rule that keeps the server's state unchanged, and counts the norms of a round."""

    rule: Learning
    max_steps: int = MAX_STEPS

    @property
    def tally(self) -> Tally:
        """The counters that go with the rule."""
        return Tally(self.rule.counters)

    @property
    def basis(self) -> Basis:
        """Where the limits come from."""
        return self.rule.basis

    @property
    def guard(self) -> WarmupGuard:
        """The protection of the first norms; the rule learns from the second on."""
        guard = self.rule.guard
        return replace(guard, least=min(guard.least, 1))

    def init(self, groups: int, xp: Arithmetic) -> State:
        """Return the state before the first round, with all counts 0."""
        initial = self.guard.init(groups, xp)
        return state_of(self.rule.begin(groups, xp), initial, self.tally.init(groups, xp))

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        """Return the limits, and the state with this step counted."""
        # Until the server knows enough, each client judges by its own norms.
        judged = self.rule.judge(norms, state, xp, self.guard)
        state = updated(state, [self.guard.learn(judged.reference, state)], xp)
        return judged.limits, self.tally.add(judged, self.max_steps, state, xp)


class SharedStatistics:
    """A client's side of a shared state.

    The `transform` is the clipper's own, as long as no counterpart has been heard. The `settings`
    are the parameters that the counterpart must have as well.
    """

    def __init__(self, clipper: str, transform: Any, settings: Config) -> None:
        self.clipper = clipper
        self.settings = settings
        self.rule = SharedRule(transform.rule.shared())
        self._local = transform
        self._warned = False
        # None until the first message of the counterpart.
        self.version: int | None = None
        self.labels: tuple[str, ...] = ()

    def transform(self, version: int | None) -> Any:
        """Return the transform for a state of this version; None for the clipper's own state."""
        return self._local if version is None else replace(self._local, rule=self.rule)

    def heard(self) -> bool:
        """Whether there is a counterpart; warn once if it is missing."""
        if self.version is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.clipper} has heard from no counterpart, and uses its own statistics: add "
                f"{self.clipper + '-server'!r} to server_opt, and a shared_name if there are two",
                FedclipWarning,
                stacklevel=2,
            )
        return self.version is not None

    def receive(self, message: FedclipSharedState, statistics: Statistics) -> Statistics:
        """Return the statistics that the server has sent in a `FedclipSharedState`.

        Counts that were not sent because the server did not know the groups yet are kept, if
        they were made with the same state.

        Raises
        ------
        ValueError
            If clipper and counterpart do not match, or the message is not valid.
        """
        if lacking := message.missing():
            raise ValueError(f"{self.clipper}: {lacking}")
        self._compare(message.settings)
        rule = SharedRule(self.rule.rule, message.max_steps)
        blank = rule.rule.begin(1, NUMPY)
        try:
            received: Statistics = {
                label: {name: message.state[name][place] for name in blank._fields}
                for place, label in enumerate(message.labels)
            }
            states.check_groups(received, blank)
        except (TypeError, LookupError) as exc:
            text = f"{self.clipper} cannot read the server's state{other(message.fedclip)}"
            raise ValueError(text) from exc
        self.rule, self.labels = rule, tuple(message.labels)
        unsent = statistics if self.version == message.version else {}
        self.version = message.version
        defaults = _plain(rule.guard.init(1, NUMPY))
        result: Statistics = {k: v for k, v in unsent.items() if k not in received}
        for label, fields in received.items():
            local = statistics.get(label, {})
            complete = {name: local.get(name, value) for name, value in defaults.items()}
            result[label] = {**self._nothing(), **complete, **unsent.get(label, {}), **fields}
        return result

    def collect(self, statistics: Statistics) -> tuple[Counts, Statistics]:
        """Return the counts since the round's start, and the statistics with the counts reset."""
        tally, nothing = self.rule.tally, self._nothing()
        columns, result = [], dict(statistics)
        for label in self.labels:
            column = [0] * tally.rows
            if (fields := statistics.get(label)) is not None:
                column = tally.encode(fields, centre_of(fields))
                result[label] = {**fields, **nothing}
            columns.append(column)
        counts = np.array(columns, dtype=np.uint64).reshape(len(columns), tally.rows)
        return np.ascontiguousarray(counts.T), result

    def get_state(self) -> dict[str, object] | None:
        """Return what a checkpoint needs besides the statistics; None without a counterpart yet."""
        return None if self.version is None else {"version": self.version}

    def check_state(self, state: object) -> int | None:
        """Return the version in a result of `get_state`."""
        if state is None:
            return None
        version = state.get("version") if isinstance(state, Mapping) else None
        return states.check_count("shared", version)

    def _nothing(self) -> Fields:
        return _plain(self.rule.tally.init(1, NUMPY))

    def _compare(self, theirs: Mapping[str, object]) -> None:
        for name, value in self.settings.items():
            theirs_value = theirs.get(name)
            # An array is equal to nothing that a setting can be.
            if name not in theirs or isinstance(theirs_value, np.ndarray) or theirs_value != value:
                raise ValueError(
                    f"{self.clipper} and {self.clipper}-server must agree on {name}: the clients "
                    f"have {value!r}, the server has {shown(theirs_value)}; write the same in both"
                )
