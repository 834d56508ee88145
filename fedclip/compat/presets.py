# SPDX-License-Identifier: Apache-2.0
"""Presets of clippers: which class of which package has the defaults, by clipper and name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Preset(NamedTuple):
    """Published defaults, as arguments of `fedclip.compat.translate`."""

    peer: str
    cls: str
    config: Mapping[str, object] = MappingProxyType({})
    """Values for parameters without a published default."""


_OPACUS = {
    "clipbound_learning_rate": 0.2,
    "target_unclipped_quantile": 0.5,
    "initial": 0.1,
    "min_clipbound": 1e-6,
    "max_clipbound": None,
}

PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "adaptive-clip": {"opacus": Preset("opacus", "AdaClipDPOptimizer", _OPACUS)},
    "agc": {
        "nfnets": Preset("nfnets", "AGC"),
        "smartclip": Preset("smartclip", "AGC"),
    },
    "auto-clip": {"smartclip": Preset("smartclip", "AutoClip")},
    "ema-clip": {
        "adagc": Preset("adagc", "AdaGC"),
        "adagc-global": Preset("adagc", "GlobalAdaGC"),
        "drytorch": Preset("drytorch", "HistClipper", {"criterion": "EMACriterion"}),
    },
    "ema-norm-clip": {"torchzero": Preset("torchzero", "ClipNormByEMA")},
    "ema-normalize": {"torchzero": Preset("torchzero", "NormalizeByEMA")},
    "ema-value-clip": {"torchzero": Preset("torchzero", "ClipValueByEMA")},
    "growth-clip": {"torchzero": Preset("torchzero", "ClipNormGrowth")},
    "growth-value-clip": {"torchzero": Preset("torchzero", "ClipValueGrowth")},
    "percentile-norm-clip": {
        "autoclip": Preset("autoclip", "autoclip_gradient", {"clip_percentile": 10.0})
    },
    "standardize": {"drytorch": Preset("drytorch", "GradZScoreNormalizer")},
    "zscore-clip": {
        "zclip": Preset("zclip", "ZClip"),
        "drytorch": Preset("drytorch", "HistClipper"),
        "smartclip": Preset("smartclip", "ZScoreClip"),
    },
}
