# SPDX-License-Identifier: Apache-2.0
"""What declearn's own modules and regularizers guarantee, by registered name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fedclip.privacy import kinds
from fedclip.privacy.lengths import SINGLE, number, outwards, root_of_squares
from fedclip.privacy.maps import Context, Guarantee, Map

__all__ = ["MAPS", "look_up"]


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
    formula = kinds.formula_of(limit, 2, noun)
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
    bound = root_of_squares([(limit, count)]) * (1.0 + 16 * SINGLE)
    return replace(result, bound=bound, formula=formula)


def _linear_memory(module: Any, context: Context) -> Map:
    beta = module.beta
    gain = 1.0 if module.name == "ewma" else 1.0 / (1.0 - beta)
    result = Map(
        module.name,
        lipschitz=outwards(gain) if gain > 1 else 1.0,
        # Each step rounds what is kept, and forgets a part of it.
        growth=gain * (1.0 + 4 * SINGLE / (1.0 - beta)),
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


MAPS: dict[str, Guarantee] = {
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
    "gaussian-noise": kinds.noise,
}
"""What is known of plug-ins that do not say it themselves, by registered name.

fedclip's clippers have a method ``guarantee``. What stands here comes before it, and one of your
own may be added."""


def look_up(plugin: Any, context: Context) -> Map:
    """Return what a plug-in guarantees; nothing, if neither it nor the table says so."""
    kind = MAPS.get(plugin.name)
    if kind is not None:
        return kind(plugin, context)
    guarantee = getattr(plugin, "guarantee", None)
    return guarantee(context) if callable(guarantee) else kinds.unknown(plugin, context)
