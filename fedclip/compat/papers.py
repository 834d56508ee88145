# SPDX-License-Identifier: Apache-2.0
"""Single rules, from papers and the packages that hold them."""

from __future__ import annotations

from typing import Any

from fedclip.compat.base import Peers, Translation, at_least, entry, order, to, word

__all__ = ["PEERS"]


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
) -> Translation:
    percentile = word("mode", mode, "zscore percentile") == "percentile"
    options = {"adaptive_scaling": "reciprocal", "mean": "mean"}
    action = "max" if percentile else word("clip_option", clip_option, options)
    factor = {"factor": clip_factor} if action == "reciprocal" else {}
    return to(
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


def _autoclip(clip_percentile: Any) -> Translation:
    return to(
        "percentile-norm-clip",
        "a gradient is not clipped while the percentile is 0; the paper's code erases it",
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
) -> Translation:
    return to(
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


def _timm_agc(clip_factor: Any = 0.01, eps: Any = 1e-3, norm_type: Any = 2.0) -> Translation:
    if order(norm_type) != 2:
        raise ValueError(f"norm_type must be 2, the only norm of agc; got {norm_type!r}")
    return to("agc", ratio=clip_factor, min_norm=eps, axis=0)


_ADAGC = {"clip_ratio": 1.04, "beta": 0.99, "eps": 1e-6, "start_clip_steps": 100, "max_norm": 1.0}


def _adagc(c: dict[str, Any], scope: str) -> Translation:
    return to(
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


def _lean_percentile(pct: Any) -> Translation:
    at_least(0, pct=pct)
    return to("percentile-clip", percentile=min(pct, 100), method="lower", scope="tensor")


PEERS: Peers = {
    "torchlean": {
        # The specifications take the absolute value, and cap the percentile, themselves.
        "clipGradientsSpec": entry(
            lambda max_norm: to("norm-clip", max_norm=abs(max_norm), scope="tensor")
        ),
        "clipByValueSpec": entry(
            lambda min_val, max_val: to("value-clip", max_value=max_val, min_value=min_val)
        ),
        "clipByPercentileSpec": entry(_lean_percentile),
    },
    "zclip": {"ZClip": entry(_zclip)},
    "autoclip": {"autoclip_gradient": entry(_autoclip)},
    "opacus": {
        "AdaClipDPOptimizer": entry(_opacus_adaptive),
        "AdaClipDPOptimizer.update_max_grad_norm": entry(_opacus_adaptive),
    },
    "timm": {"adaptive_clip_grad": entry(_timm_agc)},
    "adagc": {
        "AdaGC": entry(lambda **c: _adagc(c, "tensor"), **_ADAGC),
        "GlobalAdaGC": entry(lambda **c: _adagc(c, "global"), **_ADAGC),
    },
}
