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
from fedclip.transforms.slice import check_dims


class Parameter(NamedTuple):
    """One parameter; `check` takes the value by the parameter's name, and returns it."""

    default: Any
    check: Callable[..., Any]
    type: str
    meaning: str

    def entry(self, name: str) -> str:
        """Return the lines of a numpydoc docstring."""
        default = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        meaning = textwrap.indent(textwrap.fill(self.meaning, 92, break_on_hyphens=False), " " * 4)
        return f"{name} : {self.type}, default={default}\n{meaning}"


COMMON = {
    "dims": Parameter(
        None,
        check_dims,
        "int, list of int or None",
        "Makes each slice of a tensor a group of its own. A slice spans these dimensions; "
        'negative ones count from the end. Goes with the scopes "global" and "tensor", which '
        "then mean the same.",
    ),
    "inverse_dims": Parameter(
        False,
        parameters.boolean,
        "bool",
        "Let the slices span all dimensions except `dims`.",
    ),
    "min_size": Parameter(
        1,
        partial(parameters.integer, 1),
        "int",
        'Leave alone slices with fewer elements; with the scope "tensor", tensors with fewer.',
    ),
    "include_current": Parameter(
        False,
        parameters.boolean,
        "bool",
        "Let the statistics learn a norm before they judge it, not after; needs "
        '``feedback="raw"``.',
    ),
    "warmup": Parameter(
        20,
        partial(parameters.integer, 0),
        "int",
        "Number of norms, >= 0, that only fill the statistics, before these set the limit. "
        "The first norm always does.",
    ),
    "warmup_norm": Parameter(
        None,
        partial(parameters.optional, parameters.positive),
        "float or None",
        "Fixed limit during the warm-up, in the units of the gradient; None for none.",
    ),
    "warmup_factor": Parameter(
        2.25,
        partial(parameters.optional, parameters.at_least_one),
        "float or None",
        "Limit during the warm-up, as a multiple of the median of the last five norms, >= 1. "
        "A norm above it is a spike: the statistics learn it as 1.1 medians, and they do not "
        "learn the first five norms (see `fedclip.rules.start`). None for no limit: they "
        "learn all norms as they are.",
    ),
    "max_norm": Parameter(
        None,
        partial(parameters.optional, parameters.positive),
        "float or None",
        "Fixed limit at every step, in the units of the gradient: the learnt limit is never "
        "above it. None for none.",
    ),
    "on_spike": Parameter(
        "clip",
        partial(parameters.choice, ("clip", "skip")),
        '{"clip", "skip"}',
        'What becomes of a group that is over its limit: it is clipped, or set to zero ("skip").',
    ),
    "scope": Parameter(
        "global",
        check_scope,
        '{"global", "tensor", "layer"} or list of patterns',
        "Which tensors share a norm, and statistics: all of them, each by itself, those of a "
        "layer, or those whose names match a pattern.",
    ),
    "ord": Parameter(
        2,
        check_order,
        'float or {"inf", "rms", "mad", "std"}',
        "Which norm is measured: 2 is the Euclidean one; `fedclip.measures` has the others.",
    ),
    "eps": Parameter(
        0.0,
        parameters.non_negative,
        "float",
        "Added to the norm in the factor ``limit / (n + eps)``; 0 is exact.",
    ),
    "exclude": Parameter(
        None,
        check_exclude,
        "pattern, list of patterns or None",
        "Names, or patterns of names, of the tensors that are left alone.",
    ),
    "on_nonfinite": Parameter(
        "skip",
        partial(parameters.choice, ("skip", "raise", "propagate")),
        '{"skip", "raise", "propagate"}',
        "What becomes of a gradient with NaN or infinity: it is set to zero and counted, it "
        "raises an error, or it passes (see `fedclip.modules.Clipper`).",
    ),
    "keep_memory": Parameter(
        True,
        parameters.boolean,
        "bool",
        "Whether to keep the memory of an output for the next one (see `fedclip.modules.Clipper`).",
    ),
    "shared": Parameter(
        False,
        parameters.boolean,
        "bool",
        "Let all clients of a federation share one state, and so one limit. The server's "
        "optimizer must then have `{name}-server`. The state does not change during a round.",
    ),
    "shared_name": Parameter(
        None,
        partial(parameters.optional, parameters.name),
        "str or None",
        "Name of this pair of clipper and counterpart, needed if there are several pairs of a "
        "kind.",
    ),
}
"""The common parameters, in the order in which they follow a clipper's own."""

