# SPDX-License-Identifier: Apache-2.0
r"""What each map does to the L2 norm: one small function per kind of map, in one table.

====================================  ===============================  ========================
map                                   largest L2 norm of its output    stretches distances by
====================================  ===============================  ========================
L2 limit C                            C, or C √k for k groups          1
order p <= 2                          C √k                             d^(1/p - 1/2), p >= 1
order p > 2, of d elements            C d^(1/2 - 1/p)                  d^(1/2 - 1/p)
maximum, root mean square             C √d                             √d; 1
mean of absolute values               C d                              √d
standard deviation, variance          none: the mean is left alone     without limit
values in [-c, c]                     c √d                             1
slices, units: r each, u of them      r √u                             1
brought to a norm N (+ eps)           as a limit at N                  N / eps
mean 0, deviation 1                   √(d - k)                         1 / eps
mean taken away                       none                             1
limit learnt from gradients           that of max_norm                 without limit
====================================  ===============================  ========================

The bound of several groups is the root of the sum of their squared bounds. Bounds are rounded up,
and never too low. Those of fedclip's clippers hold in every dtype, because they scale to
a little below the limit; those of declearn's clippers hold in float32 and wider. The stretching of
distances is that of exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from fedclip.core.measures import Order
from fedclip.core.scopes import resolve

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor, by name."""


@dataclass(frozen=True)
class Context:
    """Facts about the gradients that a map receives.

    Attributes
    ----------
    shapes
        Shape of each tensor; None if unknown.
    finite
        Whether the gradients have no NaN and no infinity, and no norm is beyond float64.
    """

    shapes: Shapes | None = None
    finite: bool = False


@dataclass(frozen=True)
class Guarantee:
    """The guarantee of one map, and the reasons why it is not stronger.

    Attributes
    ----------
    name
        Registered name of the plug-in.
    bound
        Largest L2 norm of the output for any input; infinity if unknown.
    formula
        The bound in words. If `bound` is infinite and there is a formula, the bound needs shapes.
    lipschitz
        Largest factor on the distance of two inputs, or of two histories of inputs if the map has a
        memory; infinity if unbounded.
    growth
        Largest factor on the norm of the input.
    finite
        Whether the output is finite.
    noise
        Whether it adds noise.
    unbounded
        Why it has no bound; empty if it has one.
    shared
        Why its output depends on more than its input record and public values; empty if it does
        not.
    expands
        Why it may increase distances; empty if it does not.
    """

    name: str
    bound: float = math.inf
    formula: str = ""
    lipschitz: float = math.inf
    growth: float = math.inf
    finite: bool = False
    noise: bool = False
    unbounded: str = ""
    shared: str = ""
    expands: str = ""


Plugin: TypeAlias = Any
"""A clipper, module or regularizer of whatever class, by the names of its parameters."""
GuaranteeFunction: TypeAlias = Callable[[Plugin, Context], Guarantee]
"""A function that returns what a plug-in guarantees."""


class Piece(NamedTuple):
    """A number of groups of `size` elements, each with the same `limit`."""

    limit: float
    size: int
    times: int = 1


def formula_of(limit: float, ord: Order, noun: str) -> str:
    """Return the bound, in words, of groups called `noun`; "" means all elements together."""
    c = number(limit)
    each = f"of each {noun}" if noun else ""
    if ord in ("inf", "rms"):
        return f"{c}·√d for d elements"
    if ord == "mad":
        return f"{c}·√(Σ dⱼ²) for dⱼ elements {each}" if noun else f"{c}·d for d elements"
    p = float(ord)
    if p <= 2:
        return f"{c}·√k for k {noun}s" if noun else c
    if noun:
        return f"{c}·√(Σ dⱼ^(1 - 2/{p:g})) for dⱼ elements {each}"
    return f"{c}·d^(1/2 - 1/{p:g}) for d elements"


_LEARNT = "its limit is learnt from the gradients of earlier steps"
_PRESENT = "and from the very one that it clips"
_LEFT_OUT = "{} left alone, and may be of any size"
_NAN = "NaN and infinity are passed on (on_nonfinite='propagate'), and have no norm"


