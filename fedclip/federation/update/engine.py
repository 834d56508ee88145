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

from fedclip.federation.update.adaptive import AdaptiveBound
from fedclip.federation.update.averaging import rounded, zeros
from fedclip.federation.update.combining import Combining
from fedclip.federation.update.exchange import (
    COUNTS,
    VOTES,
    Arrays,
    Closed,
    Reply,
    SentBound,
    is_one_of,
)
from fedclip.federation.update.limits import Limits, check_whole, warn_of
from fedclip.federation.update.shares import WITH_NOISE, Shares
from fedclip.scopes import Scope, check_exclude, check_scope


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

    Examples
    --------
    >>> import numpy as np
    >>> from fedclip.federation.update.clipping import UpdateClient
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
        self.shares = shares or Shares()
        self.combining = combining or Combining()
        weights, noise = self.shares.kind != "equal", bound.budget is not None
        if why := self.combining.unfit(weights=weights, noise=noise):
            raise ValueError(why)
        if self.shares.kind != "equal" and bound.budget is not None:
            raise ValueError(WITH_NOISE)
        self.limits = Limits(check_scope(scope, limits=True), check_exclude(exclude), bound.name)
        check_whole(self.limits.scope)
        if self.limits.exclude and bound.budget is not None:
            raise ValueError(
                f"noise can not be sized on what exclude={self.limits.exclude} leaves without a "
                "bound"
            )

    def open(self) -> SentBound:
        """Return the message to each client, which may say why the training ends."""
        self.bound.sent = replace(
            self.bound.open(), scope=self.limits.scope, steps=self.shares.kind == "steps"
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
            If no round is open, or the open one must not be released.
        ValueError
            If a secure sum is not to become a mean.
        """
        sent = self.bound.sent
        if sent is None or sent.stop:
            raise RuntimeError(sent.stop if sent else "no round is open: call open() first")
        if why := self.combining.unfit(secure=any(reply.clients > 1 for reply in replies)):
            raise ValueError(why)
        shares, few = self.shares.of(replies), self.combining.too_few(len(replies))
        faults = [
            few
            or share.fault
            or self.limits.fault(_vetted(reply), like, sent.bound, mass=share.mass)
            for reply, share in zip(replies, shares, strict=True)
        ]
        clients = sum(reply.clients for reply in replies)
        warn_of(faults, [reply.sender for reply in replies], clients, self.bound.warn)
        votes = [(r.votes, r.within) for r in replies]
        said = [
            v for r, v in zip(replies, votes, strict=True) if r.clients > 1 or is_one_of(VOTES, v)
        ]
        record = self.bound.count(sum(n for n, _ in said), sum(n for _, n in said), clients)
        sound = [r for r, fault in zip(replies, faults, strict=True) if not fault]
        record["clipped"] = sum(reply.clipped for reply in sound)
        record["zeroed"] = sum(reply.zeroed for reply in sound)
        record["refused"] = len(replies) - len(sound)
        # With noise, whoever replies. Other shares than equal ones add up to 1 already.
        clients = self.bound.budget.clients if self.bound.budget else clients
        clients = clients if self.shares.kind == "equal" else 1
        factors = [share.factor for share, fault in zip(shares, faults, strict=True) if not fault]
        updates = [reply.arrays for reply in sound]
        exact = self.combining.of(updates, clients, factors) if sound else None
        average = rounded(exact, like) if exact else zeros(like)
        released = dict(self.bound.release(average, exact))
        return Closed(released, self.bound.withheld, faults, record)

    def get_state(self) -> dict[str, Any]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        return self.bound.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `get_state` returned; what was spent here stays spent."""
        self.bound.set_state(state)


def _vetted(reply: Reply) -> Reply:
    """Return a reply with a fault if its counts are not of one client."""
    counts = (reply.clipped, reply.zeroed)
    if reply.fault or reply.clients != 1 or is_one_of(COUNTS, counts):
        return reply
    return replace(reply, fault="its counts are not of one client")
