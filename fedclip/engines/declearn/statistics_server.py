# SPDX-License-Identifier: Apache-2.0
"""The counterparts of shared clippers, in the server's optimizer: one small class each.

One class serves all of them; the clipper's rule derives the state from counts::

    Round start:
        send the state, the same to every client
    Replies:
        exclude impossible counts, and log them
        counts = sum of the others
        state  = rule.merge(state, counts)
    Step:
        nothing: the server's gradients pass unchanged
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from declearn.optimizer.modules import OptiModule

from fedclip.clippers.adaptive_clip import AdaptiveClip
from fedclip.clippers.auto_clip import AutoClip
from fedclip.clippers.ema_clip import EmaClip
from fedclip.clippers.mad_clip import MadClip
from fedclip.clippers.percentile_norm_clip import PercentileNormClip
from fedclip.clippers.zscore_clip import ZScoreClip
from fedclip.core import parameters, states
from fedclip.core.messages import SideBySide
from fedclip.core.parameters import Config, signature_of
from fedclip.core.scopes import resolve
from fedclip.engines.declearn.context import LOGGER, AnyVector, expect, names_of, under_way
from fedclip.errors import StateError, Unchecked
from fedclip.privacy import guarantees as kinds
from fedclip.statistics.client import MAX_STEPS
from fedclip.statistics.counts import FedclipSharedCounts, FedclipSharedState
from fedclip.statistics.server import SharedState

_OWN = ("max_steps", "shared_name")


class SharedServer(OptiModule[Any], register=False):
    """Server module of a shared clipper: merges the clients' counts, and sends the state back.

    It belongs in the server's optimizer, and does not change the server's steps.

    Parameters
    ----------
    max_steps : int, default=10000
        Norms of a group that one client may count in a round, 1 to 2^31; the server excludes higher
        claims. Set it to a client's number of steps, to bound the weight of a malicious client.
    shared_name : str or None, default=None
        The clipper's `shared_name`, if it has one.
    **settings
        Those parameters of `{clipper}` that affect its statistics, equal on both sides.

    Notes
    -----
    {notes}

    State: the message to the clients, and the counts; a restarted server resumes from its
    checkpoint without a difference. The server excludes invalid counts, and logs them.
    """

    clipper: ClassVar[kinds.Plugin]
    """The clipper of this counterpart, a `fedclip.clippers.sharing.Sharing`."""
    __signature__: ClassVar[inspect.Signature]
    guarantee = kinds.unchanged
    auxvar_cls: Any = FedclipSharedState

    def __init_subclass__(cls, register: bool = True, **kwargs: object) -> None:
        """Give the class its signature and its docstring."""
        cls.name = f"{cls.clipper.name}-server"
        super().__init_subclass__(register=register, **kwargs)
        summary, _, notes = (inspect.getdoc(cls) or "").partition("\n\n")
        common = (inspect.getdoc(SharedServer) or "").partition("\n\n")[2]
        cls.__doc__ = f"{summary}\n\n{common}\n".format(clipper=cls.clipper.name, notes=notes)
        known = {**signature_of(cls.clipper), **signature_of(SharedServer)}
        names, keyword = [*cls.clipper._shared_settings(), *_OWN], inspect.Parameter.KEYWORD_ONLY
        formal = [known[name].replace(kind=keyword) for name in names]
        cls.__signature__ = inspect.Signature(formal)

    def __init__(
        self, *, max_steps: int = MAX_STEPS, shared_name: str | None = None, **settings: object
    ) -> None:
        parameters.refuse_unknown(type(self), settings)
        self.max_steps = parameters.integer(1, 2**31, max_steps=max_steps)
        # The clipper checks the parameters, and makes the rule.
        clipper = self.clipper(shared=True, shared_name=shared_name, **settings)
        self.shared_name = clipper.shared_name
        vars(self)["aux_name"] = clipper.aux_name
        self.settings: Config = clipper._sharing.settings
        self.shared_state = SharedState(clipper._sharing.rule.rule, self.max_steps)
        # How many of the clients' messages were left out so far.
        self.refused = 0
        if self.settings["scope"] == "global":
            self.shared_state.begin(("all",))

    # -- declearn's interface -----------------------------------------------------------------
    def run(self, gradients: AnyVector) -> AnyVector:
        """Return the gradients; the first ones show which groups there are."""
        if (counted := under_way(counted=True)) is not None and counted[1].budget is not None:
            raise ValueError(f"{self.name} stands before the noise: put update-clip-server first")
        if not self.shared_state.labels:
            # The update has the names of the clients' gradients, so there is no need to ask them.
            scopes = self.settings["scope"], self.settings["exclude"]
            try:
                groups = resolve(*scopes, list(gradients.coefs))
                self.shared_state.begin(tuple(sorted(groups.labels)))
            except ValueError as exc:
                # Log it only: the clients report the same error, and the server survives that.
                LOGGER.error("%s: %s", self.name, exc)
        return gradients

    def collect_aux_var(self) -> FedclipSharedState:
        """Return the state for all clients, at the start of a round.

        If the averages have noise, these statistics, which have none, may not go out: the message
        is then empty, and the run ends on all nodes (`UpdateClipServer.admit`).
        """
        opened = under_way(counted=False)
        admitted = opened is None or opened[1].admit(self.name)
        expect(str(self.aux_name), FedclipSharedCounts(1, None))
        shared = self.shared_state
        state, labels = shared.fields() if admitted else {}, shared.labels if admitted else ()
        return FedclipSharedState(shared.version, self.settings, self.max_steps, [*labels], state)

    def process_aux_var(self, aux_var: Any) -> None:
        """Merge the clients' counts; leave out, count and log those that are not valid."""
        round_ = self.shared_state.version + 1
        messages: list[tuple[Unchecked, Unchecked] | str] = []
        for sent in aux_var.messages if isinstance(aux_var, SideBySide) else [aux_var]:
            counted = isinstance(sent, FedclipSharedCounts)
            messages.append((sent.members, sent.counts) if counted else f"a {type(sent).__name__}")
        self._report(self.shared_state.merge(messages), round_)

    def get_config(self) -> dict[str, object]:
        """Return the parameters, as they would be written in a TOML file."""
        return {**self.settings, **{name: getattr(self, name) for name in _OWN}}

    def get_state(self) -> dict[str, object]:
        """Return the shared state by group, as plain numbers, strings and lists."""
        return {"clipper": self.name, **self.shared_state.get_state(), "refused": self.refused}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over a state that `get_state` of the same module returned.

        Raises
        ------
        StateError
            If anything is missing, of a wrong type, or another module's. The module then keeps
            its old state.
        """
        keys = ("clipper", "groups", "history", "version", "refused")
        if not isinstance(state, Mapping) or any(key not in state for key in keys):
            raise StateError(f"a state of {self.name} must have {', '.join(keys)}")
        if state["clipper"] != self.name:
            raise StateError(f"the state is of {state['clipper']!r}, not of {self.name!r}")
        refused = states.check_count("refused", state["refused"])
        self.shared_state.set_state(state)
        self.refused = refused

    def _report(self, faults: Sequence[str], round_: int) -> None:
        reasons: dict[str, list[str]] = {}
        for fault, sender in zip(faults, names_of(self.aux_name, len(faults)), strict=True):
            if fault:
                reasons.setdefault(fault, []).append(repr(sender) if sender else "")
        if not reasons:
            return
        refused = sum(map(len, reasons.values()))
        self.refused += refused
        # Name at most five clients, with reasons.
        known = [(why, len(s), ", ".join([*filter(None, s)][:5])) for why, s in reasons.items()]
        why = "; ".join(f"{why} ({n}×{': ' if who else ''}{who})" for why, n, who in known[:5])
        text = f"left out what {refused} of {len(faults)} messages say, round {round_}: {why}"
        LOGGER.warning("%s: %s (%d so far)", self.name, text, self.refused)


class ZScoreClipServer(SharedServer):
    """Keep mean and variance of all clients, for a shared `zscore-clip`.

    A round has N norms with mean m and population variance V; ``D = decay^N``. Before `warmup`
    norms, counted in whole rounds, the state is mean and variance of all norms. Afterwards ``mean
    <- D mean + (1-D) m`` and ``variance <- D variance + (1-D) (V + (m - mean)^2)``, exact to 1e-12
    for any number of clients.
    """

    clipper = ZScoreClip


class EmaClipServer(SharedServer):
    """Keep the average of all clients' norms, for a shared `ema-clip`.

    A round has N norms with mean m. Before `warmup` norms, counted in whole rounds, the mean is the
    smallest m. Afterwards ``mean <- decay^N mean + (1 - decay^N) m``, exact to 1e-12.
    """

    clipper = EmaClip


class AutoClipServer(SharedServer):
    """Keep median and deviation of all clients, for a shared `auto-clip`.

    Mean and variance are those of all norms, exact to 1e-12. A sketch estimates the median, of all
    norms or of the last rounds with `window` norms, within 3 %.
    """

    clipper = AutoClip


class PercentileNormClipServer(SharedServer):
    """Keep a percentile of all norms, for a shared `percentile-norm-clip`.

    A sketch estimates the percentile, of all norms or of the last rounds with `window` norms:
    within 3 % for norms between 1e-8 and 2e5.
    """

    clipper = PercentileNormClip


class MadClipServer(SharedServer):
    """Keep median and deviation of all clients, for a shared `mad-clip`.

    A sketch estimates both from the last rounds with `window` norms: the median within 3 %, the
    deviation within 3 % of its norms.
    """

    clipper = MadClip


class AdaptiveClipServer(SharedServer):
    """Keep one limit for all clients, for a shared `adaptive-clip`.

    The limit changes once a round, by the number of all clients' norms that were at most the limit,
    as soon as there are `every` norms.
    """

    clipper = AdaptiveClip