# -- which groups there are -------------------------------------------------------------------
_Scoped: TypeAlias = tuple[list[Piece] | None, str, str]
"""The groups of a clipper: pieces, their name in words, and the tensors left alone."""


def _finite(clipper: Plugin, context: Context, unclipped: object) -> bool:
    """Whether the output is finite, where `unclipped` tensors come out unchanged."""
    return context.finite or (clipper.on_nonfinite != "propagate" and not unclipped)


def _scoped(clipper: Plugin, limit: float, context: Context) -> _Scoped:
    """Return the groups of a clipper, each with its own limit, else `limit`."""
    scope, shapes = clipper.scope, context.shapes
    sliced = getattr(clipper, "dims", None) is not None or getattr(clipper, "min_size", 1) > 1
    noun = "slice" if sliced else scope if isinstance(scope, str) else "group"
    noun = "" if noun == "global" else noun
    if shapes is None:
        return _without_shapes(clipper, limit, noun, sliced)
    groups = resolve(scope, clipper.exclude, list(shapes))
    unclipped = [n for n in groups.excluded if math.prod(shapes[n])]
    pieces = []
    if sliced:
        axes_of = clipper.transform(groups).axes
        for name in groups.names:
            shape = shapes[name] or (1,)
            if (axes := axes_of(shape)) is not None:
                count = math.prod(n for a, n in enumerate(shape) if a not in axes)
                pieces.append(Piece(limit, math.prod(shape[a] for a in axes), count))
            elif math.prod(shape):
                unclipped.append(name)
    else:
        scopes = scope if isinstance(scope, Mapping) else {}
        for label, members in zip(groups.labels, groups.members, strict=True):
            size = sum(math.prod(shapes[groups.names[i]]) for i in members)
            pieces += [Piece(scopes.get(label, limit), size)] if size else []
    return pieces, noun, _left_out(unclipped)


def _without_shapes(clipper: Plugin, limit: float, noun: str, sliced: bool) -> _Scoped:
    note = "tensors without these dimensions, or too small, are" if sliced else ""
    if clipper.exclude:
        note = f"tensors like {', '.join(map(repr, clipper.exclude))} are"
    note = _LEFT_OUT.format(note) if note else ""
    if isinstance(clipper.scope, str):
        return [Piece(limit, 0)] if noun == "" else None, noun, note
    # At most one group for each pattern, and one for the rest.
    scopes = clipper.scope if isinstance(clipper.scope, Mapping) else dict.fromkeys(clipper.scope)
    limits = [limit if value is None else value for value in scopes.values()]
    return [Piece(value, 0) for value in [*limits, limit]], noun, note


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(map(repr, sorted(names)[:3])) + (" …" if len(names) > 3 else "")
    return _LEFT_OUT.format(f"{shown} {'is' if len(names) == 1 else 'are'}")


# -- limits on norms --------------------------------------------------------------------------
def _limited(clipper: Plugin, max_norm: float | None, context: Context) -> Guarantee:
    """Return the map of a clipper that scales each group down to a limit, if there is one."""
    ord: Order = clipper.ord
    limit = math.inf if max_norm is None else max_norm
    pieces, noun, note = _scoped(clipper, limit, context)
    finite = _finite(clipper, context, note)
    lipschitz, why = 1.0, ""
    if ord not in (2, "rms"):
        why = f"scaling down to a limit of order {ord!r} is no projection in the L2 norm"
        lipschitz = max((stretch(ord, p.size) for p in pieces or () if p.times), default=1.0)
        lipschitz = math.inf if context.shapes is None else lipschitz
    result = Guarantee(clipper.name, lipschitz=lipschitz, growth=1.0, finite=finite, expands=why)
    if note:
        return replace(result, unbounded=note)
    if math.isinf(l2_of(ord, 1.0, 2)):
        return replace(result, unbounded=f"a limit on the {ord} leaves the mean alone")
    if not finite:
        return replace(result, unbounded=_NAN)
    if any(math.isinf(piece.limit) for piece in pieces or [Piece(limit, 0)]):
        return replace(result, unbounded="there is no upper limit (max_norm=None)")
    formula = formula_of(limit, ord, noun)
    if isinstance(clipper.scope, Mapping):
        formula = "√(Σ Cⱼ²) for the L2 norms Cⱼ that the limits of the groups allow"
    bound = math.inf
    # A bound that depends on the number of elements needs shapes.
    if pieces is not None and (context.shapes is not None or l2_of(ord, 1.0, 4) == 1.0):
        bound = root_of_squares((l2_of(ord, p.limit, p.size), p.times) for p in pieces)
    return replace(result, bound=bound, formula=formula)


