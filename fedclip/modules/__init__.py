# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that declearn sees; importing this package registers them."""

from fedclip.modules.adaptive_clip import AdaptiveClip as AdaptiveClip
from fedclip.modules.agc import AGC as AGC
from fedclip.modules.auto_clip import AutoClip as AutoClip
from fedclip.modules.base import Clipper as Clipper
from fedclip.modules.centralize import Centralize as Centralize
from fedclip.modules.ema_clip import EmaClip as EmaClip
from fedclip.modules.ema_norm_clip import EmaNormClip as EmaNormClip
from fedclip.modules.ema_normalize import EmaNormalize as EmaNormalize
from fedclip.modules.ema_value_clip import EmaValueClip as EmaValueClip
from fedclip.modules.growth_clip import GrowthClip as GrowthClip
from fedclip.modules.growth_value_clip import GrowthValueClip as GrowthValueClip
from fedclip.modules.mad_clip import MadClip as MadClip
from fedclip.modules.no_op import NoOp as NoOp
from fedclip.modules.norm_clip import NormClip as NormClip
from fedclip.modules.normalize import Normalize as Normalize
from fedclip.modules.own_limit import OwnLimit as OwnLimit
from fedclip.modules.percentile_clip import PercentileClip as PercentileClip
from fedclip.modules.percentile_norm_clip import PercentileNormClip as PercentileNormClip
from fedclip.modules.servers import AdaptiveClipServer as AdaptiveClipServer
from fedclip.modules.servers import AutoClipServer as AutoClipServer
from fedclip.modules.servers import EmaClipServer as EmaClipServer
from fedclip.modules.servers import MadClipServer as MadClipServer
from fedclip.modules.servers import PercentileNormClipServer as PercentileNormClipServer
from fedclip.modules.servers import ZScoreClipServer as ZScoreClipServer
from fedclip.modules.standardize import Standardize as Standardize
from fedclip.modules.value_clip import ValueClip as ValueClip
from fedclip.modules.zscore_clip import ZScoreClip as ZScoreClip
