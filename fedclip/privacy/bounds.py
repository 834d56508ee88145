# SPDX-License-Identifier: Apache-2.0
"""Looks up what plug-ins guarantee, those of declearn too, and analyses a list of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedclip.core import parameters
from fedclip.privacy import guarantees as kinds
from fedclip.privacy.maps import Context, Guarantee, Map, Plugin, Shapes
from fedclip.privacy.norm_conversions import SINGLE, root_of_squares
from fedclip.privacy.sensitivity import Analysis

__all__ = ["MAPS", "analyse_plugins", "look_up"]


def _declearn_clip(module: Plugin, context: Context) -> Map:
    result = Map(module.name, lipschitz=1.0, growth=1.0, finite=context.finite)
    noun = "tensor" if module.name == "l2-clipping" else ""
    limit = float(module.max_norm)
    formula = kinds.formula_of(limit, 2, noun)
    if not context.finite:
        why = "it passes on NaN and infinity, which have no norm; for finite gradients the bound is"
        instead = f"norm-clip with max_norm={limit!r}" + (" and scope='tensor'" if noun else "")
        return replace(result, unbounded=f"{why} {formula}; use {instead} for all gradients")
    if noun and context.shapes is None:
        return replace(result, formula=formula)
    count = sum(1 for shape in (context.shapes or {}).values() if math.prod(shape)) if noun else 1
    # declearn measures and scales in the dtype of the gradient.
    bound = root_of_squares([(limit, count)]) * (1.0 + 16 * SINGLE)
    return replace(result, bound=bound, formula=formula)


MAPS: dict[str, Guarantee] = {
    "l2-clipping": _declearn_clip,
    "l2-global-clipping": _declearn_clip,
    "gaussian-noise": kinds.noise,
}
"""Guarantees of plug-ins without a method ``guarantee``, by registered name.

fedclip's clippers have that method. An entry in this table comes before it; you may add one for a
plug-in of your own."""


def look_up(plugin: Plugin, context: Context) -> Map:
    """Return the guarantee of a plug-in: no bound if neither the plug-in nor the table has one."""
    kind = MAPS.get(plugin.name)
    if kind is not None:
        return kind(plugin, context)
    guarantee = getattr(plugin, "guarantee", None)
    return guarantee(context) if callable(guarantee) else kinds.unknown(plugin, context)


def analyse_plugins(
    plugins: Sequence[Plugin], shapes: Shapes | None = None, *, finite: bool = False
) -> Analysis:
    """Return the joint guarantee of plug-ins, in the order in which they act.

    `fedclip.analyse` also takes names, configurations and optimizers, and documents the parameters.
    """
    parameters.boolean(finite=finite)
    known = _checked(shapes)
    maps: list[Map] = []
    for plugin in plugins:
        context = Context(known, finite or any(m.finite for m in maps[-1:]))
        maps.append(look_up(plugin, context))
    return Analysis(tuple(maps))


def _checked(shapes: object) -> Shapes | None:
    if shapes is None:
        return None
    allowed = "shapes must be a dict of tuples of ints, such as {'w': (3, 2)}"
    if not isinstance(shapes, Mapping):
        raise TypeError(f"{allowed}, got {shapes!r}")
    for name, shape in shapes.items():
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise TypeError(f"{allowed}, got {shape!r} for {name!r}")
        for length in shape:
            parameters.integer(0, **{f"shapes[{name!r}]": length})
    return {name: tuple(shape) for name, shape in shapes.items()}