def fixed_limit(clipper: Plugin, context: Context) -> Guarantee:
    """Return the map of a fixed limit on norms; it may also scale small norms up."""
    result = _limited(clipper, clipper.max_norm, context)
    if clipper.min_norm is None:
        return result
    why = "short gradients are scaled up (min_norm), in every direction"
    return replace(result, lipschitz=math.inf, growth=math.inf, expands=why)


def brought_to_norm(clipper: Plugin, context: Context) -> Guarantee:
    """Return the map of a division by the norm."""
    result = _limited(clipper, clipper.norm, context)
    why = "short gradients are scaled up, in every direction"
    if not clipper.eps:
        return replace(result, lipschitz=math.inf, growth=math.inf, expands=why)
    norms = clipper.scope.values() if isinstance(clipper.scope, Mapping) else ()
    steepest = slope(max([clipper.norm, *norms]), clipper.eps)
    # Tensors left alone keep their distances.
    least = 1.0 if result.unbounded else 0.0
    lipschitz = max(steepest * result.lipschitz, least)
    why = "" if lipschitz <= 1 else f"{why} by up to norm / eps = {number(steepest)}"
    return replace(result, lipschitz=lipschitz, growth=lipschitz, expands=why)


def learnt_limit(clipper: Plugin, context: Context) -> Guarantee:
    """Return the map of a limit that follows gradients; only `max_norm` bounds it."""
    result = _limited(clipper, clipper.max_norm, context)
    learnt = _LEARNT + f" {_PRESENT}" * getattr(clipper, "include_current", False)
    if clipper.max_norm is None:
        result = replace(result, unbounded=f"{learnt}, and max_norm is not set")
    return replace(result, lipschitz=math.inf, shared=learnt, expands=learnt)


# -- limits on values -------------------------------------------------------------------------
def box(clipper: Plugin, context: Context) -> Guarantee:
    """Return the map of fixed limits on values."""
    low = -clipper.max_value if clipper.min_value is None else clipper.min_value
    high = clipper.max_value
    pieces, _, note = _scoped(clipper, max(-low, high), context)
    finite = _finite(clipper, context, note)
    # A box that contains 0 only shortens; any other box moves 0 itself.
    growth = 1.0 if low <= 0.0 <= high else math.inf
    result = Guarantee(clipper.name, lipschitz=1.0, growth=growth, finite=finite)
    if math.isinf(high - low):
        side = "above" if math.isinf(high) else "below"
        return replace(result, unbounded=f"there is no limit {side}")
    if note or not finite:
        return replace(result, unbounded=note or _NAN)
    formula = f"{number(max(-low, high))}·√d for d elements"
    if isinstance(clipper.scope, Mapping):
        formula = "√(Σ cⱼ² dⱼ) for dⱼ elements of each group, limited to cⱼ"
    if pieces is None or context.shapes is None:
        return replace(result, formula=formula)
    bound = root_of_squares((piece.limit, piece.size) for piece in pieces)
    return replace(result, bound=bound, formula=formula)


def own_percentile(clipper: object, context: Context) -> Guarantee:
    """Return the map of a limit at a percentile of the gradient that it clips."""
    why = "its limit is a percentile of the very gradient that it clips"
    expands = "one element moves the limit of all"
    return replace(_followed(clipper, context, ""), unbounded=why, expands=expands)


def past_values(clipper: object, context: Context) -> Guarantee:
    """Return the map of a limit that follows only the gradients of earlier steps."""
    return _followed(clipper, context, _LEARNT)


def present_values(clipper: object, context: Context) -> Guarantee:
    """Return the map of a limit that follows all gradients, the one that it clips included."""
    return _followed(clipper, context, f"{_LEARNT} {_PRESENT}")


