# SPDX-License-Identifier: Apache-2.0
"""Constructor parameters: how a plug-in declares them, and their checks.

A parameter is a field of its class: annotation, check, default, and a docstring with its meaning::

    class Mine(Configured):
        name = "mine"

        factor: float = parameter(positive, default=2.0)
        "Multiplies the norm, > 0."

Constructor, signature, configuration and documentation follow. Every check takes the value by
keyword, so that its message names the parameter:
``positive(max_norm=-1)`` says ``max_norm must be a finite number > 0, got -1``.
The checks ask whether a value is "not inside" the range, so that NaN always fails.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, dataclass_transform

from fedclip.errors import Unchecked, nearest, shown

T = TypeVar("T")

# Plain values by name: the parameters of a plug-in, or a section of a file.
Config: TypeAlias = dict[str, Any]

# The smallest and the largest limit that can be set.
LEAST, MOST = 1e-30, 1e30

# The largest whole number of TOML, and of other languages.
_LARGEST = 2**63 - 1
_NOTHING = inspect.Parameter.empty
_BY_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _typed(name: str, allowed: str, value: object) -> TypeError:
    """Return the error for a value of another type."""
    kind = "declearn's TOML reads nan as None" if value is None else type(value).__name__
    return TypeError(f"{name} must be {allowed}, got {shown(value)} ({kind})")


def _one(values: Mapping[str, object]) -> tuple[str, Unchecked]:
    ((name, value),) = values.items()
    return name, value


def number(
    allowed: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    **values: object,
) -> float:
    """Return the one keyword value as a finite float inside [low, high] (or open ends)."""
    name, value = _one(values)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _typed(name, allowed, value)
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    is_end = (open_low and result == low) or (open_high and result == high)
    if not low <= result <= high or is_end or math.isinf(result):
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}")
    return result


def optional(check: Callable[..., T], *allowed: object, **values: object) -> T | None:
    """Return None for None, and ``check(*allowed, ...)`` for anything else."""
    return None if any(v is None for v in values.values()) else check(*allowed, **values)


def positive(**values: Unchecked) -> float:
    """Return the one keyword value as a finite float > 0."""
    return number("a finite number > 0", 0.0, open_low=True, **values)


def limit(**values: Unchecked) -> float:
    """Return the one keyword value as a limit: a float from 1e-30 to 1e30.

    Beyond, products of gradients and limits would leave the numbers of float32.
    """
    name, value = _one(values)
    if isinstance(value, numbers.Real) and value == math.inf:
        hint = "for no limit, give None to a clipper that learns it; take NoOp for norms alone"
        raise ValueError(f"{name} must be a finite number > 0, got inf: {hint}")
    result = positive(**values)
    if not LEAST <= result <= MOST:
        allowed = f"a number from {LEAST:g} to {MOST:g}"
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}: others leave float32")
    return result


def non_negative(**values: Unchecked) -> float:
    """Return the one keyword value as a finite float >= 0."""
    return number("a finite number >= 0", 0.0, **values)


def at_least_one(**values: Unchecked) -> float:
    """Return the one keyword value as a finite float >= 1."""
    return number("a finite number >= 1", 1.0, **values)


def up_to(high: float, **values: Unchecked) -> float:
    """Return the one keyword value as a float > 0 and <= high."""
    return number(f"a number > 0 and <= {high:g}", 0.0, high, open_low=True, **values)


def unit_interval(**values: Unchecked) -> float:
    """Return the one keyword value as a float strictly between 0 and 1."""
    allowed = "a number strictly between 0 and 1"
    return number(allowed, 0, 1, open_low=True, open_high=True, **values)


def share(**values: Unchecked) -> float:
    """Return the one keyword value if it is in [0, 1)."""
    return number("a number in [0, 1)", 0.0, 1.0, open_high=True, **values)


def fraction(**values: Unchecked) -> float:
    """Return the one keyword value if it is in (0, 1]."""
    return number("a number in (0, 1]", 0.0, 1.0, open_low=True, **values)


def integer(low: int, high: int = _LARGEST, /, **values: object) -> int:
    """Return the one keyword value as an int from low to high; 25.0 is not an int."""
    name, value = _one(values)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _typed(name, f"an int >= {low}", value)
    if not low <= int(value) <= high:
        allowed = f">= {low}" if value < low else f"<= {high}"
        raise ValueError(f"{name} must be an int {allowed}, got {shown(value)}")
    return int(value)


def boolean(**values: object) -> bool:
    """Return the one keyword value if it is True or False; 1 and "true" are not."""
    name, value = _one(values)
    if not isinstance(value, bool):
        raise _typed(name, "True or False", value)
    return value


def name(**values: object) -> str:
    """Return the one keyword value if it is a string that is not empty."""
    key, value = _one(values)
    if not isinstance(value, str):
        raise _typed(key, "a string", value)
    if not value:
        raise ValueError(f"{key} must be a string that is not empty, got {shown(value)}")
    return value


def choice(allowed: Sequence[str], **values: object) -> str:
    """Return the one keyword value if it is one of the `allowed` words."""
    name, value = _one(values)
    words = f"one of {', '.join(map(repr, allowed))}"
    if not isinstance(value, str):
        raise _typed(name, words, value)
    if value not in allowed:
        raise ValueError(f"{name} must be {words}, got {shown(value)}{nearest(value, allowed)}")
    return value


def signature_of(cls: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that a plug-in's constructor takes, by name."""
    # Look at `__init__`, not at `__new__`: a plug-in's `__new__` takes anything, to refuse typos.
    signature = getattr(cls, "__signature__", None) or inspect.signature(cls.__init__)
    return {name: p for name, p in signature.parameters.items() if name != "self"}


