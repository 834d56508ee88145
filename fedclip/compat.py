# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers, translated into ours.

The table `_PEERS` at the end has a function for each class of another package (a peer). Its
parameters and defaults are those of the class; it says which clipper and parameters give the same
numbers, and what differs. If the peer has a defect, the translation is the corrected clipper, and
`notes` says so. The translation treats NaN and infinity as `on_nonfinite` says, whatever the peer
does.
"""

from __future__ import annotations

import inspect
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
    build: Callable[..., _Translation]


# The default of a parameter that the peer requires.
_REQUIRED: Any = object()


def _entry(build: Callable[..., _Translation], **shared: Any) -> _Entry:
    """Return the entry of a class: its parameters are those of `build`, and the `shared` ones."""
    own = inspect.signature(build).parameters.values()
    defaults = {
        p.name: _REQUIRED if p.default is p.empty else p.default
        for p in own
        if p.kind is not p.VAR_KEYWORD
    }
    return _Entry({**defaults, **shared}, build)


_KINDS = {"agc": "regularizer", "clipped-averaging": "aggregator"}


def _to(name: str, *notes: str | None, **config: Any) -> _Translation:
    kind = _KINDS.get(name, "module")
    return _Translation(kind, name, config, [note for note in notes if note])


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
        return entry.build(**values)
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


def _word(parameter: str, given: Any, words: Mapping[str, Any] | str) -> Any:
    """Return our value for a word of the peer, or the word itself if we have the same `words`."""
    if isinstance(words, str):
        words = {word: word for word in words.split()}
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
        return str(_word("ord", value, "mad std var sum l1 l2 linf inf"))
    if number == float("inf"):
        return "inf"
    return int(number) if number.is_integer() else number


# -- drytorch ---------------------------------------------------------------------------------
_HISTORY = {
    "criterion": "zstat",
    "clipping_function": None,
    "n_warmup_steps": 20,
    "warmup_clip_strategy": "norm1",
    "alpha": None,
    "thresh": None,
}


def _history(c: dict[str, Any], scope: str) -> _Translation:
    criteria = {"zstat": "zstat", "ema": "ema", "ZStatCriterion": "zstat", "EMACriterion": "ema"}
    zstat = _word("criterion", c["criterion"], criteria) == "zstat"
    defaults = ("reciprocal", 0.97, 2.5) if zstat else ("max", 0.98, 1.05)
    names = ("clipping_function", "alpha", "thresh")
    function, alpha, thresh = (
        default if c[name] is None else c[name]
        for name, default in zip(names, defaults, strict=True)
    )
    functions = {"max": "max", "mean": "mean", "reciprocal": "reciprocal"}
    functions |= {f"{word}_clipping": word for word in functions}
    action = _word("clipping_function", function, functions)
    strategies = {"norm1": 1.0, "noop": None}
    warmup_norm = _word("warmup_clip_strategy", c["warmup_clip_strategy"], strategies)
    common = {
        "decay": alpha,
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
        return _to("zscore-clip", z_max=thresh, std_eps=1e-8, min_std=0.0, **common)
    note = "clips to the running mean, as documented; drytorch zeroes the gradient"
    return _to("ema-clip", note if action == "mean" else None, ratio=thresh, **common)


# -- smartclip --------------------------------------------------------------------------------
_GATE = {"scope": "global", "warmup_steps": 100, "min_history": 50, "eps": 1e-8, "guard_nans": True}
_ZSCORE = {"zmax": 3.0, "ema_decay": 0.99, **_GATE}
_AUTO = {
    "mode": "auto",
    "percentile": 95.0,
    "history": "ema",
    "ema_decay": 0.99,
    "window_size": 1024,
    **_GATE,
}
_AGC = {
    "clipping": 0.01,
    "exclude_bias_bn": True,
    **_GATE,
    "scope": "per_layer",
    "warmup_steps": 0,
    "min_history": 0,
}
_SCOPES = {"global": "global", "per_layer": "layer", "per_param": "tensor"}
# On TensorFlow, smartclip clips each tensor by itself, even with "per_layer".
_TF_SCOPES = {"global": "global", "per_layer": "per_param", "per_param": "per_param"}


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


def _gate_notes(c: dict[str, Any]) -> tuple[str | None, str | None]:
    groups = (
        "warmup counts calls; smartclip counts observations over all groups, so that its warm-up "
        "is shorter by the number of groups"
    )
    guard = "NaN is never observed; smartclip would note it as eps"
    return None if c["scope"] == "global" else groups, None if c["guard_nans"] else guard


def _smart_zscore(c: dict[str, Any], note: str | None = None) -> _Translation:
    return _to(
        "zscore-clip",
        *_gate_notes(c),
        note,
        z_max=c["zmax"],
        decay=c["ema_decay"],
        action="max",
        estimator="smartclip",
        std_eps=0.0,
        min_std=0.0,
        **_gated(c),
    )


def _smart_auto(c: dict[str, Any], note: str | None = None) -> _Translation:
    gated, gate = _gated(c), (*_gate_notes(c), note)
    if _word("mode", c["mode"], "auto percentile") == "auto":
        median = "the median is the published P2 estimate; smartclip's lacks a division"
        late = "a group is not clipped before its 5th norm; smartclip may erase it"
        own = {"median": "p2", "decay": None, "min_std": 1e-3}
        return _to("auto-clip", median, late, *gate, **own, **gated)
    config = {"percentile": c["percentile"], "history": "window", "window": c["window_size"]}
    if _word("history", c["history"], "ema window") == "window":
        return _to("percentile-norm-clip", *gate, **config, **gated)
    falls = "the streaming percentile goes down as well as up; smartclip's never falls"
    config = {"percentile": c["percentile"], "history": "stream", "rate": 1.0 - c["ema_decay"]}
    return _to("percentile-norm-clip", falls, *gate, **config, **gated)


def _smart_agc(c: dict[str, Any]) -> _Translation:
    _word("scope", c["scope"], _SCOPES)
    scope = "each tensor is a unit whatever the scope, as smartclip does on torch"
    gate = "clips from the first step: a limit from the weights needs no warm-up"
    return _to(
        "agc",
        None if c["scope"] == "per_param" else scope,
        gate if c["warmup_steps"] or c["min_history"] else None,
        None if c["exclude_bias_bn"] else _ZERO_WEIGHTS,
        ratio=c["clipping"],
        unit="tensor",
        eps=c["eps"],
        skip_vectors=c["exclude_bias_bn"],
    )


def _on_tensorflow(c: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    scope = _word("scope", c["scope"], _TF_SCOPES)
    note = (
        "the warm-up lasts as many calls as it is set to; smartclip's TensorFlow backend also "
        "counts each tensor, so that its own is shorter, and its last call may clip by tensor"
    )
    return {**c, "scope": scope}, note if scope == "global" else None


def _smart_tf_agc(c: dict[str, Any]) -> _Translation:
    whole = _word("scope", c["scope"], _SCOPES) == "global"
    return _to(
        "agc",
        None if whole or c["exclude_bias_bn"] else _ZERO_WEIGHTS,
        ratio=c["clipping"],
        unit="global" if whole else "tensor",
        eps=c["eps"],
        # On TensorFlow, smartclip ignores exclude_bias_bn and excludes nothing.
        skip_vectors=False,
    )


_ZERO_WEIGHTS = (
    "tensors whose weights are all zero are left a limit that they can grow from; smartclip's "
    "freezes them"
)


# -- torchzero --------------------------------------------------------------------------------
# Parameters of earlier versions, renamed or removed since, are `parameterwise` and `ema_init`.
_TARGET = {"target": "update"}
_GROUPED = {"ord": 2, "tensorwise": True, "parameterwise": None, **_TARGET}
_ALONG = {"dim": None, "inverse_dims": False, **_TARGET}
_DIMS = {"ord": 2, "min_size": 1, **_ALONG}
_GROWTH = {"add": None, "mul": 1.5, "min_value": 1e-4, "max_decay": 2}
_BY_EMA = {
    "beta": 0.99,
    "max_ema_growth": 1.5,
    "init": 0.0,
    "ema_init": None,
    "min_norm": 1e-6,
    "eps": None,
    **_GROUPED,
}


def _target_note(c: dict[str, Any]) -> str | None:
    first = "target='grad' clips the gradient itself: put this first among the modules"
    note: str | None = _word("target", c["target"], {"update": None, "grad": first})
    return note


def _grouped(c: dict[str, Any]) -> dict[str, Any]:
    old = c["parameterwise"]
    tensorwise = c["tensorwise"] if old is None else old
    return {"ord": _order(c["ord"]), "scope": "tensor" if tensorwise else "global"}


def _spanned(c: dict[str, Any]) -> dict[str, Any] | None:
    """Return our parameters for torchzero's dims; None if they leave every tensor untouched."""
    dim = c["dim"]
    if isinstance(dim, str):
        return {"scope": _word("dim", dim, "global")}
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if dims is not None and not all(type(d) is int for d in dims):
        raise ValueError(f"dim must be an int, a list of ints or 'global', got {dim!r:.80}")
    inverse, min_size = c["inverse_dims"], c["min_size"]
    if (dims is None and inverse) or (dims == [] and not inverse):
        return None
    if not dims:
        return {"scope": "tensor", "min_size": min_size}
    return {"scope": "tensor", "dims": dims, "inverse_dims": inverse, "min_size": min_size}


