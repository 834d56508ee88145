# SPDX-License-Identifier: Apache-2.0
"""The messages between a shared clipper and its counterpart on the server.

Class names of messages are global in declearn, so these begin with the name of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import numpy as np

from fedclip.core.messages import FromServer, Message
from fedclip.errors import Unchecked


@dataclass
class FedclipSharedState(FromServer):
    """The message from the server to every client, at the start of each round.

    Attributes
    ----------
    version
        How many times the state has been updated.
    settings
        The parameters that clipper and counterpart must have in common.
    max_steps
        Largest number of norms of a group that a client counts in a round.
    labels
        The groups, in the order of the counts; empty while the server does not know them.
    state
        The numbers of each field of the state, one for each label.
    """

    kinds = MappingProxyType(
        {"version": int, "settings": Mapping, "max_steps": int, "labels": list, "state": Mapping}
    )

    version: Unchecked
    settings: Unchecked
    max_steps: Unchecked
    labels: Unchecked
    state: Unchecked


@dataclass
class FedclipSharedCounts(Message):
    """The message from a client to the server, at the end of each round, or a sum of messages.

    Nothing here raises, whatever a client may have sent: an exception while declearn adds up the
    replies would leave its server waiting for ever. `counts_of` finds invalid messages later, and
    the server leaves them out.

    Attributes
    ----------
    members
        Number of clients in the message.
    counts
        Whole numbers >= 0, of shape (rows, groups); see `fedclip.statistics.counts`.
    parts
        The messages of single clients, if they came in cleartext.
    """

    members: Unchecked
    counts: Unchecked
    parts: list[object] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, object]:
        """Return the message in cleartext: small integers, most of them of one byte."""
        return {"counts": np.asarray(self.counts).ravel().tolist()}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Make the message of one client from what came over the wire, unchecked."""
        return cls(1, data.get("counts") if isinstance(data, Mapping) else None)

    def aggregate(self, other: object) -> Self:
        """Put another client's message next to this one, in constant time."""
        if self.parts is None:
            return type(self)(0, None, parts=[self, other])
        self.parts.append(other)
        return self

    def __radd__(self, other: object) -> Self:
        """Take ``0 + message``, and a message of another kind that came first."""
        if isinstance(other, int) and other == 0:
            return self
        return type(self)(0, None, parts=[other, self])

    def prepare_for_secagg(self) -> tuple[dict[str, object], dict[str, object] | None]:
        """Return all fields, for encryption: `Tally` makes no number above 2^31."""
        return {"members": self.members, "counts": self.counts}, None
