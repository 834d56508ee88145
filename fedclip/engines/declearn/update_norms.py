# SPDX-License-Identifier: Apache-2.0
"""`update-norms`: measures the update of each round, where it stays on the client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from declearn.optimizer.modules import OptiModule

from fedclip.core.records import Recorder, RoundRecord, read_rounds
from fedclip.core.scopes import resolve
from fedclip.core.states import check_count
from fedclip.engines.declearn.generics import AnyVector
from fedclip.privacy import guarantees as kinds
from fedclip.rules import FIXED, LEARNT
from fedclip.updates.limits import norms_of
from fedclip.updates.protocol import SentBound


class UpdateNorms(OptiModule[Any]):
    """Record the norm of each round's update; records stay on the client.

    ::

        Steps:             nothing; gradients pass unchanged
        End of the round:  the client records norm(update), before sharing it

    You do not configure it. `PersonalFederatedClient`, `fedclip quickrun` and `fedclip simulate`
    add it to a client without `update-clip-client`, which records the same.
    `PrivateFederatedClient` does not.

    Notes
    -----
    A record has the norm, a fixed bound if there is one, and whether the update was clipped. Rounds
    without a step and updates with integer tensors are not recorded.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> norms = UpdateNorms()
    >>> norms.on_round_start()
    >>> norms.measure(NumpyVector({"w": np.array([3.0, 4.0])}))
    >>> norms.rounds[0].norm_max
    5.0
    """

    name: ClassVar[str] = "update-norms"
    guarantee = kinds.unchanged

    def __init__(self) -> None:
        self.recorder = Recorder()

    def run(self, gradients: AnyVector) -> AnyVector:
        """Return the gradients unchanged."""
        return gradients

    def on_round_start(self) -> None:
        """Begin a round."""
        self.recorder.start_round()

    def measure(self, updates: AnyVector, bound: float | None = None) -> None:
        """Note the norm of an update, and whether it is above a fixed bound."""
        try:
            groups = resolve("global", None, tuple(updates.coefs))
            norms = norms_of(updates.coefs, groups, self.name)
        except TypeError:  # integers, which are reported where they are clipped
            return
        if norms is None:
            self.recorder.add_nonfinite()
        for norm in norms or []:
            limit = math.inf if bound is None else bound
            self.note(norm, SentBound(limit, adaptive=False), norm > limit)

    def note(self, norm: float, sent: SentBound, clipped: bool) -> None:
        """Record the norm of an update, and whether it was above the bound."""
        basis = LEARNT if sent.adaptive else FIXED
        self.recorder.add(("all",), norm, sent.bound, clipped, basis=basis)

    @property
    def rounds(self) -> list[RoundRecord]:
        """What happened to the updates of the last rounds."""
        return self.recorder.rounds()

    def get_state(self) -> dict[str, object]:
        """Return the records of the rounds."""
        return self.recorder.get_state()

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over the records of the rounds."""
        number = state.get("round") if isinstance(state, Mapping) else None
        round_ = check_count("round", number)
        self.recorder.set_state(round_, read_rounds(state))
