# SPDX-License-Identifier: Apache-2.0
"""What declearn's own modules and regularizers guarantee, by registered name."""

from __future__ import annotations

import math
from dataclasses import replace

from fedclip.privacy import kinds
from fedclip.privacy.lengths import SINGLE, number, outwards, root_of_squares
from fedclip.privacy.maps import Context, Guarantee, Map, Plugin

__all__ = ["MAPS", "look_up"]


_PASSED = "it passes NaN and infinity on, which have no norm; for finite gradients it is"
_CARRIED = "it carries the gradients of earlier steps along"


def _penalty(regularizer: Plugin, context: Context) -> Map:
    return Map(
        regularizer.name,
        lipschitz=1.0,
        finite=context.finite,
        unbounded="it adds a multiple of the weights, which may be of any size",
    )


# -- declearn's modules -----------------------------------------------------------------------
def _declearn_clip(module: Plugin, context: Context) -> Map:
    result = Map(module.name, lipschitz=1.0, growth=1.0, finite=context.finite)
    noun = "tensor" if module.name == "l2-clipping" else ""
    limit = float(module.max_norm)
    formula = kinds.formula_of(limit, 2, noun)
    if not context.finite:
        instead = f"norm-clip with max_norm={limit!r}" + (" and scope='tensor'" if noun else "")
        return replace(result, unbounded=f"{_PASSED} {formula}, and {instead} is so for all")
    if noun and context.shapes is None:
        return replace(result, formula=formula)
    count = sum(1 for shape in (context.shapes or {}).values() if math.prod(shape)) if noun else 1
    # declearn measures and scales in the dtype of the gradient.
    bound = root_of_squares([(limit, count)]) * (1.0 + 16 * SINGLE)
    return replace(result, bound=bound, formula=formula)


def _linear_memory(module: Plugin, context: Context) -> Map:
    beta = module.beta
    gain = 1.0 if module.name == "ewma" else 1.0 / (1.0 - beta)
    result = Map(
        module.name,
        lipschitz=outwards(gain) if gain > 1 else 1.0,
        # Each step rounds the average, and forgets a part of it.
        growth=gain * (1.0 + 4 * SINGLE / (1.0 - beta)),
        finite=context.finite,
        unbounded="it adds up what it is given, and limits nothing",
        shared=_CARRIED,
    )
    if gain == 1.0:
        return result
    why = f"gradients add up over steps, to 1 / (1 - beta) = {number(gain)} times the largest"
    return replace(result, expands=why)


_DIVIDES = "it divides by the size of past gradients, which makes small ones large"
# Twice the largest gradient whose square may underflow in float32.
_HIDDEN = 2.0**-62
_LEAST_EPS = 1e-10


def _divided(module: Plugin, context: Context, each: float, forgets: float = 1.0) -> Map:
    """Return the map of a division by the root of past squares; no element is above `each`.

    `forgets` is the least share of the past that a step forgets. Rounding adds up over the steps
    that are remembered.
    """
    result = Map(
        module.name,
        finite=context.finite,
        unbounded=_DIVIDES,
        shared="its divisor is learnt from the gradients of earlier steps",
        expands=_DIVIDES,
    )
    if math.isinf(each) or module.eps < _LEAST_EPS:
        return result
    each *= 1.0 + 16 * SINGLE * (1.0 + 1.0 / forgets) + _HIDDEN / (forgets * module.eps)
    formula = f"{number(each)}·√d for d elements"
    if not context.finite:
        return replace(result, unbounded=f"{_PASSED} {formula}")
    bound = math.inf
    if context.shapes is not None:
        bound = root_of_squares([(each, sum(map(math.prod, context.shapes.values())))])
    return replace(result, bound=bound, formula=formula)


def _adagrad(module: object, context: Context) -> Map:
    """Return the map of AdaGrad: no element is above 1.

    The divisor is the root of a sum of squares, the present one among them:
    ``|g_t| / sqrt(g_1^2 + … + g_t^2) <= 1``, reached by the first gradient.
    """
    return _divided(module, context, 1.0)


def _rmsprop(module: Plugin, context: Context) -> Map:
    """Return the map of RMSProp: no element is above ``1 / sqrt(1 - beta)``.

    ``v_t >= (1 - beta) g_t^2``, as nothing else in it is negative; reached by the first gradient
    that is not 0.
    """
    beta = module.ewma.beta
    if not 0.0 < beta < 1.0:
        return _divided(module, context, math.inf)
    return _divided(module, context, 1.0 / math.sqrt(1.0 - beta), 1.0 - beta)


def _adam(module: Plugin, context: Context) -> Map:
    r"""Return the map of Adam: no element is above c, if ``beta_1^2 < beta_2``.

    With a and b for ``beta_1`` and ``beta_2``, and ``r = a^2 / b``::

        m_t = (1 - a) sum_i a^i g_(t-i)          v_t = (1 - b) sum_i b^i g_(t-i)^2
        |sum_i a^i g_(t-i)| <= sqrt(sum_i r^i) sqrt(sum_i b^i g_(t-i)^2)    (Cauchy & Schwarz)
        |m_t| / sqrt(v_t) <= c = (1 - a) / sqrt(1 - b) / sqrt(1 - r)

    The corrections of both averages only shorten: with ``x = b^t`` and ``y = r^t``, the first
    t terms and the corrections together give c times ``sqrt((1 - x)(1 - y)) / (1 - sqrt(x y))``,
    which is at most c, as ``2 sqrt(x y) <= x + y``. ``amsgrad`` only shortens too, as it divides
    by the largest average so far. Gradients that grow by b / a a step reach c in the limit.
    If ``r >= 1``, the sum of its powers grows with t, and nothing bounds the quotient.
    """
    a, b = module.ewma_1.beta, module.ewma_2.beta
    if not (0.0 <= a < 1.0 and 0.0 < b < 1.0 and a * a < b):
        return _divided(module, context, math.inf)
    each = (1.0 - a) / math.sqrt(1.0 - b) / math.sqrt(1.0 - a * a / b)
    return _divided(module, context, each, min(1.0 - a, 1.0 - b))


def _yogi(module: object, context: Context) -> Map:
    return _divided(module, context, math.inf)


def _yogi_momentum(module: Plugin, context: Context) -> Map:
    why = "what it keeps grows without end under a constant gradient"
    return Map(module.name, unbounded=why, shared=_CARRIED, expands=why)


def _scaffold(module: Plugin, context: Context) -> Map:
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
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "adam": _adam,
    "yogi": _yogi,
    "scaffold-client": _scaffold,
    "scaffold-server": _scaffold,
    "gaussian-noise": kinds.noise,
}
"""Guarantees of plug-ins without a method ``guarantee``, by registered name.

fedclip's clippers have that method. An entry in this table comes before it; you may add one for a
plug-in of your own."""


def look_up(plugin: Plugin, context: Context) -> Map:
    """Return what a plug-in guarantees: no bound if neither the plug-in nor the table has one."""
    kind = MAPS.get(plugin.name)
    if kind is not None:
        return kind(plugin, context)
    guarantee = getattr(plugin, "guarantee", None)
    return guarantee(context) if callable(guarantee) else kinds.unknown(plugin, context)