def _dims_note(c: dict[str, Any]) -> str | None:
    dim = c["dim"]
    if dim is None:
        return "dim=None: all dims of each tensor; torchzero takes those of the first"
    values = [dim] if isinstance(dim, int) else [] if isinstance(dim, str) else list(dim)
    negative = "negative dims count from the end of each tensor; torchzero's may not"
    return negative if any(d < 0 for d in values) else None


_MEASURES = {
    "std": "ord='std': fewer than two elements are left alone; torchzero makes them NaN",
    "var": "ord='var': the variance is brought to the limit; torchzero overshoots",
    "sum": "ord='sum': taken as the sum of absolute values; a signed sum may flip the sign",
    0: "ord=0: the number of non-zeros does not change under scaling, nothing is clipped",
}


def _measured(name: str, c: dict[str, Any], **limits: Any) -> _Translation:
    """Translate a class that measures along dims."""
    ord, spanned = _order(c["ord"]), _spanned(c)
    notes = [_dims_note(c), _MEASURES.get(ord), _target_note(c)]
    if spanned is None or ord == 0:
        empty = None if spanned else "no dims are left to measure along: nothing is clipped"
        return _to("no-op", *notes, empty)
    return _to(name, *notes, **limits, ord=1 if ord == "sum" else ord, **spanned)


