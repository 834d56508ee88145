# SPDX-License-Identifier: Apache-2.0
"""The counterparts of shared clippers, in the server's optimizer.

One class does it all; how a state follows from counts is said by the clipper's rule.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from declearn.model.api import Vector
from declearn.optimizer.modules import AuxVar, OptiModule

from fedclip import parameters, states
from fedclip.arrays import NUMPY
from fedclip.errors import StateError
from fedclip.federation.senders import sender_of
from fedclip.federation.statistics.client import MAX_STEPS, centre_of, tally_of
from fedclip.federation.statistics.counts import BUCKETS, Bounds, Counts, Round, quantile_of
from fedclip.federation.statistics.messages import FedclipSharedCounts, FedclipSharedState
from fedclip.privacy import kinds
from fedclip.rules.sharing import Counted, Shareable
from fedclip.scopes import resolve

__all__ = ["History", "SharedServer"]

_LOGGER = logging.getLogger("declearn.server.fedclip")

_OWN = ("max_steps", "shared_name")


class History:
    """What a sketch has counted in the last rounds, of as many norms as are asked for.

    Rounds are forgotten as a whole, and only once the younger ones hold `size` norms; with one
    norm a round that is the last `size` norms.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.total = np.zeros(BUCKETS, dtype=np.int64)
        # Which buckets were not empty in each round, and how often they were met.
        self._rounds: deque[tuple[list[int], list[int]]] = deque()

    def add(self, buckets: np.ndarray[Any, np.dtype[np.int64]]) -> None:
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

    def get_state(self) -> list[list[list[int]]]:
        """Return, for each round, the buckets that are not empty and their counts."""
        if self.size is not None:
            return [[list(places), list(counts)] for places, counts in self._rounds]
        places = np.flatnonzero(self.total)
        return [[places.tolist(), self.total[places].tolist()]]

    @classmethod
    def from_state(cls, size: int | None, rounds: Any) -> History:
        """Return the history that `get_state` has described."""
        history = cls(size)
        try:
            for places, counts in rounds:
                if len(places) != len(counts):
                    raise ValueError
                for place, count in zip(places, counts, strict=True):
                    if parameters.integer(0, place=place) >= BUCKETS or count < 1:
                        raise ValueError
                buckets = np.zeros(BUCKETS, dtype=np.int64)
                buckets[places] = [parameters.integer(1, count=count) for count in counts]
                history.add(buckets)
        except (TypeError, ValueError, OverflowError) as exc:
            raise StateError(
                "'history' must be, for each group, a list of [buckets, counts], got "
                f"{rounds!r:.100}"
            ) from exc
        return history


# What all counterparts say of themselves, round about what each of them says.
_DOC = """{summary}

It belongs in the server's optimizer, whose steps it leaves alone.

Parameters
----------
max_steps : int, default=10000
    How many norms of a group one client counts in a round at most; what a client claims
    beyond that is left out.
shared_name : str or None, default=None
    The clipper's `shared_name`, if it has one.
**settings
    The parameters of `{clipper}` that its statistics depend on, by the same
    names and with the same defaults. They must be the same on both sides.

Notes
-----
{notes}

State: what is sent to clients, and what has been counted; a server that is restarted from
its checkpoint goes on as if uninterrupted. What is no sound count is left out, and logged.
"""


def _told(fault: str, senders: Sequence[str]) -> str:
    names = ", ".join([sender for sender in senders if sender][:5])
    return f"{fault} ({len(senders)}×{': ' if names else ''}{names})"


