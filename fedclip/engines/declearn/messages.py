# SPDX-License-Identifier: Apache-2.0
"""The messages of server and clients about a round update, and how declearn adds up replies.

In cleartext the updates stay side by side until the aggregator has checked each of them: an update
that was not clipped, or an invalid reply, must not reach the model. Under secure aggregation the
server only sees the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, TypeAlias

import numpy as np
from declearn.aggregator import ModelUpdates
from declearn.model.api import Vector

from fedclip.core.messages import FromServer, Message, Unsummed
from fedclip.engines.declearn.context import CLIENT_LOGGER, AnyVector
from fedclip.engines.declearn.secagg import inside
from fedclip.errors import Unchecked
from fedclip.updates.limits import peaks, zeros
from fedclip.updates.votes import BINS, COUNTS, is_one_of, is_vote

AUX_NAME = "update-clip"
"""Name under which bound and votes are exchanged."""

DECLEARN_RANGE = 1e5
"""The default `clipval` of declearn's secure aggregation."""

UNWEIGHED = (
    "a client weighs its own update under secure aggregation: a table of weights needs the "
    "server's protocol 'fedclip-websockets', and 'steps' needs max_steps without max_share"
)
"""Why a client sends zeros instead of an update."""

Counts: TypeAlias = list[int]


@dataclass
class UpdateClipBound(FromServer):
    """The message from the server to each client at the start of a round.

    Attributes
    ----------
    bound
        Largest norm of this round's update.
    adaptive
        Whether the clients should vote.
    private
        Whether noise is added.
    stop
        Why training has to end, as a sentence; empty if it goes on.
    noise
        The noise that the server expects clients to add; empty if they add none.
    schedule, round
        The entry of the server's ledger to which the round is charged; "" without noise.
    only_votes, bins
        Whether updates are shared as zeros, and how many bins votes have; an older server sends
        neither.
    """

    kinds: ClassVar = {"bound": (int, float), "adaptive": bool, "private": bool, "stop": str}

    bound: Unchecked
    adaptive: Unchecked = True
    private: Unchecked = False
    stop: Unchecked = ""
    noise: Unchecked = field(default_factory=dict)
    schedule: Unchecked = ""
    round: Unchecked = 0
    only_votes: Unchecked = False
    bins: Unchecked = BINS


