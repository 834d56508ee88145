# SPDX-License-Identifier: Apache-2.0
"""A server's part of update clipping, for any engine: opens rounds, and closes them.

::

    server = UpdateServer(AdaptiveBound(start_norm=1.0))
    for each round:
        sent = server.open()                            to each client
        reply = client.clip(update, sent, steps=n)      on each client, an `UpdateClient`
        for each reply that arrives:
            server.add(reply, like=model)
        closed = server.close()
        the model moves by closed.average
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedclip.arrays import Float64, rounded
from fedclip.core.scopes import Scope, check_exclude, check_scope
from fedclip.updates.aggregation import Aggregation, Combining, RunningAverage
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client_noise import SITES_ELSEWHERE
from fedclip.updates.limits import Limits, check_whole, refuse_statistics, zeros
from fedclip.updates.protocol import Arrays, Participation, Reply, RoundResult, SentBound
from fedclip.updates.votes import BINS, WITHOUT_BINS, counts_of, is_vote
from fedclip.updates.weights import Shares


class UpdateServer:
    """Opens and closes rounds of update clipping.

    Parameters
    ----------
    bound : AdaptiveBound
        The bound and the noise, with the parameters of `update-clip-server`.
    scope, exclude
        Those of the clients. With noise nothing can be excluded.
    shares : Shares
        The weights of the clients, equal ones by default; with noise there are no others. The
        engine sets each reply's `sender`, by which a table knows it.
    combining : Combining
        How updates become one: by default, as their mean. Another one takes neither noise, weights
        nor secure sums, and counts a round with 2 `n_hostile` replies or fewer as zeros.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above.

    Notes
    -----
    A client moves the average by at most its share of the bound C. Shares ``s_i`` add up to 1, and
    updates have norm at most C: without client i, whose update is then zero, the mean differs by
    ``s_i C``. The server measures each reply again, because it cannot know who clipped.

    Examples
    --------
    >>> import numpy as np
    >>> from fedclip.updates.client import UpdateClient
    >>> server, client = UpdateServer(AdaptiveBound(start_norm=1.0)), UpdateClient()
    >>> sent, model = server.open(), {"w": np.zeros(2)}
    >>> replies = [client.clip({"w": np.array(w)}, sent) for w in ([0.3, 0.4], [30.0, 40.0])]
    >>> server.close(replies, like=model).average["w"].round(6)
    array([0.45, 0.6 ])
    """

    def __init__(
        self,
        bound: AdaptiveBound,
        *,
        scope: Scope = "global",
        exclude: str | Sequence[str] | None = None,
        shares: Shares | None = None,
        combining: Combining | None = None,
    ) -> None:
        self.bound = bound
        limits = Limits(check_scope(scope, limits=True), check_exclude(exclude), bound.name)
        check_whole(limits.scope)
        self.aggregation = Aggregation(limits, shares or Shares(), combining or Combining())
        self._running: RunningAverage | None = None
        self._counts = np.zeros(BINS)
        why = self.aggregation.unfit_for_noise() if bound.budget else ""
        if bound.evaluation_share:
            why = "evaluation_share is for declearn's protocol fedclip-websockets: leave it out"
        if why := SITES_ELSEWHERE if bound.site else why:
            raise ValueError(why)

    def check_model(self, model: Arrays) -> None:
        """Refuse a model that noise must not be added to; an engine asks before the first round.

        Raises
        ------
        ValueError
            If it holds running statistics, such as those of BatchNorm.
        """
        if self.bound.budget:
            refuse_statistics(model)

    def open(self, due: Participation | None = None) -> SentBound:
        """Return the message to each client, which may say why the training ends.

        `due` is what a `Schedule` says of the round, if clients take turns.
        """
        scope, steps = self.aggregation.limits.scope, self.aggregation.shares.kind == "steps"
        self.bound.sent = replace(self.bound.open(due), scope=scope, steps=steps)
        # A round that was not closed is discarded.
        self._running = None
        return self.bound.sent

    def add(self, reply: Reply, like: Arrays) -> str:
        """Add a reply to the open round; return why it counts as zeros, or "".

        A round holds two arrays of the model's size in float64, however many clients reply;
        `aggregation.holds` says what it holds beyond that. A second reply of a sender changes
        nothing, and neither does one that cannot be read.

        Parameters
        ----------
        reply
            The reply of a client, or the secure sum of all of them.
        like
            The model, or what else has the names, shapes and dtypes of its updates.

        Raises
        ------
        RuntimeError
            If no round is open, or the open one must not be released.
        ValueError
            If a secure sum is not to become a mean; see `check_model`.
        """
        if why := self.aggregation.combining.unfit(secure=reply.clients > 1):
            raise ValueError(why)
        running = self._current(like)
        before = running.clients
        fault = running.add(reply)
        if running.clients > before:
            self._counts += self._votes(reply)
        return fault

    def close(self, replies: Iterable[Reply] = (), like: Arrays | None = None) -> RoundResult:
        """Return the average of the replies; those that no honest client has sent are zeros.

        Parameters
        ----------
        replies
            Replies, or their secure sum, that are added first.
        like
            As for `add`; needed if nothing was added before.

        Raises
        ------
        RuntimeError
            As `add`; with noise, also if no reply of the first round can be used.
        ValueError
            As `add`.
        """
        for reply in replies:
            self.add(reply, like or {})
        bound, running = self.bound, self._current(like)
        self._running = None
        exact = running.finish()
        if why := bound.unheard(running.void):
            bound.halt(why)
            raise RuntimeError(why)
        record = bound.count(self._counts, running.clients) | {
            "clipped": running.clipped,
            "zeroed": running.zeroed,
            "replies": running.clients,
            "refused": sum(map(bool, running.faults)),
        }
        average = rounded(exact, running.like) if exact else zeros(running.like)
        released = dict(bound.release(average, exact))
        return RoundResult(released, bound.withheld, running.faults, record)

    def _current(self, like: Arrays | None) -> RunningAverage:
        """Return the average so far of the round that is open."""
        bound, sent = self.bound, self.bound.sent
        if sent is None or sent.stop:
            raise RuntimeError(sent.stop if sent else "no round is open: call open() first")
        if self._running is None:
            if like is None:
                raise ValueError("nobody has replied: give close() the model as `like`")
            self.check_model(like)
            self._counts = np.zeros(BINS)
            # With noise, divide by the clients that were asked, whoever replies.
            clients = bound.budget.clients if bound.budget else None
            of = self.aggregation
            self._running = RunningAverage(of, like, sent.bound, bound.warn, clients=clients)
        return self._running

    def _votes(self, reply: Reply) -> Float64:
        """Return the counts of a reply; none if no honest client votes so."""
        if reply.clients == 1 and not is_vote(reply.votes, reply.within, reply.bins):
            return np.zeros(BINS)
        if self.bound.budget and reply.votes and not len(reply.bins):
            self.bound.warn(f"{reply.sender or 'a reply'}: {WITHOUT_BINS}")
            return np.zeros(BINS)
        return counts_of((reply.votes, reply.within, reply.bins))

    def get_state(self) -> dict[str, Any]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        return self.bound.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `get_state` returned; what was spent here stays spent."""
        self.bound.set_state(state)
