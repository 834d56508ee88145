# SPDX-License-Identifier: Apache-2.0
"""The bases of messages, which declearn takes for its own, and of those from the server.

A client with an older or newer fedclip can read each message of a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from fedclip.core.plugins import VERSION, Plugin, other
from fedclip.errors import Unchecked


class SideBySide:
    """The messages of several clients, of any types, in the order in which they were added."""

    def __init__(self, *messages: object) -> None:
        self.messages: list[Any] = [*messages]

    def __add__(self, other: object) -> Self:
        self.messages.append(other)
        return self


class Unsummed:
    """A message that `+` puts next to others, unchecked: whoever receives them adds them up.

    Nothing here raises, whatever a client may have sent: an exception while declearn adds up the
    replies would leave its server waiting for ever.
    """

    def __add__(self, other: object) -> Any:
        return SideBySide(self, other)

    def __radd__(self, other: object) -> Any:
        """Take ``0 + message``, and a message of another type that came first."""
        return self if isinstance(other, int) and other == 0 else SideBySide(other, self)


class Message(Unsummed, Plugin, register=False):
    """Stands for declearn's `AuxVar`: a dataclass that engines send, and put next to others."""

    group = "AuxVar"

    def __init_subclass__(cls, register: bool = True, **kwargs: object) -> None:
        """Give the message the name of its class, under which declearn packs it."""
        cls.name = cls.__name__
        super().__init_subclass__(register=register, **kwargs)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Make a message from what came over the wire, unchecked."""
        raise NotImplementedError

    @staticmethod
    def default_aggregate(first: Any, second: Any) -> Any:
        """Add two values of a field, as declearn does for fields in cleartext."""
        return first + second

    def prepare_for_secagg(self) -> tuple[dict[str, object], dict[str, object] | None]:
        """Return the fields to encrypt, and those that stay in cleartext."""
        return self.to_dict(), None


@dataclass
class FromServer(Message, register=False):
    """Base of the messages from the server to its clients.

    Decoding never raises: an exception there would end the client without a report, and leave
    the server waiting. Fields that this version of fedclip does not know are kept. Missing fields
    are None; `missing` names them, and those that are not of the `kinds` of this version. What is
    `lacking` is what it has said of a message from the wire.

    Attributes
    ----------
    fedclip
        The version that the server runs.
    """

    kinds: ClassVar[Mapping[str, type | tuple[type, ...]]] = {}

    fedclip: Unchecked = field(default=VERSION, kw_only=True)
    # Additional fields of a newer fedclip; they do not count in comparisons.
    unread: dict[str, object] = field(
        default_factory=dict, init=False, repr=False, compare=False, kw_only=True
    )
    lacking: str = field(default="", init=False, repr=False, compare=False, kw_only=True)

    def to_dict(self) -> dict[str, object]:
        """Return the fields, those of a newer fedclip too."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {**self.unread, **known}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Make a message from anything that came over the wire."""
        known = dict(data) if isinstance(data, Mapping) else {}
        result = cls(**{f.name: known.pop(f.name, None) for f in fields(cls) if f.init})
        result.unread, result.lacking = known, result.missing()
        return result

    def missing(self) -> str:
        """Say which fields are missing or of another kind, in a sentence; "" if no field is."""
        kinds = {**self.kinds, "fedclip": str}
        odd = [name for name, kind in kinds.items() if not isinstance(getattr(self, name), kind)]
        if not odd:
            return ""
        lacking = [name for name in odd if getattr(self, name) is None]
        what = f"lacks {', '.join(lacking)}" if lacking else f"has no valid {', '.join(odd)}"
        return f"the server's message {what}{other(self.fedclip)}"

    def prepare_for_secagg(self) -> tuple[dict[str, object], dict[str, object] | None]:
        """Refuse: only the server sends this message."""
        raise NotImplementedError(f"{type(self).__name__} goes from the server to its clients only")
