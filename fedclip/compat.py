# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers, translated into ours.

For each class of another package (a peer), one short function says which clipper and parameters
give the same numbers, and what differs. If the peer has a defect, the translation is the
corrected clipper, and `notes` says so. The translation treats NaN and infinity as `on_nonfinite`
says, whatever the peer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedclip.errors import nearest

__all__ = ["known", "notes", "translate"]


class _Translation(NamedTuple):
    kind: str
    name: str
    config: dict[str, Any]
    notes: list[str]


class _Entry(NamedTuple):
    parameters: dict[str, Any]
    build: Callable[[dict[str, Any]], _Translation]


# The default of a parameter that the peer requires.
_REQUIRED: Any = object()
_PEERS: dict[str, dict[str, _Entry]] = {}

_Build = Callable[[dict[str, Any]], _Translation]


def _peer(peer: str, *classes: str, **parameters: Any) -> Callable[[_Build], _Build]:
    """Register a function for classes of a peer, with their parameters and defaults."""

    def enter(build: _Build) -> _Build:
        for cls in classes:
            _PEERS.setdefault(peer, {})[cls] = _Entry(parameters, build)
        return build

    return enter


_KINDS = {"agc": "regularizer", "clipped-averaging": "aggregator"}


def _to(name: str, *notes: str | None, **config: Any) -> _Translation:
    kind = _KINDS.get(name, "module")
    return _Translation(kind, name, config, [note for note in notes if note])


def _noted(translation: _Translation, *notes: str | None) -> _Translation:
    """Return a translation with further notes."""
    return translation._replace(notes=[*translation.notes, *filter(None, notes)])