def refuse_unknown(cls: Any, config: Mapping[str, object]) -> None:
    """Raise a TypeError, with the nearest name, for a parameter that a plug-in does not have."""
    known = signature_of(cls)
    for key in config:
        if key not in known:
            hint = f"{nearest(key, known)}; its parameters are {', '.join(known)}"
            raise TypeError(f"{cls.name} has no parameter {key!r}{hint}")


@dataclass(frozen=True)
class Parameter:
    """The declaration of one parameter of a class.

    Attributes
    ----------
    check, allowed, default, kw_only, kind
        Those of `parameter`.
    common : bool
        Whether it comes from a base class without a name, which many plug-ins have.
    """

    check: Callable[..., object] | None
    allowed: tuple[Any, ...]
    default: object
    kw_only: bool
    kind: str
    annotation: str = ""
    common: bool = False

    def over(self, before: Parameter | None, annotation: object, common: bool) -> Parameter:
        """Return the parameter as a class has it; what is not said is as in the class before."""
        if annotation is not None and not isinstance(annotation, str):
            annotation = inspect.formatannotation(annotation)
        before = before or replace(self, annotation="", common=common)
        return replace(
            before,
            check=self.check or before.check,
            allowed=self.allowed if self.check else before.allowed,
            default=before.default if self.default is _NOTHING else self.default,
            kind=self.kind or before.kind,
            annotation=annotation or before.annotation,
        )

    def checked(self, name: str, value: object) -> object:
        """Return the checked value."""
        optional = "None" in self.annotation or "Optional" in self.annotation
        if self.check is None or (value is None and optional):
            return value
        return self.check(*self.allowed, **{name: value})

    def formal(self, name: str) -> inspect.Parameter:
        """Return the parameter as it stands in a signature."""
        kind = inspect.Parameter.KEYWORD_ONLY if self.kw_only else _BY_PLACE
        return inspect.Parameter(name, kind, default=self.default, annotation=self.annotation)