def _clip_grad_norm(max_norm: Any, min_norm: Any = None, **c: Any) -> _Translation:
    if max_norm is None and min_norm is None:
        return _to("no-op", "without max_norm and min_norm, nothing is clipped")
    return _measured("norm-clip", c, max_norm=max_norm, min_norm=min_norm)


def _centralize(c: dict[str, Any]) -> _Translation:
    spanned = _spanned(c)
    if spanned is None:
        return _to("no-op", "no dims are left to average along: nothing is changed")
    # Over all tensors together, torchzero has no smallest size.
    return _to("centralize", _dims_note(c), _target_note(c), **{"min_size": 1, **spanned})


def _by_ema(name: str, c: dict[str, Any]) -> _Translation:
    eps = "eps has no counterpart: it only shows where the average is shorter than eps"
    return _to(
        name,
        _target_note(c),
        None if c["eps"] is None else eps,
        decay=c["beta"],
        **_grouped(c),
        max_growth=c["max_ema_growth"],
        init=_start(c["init"], c["ema_init"], "first"),
        min_norm=c["min_norm"],
    )


def _start(init: Any, ema_init: Any, first: float | str) -> Any:
    """Return the start of an average; `first` means the first update."""
    words = {"zeros": 0.0, "update": first}
    return init if ema_init is None else _word("ema_init", ema_init, words)


def _norm_growth(min_value: Any, mul: Any, add: Any, max_decay: Any, **c: Any) -> _Translation:
    note = "min_value floors the past norm; torchzero divides every update by it"
    return _to(
        "growth-clip",
        note if min_value is not None and min_value > 1 else None,
        _target_note(c),
        mul=mul,
        add=add,
        min_norm=min_value,
        max_decay=max_decay,
        warmup_norm=None,
        **_grouped(c),
    )


# -- fixed limits of the frameworks -----------------------------------------------------------
def _optax_agc(clipping: Any, eps: Any = 1e-3, axis: Any = None) -> _Translation:
    dims = {} if axis is None else {"dims": axis}
    note = "0-d tensors are whole units; optax raises on them" if dims else None
    return _to("agc", note, ratio=clipping, min_norm=eps, **dims)


