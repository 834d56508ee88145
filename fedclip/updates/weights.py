# SPDX-License-Identifier: Apache-2.0
"""The share that each client has in the average of a round, from its weight.

::

    weight of a client = 1; or its steps, at most max_steps; or its number in a public table
    share = weight / sum of the weights of those that replied
    while a share is above max_share:
        share = max_share, and what is left of 1 is spread over the others in proportion
    average = sum of share * clipped update

Updates are clipped before they are weighed, so a client moves the average by its share of the
bound at most. In a secure sum a client multiplies its own update by its factor, its weight relative
to the largest one there may be, and the server divides by the sum of the factors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from fedclip.core import parameters
from fedclip.updates.protocol import Reply

Weights = Literal["equal", "steps"] | Mapping[str, float]

# No count of steps is larger, and each is a float64 exactly.
_MOST_STEPS = 2**53

WITH_NOISE = (
    "weights do not go with noise, which is sized on the largest share: leave weights out of "
    "clipped-averaging"
)


def shares_of(weights: Sequence[float], max_share: float | None = None) -> list[float]:
    """Return shares in proportion to weights >= 0, none above `max_share`.

    They add up to 1, or to less if too few clients have a weight, or to 0 if none has.

    Examples
    --------
    >>> shares_of([1, 1, 2, 6], 0.4)
    [0.15, 0.15, 0.3, 0.4]
    >>> shares_of([6, 1], 0.4)
    [0.4, 0.4]
    """
    most, top = max_share or 1.0, max(weights, default=0.0)
    open_ = {i: weight / top for i, weight in enumerate(weights) if weight > 0}
    shares, remaining = [0.0] * len(weights), 1.0
    while open_:
        total = sum(open_.values())
        over = [i for i, weight in open_.items() if weight * remaining / total > most]
        for i in over or open_:
            shares[i] = most if over else open_[i] * remaining / total
        if not over:
            break
        open_ = {i: weight for i, weight in open_.items() if i not in set(over)}
        remaining = max(0.0, remaining - most * len(over))
    return shares


class Share(NamedTuple):
    """The part of a reply in the average.

    Attributes
    ----------
    factor
        The number that multiplies the update.
    mass
        How many bounds it may reach: the sum of the factors in a secure sum.
    fault
        Why it cannot be weighed.
    """

    factor: float
    mass: float
    fault: str = ""


class Shares:
    """Weights of clients; the parameters are those of `clipped-averaging`."""

    def __init__(
        self,
        weights: Weights = "equal",
        max_share: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.table: dict[str, float] = {}
        if not isinstance(weights, Mapping):
            parameters.choice(("equal", "steps"), weights=weights)
        elif not weights:
            raise ValueError("weights must name at least one client, got an empty table")
        else:
            for name, weight in weights.items():
                checked = parameters.positive(**{f"weights[{name!r}]": weight})
                self.table[parameters.name(weights=name)] = checked
        self.kind = "table" if self.table else str(weights)
        self.max_share = parameters.optional(parameters.up_to, 1.0, max_share=max_share)
        self.max_steps = parameters.optional(parameters.integer, 1, max_steps=max_steps)
        if self.max_steps is not None and self.kind != "steps":
            raise ValueError(f"max_steps goes with weights='steps', got {max_steps!r}")
        if self.max_share is not None and self.kind == "equal":
            raise ValueError(f"max_share goes with weights, got {max_share!r} and equal ones")
        size = len(self.table)
        if self.table and size * (self.max_share or 1.0) < 1 - 1e-9:
            raise ValueError(f"max_share must be at least 1 / {size}, got {max_share!r}")
        # Capped over the whole table, and relative to the largest: what a client knows beforehand.
        shares = shares_of(list(self.table.values()), self.max_share)
        self.factors = {n: part / max(shares) for n, part in zip(self.table, shares, strict=True)}

    def unfit(self, secure: bool) -> str:
        """Return why these weights cannot be those of a secure sum; "" if they can."""
        if not secure or self.kind != "steps" or (self.max_steps and self.max_share is None):
            return ""
        text = "under secure aggregation, weights = 'steps' needs max_steps, and takes no max_share"
        return f"{text}, as nobody sees the steps of other clients"

    def strangers(self, names: Collection[str]) -> str:
        """Return that clients are not in the table; "" if all are."""
        missing = sorted(set(names) - self.table.keys()) if self.table else []
        named = ", ".join(map(repr, missing[:5]))
        text = f"weights of clipped-averaging does not name {named}: give each client a weight"
        return text if missing else ""

    def factor(self, name: str | None, steps: int) -> float | None:
        """Return by what a client multiplies its update in a secure sum; None if that is unknown.

        `name` is the one that the server knows it by.
        """
        if self.kind == "equal":
            return 1.0
        if self.table:
            return self.factors.get(name or "")
        return None if self.unfit(True) else self.counted(steps) / (self.max_steps or 1)

    def of(self, replies: Sequence[Reply]) -> list[Share]:
        """Return what each reply is in the average; a table knows clients by `Reply.sender`."""
        if self.kind == "equal":
            # Their sum is divided by the number of clients.
            return [Share(1.0, reply.clients) for reply in replies]
        is_only = len(replies) == 1
        parts = [self.weight_of(reply, is_only or reply.clients == 1) for reply in replies]
        if is_only and replies[0].clients > 1:
            return parts
        pairs = zip(replies, parts, strict=True)
        weights = [0.0 if p.fault else self.table.get(r.sender, p.factor) for r, p in pairs]
        shares = shares_of(weights, self.max_share)
        return [p._replace(factor=share) for p, share in zip(parts, shares, strict=True)]

    def weight_of(self, reply: Reply, alone: bool = True) -> Share:
        """Return what a reply is multiplied by before the sum is divided by that of the weights.

        The weights are not equal.
        `alone`: no secure sum is next to other replies. Without `max_share` that is what `of` says.
        """
        if reply.clients > 1 and alone:
            return self._of_sum(reply)
        fault = "" if alone else "it is a secure sum together with other replies"
        if self.table and reply.sender not in self.table:
            fault = fault or "weights does not name its sender"
        elif not (self.table or (type(reply.steps) is int and reply.steps >= 0)):
            fault = fault or "its number of steps is not valid"
        if fault:
            return Share(0.0, 0.0, fault)
        return Share(self.factors.get(reply.sender, self.counted(reply.steps or 0)), 1.0)

    def _of_sum(self, reply: Reply) -> Share:
        """Return the part of a secure sum: the average is the sum over the sum of the factors."""
        if fault := self.unfit(True):
            return Share(0.0, 0.0, fault)
        if self.table:
            names = reply.senders or (self.table if reply.clients == len(self.table) else ())
            if len(set(names)) != reply.clients or not self.table.keys() >= set(names):
                return Share(0.0, 0.0, "weights does not name the clients of the secure sum")
            mass = sum(self.factors[name] for name in names)
            # If some are missing, nobody's share grows beyond the largest: the step is shorter.
            least = max(self.factors[name] for name in names) / (self.max_share or 1.0)
            return Share(1.0 / max(mass, least), mass)
        steps, most = reply.steps, reply.clients * (self.max_steps or 1)
        if type(steps) is not int or not 0 <= steps <= most:
            return Share(0.0, 0.0, f"it claims {steps!s:.30} steps, and there are {most} at most")
        mass = steps / (self.max_steps or 1)
        return Share(1.0 / mass if mass else 0.0, mass)

    def counted(self, steps: int) -> int:
        """Return how many steps count; a secure sum adds these up."""
        return int(min(steps, self.max_steps or _MOST_STEPS))