def translate(peer: str, cls: str, config: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return the clipper of fedclip that does the same as a peer's.

    Parameters
    ----------
    peer : str
        Name of the package, e.g. "torchzero".
    cls : str
        Name of its class or function, e.g. "ClipNorm".
    config : mapping
        The parameters that it was given; the others have the peer's defaults.

    Returns
    -------
    kind : str
        "module" or "regularizer", where declearn's `Optimizer` takes it, or "aggregator".
    name : str
        Registered name of our clipper.
    config : dict
        Its parameters.

    Raises
    ------
    ValueError
        If the peer, class, parameter, or a word given for a parameter is not known; if a
        parameter without a default is missing; or if a parameter must be a number and is not.

    Examples
    --------
    >>> translate("optax", "clip_by_global_norm", {"max_norm": 0.5})
    ('module', 'norm-clip', {'max_norm': 0.5})
    >>> translate("torchzero", "ClipNrm", {})
    Traceback (most recent call last):
    ...
    ValueError: torchzero has no clipper 'ClipNrm'; did you mean 'ClipNorm'?
    """
    found = _translation(peer, cls, config)
    return found.kind, found.name, found.config


def notes(peer: str, cls: str, config: Mapping[str, Any]) -> list[str]:
    """Return how the translation differs from the peer: one sentence for each difference.

    It takes the same arguments as `translate`, and raises the same errors.

    Examples
    --------
    >>> notes("optax", "clip_by_global_norm", {"max_norm": 0.5})
    []
    >>> for note in notes("torchzero", "ClipNorm", {"max_norm": 1, "ord": "var"}):
    ...     print(note.partition(":")[0])
    dim=None
    ord='var'
    """
    return list(_translation(peer, cls, config).notes)


def known() -> dict[str, list[str]]:
    """Return the classes that can be translated, by peer.

    Examples
    --------
    >>> known()["timm"]
    ['adaptive_clip_grad']
    """
    return {peer: list(classes) for peer, classes in _PEERS.items()}


def _translation(peer: str, cls: str, config: Mapping[str, Any]) -> _Translation:
    if peer not in _PEERS:
        raise ValueError(_unknown("fedclip translates from no peer", peer, _PEERS))
    if cls not in _PEERS[peer]:
        raise ValueError(_unknown(f"{peer} has no clipper", cls, _PEERS[peer]))
    entry = _PEERS[peer][cls]
    for key in config:
        if key not in entry.parameters:
            raise ValueError(_unknown(f"{cls} of {peer} has no parameter", key, entry.parameters))
    values = {**entry.parameters, **config}
    missing = [key for key, value in values.items() if value is _REQUIRED]
    if missing:
        raise ValueError(f"{cls} of {peer} needs {', '.join(map(repr, missing))}")
    for key, value in config.items():
        default = entry.parameters[key]
        if default is not None and _is_number(default, key) and not _is_number(value, key):
            raise ValueError(f"{key} of {cls} must be a number, got {value!r:.80}")
    try:
        return entry.build(values)
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"{cls} of {peer} takes no such value: {exc}") from exc


# Orders of a norm may be words or numbers.
_WORDS = ("ord", "norm_type")


def _is_number(value: Any, key: str) -> bool:
    """Whether a value, or a default, belongs to a parameter that only takes numbers or None."""
    if value is _REQUIRED or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return key not in _WORDS
    return value is None


def _unknown(what: str, given: object, allowed: Mapping[str, Any]) -> str:
    hint = nearest(str(given), allowed) or f"; it must be one of {', '.join(allowed) or 'none'}"
    return f"{what} {given!r}{hint}"


def _word(parameter: str, given: Any, words: Mapping[str, Any]) -> Any:
    """Return our value for a word of the peer."""
    if not isinstance(given, str) or given not in words:
        raise ValueError(_unknown(f"{parameter} can not be", given, words))
    return words[given]


def _order(value: float | str) -> float | str:
    """Return our `ord` for 2, 2.0, "2", "2.0", "l2", "inf", "linf", "mad", ..."""
    if not isinstance(value, str):
        return "inf" if value == float("inf") else value
    try:
        number = float(value.removeprefix("l"))
    except ValueError:
        words = {w: w for w in ("mad", "std", "var", "sum", "l1", "l2", "linf", "inf")}
        return str(_word("ord", value, words))
    if number == float("inf"):
        return "inf"
    return int(number) if number.is_integer() else number


# -- drytorch ---------------------------------------------------------------------------------
@_peer("drytorch", "NoOp")
def _no_op(c: dict[str, Any]) -> _Translation:
    return _to("no-op")


@_peer("drytorch", "GradNormClipper", threshold=1)
def _grad_norm_clipper(c: dict[str, Any]) -> _Translation:
    return _to("norm-clip", max_norm=c["threshold"], eps=1e-6)


@_peer("drytorch", "GradValueClipper", threshold=1)
def _grad_value_clipper(c: dict[str, Any]) -> _Translation:
    return _to("value-clip", max_value=c["threshold"])


@_peer("drytorch", "GradParamNormalizer", eps=1e-8)
def _grad_param_normalizer(c: dict[str, Any]) -> _Translation:
    return _to("normalize", norm=1.0, scope="tensor", eps=c["eps"])


@_peer("drytorch", "GradZScoreNormalizer", eps=1e-8)
def _grad_zscore_normalizer(c: dict[str, Any]) -> _Translation:
    note = "tensors of one element are left alone; drytorch makes them NaN"
    return _to("standardize", note, eps=c["eps"], scope="tensor")


_HISTORY: dict[str, Any] = {
    "criterion": "zstat",
    "clipping_function": None,
    "n_warmup_steps": 20,
    "warmup_clip_strategy": "norm1",
    "alpha": None,
    "thresh": None,
}


@_peer("drytorch", "HistClipper", **_HISTORY)
def _hist_clipper(c: dict[str, Any]) -> _Translation:
    return _history_clipper(c, "global")


@_peer("drytorch", "ParamHistClipper", **_HISTORY)
def _param_hist_clipper(c: dict[str, Any]) -> _Translation:
    return _history_clipper(c, "tensor")


def _history_clipper(c: dict[str, Any], scope: str) -> _Translation:
    criteria = {"zstat": "zstat", "ema": "ema", "ZStatCriterion": "zstat", "EMACriterion": "ema"}
    zstat = _word("criterion", c["criterion"], criteria) == "zstat"
    given = {
        key: default if c[key] is None else c[key]
        for key, default in (
            ("clipping_function", "reciprocal" if zstat else "max"),
            ("alpha", 0.97 if zstat else 0.98),
            ("thresh", 2.5 if zstat else 1.05),
        )
    }
    functions = {"max": "max", "mean": "mean", "reciprocal": "reciprocal"}
    functions |= {f"{word}_clipping": word for word in functions}
    action = _word("clipping_function", given["clipping_function"], functions)
    warmup_norm = _word(
        "warmup_clip_strategy", c["warmup_clip_strategy"], {"norm1": 1.0, "noop": None}
    )
    common = {
        "decay": given["alpha"],
        "action": action,
        "feedback": "raw",
        "warmup": c["n_warmup_steps"],
        # Without a warm-up, drytorch lets the first norm pass.
        "warmup_norm": warmup_norm if c["n_warmup_steps"] else None,
        "warmup_factor": None,
        "max_norm": None,
        "estimator": "drytorch",
        "eps": 1e-6,
        "scope": scope,
    }
    if zstat:
        return _to("zscore-clip", z_max=given["thresh"], std_eps=1e-8, min_std=0.0, **common)
    note = None
    if action == "mean":
        note = "clips to the running mean, as documented; drytorch zeroes the gradient"
    return _to("ema-clip", note, ratio=given["thresh"], **common)


# -- smartclip --------------------------------------------------------------------------------
_GATE: dict[str, Any] = {"scope": "global", "warmup_steps": 100, "min_history": 50, "eps": 1e-8}
_SCOPES = {"global": "global", "per_layer": "layer", "per_param": "tensor"}


def _gated(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "feedback": "raw",
        "include_current": True,
        "warmup": max(c["warmup_steps"], c["min_history"]),
        "warmup_norm": None,
        "warmup_factor": None,
        "max_norm": None,
        "eps": c["eps"],
        "scope": _word("scope", c["scope"], _SCOPES),
    }


def _gate_note(c: dict[str, Any]) -> str | None:
    if c["scope"] == "global":
        return None
    return (
        "warmup counts calls; smartclip counts observations over all groups, so that its warm-up "
        "is shorter by the number of groups"
    )


def _guard_note(c: dict[str, Any]) -> str | None:
    return None if c["guard_nans"] else "NaN is never observed; smartclip would note it as eps"


@_peer("smartclip", "ZScoreClip", zmax=3.0, ema_decay=0.99, guard_nans=True, **_GATE)
def _smart_zscore(c: dict[str, Any]) -> _Translation:
    return _to(
        "zscore-clip",
        _gate_note(c),
        _guard_note(c),
        z_max=c["zmax"],
        decay=c["ema_decay"],
        action="max",
        estimator="smartclip",
        std_eps=0.0,
        min_std=0.0,
        **_gated(c),
    )


_AUTO: dict[str, Any] = {
    "mode": "auto",
    "percentile": 95.0,
    "history": "ema",
    "ema_decay": 0.99,
    "window_size": 1024,
    "guard_nans": True,
}


@_peer("smartclip", "AutoClip", **_AUTO, **_GATE)
def _smart_auto(c: dict[str, Any]) -> _Translation:
    if _word("mode", c["mode"], {"auto": "auto", "percentile": "percentile"}) == "auto":
        note = "the median is the published P2 estimate; smartclip's lacks a division"
        late = "a group is not clipped before its 5th norm; smartclip may erase it"
        return _to(
            "auto-clip",
            note,
            late,
            _gate_note(c),
            _guard_note(c),
            median="p2",
            decay=None,
            min_std=1e-3,
            **_gated(c),
        )
    if _word("history", c["history"], {"ema": "stream", "window": "window"}) == "window":
        return _to(
            "percentile-norm-clip",
            _gate_note(c),
            _guard_note(c),
            percentile=c["percentile"],
            history="window",
            window=c["window_size"],
            **_gated(c),
        )
    return _to(
        "percentile-norm-clip",
        "the streaming percentile goes down as well as up; smartclip's never falls",
        _gate_note(c),
        _guard_note(c),
        percentile=c["percentile"],
        history="stream",
        rate=1.0 - c["ema_decay"],
        **_gated(c),
    )


_AGC: dict[str, Any] = {"clipping": 0.01, "exclude_bias_bn": True, "eps": 1e-8, "guard_nans": True}


@_peer("smartclip", "AGC", scope="per_layer", warmup_steps=0, min_history=0, **_AGC)
def _smart_agc(c: dict[str, Any]) -> _Translation:
    _word("scope", c["scope"], _SCOPES)
    scope = "each tensor is a unit whatever the scope, as smartclip does on torch"
    gate = None
    if c["warmup_steps"] or c["min_history"]:
        gate = "clips from the first step: a limit from the weights needs no warm-up"
    return _to(
        "agc",
        None if c["scope"] == "per_param" else scope,
        gate,
        _zero_weights(c),
        ratio=c["clipping"],
        unit="tensor",
        eps=c["eps"],
        skip_vectors=c["exclude_bias_bn"],
    )


# On TensorFlow, smartclip clips each tensor by itself, even with "per_layer".
_TF_SCOPES = {"global": "global", "per_layer": "per_param", "per_param": "per_param"}


def _on_tensorflow(c: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    scope = _word("scope", c["scope"], _TF_SCOPES)
    note = None
    if scope == "global":
        note = (
            "the warm-up lasts as many calls as it is set to; smartclip's TensorFlow backend also "
            "counts each tensor, so that its own is shorter, and its last call may clip by tensor"
        )
    return {**c, "scope": scope}, note


@_peer("smartclip-tf", "ZScoreClip", zmax=3.0, ema_decay=0.99, guard_nans=True, **_GATE)
def _smart_tf_zscore(c: dict[str, Any]) -> _Translation:
    config, note = _on_tensorflow(c)
    return _noted(_smart_zscore(config), note)


@_peer("smartclip-tf", "AutoClip", **_AUTO, **_GATE)
def _smart_tf_auto(c: dict[str, Any]) -> _Translation:
    config, note = _on_tensorflow(c)
    return _noted(_smart_auto(config), note)


@_peer("smartclip-tf", "AGC", scope="per_layer", warmup_steps=0, min_history=0, **_AGC)
def _smart_tf_agc(c: dict[str, Any]) -> _Translation:
    whole = _word("scope", c["scope"], _SCOPES) == "global"
    return _to(
        "agc",
        None if whole else _zero_weights(c),
        ratio=c["clipping"],
        unit="global" if whole else "tensor",
        eps=c["eps"],
        # On TensorFlow, smartclip ignores this parameter and excludes nothing.
        skip_vectors=False,
    )


def _zero_weights(c: dict[str, Any]) -> str | None:
    if c["exclude_bias_bn"]:
        return None
    return (
        "tensors whose weights are all zero are left a limit that they can grow from; "
        "smartclip's freezes them"
    )


# -- torchzero --------------------------------------------------------------------------------
# Parameters of earlier versions, renamed or removed since.
_TARGET: dict[str, Any] = {"target": "update"}
_TENSORWISE: dict[str, Any] = {"tensorwise": True, "parameterwise": None, **_TARGET}


def _target_note(c: dict[str, Any]) -> str | None:
    first = "target='grad' clips the gradient itself: put this first among the modules"
    note: str | None = _word("target", c["target"], {"update": None, "grad": first})
    return note


def _tensorwise(c: dict[str, Any]) -> str:
    old = c["parameterwise"]
    return "tensor" if (c["tensorwise"] if old is None else old) else "global"


_DIMS: dict[str, Any] = {
    "ord": 2,
    "dim": None,
    "inverse_dims": False,
    "min_size": 1,
    **_TARGET,
}


def _spanned(c: dict[str, Any]) -> dict[str, Any] | None:
    """Return our parameters for torchzero's dims; None if they leave every tensor untouched."""
    dim = c["dim"]
    if isinstance(dim, str):
        return _word("dim", dim, {"global": {"scope": "global"}})  # type: ignore[no-any-return]
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if dims is not None and not all(type(d) is int for d in dims):
        raise ValueError(f"dim must be an int, a list of ints or 'global', got {dim!r:.80}")
    inverse, min_size = c["inverse_dims"], c["min_size"]
    if (dims is None and inverse) or (dims == [] and not inverse):
        return None
    if not dims:
        return {"scope": "tensor", "min_size": min_size}
    return {"scope": "tensor", "dims": dims, "inverse_dims": inverse, "min_size": min_size}


def _dims_notes(c: dict[str, Any]) -> list[str]:
    dim = c["dim"]
    if dim is None:
        return ["dim=None: all dims of each tensor; torchzero takes those of the first"]
    values = [dim] if isinstance(dim, int) else [] if isinstance(dim, str) else list(dim)
    if any(d < 0 for d in values):
        return ["negative dims count from the end of each tensor; torchzero's may not"]
    return []


_MEASURES = {
    "std": "ord='std': fewer than two elements are left alone; torchzero makes them NaN",
    "var": "ord='var': the variance is brought to the limit; torchzero overshoots",
    "sum": "ord='sum': taken as the sum of absolute values; a signed sum may flip the sign",
    0: "ord=0: the number of non-zeros does not change under scaling, nothing is clipped",
}


def _measured(name: str, c: dict[str, Any], **config: Any) -> _Translation:
    """Translate a class that measures along dims; `config` holds the limits."""
    ord, spanned = _order(c["ord"]), _spanned(c)
    notes = [*_dims_notes(c), _MEASURES.get(ord), _target_note(c)]
    if spanned is None or ord == 0:
        empty = None if spanned else "no dims are left to measure along: nothing is clipped"
        return _to("no-op", *notes, empty)
    return _to(name, *notes, **config, ord=1 if ord == "sum" else ord, **spanned)


@_peer("torchzero", "ClipNorm", max_norm=_REQUIRED, **_DIMS)
def _tz_clip_norm(c: dict[str, Any]) -> _Translation:
    return _measured("norm-clip", c, max_norm=c["max_norm"])


@_peer(
    "torchzero", "clip_grad_norm_", max_norm=_REQUIRED, min_norm=None, **{**_DIMS, "min_size": 2}
)
def _tz_clip_grad_norm(c: dict[str, Any]) -> _Translation:
    if c["max_norm"] is None and c["min_norm"] is None:
        return _to("no-op", "without max_norm and min_norm, nothing is clipped")
    return _measured("norm-clip", c, max_norm=c["max_norm"], min_norm=c["min_norm"])


@_peer("torchzero", "Normalize", "normalize_grads_", norm_value=1.0, **_DIMS)
def _tz_normalize(c: dict[str, Any]) -> _Translation:
    return _measured("normalize", c, norm=c["norm_value"])


@_peer("torchzero", "ClipValue", "clip_grad_value_", value=_REQUIRED, **_TARGET)
def _tz_clip_value(c: dict[str, Any]) -> _Translation:
    return _to("value-clip", _target_note(c), max_value=c["value"])


@_peer("torchzero", "Centralize", dim=None, inverse_dims=False, min_size=2, **_TARGET)
def _tz_centralize(c: dict[str, Any]) -> _Translation:
    spanned = _spanned(c)
    if spanned is None:
        return _to("no-op", "no dims are left to average along: nothing is changed")
    # Over all tensors together, torchzero has no smallest size.
    notes = [*_dims_notes(c), _target_note(c)]
    return _to("centralize", *notes, **{"min_size": 1, **spanned})


_BY_EMA: dict[str, Any] = {
    "beta": 0.99,
    "ord": 2,
    "max_ema_growth": 1.5,
    "init": 0.0,
    "ema_init": None,
    "min_norm": 1e-6,
    "eps": None,
    **_TENSORWISE,
}


def _by_ema(name: str, c: dict[str, Any]) -> _Translation:
    eps = None
    if c["eps"] is not None:
        eps = "eps has no counterpart: it only shows where the average is shorter than eps"
    return _to(
        name,
        _target_note(c),
        eps,
        decay=c["beta"],
        ord=_order(c["ord"]),
        scope=_tensorwise(c),
        max_growth=c["max_ema_growth"],
        init=_start(c, "first"),
        min_norm=c["min_norm"],
    )


def _start(c: dict[str, Any], first: float | str) -> Any:
    """Return the start of an average; `first` means the first update."""
    words = {"zeros": 0.0, "update": first}
    return c["init"] if c["ema_init"] is None else _word("ema_init", c["ema_init"], words)


@_peer("torchzero", "ClipNormByEMA", **_BY_EMA)
def _tz_clip_by_ema(c: dict[str, Any]) -> _Translation:
    return _by_ema("ema-norm-clip", c)


@_peer("torchzero", "NormalizeByEMA", **_BY_EMA)
def _tz_normalize_by_ema(c: dict[str, Any]) -> _Translation:
    return _by_ema("ema-normalize", c)


@_peer("torchzero", "ClipValueByEMA", beta=0.99, init=0, ema_init=None, **_TARGET)
def _tz_value_by_ema(c: dict[str, Any]) -> _Translation:
    return _to("ema-value-clip", _target_note(c), decay=c["beta"], init=_start(c, 1.0))


@_peer(
    "torchzero",
    "ClipNormGrowth",
    add=None,
    mul=1.5,
    min_value=1e-4,
    max_decay=2,
    ord=2,
    **_TENSORWISE,
)
def _tz_norm_growth(c: dict[str, Any]) -> _Translation:
    floor = c["min_value"]
    note = None
    if floor is not None and floor > 1:
        note = "min_value floors the past norm; torchzero divides every update by it"
    return _to(
        "growth-clip",
        note,
        _target_note(c),
        mul=c["mul"],
        add=c["add"],
        min_norm=floor,
        max_decay=c["max_decay"],
        warmup_norm=None,
        ord=_order(c["ord"]),
        scope=_tensorwise(c),
    )


@_peer("torchzero", "ClipValueGrowth", add=None, mul=1.5, min_value=1e-4, max_decay=2, **_TARGET)
def _tz_value_growth(c: dict[str, Any]) -> _Translation:
    config = {key: value for key, value in c.items() if key != "target"}
    return _to("growth-value-clip", _target_note(c), **config)


# -- fixed limits of the frameworks -----------------------------------------------------------
@_peer("declearn", "L2Clipping", max_norm=1.0)
def _l2_clipping(c: dict[str, Any]) -> _Translation:
    return _to("norm-clip", max_norm=c["max_norm"], scope="tensor")


@_peer("declearn", "L2GlobalClipping", max_norm=1.0)
@_peer("optax", "clip_by_global_norm", max_norm=_REQUIRED)
def _global_clip(c: dict[str, Any]) -> _Translation:
    return _to("norm-clip", max_norm=c["max_norm"])


@_peer("optax", "clip", max_delta=_REQUIRED)
def _optax_clip(c: dict[str, Any]) -> _Translation:
    return _to("value-clip", max_value=c["max_delta"])


@_peer("optax", "clip_by_block_rms", threshold=_REQUIRED)
def _optax_block_rms(c: dict[str, Any]) -> _Translation:
    return _to("norm-clip", max_norm=c["threshold"], ord="rms", scope="tensor")


@_peer("optax", "adaptive_grad_clip", clipping=_REQUIRED, eps=1e-3, axis=None)
def _optax_agc(c: dict[str, Any]) -> _Translation:
    note = None if c["axis"] is None else "0-d tensors are whole units; optax raises on them"
    dims = {} if c["axis"] is None else {"dims": c["axis"]}
    return _to("agc", note, ratio=c["clipping"], min_norm=c["eps"], **dims)


@_peer("torch", "clip_grad_norm_", max_norm=_REQUIRED, norm_type=2.0, error_if_nonfinite=False)
def _torch_clip_grad_norm(c: dict[str, Any]) -> _Translation:
    ord = _order(c["norm_type"])
    if ord == 0:
        return _to("no-op", "norm_type=0 counts tensors in torch, which no scaling changes")
    config = {"on_nonfinite": "raise"} if c["error_if_nonfinite"] else {}
    return _to("norm-clip", max_norm=c["max_norm"], ord=ord, eps=1e-6, **config)


@_peer("torch", "clip_grad_value_", clip_value=_REQUIRED)
def _torch_clip_grad_value(c: dict[str, Any]) -> _Translation:
    return _to("value-clip", max_value=c["clip_value"])


@_peer("tensorflow", "clip_by_global_norm", clip_norm=_REQUIRED)
def _tf_global(c: dict[str, Any]) -> _Translation:
    return _to("norm-clip", max_norm=c["clip_norm"])


@_peer("tensorflow", "clip_by_norm", clip_norm=_REQUIRED, axes=None)
def _tf_by_norm(c: dict[str, Any]) -> _Translation:
    axes = c["axes"]
    dims = {} if axes is None else {"dims": [axes] if isinstance(axes, int) else list(axes)}
    note = "tensors without these axes are left alone; TensorFlow raises" if dims else None
    return _to("norm-clip", note, max_norm=c["clip_norm"], scope="tensor", **dims)


@_peer("tensorflow", "clip_by_value", clip_value_min=_REQUIRED, clip_value_max=_REQUIRED)
def _tf_by_value(c: dict[str, Any]) -> _Translation:
    return _to("value-clip", max_value=c["clip_value_max"], min_value=c["clip_value_min"])


@_peer("keras", "Optimizer", clipnorm=None, global_clipnorm=None, clipvalue=None)
def _keras(c: dict[str, Any]) -> _Translation:
    given = {key: value for key, value in c.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"Keras takes one of {', '.join(c)}, got {', '.join(given)}")
    if not any(value > 0 for value in given.values()):
        return _to("no-op", "without a limit above 0, nothing is clipped")
    if c["clipvalue"] is not None:
        return _to("value-clip", max_value=c["clipvalue"])
    if c["global_clipnorm"] is not None:
        return _to("norm-clip", max_norm=c["global_clipnorm"])
    return _to("norm-clip", max_norm=c["clipnorm"], scope="tensor")


@_peer("lightning", "Trainer", gradient_clip_val=None, gradient_clip_algorithm=None)
def _lightning(c: dict[str, Any]) -> _Translation:
    words = {"norm": "norm", "value": "value"}
    by = _word("gradient_clip_algorithm", c["gradient_clip_algorithm"] or "norm", words)
    limit = c["gradient_clip_val"]
    if limit is None or limit <= 0:
        return _to("no-op", "without a gradient_clip_val above 0, nothing is clipped")
    if by == "value":
        return _to("value-clip", max_value=limit)
    return _to("norm-clip", max_norm=limit, eps=1e-6)


_FABRIC: dict[str, Any] = {"clip_val": None, "max_norm": None, "norm_type": 2.0}


@_peer("lightning", "Fabric.clip_gradients", **_FABRIC, error_if_nonfinite=True)
def _fabric(c: dict[str, Any]) -> _Translation:
    if (c["clip_val"] is None) == (c["max_norm"] is None):
        raise ValueError("clip_gradients of Fabric takes one of clip_val and max_norm")
    if c["max_norm"] is None:
        return _to("value-clip", max_value=c["clip_val"])
    return _torch_clip_grad_norm(c)


# -- other federated frameworks ---------------------------------------------------------------
_UPDATES = (
    'it clips a round\'s update: write aggregator = "clipped-averaging" beside it, and '
    "update-clip-client into client_opt; the line is for server_opt"
)
_WEIGHTS = "all clients weigh the same; Flower's FedAvg weighs by numbers of examples"
_SPLIT = (
    "noise_multiplier is what a round is accounted with, votes included, so that the noise on "
    "updates is a little larger than Flower's"
)
_FLOWER: dict[str, Any] = {"noise_multiplier": _REQUIRED, "num_sampled_clients": _REQUIRED}


def _noise(c: dict[str, Any]) -> dict[str, Any]:
    if not c["noise_multiplier"]:
        return {}
    return {
        "noise_multiplier": c["noise_multiplier"],
        "expected_clients": c["num_sampled_clients"],
    }


@_peer(
    "flower",
    "DifferentialPrivacyServerSideFixedClipping",
    "DifferentialPrivacyClientSideFixedClipping",
    **_FLOWER,
    clipping_norm=_REQUIRED,
)
def _flower_fixed(c: dict[str, Any]) -> _Translation:
    limit, noise = c["clipping_norm"], _noise(c)
    if not noise:
        return _to("clipped-averaging", _WEIGHTS, max_norm=limit)
    return _to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SPLIT,
        start_norm=limit,
        learning_rate=0.0,
        min_norm=limit,
        max_norm=limit,
        **noise,
    )


