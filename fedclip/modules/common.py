# SPDX-License-Identifier: Apache-2.0
"""The parameters that clippers have in common: name, default, check and words, once.

A clipper takes them as ``**common: Unpack[...]``, with one of the dictionaries below. `Clipper`
checks them, sets them as attributes, and gives the class the signature and the docstring that
it would have if they had been written out.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, get_args, get_type_hints

from fedclip import parameters
from fedclip.measures import Order, check_order
from fedclip.scopes import Scope, check_exclude, check_scope

__all__ = [
    "COMMON",
    "ORD_VAR",
    "SCOPE_NORM",
    "SCOPE_TABLE",
    "Common",
    "Exact",
    "Limited",
    "Measured",
    "Parameter",
    "Preset",
    "Remembering",
    "Shared",
    "common_of",
    "docstring_of",
    "signature_of",
]


class Parameter(NamedTuple):
    """One parameter; `check` takes the value by the parameter's name, and returns it."""

    default: Any
    check: Callable[..., Any]
    type: str
    meaning: str

    def but(self, **changes: Any) -> Parameter:
        """Return the parameter with other words, another default or another check."""
        return self._replace(**changes)

    def entry(self, name: str) -> str:
        """Return the lines of a numpydoc docstring."""
        default = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        meaning = textwrap.indent(textwrap.fill(self.meaning, 92, break_on_hyphens=False), " " * 4)
        return f"{name} : {self.type}, default={default}\n{meaning}"


COMMON = {
    "include_current": Parameter(
        False,
        parameters.boolean,
        "bool",
        'Let the statistics learn a norm before they judge it; needs ``feedback="raw"``.',
    ),
    "warmup": Parameter(
        20,
        partial(parameters.integer, 0),
        "int",
        "Number of norms, >= 0, that only fill the statistics, as the first norm always does.",
    ),
    "warmup_norm": Parameter(
        None,
        partial(parameters.optional, parameters.positive),
        "float or None",
        "Fixed limit until the statistics are full, in the units of the gradient; None for none.",
    ),
    "warmup_factor": Parameter(
        2.25,
        partial(parameters.optional, parameters.at_least_one),
        "float or None",
        "Limit until the statistics are full, in medians of the last five norms, >= 1. The "
        "statistics learn a norm above it, a spike, as 1.1 medians, and do not learn the first "
        "five norms (see `fedclip.rules.start`). None for no limit: they learn all norms as they "
        "are.",
    ),
    "max_norm": Parameter(
        None,
        partial(parameters.optional, parameters.positive),
        "float or None",
        "Fixed limit at every step; no adaptive limit is above it.",
    ),
    "on_spike": Parameter(
        "clip",
        partial(parameters.choice, ("clip", "skip")),
        '{"clip", "skip"}',
        '"skip" zeroes a group that is over its limit instead of clipping it.',
    ),
    "scope": Parameter(
        "global",
        check_scope,
        '{"global", "tensor", "layer"} or list of patterns',
        "Which tensors share a norm, and statistics.",
    ),
    "ord": Parameter(
        2,
        check_order,
        'float or {"inf", "rms", "mad", "std"}',
        "The measure (see `fedclip.measures`).",
    ),
    "eps": Parameter(
        0.0,
        parameters.non_negative,
        "float",
        "Added to the norm in the factor ``limit / (n + eps)``; 0 is exact.",
    ),
    "exclude": Parameter(
        None, check_exclude, "pattern, list of patterns or None", "Tensors left alone."
    ),
    "on_nonfinite": Parameter(
        "skip",
        partial(parameters.choice, ("skip", "raise", "propagate")),
        '{"skip", "raise", "propagate"}',
        "What happens to a gradient with NaN or infinity (see `fedclip.modules.Clipper`).",
    ),
    "shared": Parameter(
        False,
        parameters.boolean,
        "bool",
        "Whether all clients of a federation share one state, and so one limit; the server's "
        "optimizer must then have `{name}-server`. The state does not change during a round.",
    ),
    "shared_name": Parameter(
        None,
        partial(parameters.optional, parameters.name),
        "str or None",
        "Name of this pair of clipper and counterpart, if there are several pairs of a kind.",
    ),
}
"""The common parameters, in the order in which they follow a clipper's own."""

SCOPE_NORM = COMMON["scope"].but(meaning="Which tensors share a norm.")
SCOPE_TABLE = COMMON["scope"].but(
    check=partial(check_scope, limits=True),
    type='{"global", "tensor", "layer"}, list of patterns or table',
)
"""A scope that may be a table of limits."""
ORD_VAR = COMMON["ord"].but(type='float or {"inf", "rms", "mad", "std", "var"}')
"""Orders with the variance, for limits that are fixed."""


class Preset(NamedTuple):
    """Published defaults, as arguments of `fedclip.compat.translate`."""

    peer: str
    cls: str
    config: Mapping[str, Any] = MappingProxyType({})
    """Values for parameters without a published default."""


class Common(TypedDict, total=False):
    """Parameters of every clipper."""

    scope: Scope
    exclude: str | Sequence[str] | None
    on_nonfinite: str


class Measured(Common, total=False):
    """Parameters of clippers that measure a norm."""

    ord: Order


class Exact(Measured, total=False):
    """Parameters of clippers that bring a norm to a limit."""

    eps: float


class Limited(Exact, total=False):
    """Parameters of clippers whose limit follows from past norms."""

    max_norm: float | None
    on_spike: str


class Shared(Limited, total=False):
    """Parameters of clippers that can share their statistics."""

    shared: bool
    shared_name: str | None


class Remembering(Shared, total=False):
    """Parameters of clippers with statistics of the norms themselves."""

    include_current: bool
    warmup: int
    warmup_norm: float | None
    warmup_factor: float | None


@cache
def common_of(cls: Any) -> dict[str, Parameter]:
    """Return the common parameters that a clipper's constructor takes, as the clipper has them."""
    rest = _rest(cls)
    taken = get_args(get_type_hints(cls.__init__).get(rest)) if rest else ()
    names = get_type_hints(taken[0] if taken else Common)
    return {n: cls.differs.get(n, p) for n, p in COMMON.items() if n in names}


def _rest(cls: Any) -> str:
    """Return the name of a constructor's ``**`` parameter; "" if there is none."""
    found = inspect.signature(cls.__init__).parameters.values()
    return next((p.name for p in found if p.kind is p.VAR_KEYWORD), "")


def signature_of(cls: Any) -> inspect.Signature:
    """Return the signature of a clipper's constructor with the common parameters written out."""
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if _rest(cls):
        own[-1:] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=parameter.default)
            for name, parameter in common_of(cls).items()
        ]
    return inspect.Signature(own)


def docstring_of(cls: Any) -> str:
    """Return a clipper's docstring with entries for the common parameters after its own."""
    entries = [parameter.entry(name) for name, parameter in common_of(cls).items()]
    return re.sub(
        r"(\nParameters\n-{10}\n.*?)(?=\n\n\w[\w ]*\n-{3,}\n|\Z)",
        lambda found: "\n".join([found[1], *entries]).replace("{name}", cls.name),
        inspect.cleandoc(cls.__doc__),
        count=1,
        flags=re.DOTALL,
    )
