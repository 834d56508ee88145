# SPDX-License-Identifier: Apache-2.0
"""The clippers. Each is imported, and registered with declearn, when it is first used.

`servers` has the counterparts of shared ones, which need declearn.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING

from fedclip.errors import imported_when_used
from fedclip.registration import PLUGINS

if TYPE_CHECKING:
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
    from fedclip.modules.standardize import Standardize as Standardize
    from fedclip.modules.value_clip import ValueClip as ValueClip
    from fedclip.modules.zscore_clip import ZScoreClip as ZScoreClip

_NAMES = (
    "AdaptiveClip AGC AutoClip Centralize EmaClip EmaNormClip EmaNormalize EmaValueClip "
    "GrowthClip GrowthValueClip MadClip NoOp NormClip Normalize OwnLimit PercentileClip "
    "PercentileNormClip Standardize ValueClip ZScoreClip"
)
HOMES = {
    "Clipper": "base",
    **{name: re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in _NAMES.split()},
}
"""The file of each class. A test compares it with the imports above, which type checkers read."""

if not TYPE_CHECKING:
    __getattr__ = imported_when_used(__name__, HOMES)


def by_name() -> dict[str, type]:
    """Return all clippers, those that users have written too."""
    for home in HOMES.values():
        import_module(f".{home}", __name__)
    return {name: cls for (_, name), cls in PLUGINS.items()}