@_peer(
    "flower",
    "DifferentialPrivacyServerSideAdaptiveClipping",
    "DifferentialPrivacyClientSideAdaptiveClipping",
    **_FLOWER,
    initial_clipping_norm=0.1,
    target_clipped_quantile=0.5,
    clip_norm_lr=0.2,
    clipped_count_stddev=None,
)
def _flower_adaptive(c: dict[str, Any]) -> _Translation:
    noise = _noise(c)
    if noise:
        noise["bits_noise"] = c["clipped_count_stddev"]
    return _to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SPLIT if noise else None,
        "the bound settles where the share target_clipped_quantile of the updates is clipped; "
        "Flower lowers its bound when more are, so that it runs away",
        start_norm=c["initial_clipping_norm"],
        quantile=1.0 - c["target_clipped_quantile"],
        learning_rate=c["clip_norm_lr"],
        **noise,
    )


@_peer("flower", "fixedclipping_mod", clipping_norm=_REQUIRED)
def _flower_mod(c: dict[str, Any]) -> _Translation:
    return _to("clipped-averaging", _WEIGHTS, max_norm=c["clipping_norm"])


# -- papers -----------------------------------------------------------------------------------
@_peer("torchlean", "clipGradientsSpec", max_norm=_REQUIRED)
def _lean_norm(c: dict[str, Any]) -> _Translation:
    # The specification takes the absolute value itself.
    return _to("norm-clip", max_norm=abs(c["max_norm"]), scope="tensor")


