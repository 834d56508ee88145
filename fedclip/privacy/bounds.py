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
mean taken away                       none of its own                  1
limit learnt from gradients           that of max_norm                 without limit
momentum, moving average              1/(1-beta) times, 1 times        the same
                                      what comes in
====================================  ===============================  ========================

Several groups have the root of the sum of their squared bounds. Bounds are rounded up: none is
below the truth. Those of fedclip's clippers hold in every dtype, as what is clipped is scaled to
a little below the limit; those of declearn's modules in float32 and wider. How far distances
are stretched is said in exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedclip.arrays import backend_of
from fedclip.arrays.numpy import bits
from fedclip.measures import Order, slice_measures
from fedclip.measures.l2 import decode
from fedclip.scopes import Groups, resolve

__all__ = ["MAPS", "Context", "Map", "Shapes", "look_up"]

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor, by name."""

# The uncertainty of a norm that is measured in float64, and a few roundings besides.
_ROUNDING = 2.0**-44
_SINGLE = 2.0**-24
COARSEST = 2.0**-8
"""By how much, relatively, rounding single elements to the nearest bfloat16 may lengthen."""


@dataclass(frozen=True)
class Context:
    """What is known about the gradients that a map gets.

    Attributes
    ----------
    shapes
        Shape of each tensor; None if not known.
    weights
        The public weights at which `agc` is asked for its limits.
    finite
        Whether they hold no NaN and no infinity, and no norm is beyond float64.
    """

    shapes: Shapes | None = None
    weights: Mapping[str, Any] | None = None
    finite: bool = False


@dataclass(frozen=True)
class Map:
    """What one map guarantees, and why not more.

    Attributes
    ----------
    name
        Registered name of the plug-in.
    bound
        Largest L2 norm of what comes out, whatever comes in; infinity: none is known.
    formula
        The bound in words; if there is one while `bound` is infinite, shapes would give it.
    lipschitz
        By how much at most it stretches the distance of two inputs; of two histories of inputs,
        if it has a memory. Infinity if there is no such number.
    growth
        By how much at most it stretches the norm of its input.
    finite
        Whether what comes out is finite.
    noise
        Whether it adds noise.
    unbounded, shared, expands
        Why it has no bound of its own; why its output depends on more than the record that it
        is given and public values; why it is not non-expansive. Empty where that is not so.
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


class Piece(NamedTuple):
    """So many groups of `size` elements that are held to `limit` each."""

    limit: float
    size: int
    times: int = 1


def outwards(value: float) -> float:
    """Return a number that is above `value` and all that its rounding can have hidden.

    >>> outwards(1.0) > 1.0, outwards(1.0) < 1.0 + 1e-13
    (True, True)
    """
    return value * (1.0 + _ROUNDING)


