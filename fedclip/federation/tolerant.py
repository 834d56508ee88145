# SPDX-License-Identifier: Apache-2.0
"""What a server sends to its clients can be read by all of them, older ones and newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from declearn.optimizer.modules import AuxVar

from fedclip.federation.version import VERSION, other

__all__ = ["FromServer"]


@dataclass
class FromServer(AuxVar, register=False):
    """Base of the messages from the server to its clients.

    Decoding never raises: an exception there is outside of what a client reports, ends it
    without a word, and leaves the server waiting. Fields that this fedclip does not know are
    kept; those that are missing are None, and for `missing` to tell.

    Attributes
    ----------
    fedclip
        The version that the server runs.
    """

    fedclip: Any = field(default=VERSION, kw_only=True)
    # What a newer fedclip says besides; it does not count in comparisons.
    rest: dict[Any, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False, kw_only=True
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, those of a newer fedclip too."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {**self.rest, **known}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Take whatever came over the wire."""
        found = dict(data) if isinstance(data, Mapping) else {}
        result = cls(**{f.name: found.pop(f.name, None) for f in fields(cls) if f.init})
        result.rest = found
        return result

    def missing(self) -> str:
        """Say which fields are missing, in a sentence; "" if none is."""
        lacking = [f.name for f in fields(self) if f.init and getattr(self, f.name) is None]
        if not lacking:
            return ""
        return f"the server's message lacks {', '.join(lacking)}{other(self.fedclip)}"

    def prepare_for_secagg(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Refuse: the server sends this to everybody, and clients do not send it at all."""
        raise NotImplementedError(f"{type(self).__name__} goes from the server to its clients only")