@_peer("torchlean", "clipByValueSpec", min_val=_REQUIRED, max_val=_REQUIRED)
def _lean_value(c: dict[str, Any]) -> _Translation:
    return _to("value-clip", max_value=c["max_val"], min_value=c["min_val"])


@_peer("torchlean", "clipByPercentileSpec", pct=_REQUIRED)
def _lean_percentile(c: dict[str, Any]) -> _Translation:
    # The specification caps the percentile itself.
    return _to("percentile-clip", percentile=min(c["pct"], 100), method="lower", scope="tensor")


@_peer(
    "zclip",
    "ZClip",
    alpha=0.97,
    z_thresh=2.5,
    max_grad_norm=1.0,
    eps=1e-6,
    warmup_steps=25,
    mode="zscore",
    clip_option="adaptive_scaling",
    clip_factor=1.0,
    skip_update_on_spike=False,
)
def _zclip(c: dict[str, Any]) -> _Translation:
    percentile = _word("mode", c["mode"], {"zscore": False, "percentile": True})
    options = {"adaptive_scaling": "reciprocal", "mean": "mean"}
    action = "max" if percentile else _word("clip_option", c["clip_option"], options)
    factor = {"factor": c["clip_factor"]} if action == "reciprocal" else {}
    return _to(
        "zscore-clip",
        "mode='percentile' is a limit of mean + z_thresh * std" if percentile else None,
        z_max=c["z_thresh"],
        decay=c["alpha"],
        action=action,
        feedback="none" if c["skip_update_on_spike"] else "clipped",
        warmup=c["warmup_steps"],
        max_norm=c["max_grad_norm"],
        warmup_factor=None,
        min_std=0.0,
        # The percentile mode compares norms, not z-scores.
        std_eps=0.0 if percentile else c["eps"],
        eps=1e-6,
        **factor,
    )


