# SPDX-License-Identifier: Apache-2.0
"""The clippers of smartclip, on torch and on TensorFlow."""

from __future__ import annotations

from fedclip.compat.base import Given, Peers, Translation, entry, renamed, signature, to
from fedclip.compat.words import at_least, word

_GATE = "scope='global', warmup_steps=100, min_history=50, eps=1e-8, guard_nans=True"
_ZSCORE = f"zmax=3.0, ema_decay=0.99, {_GATE}"
_AUTO = f"mode='auto', percentile=95.0, history='ema', ema_decay=0.99, window_size=1024, {_GATE}"
_AGC = (
    "clipping=0.01, exclude_bias_bn=True, scope='per_layer', warmup_steps=0, min_history=0, "
    "eps=1e-8, guard_nans=True"
)
_SCOPES = {"global": "global", "per_layer": "layer", "per_param": "tensor"}
# On TensorFlow, smartclip clips each tensor by itself, even with "per_layer".
_TF_SCOPES = {"global": "global", "per_layer": "per_param", "per_param": "per_param"}


def _checked(c: Given) -> None:
    """Check what some translations leave out."""
    at_least(0, warmup_steps=c["warmup_steps"], min_history=c["min_history"])
    word("scope", c["scope"], _SCOPES)


def _gated(c: Given) -> Given:
    return {
        **signature("feedback='raw', include_current=True"),
        **signature("warmup_norm=None, warmup_factor=None, max_norm=None"),
        "warmup": max(c["warmup_steps"], c["min_history"]),
        "eps": c["eps"],
        "scope": _SCOPES[c["scope"]],
    }


def _gate_notes(c: Given) -> tuple[str | None, ...]:
    _checked(c)
    groups = (
        "warmup counts calls; smartclip counts observations over all groups, so that its warm-up "
        "is shorter by the number of groups"
    )
    guard = "NaN is never observed; smartclip would note it as eps"
    return None if c["scope"] == "global" else groups, None if c["guard_nans"] else guard


def _on_torch(c: Given) -> tuple[str | None, ...]:
    absent = "a tensor without a gradient is not observed; smartclip would note its norm as eps"
    root = (
        "a tensor whose name has no dot is a layer of its own; smartclip makes one layer of all "
        "that belong to the model itself: for that, list the other layers as patterns, "
        'scope = ["enc.*", "head.*"], and what matches none is one group'
    )
    return (None if c["scope"] == "global" else absent, root if c["scope"] == "per_layer" else None)


def _smart_zscore(c: Given, *notes: str | None) -> Translation:
    return to(
        "zscore-clip",
        *_gate_notes(c),
        *notes,
        **renamed(c, "z_max=zmax, decay=ema_decay"),
        **signature("action='max', estimator='smartclip', std_eps=0.0, min_std=0.0"),
        **_gated(c),
    )


def _smart_auto(c: Given, *notes: str | None) -> Translation:
    gate, gated = (*_gate_notes(c), *notes), _gated(c)
    window = word("history", c["history"], "ema window") == "window"
    at_least(1, window_size=c["window_size"])
    if not (0 < c["percentile"] <= 100 and 0 < c["ema_decay"] < 1):
        raise ValueError(
            "percentile must be in (0, 100] and ema_decay in (0, 1), got "
            f"{c['percentile']!r} and {c['ema_decay']!r}"
        )
    if word("mode", c["mode"], "auto percentile") == "auto":
        median = "the median is the published P2 estimate; smartclip's lacks a division"
        late = "a group is not clipped before its 5th norm; smartclip may erase it"
        own = {"median": "p2", "decay": None, "min_std": 1e-3}
        return to("auto-clip", median, late, *gate, **own, **gated)
    zero = "a group whose percentile is 0 is not clipped; smartclip erases its gradient"
    gate = (zero, *gate)
    config = {"percentile": c["percentile"], "history": "window", "window": c["window_size"]}
    if window:
        return to("percentile-norm-clip", *gate, **config, **gated)
    falls = "the streaming percentile goes down as well as up; smartclip's never falls"
    config = {"percentile": c["percentile"], "history": "stream", "rate": 1.0 - c["ema_decay"]}
    return to("percentile-norm-clip", falls, *gate, **config, **gated)


def _smart_agc(c: Given) -> Translation:
    scope = "each tensor is a unit whatever the scope, as smartclip does on torch"
    alike = None if c["scope"] == "per_param" else scope
    return _agc(c, "tensor", c["exclude_bias_bn"], alike)


def _smart_tf_agc(c: Given) -> Translation:
    # On TensorFlow, smartclip ignores exclude_bias_bn and excludes nothing.
    return _agc(c, "global" if c["scope"] == "global" else "tensor", False)


def _agc(c: Given, unit: str, skip: bool, *notes: str | None) -> Translation:
    _checked(c)
    zero = None if unit == "global" or c["exclude_bias_bn"] else _ZERO_WEIGHTS
    own = {**renamed(c, "ratio=clipping, eps=eps"), "min_norm": 1e-3}
    return to("agc", *notes, _ungated(c), zero, **own, unit=unit, skip_vectors=skip)


def _ungated(c: Given) -> str | None:
    gate = "clips from the first step: a limit from the weights needs no warm-up"
    return gate if c["warmup_steps"] or c["min_history"] else None


def _on_tensorflow(c: Given) -> tuple[Given, str | None]:
    scope = word("scope", c["scope"], _TF_SCOPES)
    note = (
        "the warm-up lasts as many calls as it is set to; smartclip's TensorFlow backend also "
        "counts each tensor, so that its own is shorter, and its last call may clip by tensor"
    )
    return {**c, "scope": scope}, note if scope == "global" else None


_ZERO_WEIGHTS = (
    "tensors whose weights are all zero are left a limit that they can grow from; smartclip's "
    "freezes them"
)
_LOOP = "it is part of a loop: here clip_ and attach of fedclip.adapters are, see docs/torch.md"
_TYPE = "it is a type for annotations; ours take the frameworks' own"


PEERS: Peers = {
    "smartclip": {
        "ZScoreClip": entry(lambda c: _smart_zscore(c, *_on_torch(c)), _ZSCORE),
        "AutoClip": entry(lambda c: _smart_auto(c, *_on_torch(c)), _AUTO),
        "AGC": entry(_smart_agc, _AGC),
        "ClipperBase": "it is the base of the others; fedclip's is Clipper",
        "apply": _LOOP,
        "step": _LOOP,
        "clip_context": _LOOP,
        "TensorLike": _TYPE,
        "ParamLike": _TYPE,
    },
    "smartclip-tf": {
        "ZScoreClip": entry(lambda c: _smart_zscore(*_on_tensorflow(c)), _ZSCORE),
        "AutoClip": entry(lambda c: _smart_auto(*_on_tensorflow(c)), _AUTO),
        "AGC": entry(_smart_tf_agc, _AGC),
    },
}