class SharedServer(OptiModule, register=False):  # type: ignore[type-arg]
    """Counterpart of a shared clipper: merges what clients count, and sends the state back.

    ::

        Round start:
            send the state, the same to every client
        Replies:
            leave out what can not be counts, and say so
            counts = sum of the rest
            state  = rule.merge(state, counts)
        Step:
            nothing: the server's gradients pass as they are

    Parameters
    ----------
    max_steps : int, default=10000
        How many norms of a group one client counts in a round at most. What a client claims
        beyond that is refused, so that the number of steps that a client really takes bounds
        the weight of one that lies.
    shared_name : str or None, default=None
        The name that the clipper has been given, if any.
    **settings
        The parameters of the clipper that its state depends on, by its own names and with its
        own defaults. Both sides must have the same.
    """

    clipper: ClassVar[Any]
    """The clipper that this is the counterpart of, a `fedclip.modules.sharing.SharedClipper`."""
    guarantee = kinds.unchanged
    auxvar_cls = FedclipSharedState

    def __init_subclass__(cls, register: bool = True, **kwargs: Any) -> None:
        """Give the class the signature and the docstring that it has, for all who look at it."""
        super().__init_subclass__(register=register, **kwargs)
        summary, _, notes = (inspect.getdoc(cls) or "").partition("\n\n")
        cls.__doc__ = _DOC.format(summary=summary, clipper=cls.clipper.name, notes=notes)
        theirs = inspect.signature(cls.clipper).parameters
        own = inspect.signature(SharedServer.__init__).parameters
        chosen = [theirs[name] for name in cls.clipper.shared_settings] + [own[n] for n in _OWN]
        keyword = inspect.Parameter.KEYWORD_ONLY
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=keyword) for parameter in chosen]
        )

    def __init__(
        self, *, max_steps: int = MAX_STEPS, shared_name: str | None = None, **settings: Any
    ) -> None:
        parameters.refuse_unknown(type(self), settings)
        self.max_steps = parameters.integer(1, max_steps=max_steps)
        if self.max_steps > 2**31:
            raise ValueError(f"max_steps must be at most 2^31, got {max_steps!r}")
        # Checks the parameters, and knows the rule that follows from them.
        clipper = self.clipper(shared=True, shared_name=shared_name, **settings)
        self.shared_name = clipper.shared_name
        self.aux_name = clipper.aux_name  # type: ignore[misc]
        self.settings: dict[str, Any] = clipper.sharing.settings
        self._rule: Shareable = clipper.sharing.rule.rule
        self._tally = tally_of(self._rule.counters)
        self._labels: tuple[str, ...] = ()
        self._state: Any = None
        self._histories: list[History] = []
        self._version = 0
        self._refused = 0
        if self.settings["scope"] == "global":
            self._set_labels(("all",))

    # -- declearn's interface -----------------------------------------------------------------
    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        """Return the gradients; the first ones say which groups there are."""
        if not self._labels:
            # The update has the names that the clients' gradients have, and no client is asked.
            try:
                groups = resolve(
                    self.settings["scope"], self.settings["exclude"], list(gradients.coefs)
                )
                self._set_labels(tuple(sorted(groups.labels)))
            except ValueError as exc:
                # The clients say the same, and declearn's server survives that.
                _LOGGER.error("%s: %s", self.name, exc)
        return gradients

    def collect_aux_var(self) -> FedclipSharedState:
        """Return the state, for all clients; before any of them has ever sent a thing."""
        fields = {} if self._state is None else self._state._asdict()
        return FedclipSharedState(
            version=self._version,
            settings=self.settings,
            max_steps=self.max_steps,
            labels=list(self._labels),
            state={
                name: [int(x) if name == "count" else float(x) for x in column]
                for name, column in fields.items()
            },
        )

    def process_aux_var(self, aux_var: AuxVar) -> None:
        """Merge what clients have counted; what is not sound is left out, counted and logged."""
        parts = getattr(aux_var, "parts", None) or [aux_var]
        total, members = self._add_up(parts)
        if total is None:
            return
        rounds = [self._tally.decode(total[:, group]) for group in range(len(self._labels))]
        self._merge(rounds)
        self._version += 1
        _LOGGER.debug(
            "%s: %d norms of %d clients", self.name, max(round_.n for round_ in rounds), members
        )

    def get_config(self) -> dict[str, Any]:
        """Return the parameters, as they would be written in a TOML file."""
        return {**self.settings, **{name: getattr(self, name) for name in _OWN}}

    def get_state(self) -> dict[str, Any]:
        """Return the shared state by group, as plain numbers, strings and lists."""
        groups = {} if self._state is None else states.dump(self._state, self._labels)
        pairs = zip(self._labels, self._histories, strict=True)
        history = {label: history.get_state() for label, history in pairs}
        return {
            "clipper": self.name,
            "groups": groups,
            "history": history if self._tally.has_sketch else {},
            "version": self._version,
            "refused": self._refused,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `get_state` of the same module returned.

        Raises
        ------
        StateError
            If anything is missing, of a wrong type, or another module's. The state is then what
            it was before.
        """
        keys = ("clipper", "groups", "history", "version", "refused")
        if not isinstance(state, Mapping) or any(key not in state for key in keys):
            raise StateError(f"a state of {self.name} must have {', '.join(keys)}")
        if state["clipper"] != self.name:
            raise StateError(f"the state is of {state['clipper']!r}, and this is {self.name!r}")
        for key in keys[3:]:
            if isinstance(state[key], bool) or not isinstance(state[key], int) or state[key] < 0:
                raise StateError(f"{key!r} must be an int >= 0, got {state[key]!r}")
        groups = states.check_groups(state["groups"], self._rule.init(1, NUMPY))
        labels, history = tuple(groups), state["history"]
        wanted = set(labels) if self._tally.has_sketch else set()
        if not isinstance(history, Mapping) or set(history) != wanted:
            raise StateError(f"'history' must have {sorted(wanted)}, got {history!r:.100}")
        size = self._rule.sketched[1]
        histories = [History.from_state(size, history.get(label, ())) for label in labels]
        fresh = self._rule.init(len(labels), NUMPY)
        loaded = states.load(fresh, groups, labels) if labels else None
        self._labels, self._histories = labels, histories
        self._state = _columns(loaded) if labels else None
        self._version, self._refused = state["version"], state["refused"]

    @property
    def refused(self) -> int:
        """How many messages of clients have been left out so far."""
        return self._refused

    # -- how it is done -----------------------------------------------------------------------
    def _set_labels(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._state = _columns(self._rule.init(len(labels), NUMPY))
        size = self._rule.sketched[1]
        self._histories = [History(size) for _ in labels]

    def _bounds(self) -> Bounds:
        with np.errstate(all="ignore"):
            highest = self._rule.ceiling(self._state)
        return Bounds.of(np.array(self._centres()), highest)

    def _centres(self) -> list[float]:
        fields = states.dump(self._state, self._labels)
        return [centre_of(fields[label]) for label in self._labels]

    def _add_up(self, parts: Sequence[Any]) -> tuple[Counts | None, int]:
        """Return the sum of the sound messages, None if there is none, and of how many clients."""
        shape = (self._tally.rows, len(self._labels))
        if not self._labels:
            # A round in which clients keep what they have counted.
            return None, 0
        bounds = self._bounds()
        total, members = np.zeros(shape, dtype=np.uint64), 0
        faults: dict[str, list[str]] = {}
        for position, part in enumerate(parts):
            fault = f"a {type(part).__name__}"
            if isinstance(part, FedclipSharedCounts):
                counts, fault = part.check(shape)
                if counts is not None:
                    fault = self._tally.fault(counts, part.members, self.max_steps, bounds)
                    if not fault:
                        total += counts
                        members += part.members
            if fault:
                sender = sender_of(self.aux_name, position, len(parts))
                faults.setdefault(fault, []).append(repr(sender) if sender else "")
        if faults:
            refused = sum(map(len, faults.values()))
            self._refused += refused
            # Of many clients, some names and reasons.
            found = [_told(fault, senders) for fault, senders in list(faults.items())[:5]]
            _LOGGER.warning(
                "%s: left out what %d of %d messages say, round %d: %s (%d so far)",
                self.name,
                refused,
                len(parts),
                self._version + 1,
                "; ".join(found),
                self._refused,
            )
        return (total if members else None), members

    def _merge(self, rounds: Sequence[Round]) -> None:
        quantile, _ = self._rule.sketched
        centres, rows = self._centres(), []
        for centre, history, round_ in zip(centres, self._histories, rounds, strict=True):
            level = 0.0
            if round_.buckets is not None and round_.n:
                history.add(round_.buckets)
                level = quantile_of(history.total, quantile)
            mean, variance = round_.moments(centre)
            rows.append((round_.n, mean, variance, level, round_.unclipped))
        counted = Counted(*np.array(rows, dtype=np.float64).T)
        with np.errstate(all="ignore"):
            after = self._rule.merge(self._state, counted)
        sound = (counted.n > 0) & np.all([np.isfinite(column) for column in after], axis=0)
        self._state = type(after)(
            *(np.where(sound, new, old) for old, new in zip(self._state, after, strict=True))
        )


def _columns(state: Any) -> Any:
    """Return a state as one array of float64 for each field."""
    return type(state)(*(np.array(column, dtype=np.float64, ndmin=1) for column in state))
