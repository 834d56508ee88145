# SPDX-License-Identifier: Apache-2.0
"""Single rules, from papers and the packages that hold them."""

from __future__ import annotations

from fedclip.compat.base import Given, Peers, Translation, entry, renamed, signature, to
from fedclip.compat.words import at_least, order, word


def _zclip(c: Given) -> Translation:
    percentile = word("mode", c["mode"], "zscore percentile") == "percentile"
    options = {"adaptive_scaling": "reciprocal", "mean": "mean"}
    action = "max" if percentile else word("clip_option", c["clip_option"], options)
    return to(
        "zscore-clip",
        "mode='percentile' is a limit of mean + z_thresh * std" if percentile else None,
        **renamed(c, "z_max=z_thresh, decay=alpha, warmup=warmup_steps, max_norm=max_grad_norm"),
        **signature("warmup_factor=None, min_std=0.0, eps=1e-6"),
        action=action,
        feedback="none" if c["skip_update_on_spike"] else "clipped",
        # The percentile mode compares norms, not z-scores.
        std_eps=0.0 if percentile else c["eps"],
        **({"factor": c["clip_factor"]} if action == "reciprocal" else {}),
    )


def _autoclip(clip_percentile: object) -> Translation:
    return to(
        "percentile-norm-clip",
        "a gradient is not clipped while the percentile is 0; the paper's code erases it",
        **signature(
            "history='window', window=None, feedback='raw', include_current=True, eps=1e-6"
        ),
        **signature("warmup=0, warmup_norm=None, warmup_factor=None, max_norm=None"),
        percentile=clip_percentile,
    )


def _opacus_adaptive(c: Given) -> Translation:
    return to(
        "adaptive-clip",
        "counts norms without noise: the update of the bound only, which is not private by itself",
        **renamed(c, "quantile=target_unclipped_quantile, rate=clipbound_learning_rate"),
        **renamed(c, "start_norm=initial, every=sample_size"),
        **renamed(c, "min_norm=min_clipbound, max_norm=max_clipbound"),
        eps=1e-6,
    )


def _timm_agc(
    clip_factor: object = 0.01, eps: object = 1e-3, norm_type: object = 2.0
) -> Translation:
    if order(norm_type) != 2:
        raise ValueError(f"norm_type must be 2, the only norm of agc; got {norm_type!r}")
    return to("agc", ratio=clip_factor, min_norm=eps, axis=0)


def _nfnets_agc(clipping: object = 0.01, eps: object = 1e-3) -> Translation:
    return to("agc", ratio=clipping, min_norm=eps)


def _adagc(c: Given, scope: str) -> Translation:
    return to(
        "ema-clip",
        **renamed(c, "ratio=clip_ratio, decay=beta, eps=eps"),
        **renamed(c, "warmup=start_clip_steps, warmup_norm=max_norm"),
        **signature("action='max', feedback='clipped', estimator='adagc'"),
        **signature("warmup_factor=None, max_norm=None"),
        # The warm-up of both variants bounds the whole gradient.
        warmup_scope="group" if scope == "global" else "global",
        scope=scope,
    )


def _lean_percentile(pct: int) -> Translation:
    at_least(0, pct=pct)
    return to("percentile-clip", percentile=min(pct, 100), method="lower", scope="tensor")


_ZCLIP = (
    "alpha=0.97, z_thresh=2.5, max_grad_norm=1.0, eps=1e-6, warmup_steps=25, mode='zscore', "
    "clip_option='adaptive_scaling', clip_factor=1.0, skip_update_on_spike=False"
)
_OPACUS = entry(
    _opacus_adaptive,
    "clipbound_learning_rate, target_unclipped_quantile, max_clipbound, min_clipbound, initial, "
    "sample_size=1",
)
_ADAGC = "clip_ratio=1.04, beta=0.99, eps=1e-6, start_clip_steps=100, max_norm=1.0"

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
    "zclip": {"ZClip": entry(_zclip, _ZCLIP)},
    "autoclip": {"autoclip_gradient": entry(_autoclip)},
    "opacus": {"AdaClipDPOptimizer": _OPACUS, "AdaClipDPOptimizer.update_max_grad_norm": _OPACUS},
    "nfnets": {"AGC": entry(_nfnets_agc)},
    "timm": {"adaptive_clip_grad": entry(_timm_agc)},
    "adagc": {
        "AdaGC": entry(lambda c: _adagc(c, "tensor"), _ADAGC),
        "GlobalAdaGC": entry(lambda c: _adagc(c, "global"), _ADAGC),
    },
}
