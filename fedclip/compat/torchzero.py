# SPDX-License-Identifier: Apache-2.0
"""The clippers of torchzero."""

from __future__ import annotations

from fedclip.compat.base import Given, Peers, Translation, entry, renamed, signature, to
from fedclip.compat.words import dims, order, word

# Parameters of earlier versions, renamed or removed since, are `parameterwise`, `ema_init`,
# `ema_tfm`, `eps` and `target`.
_TARGET = "target='update'"
_GROUPED = f"ord=2, tensorwise=True, parameterwise=None, {_TARGET}"
_ALONG = f"dim=None, inverse_dims=False, {_TARGET}"
_DIMS = f"ord=2, min_size=1, {_ALONG}"
_GROWTH = "add=None, mul=1.5, min_value=1e-4, max_decay=2"
_BY_EMA = (
    "beta=0.99, max_ema_growth=1.5, init=0.0, ema_init=None, min_norm=1e-6, eps=None, inner=None, "
    + _GROUPED
)
_VALUE_BY_EMA = (
    f"beta=0.99, init=0, ema_init=None, inner=None, exp_avg_tfm=None, ema_tfm=None, {_TARGET}"
)


def _target_note(c: Given) -> str | None:
    first = "target='grad' clips the gradient itself: put this first among the modules"
    return first if word("target", c["target"], "update grad") == "grad" else None


def _grouped(c: Given) -> Given:
    old = c["parameterwise"]
    tensorwise = c["tensorwise"] if old is None else old
    if not isinstance(tensorwise, bool):
        raise ValueError(f"parameterwise must be True or False, got {tensorwise!r:.80}")
    return {"ord": order(c["ord"]), "scope": "tensor" if tensorwise else "global"}


def _spanned(c: Given) -> Given | None:
    """Return our parameters for torchzero's dims; None if they leave every tensor untouched."""
    dim = c["dim"]
    if isinstance(dim, str):
        return {"scope": word("dim", dim, "global")}
    along, inverse, min_size = dims("dim", dim), c["inverse_dims"], c["min_size"]
    if (along is None and inverse) or (along == [] and not inverse):
        return None
    if not along:
        return {"scope": "tensor", "min_size": min_size}
    return {"scope": "tensor", "dims": along, "inverse_dims": inverse, "min_size": min_size}


def _dims_note(c: Given) -> str | None:
    dim = c["dim"]
    if dim is None:
        return "dim=None: all dims of each tensor; torchzero takes those of the first"
    negative = "negative dims count from the end of each tensor; torchzero's may not"
    found = dim != "global" and any(d < 0 for d in dims("dim", dim) or ())
    return negative if found else None


_MEASURES = {
    "std": "ord='std': fewer than two elements are left alone; torchzero makes them NaN",
    "var": "ord='var': the variance is brought to the limit; torchzero overshoots",
    "sum": "ord='sum': taken as the sum of absolute values; a signed sum may flip the sign",
    0: "ord=0: the number of non-zeros does not change under scaling, nothing is clipped",
}


def _measured(name: str, c: Given, **limits: object) -> Translation:
    """Translate a class that measures along dims."""
    ord, spanned = order(c["ord"]), _spanned(c)
    notes = [_dims_note(c), _MEASURES.get(ord), _target_note(c)]
    if spanned is None or ord == 0:
        empty = None if spanned else "no dims are left to measure along: nothing is clipped"
        return to("no-op", *notes, empty)
    return to(name, *notes, **limits, ord=1 if ord == "sum" else ord, **spanned)


def _clip_grad_norm(c: Given) -> Translation:
    # A smallest norm of 0 is none.
    limits = {"max_norm": c["max_norm"], "min_norm": c["min_norm"] or None}
    if {*limits.values()} == {None}:
        return to("no-op", "without max_norm and min_norm, nothing is clipped")
    return _measured("norm-clip", c, **limits)


def _centralize(c: Given) -> Translation:
    spanned = _spanned(c)
    if spanned is None:
        return to("no-op", "no dims are left to average along: nothing is changed")
    # Over all tensors together, torchzero has no smallest size.
    return to("centralize", _dims_note(c), _target_note(c), **{"min_size": 1, **spanned})


