# SPDX-License-Identifier: Apache-2.0
"""Bases of clippers that can share one state with all clients of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedclip.clippers.families import LimitedClipper
from fedclip.core import parameters
from fedclip.core.parameters import boolean, integer, parameter
from fedclip.statistics.client import SharedStatistics
from fedclip.statistics.messages import FedclipSharedCounts, FedclipSharedState
from fedclip.transforms import Transform


class SharedClipper(LimitedClipper, register=False):
    """Base of the clippers that have a server module."""

    _common_settings: ClassVar[tuple[str, ...]] = ("warmup", "scope", "exclude", "ord")
    """The common parameters that the server module must have too, if the clipper has them."""
    _client_settings: ClassVar[tuple[str, ...]] = ()
    """Its parameters that the server module need not have."""

    shared: bool = parameter(boolean, default=False)
    """All clients of a federation share one limit, fixed during a round. The server's optimizer
    needs `{name}-server`."""
    shared_name: str | None = parameter(parameters.name, default=None)
    """Name of this pair of clipper and server module, if there are several."""

    @classmethod
    def _shared_settings(cls) -> list[str]:
        """Return the parameters that the server module must have too."""
        common = [name for name, declared in cls.parameters.items() if declared.common]
        own = [name for name in cls.parameters if name not in (*common, *cls._client_settings)]
        return own + [name for name in cls._common_settings if name in common]

    def __post_init__(self) -> None:
        """Build the transform, and what is shared of it."""
        super().__post_init__()
        self._sharing: SharedStatistics | None = None
        self._goes_with("shared_name", "shared", True)
        if not self.shared:
            return
        if getattr(self, "include_current", False):
            raise ValueError(
                "shared=True does not go with include_current=True: what is shared is the state "
                "of the round's start, which has not seen the current norm"
            )
        # Set on the instance, where declearn looks: two pairs of one kind can have two names.
        vars(self)["aux_name"] = self.shared_name or f"{self.name}-shared"
        settings = {key: getattr(self, key) for key in self._shared_settings()}
        self._sharing = SharedStatistics(self.name, self._transform, settings)

    def collect_aux_var(self) -> object | None:
        """Return the counts, if they are shared; on a server, begin a round."""
        super().collect_aux_var()
        if not self._on_client:
            # A clipper on the server shares nothing; the clients' counts are for the counterpart.
            vars(self)["aux_name"] = None
        elif self._sharing is not None and self._sharing.heard():
            with self.lock:
                counts, statistics = self._sharing.collect(self._statistics())
                self._install(statistics)

            return FedclipSharedCounts(1, counts)
        return None

    def process_aux_var(self, aux_var: object) -> None:
        """Take over the state that the server has sent.

        Raises
        ------
        ValueError
            If clipper and counterpart do not match, or the message is not valid.
        """
        if self._sharing is not None and isinstance(aux_var, FedclipSharedState):
            with self.lock:
                statistics = self._sharing.receive(aux_var, self._statistics())
                self._transform = self._sharing.transform(self._sharing.version)
                self._install(statistics)
        else:
            super().process_aux_var(aux_var)

    def get_state(self) -> dict[str, Any]:
        """Return the state of every clipper, and the version of a shared state."""
        shared = {} if self._sharing is None else {"shared": self._sharing.get_state()}
        return {**super().get_state(), **shared}

    def reset(self) -> None:
        super().reset()
        if self._sharing is not None:
            self._sharing.version, self._transform = None, self._sharing.transform(None)

    def _take_over(self, state: object, transform: Transform) -> None:
        version = None
        if self._sharing is not None and isinstance(state, Mapping):
            version = self._sharing.check_state(state.get("shared"))
            transform = self._sharing.transform(version)
        super()._take_over(state, transform)
        if self._sharing is not None:
            self._sharing.version = version
            # The server decides which groups there are, and may know more of them.
            self._loaded = self._loaded and version is None


class HistoryClipper(SharedClipper, register=False):
    """Base of clippers with statistics of the norms themselves."""

    include_current: bool = parameter(boolean, default=False)
    """Learn a norm before judging it; needs ``feedback="raw"``."""
    warmup: int = parameter(integer, 0, default=20)
    """Norms, >= 0, before the statistics set the limit; they never limit the first one. Shared:
    norms of all clients count, except the first of each."""
    warmup_norm: float | None = parameter(parameters.limit, default=None)
    """Fixed limit during the warm-up, > 0, in units of the gradient."""
    warmup_factor: float | None = parameter(parameters.at_least_one, default=2.25)
    """Limit during the warm-up, in medians of the last five norms, >= 1. Spikes are learnt as 1.1
    medians; the first five norms only fill the median. None: no limit; norms are learnt
    unclipped."""

    def __post_init__(self) -> None:
        """Check that a norm is learnt as it was seen."""
        feedback = getattr(self, "feedback", "clipped")
        if self.include_current and feedback != "raw":
            raise ValueError(
                "include_current=True needs feedback='raw': a norm that has been learnt already "
                f"can not be fed back clipped; got feedback={feedback!r}"
            )
        super().__post_init__()
