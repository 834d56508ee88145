# SPDX-License-Identifier: Apache-2.0
"""Bases of clippers that can share one state with all clients of a federation."""

from __future__ import annotations

from typing import ClassVar, TypeGuard

from fedclip.core import parameters
from fedclip.core.parameters import Configured, boolean, parameter
from fedclip.core.states import Statistics
from fedclip.statistics.client import SharedStatistics
from fedclip.statistics.counts import FedclipSharedCounts, FedclipSharedState
from fedclip.transforms import Transform


class Sharing(Configured):
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
        others = [name for name in cls.parameters if name not in (*common, *cls._client_settings)]
        return others + [name for name in cls._common_settings if name in common]

    def _shared_state(self, transform: Transform) -> SharedState | None:
        """Return the client's side of a shared state; None if the clipper shares none."""
        self.check_goes_with("shared_name", "shared", True)
        if not self.shared:
            return None
        if getattr(self, "include_current", False):
            raise ValueError("shared=True does not go with include_current=True: give one of them")
        # Set on the instance, where declearn looks: two pairs of one kind can have two names.
        vars(self)["aux_name"] = self.shared_name or f"{self.name}-shared"
        settings = {key: getattr(self, key) for key in self._shared_settings()}
        return SharedState(self.name, transform, settings)


class SharedState(SharedStatistics):
    """A client's side of a shared state, with the messages of declearn."""

    def reads(self, message: object) -> TypeGuard[FedclipSharedState]:
        """Return whether a message is of the server module."""
        return isinstance(message, FedclipSharedState)

    def message(self, statistics: Statistics) -> tuple[FedclipSharedCounts, Statistics]:
        """Return the counts since the round's start, and the statistics with the counts reset."""
        counts, after = self.collect(statistics)
        return FedclipSharedCounts(1, counts), after