def parameter(
    check: Callable[..., object] | None = None,
    *allowed: object,
    default: object = _NOTHING,
    kw_only: bool = True,
    kind: str = "",
) -> Any:
    """Declare a parameter of a `Configured` class: the value of an annotated field.

    Where a base class has it already, what is left out is as there.

    Parameters
    ----------
    check : callable or None, default=None
        One of the checks of this file, or another that takes the value by the parameter's name.
        None, where the annotation allows it, is not asked about.
    *allowed
        What the check takes before the value.
    default
        What the parameter is if it is not given; without it, it must be given.
    kw_only : bool, default=True
        Whether it is given by its name only, and not by its position.
    kind : str, default=""
        Its type in the documentation, if annotation and check do not say it.
    """
    return Parameter(check, allowed, default, kw_only, kind)


@dataclass_transform(kw_only_default=True, field_specifiers=(parameter,))
class Configured:
    """Base of plug-ins that declare their parameters, refuse unknown ones, and keep the others.

    Each value is kept under its parameter's name. Then `__post_init__` is called, which checks
    what must go together. A class that writes an `__init__` writes its parameters there.

    Attributes
    ----------
    parameters : mapping
        The declared parameters, by name: a class's own first.
    """

    name: ClassVar[str]
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({})
    # The order of the common ones, which follow.
    _common_order: ClassVar[Sequence[str]] = ()
    _signature: ClassVar[inspect.Signature]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Collect the parameters, of the bases too."""
        super().__init_subclass__(**kwargs)
        collected: dict[str, Parameter] = {}
        for base in reversed(cls.__bases__):
            collected |= getattr(base, "parameters", {})
        annotations = vars(cls).get("__annotations__", {})
        for name, value in list(vars(cls).items()):
            if isinstance(value, Parameter):
                common = not hasattr(cls, "name")
                collected[name] = value.over(collected.get(name), annotations.get(name), common)
                setattr(cls, name, collected[name].default)
        known = [*cls._common_order, *collected]
        # Those by position come first, then a class's own ones.
        of = {n: (p.kw_only, known.index(n) if p.common else -1) for n, p in collected.items()}
        cls.parameters = {name: collected[name] for name in sorted(collected, key=of.__getitem__)}
        formal = inspect.Signature([p.formal(name) for name, p in cls.parameters.items()])
        cls._signature = cls.__signature__ = formal
        if cls.__init__ is not Configured.__init__:
            written = [*inspect.signature(cls.__init__).parameters.values()]
            cls.__signature__ = inspect.Signature(written[1:])

    def __new__(cls, *args: object, **config: object) -> Self:
        """Refuse unknown parameters, with the nearest name."""
        # Not in __init__: here a typo gets an answer with the nearest name in Python, in
        # declearn's specs and in TOML.
        refuse_unknown(cls, config)
        return super().__new__(cls)

    def __init__(self, *args: object, **values: object) -> None:
        bound = self._signature.bind(*args, **values)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            setattr(self, name, self.parameters[name].checked(name, value))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Go on from the parameters, which are all set."""

    def check_goes_with(self, name: str, other: str, needed: object) -> None:
        """Raise a ValueError for a parameter that is not at its default, unless another fits."""
        value, actual = getattr(self, name), getattr(self, other)
        if value != self.parameters[name].default and actual != needed:
            got = f"{name}={value!r} with {other}={actual!r}"
            raise ValueError(f"{name} goes with {other}={needed!r} only, got {got}")

    def get_config(self) -> Config:
        """Return the parameters, as they would be written in a TOML file."""
        return config_of(self)

    def __repr__(self) -> str:
        changed = changed_from_default(type(self), config_of(self))
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def config_of(plugin: object) -> Config:
    """Return the parameters of a plug-in, which keeps them under their own names."""
    return {name: getattr(plugin, name) for name in signature_of(type(plugin))}


def changed_from_default(cls: type, config: Mapping[str, object]) -> Config:
    """Return the parameters of a plug-in's configuration that are not at their defaults."""
    known = signature_of(cls)
    return {k: v for k, v in config.items() if k not in known or v != known[k].default}


# Largest size of a window: a state can still hold it, and a step sorts it in a millisecond.
LARGEST_WINDOW = 65_536
