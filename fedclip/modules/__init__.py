# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that declearn sees; importing this package registers them."""

from fedclip.modules.base import Clipper
from fedclip.modules.no_op import NoOp
from fedclip.modules.norm_clip import NormClip
from fedclip.modules.value_clip import ValueClip
from fedclip.modules.zscore_clip import ZScoreClip

__all__ = ["Clipper", "NoOp", "NormClip", "ValueClip", "ZScoreClip"]