SCOPE_NORM = COMMON["scope"]._replace(
    meaning="Which tensors share a norm: all of them, each by itself, those of a layer, or those "
    "whose names match a pattern."
)
SCOPE_ELEMENTS = COMMON["scope"]._replace(
    meaning="Which tensors are reported on together; every element has its own limit."
)
SCOPE_TABLE = COMMON["scope"]._replace(
    check=partial(check_scope, limits=True),
    type='{"global", "tensor", "layer"}, list of patterns or table',
)
"""A scope that may be a table of limits."""
ORD_VAR = COMMON["ord"]._replace(type='float or {"inf", "rms", "mad", "std", "var"}')
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
    keep_memory: bool


class Sliced(Common, total=False):
    """Parameters of clippers that can treat each slice of a tensor by itself."""

    dims: int | Sequence[int] | None
    inverse_dims: bool
    min_size: int


class Measured(Common, total=False):
    """Parameters of clippers that measure a norm."""

    ord: Order


class Exact(Measured, total=False):
    """Parameters of clippers that bring a norm to a limit."""

    eps: float


class Fixed(Sliced, Exact, total=False):
    """Parameters of clippers that bring the norm of a group, or of a slice, to a fixed limit."""


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


PHRASES = {
    "resumed": "it goes on from one round of a client to the next, and a run that is saved and "
    "resumed gives the same outputs, bit for bit",
    "learnt": "Guarantees: no output norm is above its limit, nor above `max_norm`; without spikes "
    "the very same Vector comes back; NaN and infinity never reach the statistics",
    "private": "For differential privacy only `max_norm` counts: the learnt limit depends on the "
    "data, and bounds no sensitivity",
    "arrays": "State: for each tensor, an array of its shape (float64 for float64, else float32) "
    "on its device, and its number of steps; as much memory as the model. A run that is saved and "
    "resumed gives the same outputs, bit for bit",
}
"""What several docstrings say: ``{resumed}`` in a docstring stands for the words here."""

_RAISES = """Raises
------
TypeError, ValueError
    At construction, if a parameter is not as above or two do not go together; at a gradient, if
    a pattern matches no tensor{or_shape}."""
_IMPORTS = """\
>>> import numpy as np
>>> from declearn.model.sklearn import NumpyVector
"""
_OR_SHAPE = ", or its shape is not that of the state"


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
    """Return a clipper's docstring, with what it has in common with others written out.

    The entries of common parameters follow its own. A clipper without parameters of its own has
    those of the clipper that it is made from, one without "Raises" has the usual errors, and an
    example without imports has the usual ones.
    """
    text = inspect.cleandoc(cls.__doc__)
    raises = _RAISES.format(or_shape=_OR_SHAPE if "{arrays}" in text else "")
    head, found = _sections("\n\n".join(map(_filled, text.split("\n\n"))))
    if "Parameters" in found or "__init__" in vars(cls):
        entries = [parameter.entry(name) for name, parameter in common_of(cls).items()]
        own = found.get("Parameters", "Parameters\n----------")
        found["Parameters"] = "\n".join([own, *entries])
    elif hasattr(cls.__base__, "name"):
        found = {**_sections(cls.__base__.__doc__)[1], **found}
    else:
        return text
    found = {"Parameters": found["Parameters"], "Raises": raises, **found}
    if "import " not in (examples := found.get("Examples", "import ")):
        found["Examples"] = examples.replace("--------\n", f"--------\n{_IMPORTS}", 1)
    return "\n\n".join([head, *found.values()]).replace("{name}", cls.name)


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Return what comes before the first heading, and the sections by heading."""
    head, *sections = re.split(r"\n\n(?=\w[\w ]*\n-{3,}\n)", text)
    return head, {section.partition("\n")[0]: section for section in sections}


def _filled(paragraph: str) -> str:
    for name, words in PHRASES.items():
        if f"{{{name}}}" in paragraph:
            *heading, text = re.split(r"(?<=---\n)", paragraph.replace(f"{{{name}}}", words))
            paragraph = "".join([*heading, textwrap.fill(text, 96, break_on_hyphens=False)])
    return paragraph
