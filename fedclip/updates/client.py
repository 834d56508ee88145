# SPDX-License-Identifier: Apache-2.0
"""A client's part of update clipping: clips the update of a round, and votes on the bound.

::

    if any value is not finite, or norm(update) is far out of range:
        update = 0
    for each group of tensors:
        group *= min(1, limit / norm(group))
    vote for the bin of log2(norm / bound); with groups, of the largest such ratio
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import truediv
from typing import ClassVar, NamedTuple

from fedclip.arrays import on_host
from fedclip.core import parameters
from fedclip.core.measures import Order, check_order
from fedclip.core.parameters import Configured, parameter
from fedclip.core.scopes import Scope, check_exclude, check_scope
from fedclip.errors import FedclipWarning, NonFiniteError
from fedclip.rules import NoState
from fedclip.transforms import Gradient, NotFiniteError, take_step
from fedclip.updates.limits import Limits, norm_of, refuse_statistics, zeros
from fedclip.updates.protocol import Arrays, Reply, SentBound
from fedclip.updates.votes import BINS, one_hot


class Outcome(NamedTuple):
    """What became of an update; all but the arrays stays on the client.

    Attributes
    ----------
    norm
        The smallest bound that would not clip the update; None without a valid update.
    times
        That norm as a multiple of the bound.
    clipped
        Whether the update was above the bound.
    zeroed
        Why zeros take its place, if they do.
    """

    arrays: Arrays
    norm: float | None = None
    clipped: bool = False
    zeroed: str = ""
    times: float = 0.0

    def reply(self, sent: SentBound) -> Reply:
        """Return what the client sends to the server: no number that the server does not need."""
        votes = sent.adaptive and self.norm is not None
        counted, zeroed = not sent.private, bool(self.zeroed)
        bins = one_hot(self.times, self.clipped) if votes else (0,) * BINS
        return Reply(
            zeros(self.arrays) if sent.only_votes else self.arrays,
            votes=int(votes),
            within=int(votes and not self.clipped),
            clipped=int(counted and self.clipped and not zeroed),
            zeroed=int(counted and zeroed),
            bins=bins if sent.adaptive and sent.bins == BINS else (),
        )


class UpdateClient(Configured):
    """Clips the updates of one client; the parameters are those of `clipped-averaging`.

    Examples
    --------
    >>> import numpy as np
    >>> reply = UpdateClient().clip({"w": np.array([3.0, 4.0])}, SentBound(1.0), steps=5)
    >>> reply.arrays["w"].round(6), reply.votes, reply.within
    (array([0.6, 0.8]), 1, 0)
    """

    name: ClassVar[str] = "update clipping"
    logger: ClassVar[logging.Logger] = logging.getLogger("fedclip.client")

    scope: Scope = parameter(partial(check_scope, limits=True), default="global")
    exclude: str | Sequence[str] | None = parameter(check_exclude, default=None)
    zeroing_norm: float | None = parameter(parameters.positive, default=None)
    zeroing_factor: float | None = parameter(
        partial(parameters.number, "a finite number > 1", 1.0, open_low=True), default=None
    )
    zeroing_ord: Order = parameter(lambda zeroing_ord: check_order(zeroing_ord), default="inf")
    on_nonfinite: str = parameter(parameters.choice, ("skip", "raise"), default="skip")

    def __post_init__(self) -> None:
        """Resolve the limits."""
        self.limits = Limits(self.scope, self.exclude, self.name)

    def clip(self, update: Arrays, sent: SentBound, *, steps: int | None = None) -> Reply:
        """Return the reply to the server.

        Parameters
        ----------
        update
            The model before the round minus the model after it, or the other way round.
        sent
            The server's message.
        steps
            Number of steps of the round. Without any, the client does not vote, as zeros say
            nothing about the norm of an update. None: it abstains if the update is all zeros.

        Raises
        ------
        RuntimeError
            If the server has decided to stop.
        ValueError
            If `sent` has no valid bound, or its scope differs; with noise, if the update is also of
            running statistics.
        NonFiniteError
            If the update is not finite and ``on_nonfinite="raise"``; the message names the tensors.
        """
        if sent.stop:
            raise RuntimeError(f"the server stops the training: {sent.stop}")
        if sent.scope != self.scope:
            where = f"scope={sent.scope!r}, and this client has {self.scope!r}"
            raise ValueError(f"the server's bound is for {where}: write the same in both")
        if sent.private:
            refuse_statistics(update)
        reply = self.outcome(update, parameters.positive(bound=sent.bound), steps).reply(sent)
        return replace(reply, steps=steps) if sent.steps else reply

    def outcome(
        self, update: Arrays, bound: float, steps: int | None, whole: bool = True
    ) -> Outcome:
        """Return the clipped update, or zeros; `whole`: the bound is for all groups together."""
        groups = self.limits.groups(update)
        limits = self.limits.of(groups, bound, whole)
        transform, gradient = self.limits.prepared(update, groups, limits)
        try:
            step = take_step(transform, gradient, NoState(), "raise")
        except NotFiniteError:
            return Outcome(zeros(update), zeroed=self._logged(self._not_finite(gradient)))
        arrays = gradient.result(update, step.outputs)
        # The factor by which the bound would have to grow to leave the update alone.
        times = max(map(truediv, on_host(step.norms).tolist(), limits), default=0.0)
        idle = times == 0.0 if steps is None else steps == 0
        norm = None if idle else times * bound
        clipped = bool(on_host(step.clipped).any())
        if far := self._far(update, times):
            return Outcome(zeros(update), norm, clipped, self._logged(far), times)
        return Outcome(arrays, norm, clipped, times=times)

    def _logged(self, why: str) -> str:
        self.logger.warning("%s shares zeros for the update: %s", self.name, why)
        return why

    def _not_finite(self, gradient: Gradient) -> str:
        named = ", ".join(map(repr, gradient.nonfinite()))
        text = f"NaN or infinity in {named}" if named else "a norm beyond float64"
        if self.on_nonfinite == "raise":
            raise NonFiniteError(f"{self.name}: {text}")
        warning = f"{self.name}: {text}; zeros are shared for the update"
        # Point to the caller of `clip`, or of `prepare_for_sharing`.
        warnings.warn(warning, FedclipWarning, stacklevel=4)
        return text

    def _far(self, update: Arrays, times: float) -> str:
        """Return a sentence if a finite update is far out of range, else ""."""
        if self.zeroing_norm is not None:
            measured = norm_of(update, self.name, self.zeroing_ord)
            norm = math.inf if measured is None else measured
            if norm > self.zeroing_norm:
                return f"its norm is {norm:.4g}, above zeroing_norm={self.zeroing_norm!r}"
        if self.zeroing_factor is not None and times > self.zeroing_factor:
            return f"it is {times:.4g} times the bound, above {self.zeroing_factor!r}"
        return ""