def _torch_norm(
    max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False
) -> _Translation:
    ord = _order(norm_type)
    if ord == 0:
        return _to("no-op", "norm_type=0 counts tensors in torch, which no scaling changes")
    config = {"on_nonfinite": "raise"} if error_if_nonfinite else {}
    return _to("norm-clip", max_norm=max_norm, ord=ord, eps=1e-6, **config)


def _tf_by_norm(clip_norm: Any, axes: Any = None) -> _Translation:
    dims = {} if axes is None else {"dims": [axes] if isinstance(axes, int) else list(axes)}
    note = "tensors without these axes are left alone; TensorFlow raises" if dims else None
    return _to("norm-clip", note, max_norm=clip_norm, scope="tensor", **dims)


def _keras(**c: Any) -> _Translation:
    given = {key: value for key, value in c.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"Keras takes one of {', '.join(c)}, got {', '.join(given)}")
    match given:
        case {"clipvalue": limit} if limit > 0:
            return _to("value-clip", max_value=limit)
        case {"global_clipnorm": limit} if limit > 0:
            return _to("norm-clip", max_norm=limit)
        case {"clipnorm": limit} if limit > 0:
            return _to("norm-clip", max_norm=limit, scope="tensor")
    return _to("no-op", "without a limit above 0, nothing is clipped")


def _lightning(gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> _Translation:
    by = _word("gradient_clip_algorithm", gradient_clip_algorithm or "norm", "norm value")
    if gradient_clip_val is None or gradient_clip_val <= 0:
        return _to("no-op", "without a gradient_clip_val above 0, nothing is clipped")
    if by == "value":
        return _to("value-clip", max_value=gradient_clip_val)
    return _to("norm-clip", max_norm=gradient_clip_val, eps=1e-6)


def _fabric(
    clip_val: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    error_if_nonfinite: Any = True,
) -> _Translation:
    if (clip_val is None) == (max_norm is None):
        raise ValueError("clip_gradients of Fabric takes one of clip_val and max_norm")
    if max_norm is None:
        return _to("value-clip", max_value=clip_val)
    return _torch_norm(max_norm, norm_type, error_if_nonfinite)


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
_SETTLES = (
    "the bound settles where the share target_clipped_quantile of the updates is clipped; Flower "
    "lowers its bound when more are, so that it runs away"
)


def _flower_fixed(
    noise_multiplier: Any, num_sampled_clients: Any, clipping_norm: Any
) -> _Translation:
    if not noise_multiplier:
        return _to("clipped-averaging", _WEIGHTS, max_norm=clipping_norm)
    return _to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SPLIT,
        start_norm=clipping_norm,
        learning_rate=0.0,
        min_norm=clipping_norm,
        max_norm=clipping_norm,
        noise_multiplier=noise_multiplier,
        expected_clients=num_sampled_clients,
    )


def _flower_adaptive(
    noise_multiplier: Any,
    num_sampled_clients: Any,
    initial_clipping_norm: Any = 0.1,
    target_clipped_quantile: Any = 0.5,
    clip_norm_lr: Any = 0.2,
    clipped_count_stddev: Any = None,
) -> _Translation:
    noise = {
        "noise_multiplier": noise_multiplier,
        "expected_clients": num_sampled_clients,
        "bits_noise": clipped_count_stddev,
    }
    return _to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SPLIT if noise_multiplier else None,
        _SETTLES,
        start_norm=initial_clipping_norm,
        quantile=1.0 - target_clipped_quantile,
        learning_rate=clip_norm_lr,
        **(noise if noise_multiplier else {}),
    )


