# SPDX-License-Identifier: Apache-2.0
"""What a translation is, and the words that peers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fedclip.errors import nearest

__all__ = ["REQUIRED", "Entry", "Peers", "Translation", "entry", "order", "to", "unknown", "word"]


class Translation(NamedTuple):
    """A clipper of fedclip, and how it differs from the peer's."""

    kind: str
    name: str
    config: dict[str, Any]
    notes: list[str]


class Entry(NamedTuple):
    """A class of a peer: its parameters with defaults, and what they become."""

    parameters: dict[str, Any]
    build: Callable[..., Translation]


Peers: TypeAlias = dict[str, dict[str, Entry]]
"""The classes of each peer, by its name."""

# The default of a parameter that the peer requires.
REQUIRED: Any = object()


def entry(build: Callable[..., Translation], **shared: Any) -> Entry:
    """Return the entry of a class: its parameters are those of `build`, and the `shared` ones."""
    own = inspect.signature(build).parameters.values()
    defaults = {
        p.name: REQUIRED if p.default is p.empty else p.default
        for p in own
        if p.kind is not p.VAR_KEYWORD
    }
    return Entry({**defaults, **shared}, build)


_KINDS = {"agc": "regularizer", "clipped-averaging": "aggregator"}


def to(name: str, *notes: str | None, **config: Any) -> Translation:
    """Return the translation to a registered name and its parameters."""
    kind = _KINDS.get(name, "module")
    return Translation(kind, name, config, [note for note in notes if note])


def unknown(what: str, given: object, allowed: Mapping[str, Any]) -> str:
    """Return a sentence about what is not allowed, with the nearest that is."""
    hint = nearest(str(given), allowed) or f"; it must be one of {', '.join(allowed) or 'none'}"
    return f"{what} {given!r}{hint}"


def word(parameter: str, given: Any, words: Mapping[str, Any] | str) -> Any:
    """Return our value for a word of the peer, or the word itself if we have the same `words`."""
    if isinstance(words, str):
        words = {word: word for word in words.split()}
    if not isinstance(given, str) or given not in words:
        raise ValueError(unknown(f"{parameter} can not be", given, words))
    return words[given]


def order(value: float | str) -> float | str:
    """Return our `ord` for 2, 2.0, "2", "2.0", "l2", "inf", "linf", "mad", ..."""
    if not isinstance(value, str):
        return "inf" if value == float("inf") else value
    try:
        number = float(value.removeprefix("l"))
    except ValueError:
        return str(word("ord", value, "mad std var sum l1 l2 linf inf"))
    if number == float("inf"):
        return "inf"
    return int(number) if number.is_integer() else number
