# SPDX-License-Identifier: Apache-2.0
"""What a shared clipper and its counterpart on the server send each other.

Names of such classes are global in declearn, so that these carry the package's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from declearn.optimizer.modules import AuxVar

from fedclip.federation.tolerant import FromServer

__all__ = ["FedclipSharedCounts", "FedclipSharedState"]


@dataclass
class FedclipSharedState(FromServer):
    """The server to every client, at the start of each round.

    Attributes
    ----------
    version
        How many times the state has been moved on.
    settings
        The parameters that clipper and counterpart must have in common.
    max_steps
        How many norms of a group a client counts in a round at most.
    labels
        The groups, in the order in which they are to be counted; empty while the server does
        not know them.
    state
        The numbers of each field of the state, one for each label.
    """

    version: Any
    settings: Any
    max_steps: Any
    labels: Any
    state: Any


@dataclass
class FedclipSharedCounts(AuxVar):
    """A client to the server, at the end of each round, and sums of such.

    Nothing here raises, whatever a client may have sent: an exception while a round's replies
    are added up would leave declearn's server waiting for ever. What is no sound message is
    found when it is looked at (`counts_of`), and left out.

    Attributes
    ----------
    members
        How many clients it is from.
    counts
        Whole numbers >= 0, of shape (rows, groups); see `fedclip.federation.statistics.counts`.
    parts
        The messages of single clients, where they came in cleartext.
    """

    members: Any
    counts: Any
    parts: list[Any] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return what goes over the wire in cleartext: small integers, a byte each for most."""
        return {"counts": np.asarray(self.counts).ravel().tolist()}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Take what came over the wire, for one client, as it is."""
        return cls(1, data.get("counts") if isinstance(data, Mapping) else None)

    def aggregate(self, other: Any) -> Self:
        """Put another client's message next to this one's; takes the same time for each."""
        if self.parts is None:
            return type(self)(0, None, parts=[self, other])
        self.parts.append(other)
        return self

    def __radd__(self, other: Any) -> Self:
        """Take ``0 + message``, and a message of another kind that came first."""
        if isinstance(other, int) and other == 0:
            return self
        return type(self)(0, None, parts=[other, self])

    def prepare_for_secagg(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what is encrypted: everything.

        Raises
        ------
        ValueError
            If a field is not what encryption adds up faithfully; it is named.
        """
        members, counts = self.members, self.counts
        if type(members) is not int or members != 1:
            raise ValueError(f"members must be 1 to be encrypted, got {members!r}")
        if not isinstance(counts, np.ndarray) or counts.dtype != np.uint64:
            raise ValueError(f"counts must be an array of uint64 to be encrypted, got {counts!r}")
        # Sums over clients must stay below 2^bitsize; bits of fields with 16 bits to spare.
        if counts.size and int(counts.max()) >= 2**48:
            raise ValueError(f"counts must be below 2^48 to be encrypted, got {counts.max()}")
        return {"members": members, "counts": counts}, None