# -- papers -----------------------------------------------------------------------------------
def _zclip(
    alpha: Any = 0.97,
    z_thresh: Any = 2.5,
    max_grad_norm: Any = 1.0,
    eps: Any = 1e-6,
    warmup_steps: Any = 25,
    mode: Any = "zscore",
    clip_option: Any = "adaptive_scaling",
    clip_factor: Any = 1.0,
    skip_update_on_spike: Any = False,
) -> _Translation:
    percentile = _word("mode", mode, "zscore percentile") == "percentile"
    options = {"adaptive_scaling": "reciprocal", "mean": "mean"}
    action = "max" if percentile else _word("clip_option", clip_option, options)
    factor = {"factor": clip_factor} if action == "reciprocal" else {}
    return _to(
        "zscore-clip",
        "mode='percentile' is a limit of mean + z_thresh * std" if percentile else None,
        z_max=z_thresh,
        decay=alpha,
        action=action,
        feedback="none" if skip_update_on_spike else "clipped",
        warmup=warmup_steps,
        max_norm=max_grad_norm,
        warmup_factor=None,
        min_std=0.0,
        # The percentile mode compares norms, not z-scores.
        std_eps=0.0 if percentile else eps,
        eps=1e-6,
        **factor,
    )


def _autoclip(clip_percentile: Any) -> _Translation:
    return _to(
        "percentile-norm-clip",
        percentile=clip_percentile,
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


def _opacus_adaptive(
    clipbound_learning_rate: Any,
    target_unclipped_quantile: Any,
    max_clipbound: Any,
    min_clipbound: Any,
    initial: Any,
    sample_size: Any = 1,
) -> _Translation:
    return _to(
        "adaptive-clip",
        "counts norms without noise: the update of the bound only, which is not private by itself",
        quantile=target_unclipped_quantile,
        rate=clipbound_learning_rate,
        start_norm=initial,
        every=sample_size,
        min_norm=min_clipbound,
        max_norm=max_clipbound,
        eps=1e-6,
    )


def _timm_agc(clip_factor: Any = 0.01, eps: Any = 1e-3, norm_type: Any = 2.0) -> _Translation:
    if _order(norm_type) != 2:
        raise ValueError(f"norm_type must be 2, the only norm of agc; got {norm_type!r}")
    return _to("agc", ratio=clip_factor, min_norm=eps, axis=0)


_ADAGC = {"clip_ratio": 1.04, "beta": 0.99, "eps": 1e-6, "start_clip_steps": 100, "max_norm": 1.0}


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


# -- all classes ------------------------------------------------------------------------------
def _norm_clip(max_norm: Any) -> _Translation:
    return _to("norm-clip", max_norm=max_norm)


_PEERS: dict[str, dict[str, _Entry]] = {
    "drytorch": {
        "NoOp": _entry(lambda: _to("no-op")),
        "GradNormClipper": _entry(
            lambda threshold=1: _to("norm-clip", max_norm=threshold, eps=1e-6)
        ),
        "GradValueClipper": _entry(lambda threshold=1: _to("value-clip", max_value=threshold)),
        "GradParamNormalizer": _entry(
            lambda eps=1e-8: _to("normalize", norm=1.0, scope="tensor", eps=eps)
        ),
        "GradZScoreNormalizer": _entry(
            lambda eps=1e-8: _to(
                "standardize",
                "tensors of one element are left alone; drytorch makes them NaN",
                eps=eps,
                scope="tensor",
            )
        ),
        "HistClipper": _entry(lambda **c: _history(c, "global"), **_HISTORY),
        "ParamHistClipper": _entry(lambda **c: _history(c, "tensor"), **_HISTORY),
    },
    "smartclip": {
        "ZScoreClip": _entry(lambda **c: _smart_zscore(c), **_ZSCORE),
        "AutoClip": _entry(lambda **c: _smart_auto(c), **_AUTO),
        "AGC": _entry(lambda **c: _smart_agc(c), **_AGC),
    },
    "smartclip-tf": {
        "ZScoreClip": _entry(lambda **c: _smart_zscore(*_on_tensorflow(c)), **_ZSCORE),
        "AutoClip": _entry(lambda **c: _smart_auto(*_on_tensorflow(c)), **_AUTO),
        "AGC": _entry(lambda **c: _smart_tf_agc(c), **_AGC),
    },
    "torchzero": {
        "ClipNorm": _entry(
            lambda max_norm, **c: _measured("norm-clip", c, max_norm=max_norm), **_DIMS
        ),
        "clip_grad_norm_": _entry(_clip_grad_norm, **{**_DIMS, "min_size": 2}),
        "Normalize": (
            _normalize := _entry(
                lambda norm_value=1.0, **c: _measured("normalize", c, norm=norm_value), **_DIMS
            )
        ),
        "normalize_grads_": _normalize,
        "ClipValue": (
            _clip_value := _entry(
                lambda value, **c: _to("value-clip", _target_note(c), max_value=value), **_TARGET
            )
        ),
        "clip_grad_value_": _clip_value,
        "Centralize": _entry(lambda **c: _centralize(c), min_size=2, **_ALONG),
        "ClipNormByEMA": _entry(lambda **c: _by_ema("ema-norm-clip", c), **_BY_EMA),
        "NormalizeByEMA": _entry(lambda **c: _by_ema("ema-normalize", c), **_BY_EMA),
        "ClipValueByEMA": _entry(
            lambda beta=0.99, init=0, ema_init=None, **c: _to(
                "ema-value-clip", _target_note(c), decay=beta, init=_start(init, ema_init, 1.0)
            ),
            **_TARGET,
        ),
        "ClipNormGrowth": _entry(_norm_growth, **{**_GROWTH, **_GROUPED}),
        "ClipValueGrowth": _entry(
            lambda target="update", **c: _to(
                "growth-value-clip", _target_note({"target": target}), **c
            ),
            **_GROWTH,
        ),
    },
    "declearn": {
        "L2Clipping": _entry(
            lambda max_norm=1.0: _to("norm-clip", max_norm=max_norm, scope="tensor")
        ),
        "L2GlobalClipping": _entry(_norm_clip, max_norm=1.0),
    },
    "optax": {
        "clip_by_global_norm": _entry(_norm_clip),
        "clip": _entry(lambda max_delta: _to("value-clip", max_value=max_delta)),
        "clip_by_block_rms": _entry(
            lambda threshold: _to("norm-clip", max_norm=threshold, ord="rms", scope="tensor")
        ),
        "adaptive_grad_clip": _entry(_optax_agc),
    },
    "torch": {
        "clip_grad_norm_": _entry(_torch_norm),
        "clip_grad_value_": _entry(lambda clip_value: _to("value-clip", max_value=clip_value)),
    },
    "tensorflow": {
        "clip_by_global_norm": _entry(lambda clip_norm: _norm_clip(clip_norm)),
        "clip_by_norm": _entry(_tf_by_norm),
        "clip_by_value": _entry(
            lambda clip_value_min, clip_value_max: _to(
                "value-clip", max_value=clip_value_max, min_value=clip_value_min
            )
        ),
    },
    "keras": {
        "Optimizer": _entry(_keras, clipnorm=None, global_clipnorm=None, clipvalue=None),
    },
    "lightning": {"Trainer": _entry(_lightning), "Fabric.clip_gradients": _entry(_fabric)},
    "flower": {
        "DifferentialPrivacyServerSideFixedClipping": _entry(_flower_fixed),
        "DifferentialPrivacyClientSideFixedClipping": _entry(_flower_fixed),
        "DifferentialPrivacyServerSideAdaptiveClipping": _entry(_flower_adaptive),
        "DifferentialPrivacyClientSideAdaptiveClipping": _entry(_flower_adaptive),
        "fixedclipping_mod": _entry(
            lambda clipping_norm: _to("clipped-averaging", _WEIGHTS, max_norm=clipping_norm)
        ),
    },
    "torchlean": {
        # The specifications take the absolute value, and cap the percentile, themselves.
        "clipGradientsSpec": _entry(
            lambda max_norm: _to("norm-clip", max_norm=abs(max_norm), scope="tensor")
        ),
        "clipByValueSpec": _entry(
            lambda min_val, max_val: _to("value-clip", max_value=max_val, min_value=min_val)
        ),
        "clipByPercentileSpec": _entry(
            lambda pct: _to(
                "percentile-clip", percentile=min(pct, 100), method="lower", scope="tensor"
            )
        ),
    },
    "zclip": {"ZClip": _entry(_zclip)},
    "autoclip": {"autoclip_gradient": _entry(_autoclip)},
    "opacus": {
        "AdaClipDPOptimizer": _entry(_opacus_adaptive),
        "AdaClipDPOptimizer.update_max_grad_norm": _entry(_opacus_adaptive),
    },
    "timm": {"adaptive_clip_grad": _entry(_timm_agc)},
    "adagc": {
        "AdaGC": _entry(lambda **c: _adagc(c, "tensor"), **_ADAGC),
        "GlobalAdaGC": _entry(lambda **c: _adagc(c, "global"), **_ADAGC),
    },
}