@_peer("autoclip", "autoclip_gradient", clip_percentile=_REQUIRED)
def _autoclip(c: dict[str, Any]) -> _Translation:
    return _to(
        "percentile-norm-clip",
        percentile=c["clip_percentile"],
        history="window",
        window=None,
        feedback="raw",
        include_current=True,
        warmup=0,
        warmup_norm=None,
        warmup_factor=None,
        max_norm=None,
        eps=1e-6,
    )


@_peer(
    "opacus",
    "AdaClipDPOptimizer",
    "AdaClipDPOptimizer.update_max_grad_norm",
    clipbound_learning_rate=_REQUIRED,
    target_unclipped_quantile=_REQUIRED,
    max_clipbound=_REQUIRED,
    min_clipbound=_REQUIRED,
    initial=_REQUIRED,
    sample_size=1,
)
def _opacus_adaptive(c: dict[str, Any]) -> _Translation:
    return _to(
        "adaptive-clip",
        "counts norms without noise: the update of the bound only, which is not private by itself",
        quantile=c["target_unclipped_quantile"],
        rate=c["clipbound_learning_rate"],
        start_norm=c["initial"],
        every=c["sample_size"],
        min_norm=c["min_clipbound"],
        max_norm=c["max_clipbound"],
        eps=1e-6,
    )