def root_of_squares(bounds: Iterable[tuple[float, int]]) -> float:
    """Return the L2 norm of so many numbers each, rounded up; of a single one, itself.

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


def l2_of(ord: Order, limit: float, size: int) -> float:
    """Return the largest L2 norm of `size` numbers whose measure is at most `limit`.

    >>> l2_of(2, 0.5, 10), l2_of(1, 0.5, 10)
    (0.5, 0.5)
    >>> 5.0 <= l2_of("inf", 0.5, 100) < 5.0 + 1e-12
    True
    >>> l2_of("std", 0.5, 10)
    inf
    """
    match ord:
        case "inf" | "rms":
            factor = math.sqrt(size)
        case "mad":
            # All of it in one element.
            factor = float(size)
        case "std" | "var":
            return math.inf
        case _:
            p = float(ord)
            factor = 1.0 if p <= 2 else size ** (0.5 - 1.0 / p)
    return limit if factor == 1.0 else outwards(limit * factor)


def stretch(ord: Order, size: int) -> float:
    """Return by how much scaling `size` numbers down to a limit stretches distances at most.

    Outside of the ball the derivative is a contraction times an oblique projection, of the norm
    ``|x| |grad n(x)| / n(x)``, which is what this is an upper bound of.

    >>> stretch(2, 100), stretch("rms", 100)
    (1.0, 1.0)
    >>> 10.0 <= stretch("inf", 100) < 10.0 + 1e-12
    True
    >>> stretch(0.5, 100)
    inf
    """
    match ord:
        case "rms":
            return 1.0
        case "inf" | "mad":
            power = 0.5
        case "std" | "var":
            return math.inf
        case _:
            p = float(ord)
            if p < 1:
                return math.inf
            power = abs(0.5 - 1.0 / p)
    return 1.0 if power == 0.0 or size == 1 else outwards(size**power)


def slope(rise: float, eps: float) -> float:
    """Return ``rise / eps``, rounded up but where it is at most 1.

    >>> slope(0.5, 0.5), slope(1.0, 0.0)
    (1.0, inf)
    """
    if rise <= eps:
        return rise / eps
    return outwards(rise / eps) if eps else math.inf


def number(value: float) -> str:
    """Return a number in words, with as many digits as one reads."""
    return f"{value:.6g}"


def _formula(limit: float, ord: Order, noun: str) -> str:
    """Return the bound of groups that are called `noun`; "" is all elements together."""
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


_LEFT_ALONE = "{} left alone, and may be of any size"
_NAN = "NaN and infinity are passed on (on_nonfinite='propagate'), and have no norm"


# -- which groups there are -------------------------------------------------------------------
class _Scoped(NamedTuple):
    """What is limited together: pieces, what the groups are called, and what is left alone."""

    pieces: list[Piece] | None
    noun: str
    alone: str = ""


def _sizes(groups: Groups, shapes: Shapes) -> list[int]:
    return [sum(math.prod(shapes[groups.names[i]]) for i in m) for m in groups.members]


def _scoped(clipper: Any, limit: float, context: Context) -> _Scoped:
    """Return the groups of a clipper, each with its own limit, else `limit`."""
    scope, shapes = clipper.scope, context.shapes
    sliced = getattr(clipper, "dims", None) is not None or getattr(clipper, "min_size", 1) > 1
    noun = (
        "slice"
        if sliced
        else {"global": "", "tensor": "tensor", "layer": "layer"}.get(
            scope if isinstance(scope, str) else "", "group"
        )
    )
    if shapes is None:
        return _without_shapes(clipper, limit, noun, sliced)
    groups = resolve(scope, clipper.exclude, list(shapes))
    alone = [n for n in groups.excluded if math.prod(shapes[n])]
    pieces = []
    if sliced:
        axes_of = clipper.transform(groups).axes
        for name in groups.names:
            shape = shapes[name] or (1,)
            axes = axes_of(shape)
            if axes is not None:
                count = math.prod(n for a, n in enumerate(shape) if a not in axes)
                pieces.append(Piece(limit, math.prod(shape[a] for a in axes), count))
            elif math.prod(shape):
                alone.append(name)
    else:
        own = scope if isinstance(scope, Mapping) else {}
        sizes = _sizes(groups, shapes)
        pieces = [
            Piece(own.get(label, limit), size)
            for label, size in zip(groups.labels, sizes, strict=True)
            if size
        ]
    return _Scoped(pieces, noun, _alone(alone))


def _without_shapes(clipper: Any, limit: float, noun: str, sliced: bool) -> _Scoped:
    alone = ""
    if clipper.exclude:
        alone = _LEFT_ALONE.format(f"tensors like {', '.join(map(repr, clipper.exclude))} are")
    elif sliced:
        alone = _LEFT_ALONE.format("tensors without these dimensions, or too small, are")
    if isinstance(clipper.scope, str):
        return _Scoped([Piece(limit, 0)] if noun == "" else None, noun, alone)
    # One group for each pattern at most, and one for the rest.
    own = clipper.scope if isinstance(clipper.scope, Mapping) else dict.fromkeys(clipper.scope)
    limits = [limit if value is None else value for value in own.values()]
    return _Scoped([Piece(value, 0) for value in [*limits, limit]], noun, alone)


def _alone(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(map(repr, sorted(names)[:3])) + (" …" if len(names) > 3 else "")
    return _LEFT_ALONE.format(f"{shown} {'is' if len(names) == 1 else 'are'}")


# -- limits on norms --------------------------------------------------------------------------
def _limited(clipper: Any, limit: float, context: Context) -> Map:
    """Return the map of a clipper that scales each group down to a limit."""
    ord: Order = clipper.ord
    pieces, noun, alone = _scoped(clipper, limit, context)
    finite = context.finite or (clipper.on_nonfinite != "propagate" and not alone)
    result = Map(clipper.name, growth=1.0, finite=finite, expands=_oblique(ord))
    if ord in (2, "rms") or pieces is None or context.shapes is None:
        lipschitz = 1.0 if ord in (2, "rms") else math.inf
    else:
        lipschitz = max((stretch(ord, p.size) for p in pieces if p.times), default=1.0)
    result = replace(result, lipschitz=lipschitz)
    if alone:
        return replace(result, unbounded=alone)
    if math.isinf(l2_of(ord, 1.0, 2)):
        return replace(result, unbounded=f"a limit on the {ord} leaves the mean alone")
    if not finite:
        return replace(result, unbounded=_NAN)
    if any(math.isinf(piece.limit) for piece in pieces or [Piece(limit, 0)]):
        return replace(result, unbounded="there is no upper limit (max_norm=None)")
    formula = _formula(limit, ord, noun)
    if isinstance(clipper.scope, Mapping):
        formula = "√(Σ Cⱼ²) for the L2 norms Cⱼ that the limits of the groups allow"
    bound = math.inf
    # Without shapes, what depends on the number of elements is not known.
    if pieces is not None and (context.shapes is not None or l2_of(ord, 1.0, 4) == 1.0):
        bound = root_of_squares((l2_of(ord, p.limit, p.size), p.times) for p in pieces)
    return replace(result, bound=bound, formula=formula)


def _oblique(ord: Order) -> str:
    if ord in (2, "rms"):
        return ""
    return f"scaling down to a limit of order {ord!r} is no projection in the L2 norm"


def _norm_clip(clipper: Any, context: Context) -> Map:
    limit = math.inf if clipper.max_norm is None else clipper.max_norm
    result = _limited(clipper, limit, context)
    if clipper.min_norm is None:
        return result
    return replace(
        result,
        lipschitz=math.inf,
        growth=math.inf,
        expands="short gradients are scaled up (min_norm), in every direction",
    )


def _normalize(clipper: Any, context: Context) -> Map:
    result = _limited(clipper, clipper.norm, context)
    why = "short gradients are scaled up, in every direction"
    if not clipper.eps:
        return replace(result, lipschitz=math.inf, growth=math.inf, expands=why)
    norms = [clipper.norm]
    if isinstance(clipper.scope, Mapping):
        norms += clipper.scope.values()
    steepest = slope(max(norms), clipper.eps)
    # What is left alone is neither stretched nor shrunk.
    least = 1.0 if result.unbounded else 0.0
    lipschitz = max(steepest * result.lipschitz, least)
    return replace(
        result,
        lipschitz=lipschitz,
        growth=lipschitz,
        expands="" if lipschitz <= 1 else why + f" by up to norm / eps = {number(steepest)}",
    )


def _learnt(clipper: Any, context: Context) -> Map:
    """Return the map of a limit that follows gradients; only `max_norm` does not."""
    limit = math.inf if clipper.max_norm is None else clipper.max_norm
    result = _limited(clipper, limit, context)
    learnt = "its limit is learnt from the gradients of earlier steps"
    if getattr(clipper, "include_current", False):
        learnt += " and from the very one that it clips"
    if clipper.max_norm is None:
        result = replace(result, unbounded=f"{learnt}, and nothing holds it (max_norm=None)")
    return replace(result, lipschitz=math.inf, shared=learnt, expands=learnt)


# -- limits on values -------------------------------------------------------------------------
def _value_clip(clipper: Any, context: Context) -> Map:
    low = -clipper.max_value if clipper.min_value is None else clipper.min_value
    high = clipper.max_value
    own = clipper.scope if isinstance(clipper.scope, Mapping) else {}
    pieces, _, alone = _scoped(clipper, max(-low, high), context)
    finite = context.finite or (clipper.on_nonfinite != "propagate" and not alone)
    # A box around 0 shortens; another one moves 0 itself.
    growth = 1.0 if low <= 0.0 <= high else math.inf
    result = Map(clipper.name, lipschitz=1.0, growth=growth, finite=finite)
    if alone or not finite:
        return replace(result, unbounded=alone or _NAN)
    bound = math.inf
    if pieces is not None and context.shapes is not None:
        bound = root_of_squares((piece.limit, piece.size) for piece in pieces)
    formula = f"{number(max(-low, high))}·√d for d elements"
    if own:
        formula = "√(Σ cⱼ² dⱼ) for dⱼ elements of each group, limited to cⱼ"
    return replace(result, bound=bound, formula=formula)


def _percentile_clip(clipper: Any, context: Context) -> Map:
    _, _, alone = _scoped(clipper, 1.0, context)
    return Map(
        clipper.name,
        growth=1.0,
        finite=context.finite or (clipper.on_nonfinite != "propagate" and not alone),
        unbounded="its limit is a percentile of the very gradient that it clips",
        expands="one element moves the limit of all",
    )


def _past(clipper: Any, context: Context) -> Map:
    """Return the map of a limit at the moving average, or growth, of the gradient itself."""
    _, _, alone = _scoped(clipper, 1.0, context)
    learnt = "its limit is learnt from the gradients of earlier steps"
    if clipper.name != "growth-value-clip":
        learnt += " and from the very one that it clips"
    return Map(
        clipper.name,
        growth=math.inf if clipper.name == "ema-normalize" else 1.0,
        finite=context.finite or (clipper.on_nonfinite != "propagate" and not alone),
        unbounded=f"{learnt}, and nothing holds it",
        shared=learnt,
        expands=learnt,
    )


# -- means and deviations ---------------------------------------------------------------------
def _centralize(clipper: Any, context: Context) -> Map:
    return Map(
        clipper.name,
        lipschitz=1.0,
        # An orthogonal projection, whose elements are rounded.
        growth=1.0 + COARSEST,
        finite=context.finite or (clipper.on_nonfinite != "propagate" and not clipper.exclude),
        unbounded="it takes the mean away, and limits nothing",
    )


def _standardize(clipper: Any, context: Context) -> Map:
    pieces, noun, alone = _scoped(clipper, 1.0, context)
    finite = context.finite or (clipper.on_nonfinite != "propagate" and not alone)
    steepest = slope(1.0, clipper.eps)
    why = "gradients that vary little are scaled up"
    if not math.isinf(steepest):
        why += f" by up to 1 / eps = {number(steepest)}"
    result = Map(
        clipper.name,
        lipschitz=max(1.0, steepest),
        growth=max(1.0, steepest) * (1.0 + COARSEST),
        finite=finite,
        expands="" if steepest <= 1 else why,
    )
    single = context.shapes is not None and any(p.size == 1 for p in pieces or ())
    if alone or single or not finite:
        what = "a group of one element has no deviation, and is left alone"
        return replace(result, unbounded=alone or (what if single else _NAN))
    bound = math.inf
    if pieces is not None and context.shapes is not None:
        freedom = sum(piece.size - 1 for piece in pieces)
        bound = outwards(math.sqrt(freedom)) * (1.0 + COARSEST)
    formula = f"√(d - k) for d elements in k {noun}s, if none has only one"
    return replace(result, bound=bound, formula=formula if noun else "√(d - 1) for d elements")


def _no_op(clipper: Any, context: Context) -> Map:
    return Map(
        clipper.name,
        lipschitz=1.0,
        growth=1.0,
        finite=context.finite,
        unbounded="it leaves gradients as they are",
    )


# -- the regularizers -------------------------------------------------------------------------
def _agc(regularizer: Any, context: Context) -> Map:
    shapes = context.shapes
    if shapes is not None:
        patterns = regularizer.excluded(shapes)
        groups = resolve("tensor", patterns, list(shapes))
        alone = [n for n in groups.excluded if math.prod(shapes[n])]
        axes_of = _unit_axes(regularizer)
        alone += [n for n in groups.names if math.prod(shapes[n]) and axes_of(shapes[n]) is None]
        why = _alone(alone)
    elif regularizer.exclude or regularizer.skip_vectors or regularizer.dims is not None:
        why = _LEFT_ALONE.format("tensors that are excluded, or without these dims, are")
    else:
        why = ""
    finite = context.finite or (regularizer.on_nonfinite != "propagate" and not why)
    result = Map(regularizer.name, lipschitz=1.0, growth=1.0, finite=finite)
    if why or not finite:
        return replace(result, unbounded=why or _NAN)
    formula = (
        f"{number(regularizer.ratio)}·√(Σ max(|W|, {number(regularizer.min_norm)})²) over the "
        "units of weights W, which have to be public"
    )
    bound = math.inf
    if context.weights is not None:
        bound = root_of_squares(_unit_limits(regularizer, context.weights))
    return replace(result, bound=bound, formula=formula)


def _unit_axes(regularizer: Any) -> Callable[[tuple[int, ...]], tuple[int, ...] | None]:
    if regularizer.unit == "output":
        axes: Callable[[tuple[int, ...]], tuple[int, ...] | None] = regularizer.slices(()).axes
        return axes
    return lambda shape: tuple(range(len(shape or (1,))))


def _unit_limits(regularizer: Any, weights: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return the limit of each unit at these weights, and how many there are of it."""
    norms = []
    axes_of = _unit_axes(regularizer)
    for array in weights.values():
        view = np.atleast_1d(decode(bits(backend_of(array).to_host(array))))
        axes = axes_of(view.shape)
        if axes is not None and view.size:
            norms += slice_measures(view, axes, 2).ravel().tolist()
    if regularizer.unit == "global":
        norms = [math.hypot(*norms)]
    sound = [norm if math.isfinite(norm) else 0.0 for norm in norms]
    limit = [regularizer.ratio * (max(n, regularizer.min_norm) + regularizer.eps) for n in sound]
    return [(outwards(value), 1) for value in limit]


