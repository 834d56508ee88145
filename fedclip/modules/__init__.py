# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that declearn sees; importing this package registers them."""

from fedclip.modules.adaptive_clip import AdaptiveClip
from fedclip.modules.agc import AGC
from fedclip.modules.auto_clip import AutoClip
from fedclip.modules.base import Clipper
from fedclip.modules.centralize import Centralize
from fedclip.modules.ema_clip import EmaClip
from fedclip.modules.ema_norm_clip import EmaNormClip
from fedclip.modules.ema_normalize import EmaNormalize
from fedclip.modules.ema_value_clip import EmaValueClip
from fedclip.modules.growth_clip import GrowthClip
from fedclip.modules.growth_value_clip import GrowthValueClip
from fedclip.modules.no_op import NoOp
from fedclip.modules.norm_clip import NormClip
from fedclip.modules.normalize import Normalize
from fedclip.modules.percentile_clip import PercentileClip
from fedclip.modules.percentile_norm_clip import PercentileNormClip
from fedclip.modules.servers import (
    AdaptiveClipServer,
    AutoClipServer,
    EmaClipServer,
    PercentileNormClipServer,
    ZScoreClipServer,
)
from fedclip.modules.standardize import Standardize
from fedclip.modules.value_clip import ValueClip
from fedclip.modules.zscore_clip import ZScoreClip

__all__ = [
    "AGC",
    "AdaptiveClip",
    "AdaptiveClipServer",
    "AutoClip",
    "AutoClipServer",
    "Centralize",
    "Clipper",
    "EmaClip",
    "EmaClipServer",
    "EmaNormClip",
    "EmaNormalize",
    "EmaValueClip",
    "GrowthClip",
    "GrowthValueClip",
    "NoOp",
    "NormClip",
    "Normalize",
    "PercentileClip",
    "PercentileNormClip",
    "PercentileNormClipServer",
    "Standardize",
    "ValueClip",
    "ZScoreClip",
    "ZScoreClipServer",
]