@_peer("timm", "adaptive_clip_grad", clip_factor=0.01, eps=1e-3, norm_type=2.0)
def _timm_agc(c: dict[str, Any]) -> _Translation:
    if _order(c["norm_type"]) != 2:
        raise ValueError(f"norm_type must be 2, the only norm of agc; got {c['norm_type']!r}")
    return _to("agc", ratio=c["clip_factor"], min_norm=c["eps"], axis=0)


_ADAGC: dict[str, Any] = {
    "clip_ratio": 1.04,
    "beta": 0.99,
    "eps": 1e-6,
    "start_clip_steps": 100,
    "max_norm": 1.0,
}


@_peer("adagc", "AdaGC", **_ADAGC)
def _adagc_tensor(c: dict[str, Any]) -> _Translation:
    return _adagc(c, "tensor")


@_peer("adagc", "GlobalAdaGC", **_ADAGC)
def _adagc_global(c: dict[str, Any]) -> _Translation:
    return _adagc(c, "global")


def _adagc(c: dict[str, Any], scope: str) -> _Translation:
    return _to(
        "ema-clip",
        ratio=c["clip_ratio"],
        decay=c["beta"],
        action="max",
        feedback="clipped",
        warmup=c["start_clip_steps"],
        warmup_norm=c["max_norm"],
        warmup_factor=None,
        # The warm-up of both variants bounds the whole gradient.
        warmup_scope="group" if scope == "global" else "global",
        max_norm=None,
        estimator="adagc",
        eps=c["eps"],
        scope=scope,
    )
