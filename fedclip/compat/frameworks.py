# SPDX-License-Identifier: Apache-2.0
"""The fixed limits of frameworks: torch, TensorFlow, Keras, optax, Lightning, and declearn's."""

from __future__ import annotations

from fedclip.compat.base import Given, Peers, Translation, entry, to
from fedclip.compat.words import dims, order, word


def _optax_agc(clipping: object, eps: object = 1e-3, axis: object = None) -> Translation:
    along = dims("axis", axis)
    note = "tensors without these axes are left alone, 0-d ones are one unit; optax raises on both"
    if along is None:
        return to("agc", ratio=clipping, min_norm=eps, unit="optax")
    return to("agc", note, ratio=clipping, min_norm=eps, dims=along)


def _torch_norm(
    max_norm: object, norm_type: object = 2.0, error_if_nonfinite: object = False
) -> Translation:
    ord = order(norm_type)
    if ord == 0:
        return to("no-op", "norm_type=0 counts tensors in torch, which no scaling changes")
    config = {"on_nonfinite": "raise"} if error_if_nonfinite else {}
    return to("norm-clip", max_norm=max_norm, ord=ord, eps=1e-6, **config)


def _tf_by_norm(clip_norm: object, axes: object = None) -> Translation:
    along = dims("axes", axes)
    note = "tensors without these axes are left alone; TensorFlow raises"
    if along is None:
        return to("norm-clip", max_norm=clip_norm, scope="tensor")
    return to("norm-clip", note, max_norm=clip_norm, scope="tensor", dims=along)


def _keras(c: Given) -> Translation:
    given = {key: value for key, value in c.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"Keras takes one of {', '.join(c)}, got {', '.join(given)}")
    match given:
        case {"clipvalue": limit} if limit > 0:
            return to("value-clip", max_value=limit)
        case {"global_clipnorm": limit} if limit > 0:
            return to("norm-clip", max_norm=limit)
        case {"clipnorm": limit} if limit > 0:
            return to("norm-clip", max_norm=limit, scope="tensor")
    return to("no-op", "without a limit above 0, nothing is clipped")


def _lightning(
    gradient_clip_val: float | None = None, gradient_clip_algorithm: object = None
) -> Translation:
    algorithm = "norm" if gradient_clip_algorithm is None else gradient_clip_algorithm
    by = word("gradient_clip_algorithm", algorithm, "norm value")
    if gradient_clip_val is None or gradient_clip_val <= 0:
        return to("no-op", "without a gradient_clip_val above 0, nothing is clipped")
    if by == "value":
        return to("value-clip", max_value=gradient_clip_val)
    return to("norm-clip", max_norm=gradient_clip_val, eps=1e-6)


def _fabric(
    clip_val: object = None,
    max_norm: object = None,
    norm_type: object = 2.0,
    error_if_nonfinite: object = True,
) -> Translation:
    if (clip_val is None) == (max_norm is None):
        raise ValueError("clip_gradients of Fabric takes one of clip_val and max_norm")
    if max_norm is None:
        return to("value-clip", max_value=clip_val)
    return _torch_norm(max_norm, norm_type, error_if_nonfinite)


_RECORDS = "it clips record by record, as sample-clip does in fedclip's DP-SGD (docs/dp-sgd.md)"


def _norm_clip(max_norm: object) -> Translation:
    return to("norm-clip", max_norm=max_norm)


PEERS: Peers = {
    "declearn": {
        "L2Clipping": entry(
            lambda max_norm=1.0: to("norm-clip", max_norm=max_norm, scope="tensor")
        ),
        "L2GlobalClipping": entry(lambda max_norm=1.0: _norm_clip(max_norm)),
    },
    "optax": {
        "clip_by_global_norm": entry(_norm_clip),
        "clip": entry(lambda max_delta: to("value-clip", max_value=max_delta)),
        "clip_by_block_rms": entry(
            lambda threshold: to("norm-clip", max_norm=threshold, ord="rms", scope="tensor")
        ),
        "adaptive_grad_clip": entry(_optax_agc),
        "per_example_global_norm_clip": _RECORDS,
        "per_example_layer_norm_clip": _RECORDS,
    },
    "torch": {
        "clip_grad_norm_": entry(_torch_norm),
        "clip_grad_value_": entry(lambda clip_value: to("value-clip", max_value=clip_value)),
    },
    "tensorflow": {
        "clip_by_global_norm": entry(lambda clip_norm: _norm_clip(clip_norm)),
        "clip_by_norm": entry(_tf_by_norm),
        "clip_by_value": entry(
            lambda clip_value_min, clip_value_max: to(
                "value-clip", max_value=clip_value_max, min_value=clip_value_min
            )
        ),
    },
    "keras": {"Optimizer": entry(_keras, "clipnorm=None, global_clipnorm=None, clipvalue=None")},
    "lightning": {"Trainer": entry(_lightning), "Fabric.clip_gradients": entry(_fabric)},
}
