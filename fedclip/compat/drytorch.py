# SPDX-License-Identifier: Apache-2.0
"""The clippers of drytorch."""

from __future__ import annotations

from fedclip.compat.base import Entry, Given, Peers, Translation, checked, entry, signature, to
from fedclip.compat.words import made, unknown

_CRITERIA = {
    "ZStatCriterion": signature(
        "alpha=0.97, z_thresh=2.5, clipping_function='reciprocal_clipping'"
    ),
    "EMACriterion": signature("alpha=0.98, r_thresh=1.05, clipping_function='max_clipping'"),
}
_CRITERIA |= {"zstat": _CRITERIA["ZStatCriterion"], "ema": _CRITERIA["EMACriterion"]}
_WARMUPS: dict[str, Given] = {"GradNormClipper": {"threshold": 1.0}, "NoOp": {}}
_WARMUPS |= {"norm1": _WARMUPS["GradNormClipper"], "noop": {}}
# The parameters of a criterion, which may be given beside it: `thresh` is the threshold of either.
_BESIDE = "alpha=None, thresh=None, z_thresh=None, r_thresh=None, clipping_function=None"
_HISTORY = (
    "criterion='ZStatCriterion', warmup_clip_strategy='GradNormClipper', n_warmup_steps=20, "
    + _BESIDE
)
_FUNCTIONS = {name: name for name in ("max", "mean", "reciprocal")}
_FUNCTIONS |= {f"{name}_clipping": name for name in _FUNCTIONS}

_OWN = " (OwnLimit of fedclip takes a function of your own)"
_OTHER = " (docs/coming-from.md shows how to warm up with any other operation)"
_CLIPPING = "it is a value of clipping_function, which is `action` here"


def _history(c: Given, scope: str) -> Translation:
    criterion, given = made("criterion", c["criterion"], _CRITERIA, _OWN)
    parameters = _CRITERIA[criterion]
    limit = "z_thresh" if "z_thresh" in parameters else "r_thresh"
    for key in signature(_BESIDE):
        name = limit if key == "thresh" else key
        if c[key] is not None:
            if name in given:
                raise ValueError(f"{name} of {criterion} is given twice")
            given[name] = c[key]
    values = checked("drytorch", criterion, parameters, given)
    alpha, thresh, function = values.values()
    function = getattr(function, "__name__", function)
    if function not in _FUNCTIONS:
        raise ValueError(unknown("clipping_function can not be", function, _FUNCTIONS) + _OWN)
    action = _FUNCTIONS[function]
    warmup, operation = made("warmup_clip_strategy", c["warmup_clip_strategy"], _WARMUPS, _OTHER)
    operation = checked("drytorch", warmup, _WARMUPS[warmup], operation)
    common = {
        "decay": alpha,
        "action": action,
        "warmup": c["n_warmup_steps"],
        "scope": scope,
        **signature("feedback='raw', warmup_factor=None, max_norm=None, eps=1e-6"),
        # Without a warm-up, drytorch lets the first norm pass.
        "warmup_norm": operation.get("threshold") if c["n_warmup_steps"] else None,
        "estimator": "drytorch",
    }
    if limit == "z_thresh":
        return to("zscore-clip", z_max=thresh, std_eps=1e-8, min_std=0.0, **common)
    note = "clips to the running mean, as documented; drytorch zeroes the gradient"
    return to("ema-clip", note if action == "mean" else None, ratio=thresh, **common)


def _criterion(name: str) -> Entry:
    """Return the entry of a criterion by itself: what it says of norms, without a warm-up."""
    alone = {**signature(_HISTORY), "n_warmup_steps": 0, "criterion": name}
    return Entry(_CRITERIA[name], lambda c: _history({**alone, **c}, "global"))


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
        "HistClipper": entry(lambda c: _history(c, "global"), _HISTORY),
        "ParamHistClipper": entry(lambda c: _history(c, "tensor"), _HISTORY),
        "ZStatCriterion": _criterion("ZStatCriterion"),
        "EMACriterion": _criterion("EMACriterion"),
        "ClippingCriterion": f"it stands for one of your own{_OWN}",
        "ClipOperation": "it stands for an operation of your own: call that in your loop",
        "StatsCollector": "a clipper collects its own warm-up, which its statistics() tells",
        "max_clipping": _CLIPPING,
        "mean_clipping": _CLIPPING,
        "reciprocal_clipping": _CLIPPING,
    }
}
