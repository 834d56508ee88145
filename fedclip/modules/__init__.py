# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that declearn sees; importing this package registers them."""

from fedclip.modules.adaptive_clip import AdaptiveClip
from fedclip.modules.auto_clip import AutoClip
from fedclip.modules.base import Clipper
from fedclip.modules.ema_clip import EmaClip
from fedclip.modules.growth_clip import GrowthClip
from fedclip.modules.no_op import NoOp
from fedclip.modules.norm_clip import NormClip
from fedclip.modules.percentile_norm_clip import PercentileNormClip
from fedclip.modules.value_clip import ValueClip
from fedclip.modules.zscore_clip import ZScoreClip

__all__ = [
    "AdaptiveClip",
    "AutoClip",
    "Clipper",
    "EmaClip",
    "GrowthClip",
    "NoOp",
    "NormClip",
    "PercentileNormClip",
    "ValueClip",
    "ZScoreClip",
]
