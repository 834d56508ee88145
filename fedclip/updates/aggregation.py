# SPDX-License-Identifier: Apache-2.0
"""Closes a round, for any engine: its replies are vetted, weighed, and made one.

::

    for each reply:
        fault = its weight is none, or no honest client can have sent it
    a secure sum of m clients: the nearest one of norm m * C
    exact = the mean of those without a fault, by their shares; or what resists hostile ones
            the others are zeros
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedclip.arrays import Float64
from fedclip.updates.combining import Combining
from fedclip.updates.limits import Limits
from fedclip.updates.protocol import Arrays, Reply
from fedclip.updates.weights import WITH_NOISE, Shares


class Vetted(NamedTuple):
    """What the replies of a round are.

    Attributes
    ----------
    faults
        Why each counts as zeros; "" if it does not.
    sound
        Those without a fault.
    exact
        The average; None if no reply is sound, so that it is zeros.
    """

    faults: list[str]
    sound: list[Reply]
    exact: dict[str, Float64] | None

    @property
    def void(self) -> str:
        """Why the average holds no update; "" if it holds some."""
        if self.sound:
            return ""
        why = self.faults[0] if self.faults else "nobody has replied"
        return f"none of the {len(self.faults)} replies of the round can be used: {why}"


@dataclass(frozen=True)
class Closing:
    """Limits of the replies, their weights, and how they become one."""

    limits: Limits
    shares: Shares
    combining: Combining

    def __post_init__(self) -> None:
        """Refuse weights and combining that do not go together."""
        if why := self.combining.unfit(weights=self.shares.kind != "equal"):
            raise ValueError(why)

    def beside_noise(self) -> str:
        """Return why no noise can be sized on this average; "" if it can."""
        if self.limits.exclude:
            return (
                f"noise can not be sized on what exclude={list(self.limits.exclude)} leaves "
                "without a bound"
            )
        return WITH_NOISE if self.shares.kind != "equal" else self.combining.unfit(noise=True)

    def of_sums(self, replies: Sequence[Reply]) -> str:
        """Return why these can not be combined, as they are secure sums; "" if they can."""
        return self.combining.unfit(secure=any(reply.clients > 1 for reply in replies))

    def of(
        self,
        replies: Sequence[Reply],
        like: Arrays,
        bound: float,
        warn: Callable[[str], None],
        *,
        whole: bool = True,
        clients: int | None = None,
    ) -> Vetted:
        """Return the replies and their average, in float64.

        Parameters
        ----------
        replies, like
            The replies, or their secure sum; and what has the names and shapes of the model.
        bound
            Of the `whole` update, or of each group.
        warn
            Is told which replies count as zeros.
        clients
            By how many to divide; None: by as many as replied.
        """
        unfit = self.of_sums(replies) or self.combining.too_few(len(replies))
        there, found = sum(reply.clients for reply in replies), Vetted([], [], None)
        arrays: list[Arrays] = []
        factors: list[float] = []
        for reply, share in zip(replies, self.shares.of(replies), strict=True):
            fault = unfit or share.fault or self.limits.fault(reply, like, bound, whole)
            found.faults.append(fault)
            if fault:
                who = repr(reply.sender) if reply.sender else f"one of {there} replies"
                warn(f"the update of {who} counts as zero: {fault}")
                continue
            found.sound.append(reply)
            factors.append(share.factor)
            tensors, n = reply.arrays, reply.clients
            if n > 1:
                tensors = self.limits.projected(tensors, bound, whole, n, share.mass)
            arrays.append(tensors)
        if not arrays:
            return found
        # Other shares than equal ones add up to 1 already.
        divisor = (clients or there) if self.shares.kind == "equal" else 1
        return found._replace(exact=self.combining.of(arrays, divisor, factors))
