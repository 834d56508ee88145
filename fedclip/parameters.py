# SPDX-License-Identifier: Apache-2.0
"""Checks of constructor parameters.

Every check takes the value by keyword, so that its message names the parameter:
``positive(max_norm=-1)`` says ``max_norm must be a finite number > 0, got -1``.
The checks ask whether a value is "not inside" the range, so that NaN always fails.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from fedclip.errors import nearest, shown

T = TypeVar("T")


# The largest whole number of TOML, and of other languages.
_LARGEST = 2**63 - 1


def _typed(value: Any) -> str:
    """Return the repr of a value, and its type."""
    return f"{shown(value)} ({type(value).__name__})"


def _one(values: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = values.items()
    return name, value


def number(
    allowed: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    **values: Any,
) -> float:
    """Return the one keyword value as a finite float inside [low, high] (or open ends)."""
    name, value = _one(values)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        got = "None (declearn's TOML reads nan as None)" if value is None else _typed(value)
        raise TypeError(f"{name} must be {allowed}, got {got}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    inside = (low < result if open_low else low <= result) and (
        result < high if open_high else result <= high
    )
    if not (inside and math.isfinite(result)):
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}")
    return result


def optional(check: Callable[..., T], *allowed: Any, **values: Any) -> T | None:
    """Return None for None, and ``check(*allowed, ...)`` for anything else."""
    return None if any(v is None for v in values.values()) else check(*allowed, **values)


def positive(**values: Any) -> float:
    """Return the one keyword value as a finite float > 0."""
    return number("a finite number > 0", 0.0, open_low=True, **values)


def non_negative(**values: Any) -> float:
    """Return the one keyword value as a finite float >= 0."""
    return number("a finite number >= 0", 0.0, **values)


def at_least_one(**values: Any) -> float:
    """Return the one keyword value as a finite float >= 1."""
    return number("a finite number >= 1", 1.0, **values)


def unit_interval(**values: Any) -> float:
    """Return the one keyword value as a float strictly between 0 and 1."""
    return number(
        "a number strictly between 0 and 1", 0, 1, open_low=True, open_high=True, **values
    )


def integer(low: int, **values: Any) -> int:
    """Return the one keyword value as an int from low to 2^63 - 1; 25.0 is not an int."""
    name, value = _one(values)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int >= {low}, got {_typed(value)}")
    if int(value) > _LARGEST:
        raise ValueError(f"{name} must be an int <= 2^63 - 1, got {shown(value)}")
    if value < low:
        raise ValueError(f"{name} must be an int >= {low}, got {shown(value)}")
    return int(value)


def boolean(**values: Any) -> bool:
    """Return the one keyword value if it is True or False; 1 and "true" are not."""
    name, value = _one(values)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_typed(value)}")
    return value


def name(**values: Any) -> str:
    """Return the one keyword value if it is a string that is not empty."""
    key, value = _one(values)
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a string, got {_typed(value)}")
    if not value:
        raise ValueError(f"{key} must be a string that is not empty, got {shown(value)}")
    return value


def choice(allowed: Sequence[str], **values: Any) -> str:
    """Return the one keyword value if it is one of the `allowed` words."""
    name, value = _one(values)
    words = ", ".join(repr(word) for word in allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {words}, got {_typed(value)}")
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {words}, got {shown(value)}{nearest(value, allowed)}"
        )
    return value


def raw_if_current(include_current: bool, feedback: str, seen_by: str = "statistics have") -> None:
    """Raise a ValueError if a rule should learn a norm before clipping, but the clipped norm."""
    if include_current and feedback != "raw":
        raise ValueError(
            f"include_current=True needs feedback='raw': a norm that the {seen_by} already seen "
            f"can not be fed back clipped; got feedback={feedback!r}"
        )


def signature_of(cls: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that a plug-in's constructor takes, by name."""
    # Look at `__init__`, not at `__new__`: a clipper's `__new__` takes anything, to refuse typos.
    signature = getattr(cls, "__signature__", None) or inspect.signature(cls.__init__)
    return {name: p for name, p in signature.parameters.items() if name != "self"}


def refuse_unknown(cls: Any, config: Mapping[str, Any]) -> None:
    """Raise a TypeError, with the nearest name, for a parameter that a plug-in does not have."""
    known = signature_of(cls)
    for key in config:
        if key not in known:
            raise TypeError(
                f"{cls.name} has no parameter {key!r}{nearest(key, known)}; "
                f"its parameters are {', '.join(known)}"
            )


class Configured:
    """Base of plug-ins that refuse unknown parameters, and keep the others under their names."""

    name: ClassVar[str]

    def __new__(cls, *args: Any, **config: Any) -> Self:
        """Refuse unknown parameters, with the nearest name."""
        # Not in __init__: here a typo gets an answer with the nearest name in Python, in
        # declearn's specs and in TOML.
        refuse_unknown(cls, config)
        return super().__new__(cls)

    def get_config(self) -> dict[str, Any]:
        """Return the parameters, as they would be written in a TOML file."""
        return config_of(self)


def config_of(plugin: Any) -> dict[str, Any]:
    """Return the parameters of a plug-in, which keeps them under their own names."""
    return {name: getattr(plugin, name) for name in signature_of(type(plugin))}