def _alone(**modules: object) -> None:
    for name, module in modules.items():
        if module is not None:
            raise ValueError(
                f"{name} can only be None: other modules inside a clipper leave it without a "
                "bound, and without a state that a checkpoint could hold"
            )


def _by_ema(name: str, c: Given) -> Translation:
    _alone(inner=c["inner"])
    eps = "eps has no counterpart: it only shows where the average is shorter than eps"
    return to(
        name,
        _target_note(c),
        None if c["eps"] is None else eps,
        **renamed(c, "decay=beta, max_growth=max_ema_growth, min_norm=min_norm"),
        **_grouped(c),
        init=_start(c["init"], c["ema_init"], "first"),
    )


def _start(init: object, ema_init: object, first: float | str) -> object:
    """Return the start of an average; `first` means the first update."""
    words = {"zeros": 0.0, "update": first}
    if ema_init is not None:
        return word("ema_init", ema_init, words)
    # Some versions take words for `init` as well.
    return word("init", init, words) if isinstance(init, str) else init


def _value_by_ema(c: Given) -> Translation:
    _alone(**{name: c[name] for name in ("inner", "exp_avg_tfm", "ema_tfm")})
    start = _start(c["init"], c["ema_init"], 1.0)
    return to("ema-value-clip", _target_note(c), decay=c["beta"], init=start)


def _floor_note(min_value: float | None, norms: bool) -> str | None:
    if min_value is None:
        return "the step after a 0 is a first step again; torchzero then gives 0 for ever"
    if not norms:
        return None
    floors = "min_value floors the past norm, the first as well; torchzero lets the first stand"
    return floors + (", and divides every update by it" if min_value > 1 else "")


def _norm_growth(c: Given) -> Translation:
    return to(
        "growth-clip",
        _floor_note(c["min_value"], norms=True),
        _target_note(c),
        **renamed(c, "mul=mul, add=add, min_norm=min_value, max_decay=max_decay"),
        warmup_norm=None,
        **_grouped(c),
    )


def _value_growth(c: Given) -> Translation:
    notes = _floor_note(c["min_value"], norms=False), _target_note(c)
    return to("growth-value-clip", *notes, **{name: c[name] for name in signature(_GROWTH)})


_NORMALIZE = entry(
    lambda c: _measured("normalize", c, norm=c["norm_value"]), f"norm_value=1.0, {_DIMS}"
)
_CLIP_VALUE = entry(
    lambda c: to("value-clip", _target_note(c), max_value=c["value"]), f"value, {_TARGET}"
)
_CLIP_NORM = entry(
    lambda c: _measured("norm-clip", c, max_norm=c["max_norm"]), f"max_norm, {_DIMS}"
)

PEERS: Peers = {
    "torchzero": {
        "ClipNorm": _CLIP_NORM,
        "clip_grad_norm_": entry(
            _clip_grad_norm, f"max_norm, min_norm=None, ord=2, min_size=2, {_ALONG}"
        ),
        "Normalize": _NORMALIZE,
        "normalize_grads_": _NORMALIZE,
        "ClipValue": _CLIP_VALUE,
        "clip_grad_value_": _CLIP_VALUE,
        "Centralize": entry(_centralize, f"min_size=2, {_ALONG}"),
        "ClipNormByEMA": entry(lambda c: _by_ema("ema-norm-clip", c), _BY_EMA),
        "NormalizeByEMA": entry(lambda c: _by_ema("ema-normalize", c), _BY_EMA),
        "ClipValueByEMA": entry(_value_by_ema, _VALUE_BY_EMA),
        "ClipNormGrowth": entry(_norm_growth, f"{_GROWTH}, {_GROUPED}"),
        "ClipValueGrowth": entry(_value_growth, f"{_GROWTH}, {_TARGET}"),
        "WarmupNormClip": "a limit that follows a schedule is a function for fedclip's OwnLimit",
    }
}
