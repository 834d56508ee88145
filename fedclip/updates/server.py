# SPDX-License-Identifier: Apache-2.0
"""A server's part of update clipping, for any engine: opens rounds, and closes them.

::

    server = UpdateServer(AdaptiveBound(start_norm=1.0))
    for each round:
        sent = server.open()                            to each client
        reply = client.clip(update, sent, steps=n)      on each client, an `UpdateClient`
        closed = server.close(replies, like=model)
        the model moves by closed.average
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedclip.core.scopes import Scope, check_exclude, check_scope
from fedclip.updates.adaptive import AdaptiveBound
from fedclip.updates.aggregation import Closing
from fedclip.updates.averaging import rounded, zeros
from fedclip.updates.client_noise import SITES_ELSEWHERE
from fedclip.updates.combining import Combining
from fedclip.updates.limits import Limits, check_whole
from fedclip.updates.protocol import VOTES, Arrays, Closed, Reply, SentBound, is_one_of
from fedclip.updates.running import refuse_statistics
from fedclip.updates.schedule import Due
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
        self.closing = Closing(limits, shares or Shares(), combining or Combining())
        why = self.closing.beside_noise() if bound.budget else ""
        if bound.site is not None:
            why = SITES_ELSEWHERE
        if bound.evaluation_share:
            why = "evaluation_share is for declearn's protocol fedclip-websockets: leave it out"
        if why:
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

    def open(self, due: Due | None = None) -> SentBound:
        """Return the message to each client, which may say why the training ends.

        `due` is what a `Schedule` says of the round, if clients take turns.
        """
        self.bound.sent = replace(
            self.bound.open(due),
            scope=self.closing.limits.scope,
            steps=self.closing.shares.kind == "steps",
        )
        return self.bound.sent

    def close(self, replies: Sequence[Reply], like: Arrays) -> Closed:
        """Return the average of the replies; those that no honest client has sent are zeros.

        Parameters
        ----------
        replies
            All replies of the round; or their secure sum.
        like
            The model, or what else has the names, shapes and dtypes of its updates.

        Raises
        ------
        RuntimeError
            If no round is open, or the open one must not be released; with noise, if no reply of
            the first round can be used.
        ValueError
            If a secure sum is not to become a mean; see `check_model`.
        """
        self.check_model(like)
        bound, sent = self.bound, self.bound.sent
        if sent is None or sent.stop:
            raise RuntimeError(sent.stop if sent else "no round is open: call open() first")
        if why := self.closing.of_sums(replies):
            raise ValueError(why)
        # With noise, divide by the clients that were asked, whoever replies.
        fixed = bound.budget.clients if bound.budget else None
        vetted = self.closing.of(replies, like, sent.bound, bound.warn, clients=fixed)
        if why := bound.unheard(vetted.void):
            bound.halt(why)
            raise RuntimeError(why)
        said = [r for r in replies if r.clients > 1 or is_one_of(VOTES, (r.votes, r.within))]
        clients = sum(reply.clients for reply in replies)
        record = bound.count(sum(r.votes for r in said), sum(r.within for r in said), clients)
        record["clipped"] = sum(reply.clipped for reply in vetted.sound)
        record["zeroed"] = sum(reply.zeroed for reply in vetted.sound)
        record |= {"replies": clients, "refused": len(replies) - len(vetted.sound)}
        average = rounded(vetted.exact, like) if vetted.exact else zeros(like)
        released = dict(bound.release(average, vetted.exact))
        return Closed(released, bound.withheld, vetted.faults, record)

    def get_state(self) -> dict[str, Any]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        return self.bound.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `get_state` returned; what was spent here stays spent."""
        self.bound.set_state(state)