def _penalty(regularizer: Any, context: Context) -> Map:
    return Map(
        regularizer.name,
        lipschitz=1.0,
        finite=context.finite,
        unbounded="it adds a multiple of the weights, which may be of any size",
    )


# -- declearn's modules -----------------------------------------------------------------------
def _declearn_clip(module: Any, context: Context) -> Map:
    result = Map(module.name, lipschitz=1.0, growth=1.0, finite=context.finite)
    noun = "tensor" if module.name == "l2-clipping" else ""
    limit = float(module.max_norm)
    formula = _formula(limit, 2, noun)
    if not context.finite:
        instead = f"norm-clip with max_norm={limit!r}" + (" and scope='tensor'" if noun else "")
        return replace(
            result,
            unbounded=(
                "it passes NaN and infinity on, which have no norm; for finite gradients it is "
                f"{formula}, and {instead} is so for all"
            ),
        )
    count = 1
    if noun:
        if context.shapes is None:
            return replace(result, formula=formula)
        count = sum(1 for shape in context.shapes.values() if math.prod(shape))
    # It measures and scales in the dtype of the gradient.
    bound = root_of_squares([(limit, count)]) * (1.0 + 16 * _SINGLE)
    return replace(result, bound=bound, formula=formula)


def _linear_memory(module: Any, context: Context) -> Map:
    beta = module.beta
    gain = 1.0 if module.name == "ewma" else 1.0 / (1.0 - beta)
    result = Map(
        module.name,
        lipschitz=outwards(gain) if gain > 1 else 1.0,
        # Each step rounds what is kept, and forgets a part of it.
        growth=gain * (1.0 + 4 * _SINGLE / (1.0 - beta)),
        finite=context.finite,
        unbounded="it adds up what it is given, and limits nothing",
        shared="it carries the gradients of earlier steps along",
    )
    if gain == 1.0:
        return result
    why = f"gradients add up over steps, to 1 / (1 - beta) = {number(gain)} times the largest"
    return replace(result, expands=why)