def divided_by_average(clipper: object, context: Context) -> Guarantee:
    """Return the map of a division by an average of norms, the current one included."""
    return replace(present_values(clipper, context), growth=math.inf)


def _followed(clipper: Plugin, context: Context, learnt: str) -> Guarantee:
    finite = _finite(clipper, context, _scoped(clipper, 1.0, context)[-1])
    result = Guarantee(clipper.name, growth=1.0, finite=finite, shared=learnt, expands=learnt)
    return replace(result, unbounded=f"{learnt}, and nothing bounds it")


# -- means and deviations ---------------------------------------------------------------------
def centred(clipper: Plugin, context: Context) -> Guarantee:
    """Return the map that subtracts the mean."""
    # An orthogonal projection, plus the rounding of its elements.
    growth, finite = 1.0 + COARSEST, _finite(clipper, context, clipper.exclude)
    why = "it takes the mean away, and limits nothing"
    return Guarantee(clipper.name, lipschitz=1.0, growth=growth, finite=finite, unbounded=why)


def standardised(clipper: Plugin, context: Context) -> Guarantee:
    """Return the map that subtracts the mean and divides by the standard deviation."""
    pieces, noun, note = _scoped(clipper, 1.0, context)
    finite = _finite(clipper, context, note)
    steepest = slope(1.0, clipper.eps)
    why = "gradients that vary little are scaled up"
    if not math.isinf(steepest):
        why += f" by up to 1 / eps = {number(steepest)}"
    lipschitz, why = max(1.0, steepest), "" if steepest <= 1 else why
    growth = lipschitz * (1.0 + COARSEST)
    result = Guarantee(clipper.name, lipschitz=lipschitz, growth=growth, finite=finite, expands=why)
    single = context.shapes is not None and any(p.size == 1 for p in pieces or ())
    if note or single or not finite:
        what = "a group of one element has no deviation, and is left alone"
        return replace(result, unbounded=note or (what if single else _NAN))
    formula = f"√(d - k) for d elements in k {noun}s, if none has only one"
    result = replace(result, formula=formula if noun else "√(d - 1) for d elements")
    if pieces is None or context.shapes is None:
        return result
    freedom = sum(piece.size - 1 for piece in pieces)
    return replace(result, bound=outwards(math.sqrt(freedom)) * (1.0 + COARSEST))


def unchanged(clipper: Plugin, context: Context) -> Guarantee:
    """Return the guarantee of a plug-in that leaves gradients unchanged."""
    why = "it leaves gradients unchanged"
    return Guarantee(clipper.name, lipschitz=1.0, growth=1.0, finite=context.finite, unbounded=why)


# -- the regularizers -------------------------------------------------------------------------
def weight_limit(regularizer: Plugin, context: Context) -> Guarantee:
    """Return the map of limits relative to the norms of weights."""
    shapes, why = context.shapes, ""
    if shapes is not None:
        groups = resolve("tensor", regularizer.excluded(shapes), list(shapes))
        unclipped = [n for n in groups.excluded if math.prod(shapes[n])]
        if regularizer.unit in ("output", "optax"):
            sized = [n for n in groups.names if math.prod(shapes[n])]
            unclipped += [n for n in sized if regularizer.axes(shapes[n]) is None]
        why = _left_out(unclipped)
    elif regularizer.exclude or regularizer.skip_vectors or regularizer.dims is not None:
        why = _LEFT_OUT.format("tensors that are excluded, or without these dims, are")
    finite = _finite(regularizer, context, why)
    result = Guarantee(regularizer.name, lipschitz=1.0, growth=1.0, finite=finite)
    if why or not finite:
        return replace(result, unbounded=why or _NAN)
    least = number(regularizer.min_norm)
    formula = f"{number(regularizer.ratio)}·√(Σ max(|W|, {least})²) over the units of weights W"
    return replace(result, formula=f"{formula}, which have to be public")


def noise(module: Plugin, context: Context) -> Guarantee:
    """Return the map of a plug-in that adds noise."""
    why = "noise is of any size"
    return Guarantee(module.name, noise=True, unbounded=why, expands="it adds noise")


