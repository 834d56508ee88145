# SPDX-License-Identifier: Apache-2.0
"""The clippers of drytorch."""

from __future__ import annotations

from typing import Any

from fedclip.compat.base import Peers, Translation, entry, to, word

__all__ = ["PEERS"]

_HISTORY = {
    "criterion": "zstat",
    "clipping_function": None,
    "n_warmup_steps": 20,
    "warmup_clip_strategy": "norm1",
    "alpha": None,
    "thresh": None,
}


def _history(c: dict[str, Any], scope: str) -> Translation:
    criteria = {"zstat": "zstat", "ema": "ema", "ZStatCriterion": "zstat", "EMACriterion": "ema"}
    zstat = word("criterion", c["criterion"], criteria) == "zstat"
    defaults = ("reciprocal", 0.97, 2.5) if zstat else ("max", 0.98, 1.05)
    names = ("clipping_function", "alpha", "thresh")
    function, alpha, thresh = (
        default if c[name] is None else c[name]
        for name, default in zip(names, defaults, strict=True)
    )
    functions = {"max": "max", "mean": "mean", "reciprocal": "reciprocal"}
    functions |= {f"{word}_clipping": word for word in functions}
    action = word("clipping_function", function, functions)
    strategies = {"norm1": 1.0, "noop": None}
    warmup_norm = word("warmup_clip_strategy", c["warmup_clip_strategy"], strategies)
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
        return to("zscore-clip", z_max=thresh, std_eps=1e-8, min_std=0.0, **common)
    note = "clips to the running mean, as documented; drytorch zeroes the gradient"
    return to("ema-clip", note if action == "mean" else None, ratio=thresh, **common)


PEERS: Peers = {
    "drytorch": {
        "NoOp": entry(lambda: to("no-op")),
        "GradNormClipper": entry(lambda threshold=1: to("norm-clip", max_norm=threshold, eps=1e-6)),
        "GradValueClipper": entry(lambda threshold=1: to("value-clip", max_value=threshold)),
        "GradParamNormalizer": entry(
            lambda eps=1e-8: to("normalize", norm=1.0, scope="tensor", eps=eps)
        ),
        "GradZScoreNormalizer": entry(
            lambda eps=1e-8: to(
                "standardize",
                "tensors of one element are left alone; drytorch makes them NaN",
                eps=eps,
                scope="tensor",
            )
        ),
        "HistClipper": entry(lambda **c: _history(c, "global"), **_HISTORY),
        "ParamHistClipper": entry(lambda **c: _history(c, "tensor"), **_HISTORY),
    },
}