@dataclass
class UpdateClipVotes(Message):
    """The vote of a client about its update, or a secure sum.

    A message always has the same fields >= 0 in a round, because a secure sum needs all of them:
    four ints, and `n_bins` if the bound follows the votes, or `n_noised` if clients add noise.

    Attributes
    ----------
    n_clients
        1 for each client.
    n_votes
        1 if the client has a valid update: it took a step, and the update is finite.
    n_within
        1 if that update was within the bound.
    n_faults
        Number of invalid replies; set on arrival, not by clients.
    n_noised
        A number for each bin with the client's noise, which replaces the other votes.
    n_bins
        The vote: 1 for one of the bins; or the counts of a sum. An older client sends none.
    """

    n_clients: int = 1
    n_votes: int = 0
    n_within: int = 0
    n_faults: int = 0
    n_noised: Counts | None = None
    n_bins: Counts | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the fields that are sent."""
        return {name: number for name, number in vars(self).items() if number is not None}

    def prepare_for_secagg(self) -> tuple[dict[str, object], None]:
        """Return all fields, for encryption."""
        content = self.to_dict().items()
        return {n: np.array(x, np.uint64) if isinstance(x, list) else x for n, x in content}, None

    @classmethod
    def from_dict(cls, data: Unchecked) -> UpdateClipVotes:
        """Return a client's votes; if they are invalid, an abstention, which is counted.

        An exception here would be in the server's loop, which would then never end.
        """
        data = data if isinstance(data, Mapping) else {}
        votes, within = (data.get(key) for key in ("n_votes", "n_within"))
        noised, bins = data.get("n_noised"), data.get("n_bins")
        lists = [numbers for numbers in (noised, bins) if numbers is not None]
        right = all(isinstance(x, list) and [*map(type, x)] == [int] * BINS for x in lists)
        right = right and is_one_of(((1,),), [data.get("n_clients")])
        # Noise takes the place of the other votes.
        if right and is_vote(votes, within, bins or ()) and (noised is None or not (votes or bins)):
            return cls(1, votes, within, n_noised=noised, n_bins=bins)
        return cls(n_faults=1)


@dataclass
class ClippedUpdates(Unsummed, ModelUpdates):
    """The update of one client, or a secure sum.

    Attributes
    ----------
    updates
        The clipped update.
    weights
        1 for each client; or the number of steps that it claims, if these are the weights.
    n_clients, n_clipped, n_zeroed
        Number of updates, and of those that were clipped or zeroed.
    """

    updates: Unchecked
    n_clients: int = 1
    n_clipped: int = 0
    n_zeroed: int = 0

    # These fields are not sent.
    fault: str = field(default="", init=False, repr=False, compare=False)
    secagg_range: float | None = field(default=None, init=False, repr=False, compare=False)
    factor: float | None = field(default=1.0, init=False, repr=False, compare=False)
    noised: bool = field(default=False, init=False, repr=False, compare=False)

    def beyond(self, limit: float) -> str:
        """Return which values are beyond a range of secure aggregation; "" for none."""
        values = peaks(self.updates.coefs, limit)
        named = ", ".join(f"{name!r} ({peak:.4g})" for name, peak in values.items())
        advice = "lower the bound, or raise clipval on the server and secagg_range with it"
        return f"values beyond secagg_range=±{limit:g} in {named}: {advice}" if values else ""

    def to_dict(self) -> dict[str, object]:
        """Return the fields, without copying them as declearn's own method does."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @classmethod
    def from_dict(cls, data: Unchecked) -> ClippedUpdates:
        """Return a client's reply, with `fault` set if it is not valid; its weight is unchecked.

        An exception here would be in the server's loop, which would then never end.
        """
        data = data if isinstance(data, Mapping) else {}
        vector, counts = data.get("updates"), [data.get(key) for key in ("n_clipped", "n_zeroed")]
        fault = ""
        if not isinstance(vector, Vector) or not isinstance(vector.coefs, dict):
            fault = f"the update is {type(vector).__name__}, not a Vector of tensors"
        elif not is_one_of(((1,),), [data.get("n_clients")]) or not is_one_of(COUNTS, counts):
            fault = "its counts are not of one client"
        result = cls(vector, data.get("weights"), 1, *((0, 0) if fault else counts))
        result.fault = fault
        return result

    @classmethod
    def stranger(cls, reply: object) -> ClippedUpdates:
        """Return the replacement for a reply of another type."""
        result = cls(None, 1)
        result.fault = f"it is of type {type(reply).__name__}"
        return result

    def prepare_for_secagg(self) -> tuple[dict[str, object], None]:
        """Return all fields, for encryption; replace an update that is out of range by zeros.

        The replacement is logged and counted. declearn would clip the values silently. An
        exception here would be outside the client's error handling, and the server would wait for
        ever. The aggregator's `secagg_range` refuses such values earlier, with an error that
        reaches the server.

        Values at the very edge of the range, whose sign declearn would change, move inside.
        """
        content = self.to_dict()
        if self.noised:
            # These are integers of the encrypter's grid, within its range.
            return content, None
        limit, factor = self.secagg_range or DECLEARN_RANGE, self.factor
        if why := UNWEIGHED if factor is None else self.beyond(limit):
            CLIENT_LOGGER.error("zeros are sent instead of the update: %s", why)
            zeroed = {"updates": zeros_like(self.updates), "n_clipped": 0, "n_zeroed": 1}
            return content | zeroed, None
        # The server cannot weigh what it does not see.
        updates = self.updates if factor == 1.0 else self.updates * factor
        content["updates"] = type(updates)(dict(inside(updates.coefs, limit)))
        return content, None


def zeros_like(vector: AnyVector) -> AnyVector:
    """Return a vector of zeros, even if this one holds NaN."""
    return type(vector)(zeros(vector.coefs))