def unchanged_or_noise(module: Plugin, context: Context) -> Guarantee:
    """Return the map of a module of update clipping: no change of the step, or only noise."""
    noisy = getattr(module, "noise_multiplier", 0.0)
    return noise(module, context) if noisy else unchanged(module, context)


def unknown(plugin: Plugin, context: Context) -> Guarantee:
    """Return the map of a plug-in that states no guarantee."""
    why = "no bound is known of it"
    return Guarantee(plugin.name, unbounded=why, shared=why, expands=why)


# -- norms of other orders -------------------------------------------------------------------------
# The uncertainty of a norm measured in float64, plus a few roundings.
_ROUNDING = 2.0**-44
SINGLE = 2.0**-24
"""Half the distance from 1 to the next number of float32."""
COARSEST = 2.0**-8
"""Relative amount by which rounding elements to the nearest bfloat16 may lengthen an array."""


def outwards(value: float) -> float:
    """Return a number above `value` by more than its rounding error.

    >>> outwards(1.0) > 1.0, outwards(1.0) < 1.0 + 1e-13
    (True, True)
    """
    return value * (1.0 + _ROUNDING)


def root_of_squares(bounds: Iterable[tuple[float, int]]) -> float:
    """Return the L2 norm of (value, count) pairs, rounded up; a single value exactly.

    >>> root_of_squares([(3.0, 1)])
    3.0
    >>> 2.0 <= root_of_squares([(1.0, 4)]) < 2.0 + 1e-12
    True
    """
    terms = [(value, count) for value, count in bounds if count]
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    # Relative to the largest, so that no square overflows or vanishes.
    peak = max((value for value, _ in terms), default=0.0)
    if not 0.0 < peak < math.inf:
        return peak
    return outwards(peak * math.sqrt(math.fsum(n * (v / peak) ** 2 for v, n in terms)))


def _powers(ord: Order) -> tuple[float, float]:
    """Return the powers of the number of elements in `l2_of` and `stretch`, if there are any."""
    if isinstance(ord, str):
        no_limit = (math.inf, math.inf)
        # A mean of absolute values may all be in one element.
        return {"inf": (0.5, 0.5), "rms": (0.5, 0.0), "mad": (1.0, 0.5)}.get(ord, no_limit)
    power = 0.5 - 1.0 / ord
    return max(power, 0.0), abs(power) if ord >= 1 else math.inf


def l2_of(ord: Order, limit: float, size: int) -> float:
    """Return the largest L2 norm of `size` numbers whose measure is at most `limit`.

    >>> l2_of(2, 0.5, 10), l2_of(1, 0.5, 10)
    (0.5, 0.5)
    >>> 5.0 <= l2_of("inf", 0.5, 100) < 5.0 + 1e-12
    True
    >>> l2_of("std", 0.5, 10)
    inf
    """
    return _times_power(limit, size, _powers(ord)[0])


def stretch(ord: Order, size: int) -> float:
    """Return the most by which scaling `size` numbers down to a limit stretches distances.

    Outside the ball the derivative is a contraction times an oblique projection. The norm of that
    projection is ``|x| |grad n(x)| / n(x)``; the result is an upper bound of it.

    >>> stretch(2, 100), stretch("rms", 100)
    (1.0, 1.0)
    >>> 10.0 <= stretch("inf", 100) < 10.0 + 1e-12
    True
    >>> stretch(0.5, 100)
    inf
    """
    return _times_power(1.0, size, _powers(ord)[1])


def _times_power(length: float, size: int, power: float) -> float:
    """Return a length times a power of the size, rounded outwards."""
    factor = power if math.isinf(power) else size**power
    return length if factor == 1.0 else outwards(length * factor)


def slope(rise: float, eps: float) -> float:
    """Return ``rise / eps``, rounded up if it is above 1.

    >>> slope(0.5, 0.5), slope(1.0, 0.0)
    (1.0, inf)
    """
    if rise <= eps:
        return rise / eps
    return outwards(rise / eps) if eps else math.inf


def number(value: float) -> str:
    """Return a number as text, with few digits."""
    return f"{value:.6g}"