def _preconditioner(module: Any, context: Context) -> Map:
    why = "it divides by the size of past gradients, which makes small ones large"
    shared = "its divisor is learnt from the gradients of earlier steps"
    return Map(module.name, unbounded=why, shared=shared, expands=why)


def _yogi_momentum(module: Any, context: Context) -> Map:
    why = "what it keeps grows without end under a constant gradient"
    return Map(
        module.name,
        unbounded=why,
        shared="it carries the gradients of earlier steps along",
        expands=why,
    )


def _scaffold(module: Any, context: Context) -> Map:
    why = "it adds a correction that the other nodes determine"
    return Map(module.name, unbounded=why, shared=why, expands=why)


def _update_clip(module: Any, context: Context) -> Map:
    """Return the map of a module of update clipping, which leaves steps alone but for noise."""
    if getattr(module, "noise_multiplier", 0.0):
        return _noise(module, context)
    return _no_op(module, context)


def _noise(module: Any, context: Context) -> Map:
    return Map(
        module.name,
        noise=True,
        unbounded="noise is of any size",
        expands="it adds noise",
    )


MAPS: dict[str, Callable[[Any, Context], Map]] = {
    "norm-clip": _norm_clip,
    "normalize": _normalize,
    "zscore-clip": _learnt,
    "ema-clip": _learnt,
    "auto-clip": _learnt,
    "percentile-norm-clip": _learnt,
    "adaptive-clip": _learnt,
    "growth-clip": _learnt,
    "value-clip": _value_clip,
    "percentile-clip": _percentile_clip,
    "ema-norm-clip": _past,
    "ema-normalize": _past,
    "ema-value-clip": _past,
    "growth-value-clip": _past,
    "centralize": _centralize,
    "standardize": _standardize,
    "no-op": _no_op,
    # The counterparts of shared clippers leave the server's steps alone.
    "zscore-clip-server": _no_op,
    "ema-clip-server": _no_op,
    "auto-clip-server": _no_op,
    "percentile-norm-clip-server": _no_op,
    "adaptive-clip-server": _no_op,
    "update-clip-client": _update_clip,
    "update-clip-server": _update_clip,
    "agc": _agc,
    "fedprox": _penalty,
    "lasso": _penalty,
    "ridge": _penalty,
    "l2-clipping": _declearn_clip,
    "l2-global-clipping": _declearn_clip,
    "momentum": _linear_memory,
    "ewma": _linear_memory,
    "yogi-momentum": _yogi_momentum,
    "adagrad": _preconditioner,
    "rmsprop": _preconditioner,
    "adam": _preconditioner,
    "yogi": _preconditioner,
    "scaffold-client": _scaffold,
    "scaffold-server": _scaffold,
    "gaussian-noise": _noise,
}
"""What is known of each plug-in, by registered name; one of your own may be added."""


def look_up(plugin: Any, context: Context) -> Map:
    """Return what a plug-in guarantees; nothing, if it is not in the table."""
    kind = MAPS.get(plugin.name)
    if kind is None:
        why = "fedclip does not know what it does"
        return Map(plugin.name, unbounded=why, shared=why, expands=why)
    return kind(plugin, context)
