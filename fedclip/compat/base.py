# SPDX-License-Identifier: Apache-2.0
"""What a translation is, and how the tables of peers are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fedclip.compat.words import is_number, parsed, unknown
from fedclip.errors import shown

Given: TypeAlias = dict[str, Any]
"""Parameters by name."""


class Translation(NamedTuple):
    """A clipper of fedclip, and how it differs from the peer's."""

    kind: str
    name: str
    config: Given
    notes: list[str]


class Entry(NamedTuple):
    """A class of a peer: its parameters with defaults, and what they become."""

    parameters: Given
    build: Callable[[Given], Translation]


Peers: TypeAlias = dict[str, dict[str, Entry | str]]
"""The classes of each peer, by its name; a text says why there is no translation."""

# The default of a parameter that the peer requires.
REQUIRED: object = object()


def entry(build: Callable[..., Translation], parameters: str | None = None) -> Entry:
    """Return the entry of a class: its parameters as in a `signature`, or else those of `build`.

    With a signature, `build` takes the parameters as one mapping.
    """
    if parameters is not None:
        return Entry(signature(parameters), build)
    own = inspect.signature(build).parameters.values()
    known = {p.name: REQUIRED if p.default is p.empty else p.default for p in own}
    return Entry(known, lambda c: build(**c))


def signature(text: str) -> Given:
    """Return parameters with their defaults, as they are written in a call.

    Examples
    --------
    >>> signature("beta=0.99, init=None")
    {'beta': 0.99, 'init': None}
    >>> signature("max_norm")["max_norm"] is REQUIRED
    True
    """
    _, pairs = parsed("a signature", f"f({text})")
    required = {value: REQUIRED for key, value in pairs if isinstance(key, int)}
    return {**required, **{key: value for key, value in pairs if not isinstance(key, int)}}


def renamed(c: Given, names: str) -> Given:
    """Return our parameters, each with the value of the peer's: "ours=theirs, ...".

    Examples
    --------
    >>> renamed({"beta": 0.9}, "decay=beta")
    {'decay': 0.9}
    """
    return {ours: c[theirs] for ours, theirs in signature(names).items()}


_KINDS = {"agc": "regularizer", "clipped-averaging": "aggregator"}


def to(name: str, *notes: str | None, **config: object) -> Translation:
    """Return the translation to a registered name and its parameters."""
    kind = _KINDS.get(name, "module")
    return Translation(kind, name, config, [note for note in notes if note])


def checked(
    package: str, cls: str, parameters: Mapping[str, object], given: Mapping[str, object]
) -> Given:
    """Return the values of all parameters, those left out at their defaults.

    Raises
    ------
    ValueError
        If one is unknown or missing, or its default is of another type.
    """
    for key, value in given.items():
        if key not in parameters:
            raise ValueError(unknown(f"{cls} of {package} has no parameter", key, parameters))
        default = parameters[key]
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{key} of {cls} must be True or False, got {shown(value)}")
        elif key not in _FREE and not isinstance(default, str) and not is_number(value):
            if value is None and (default is None or key in _MAY_BE_NONE):
                continue
            raise ValueError(f"{key} of {cls} must be a number, got {shown(value)}")
    values = {**parameters, **given}
    missing = [key for key, value in values.items() if value is REQUIRED]
    if missing:
        raise ValueError(f"{cls} of {package} needs {', '.join(map(repr, missing))}")
    return values


# Parameters that take more than numbers although their default is none or a number: each
# translation checks its own. Then those whose value may be None, which is not their default.
_FREE = {"ord", "norm_type", "dim", "axis", "axes", "init", "ema_init", "clipping_function"}
_FREE |= {"parameterwise", "gradient_clip_algorithm", "inner", "exp_avg_tfm", "ema_tfm"}
_MAY_BE_NONE = {"max_norm", "max_grad_norm", "max_ema_growth", "mul", "min_value", "max_decay"}
_MAY_BE_NONE |= {"max_clipbound"}
