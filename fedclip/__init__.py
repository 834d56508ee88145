# SPDX-License-Identifier: Apache-2.0
"""fedclip: the gradient-clipping library of federated learning.

Importing it registers its clippers with declearn, before or after declearn itself is imported::

    import fedclip
    Optimizer(lrate=0.1, modules=["l2-global-clipping", "zscore-clip"])

Each name is imported when it is first used, so that a part can be imported alone.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedclip import errors
from fedclip.clippers import by_name
from fedclip.engines.declearn.registration import enter, register_when_possible

if TYPE_CHECKING:
    from fedclip.clippers.adaptive_clip import AdaptiveClip as AdaptiveClip
    from fedclip.clippers.agc import AGC as AGC
    from fedclip.clippers.auto_clip import AutoClip as AutoClip
    from fedclip.clippers.base import Clipper as Clipper
    from fedclip.clippers.centralize import Centralize as Centralize
    from fedclip.clippers.ema_clip import EmaClip as EmaClip
    from fedclip.clippers.ema_norm_clip import EmaNormClip as EmaNormClip
    from fedclip.clippers.ema_normalize import EmaNormalize as EmaNormalize
    from fedclip.clippers.ema_value_clip import EmaValueClip as EmaValueClip
    from fedclip.clippers.growth_clip import GrowthClip as GrowthClip
    from fedclip.clippers.growth_value_clip import GrowthValueClip as GrowthValueClip
    from fedclip.clippers.mad_clip import MadClip as MadClip
    from fedclip.clippers.no_op import NoOp as NoOp
    from fedclip.clippers.norm_clip import NormClip as NormClip
    from fedclip.clippers.normalize import Normalize as Normalize
    from fedclip.clippers.own_limit import OwnLimit as OwnLimit
    from fedclip.clippers.percentile_clip import PercentileClip as PercentileClip
    from fedclip.clippers.percentile_norm_clip import PercentileNormClip as PercentileNormClip
    from fedclip.clippers.standardize import Standardize as Standardize
    from fedclip.clippers.value_clip import ValueClip as ValueClip
    from fedclip.clippers.zscore_clip import ZScoreClip as ZScoreClip
    from fedclip.core.records import RoundRecord as RoundRecord
    from fedclip.core.records import StepRecord as StepRecord
    from fedclip.core.toml import to_toml as to_toml
    from fedclip.engines.declearn.aggregator import ClippedAveraging as ClippedAveraging
    from fedclip.engines.declearn.personal import PersonalModel as PersonalModel
    from fedclip.engines.declearn.personal_client import (
        PersonalFederatedClient as PersonalFederatedClient,
    )
    from fedclip.engines.declearn.private_client import (
        PrivateFederatedClient as PrivateFederatedClient,
    )
    from fedclip.engines.declearn.sample_clip import SampleClip as SampleClip
    from fedclip.engines.declearn.samplers import NamedClients as NamedClients
    from fedclip.engines.declearn.samplers import RoundRobin as RoundRobin
    from fedclip.engines.declearn.stages import analyse as analyse
    from fedclip.engines.declearn.update_modules import UpdateClipClient as UpdateClipClient
    from fedclip.engines.declearn.update_modules import UpdateClipServer as UpdateClipServer
    from fedclip.engines.declearn.update_modules import UpdateNorms as UpdateNorms
    from fedclip.errors import FedclipWarning as FedclipWarning
    from fedclip.errors import NonFiniteError as NonFiniteError
    from fedclip.errors import StateError as StateError

__version__ = "0.1.0"

_CLIPPERS = (
    "AGC AdaptiveClip AutoClip Centralize EmaClip EmaNormClip EmaNormalize EmaValueClip "
    "GrowthClip GrowthValueClip MadClip NoOp NormClip Normalize OwnLimit PercentileClip "
    "PercentileNormClip Standardize ValueClip ZScoreClip"
)
_WORDS = re.compile("(?<=[a-z])(?=[A-Z])")

# The module of each name. A test compares it with the imports above, which type checkers read.
_HOMES = {
    name: home
    for home, names in {
        "engines.declearn.private_client": "PrivateFederatedClient",
        "engines.declearn.sample_clip": "SampleClip",
        "errors": "FedclipWarning NonFiniteError StateError",
        "engines.declearn.stages": "analyse",
        "engines.declearn.personal": "PersonalModel",
        "engines.declearn.personal_client": "PersonalFederatedClient",
        "engines.declearn.samplers": "NamedClients RoundRobin",
        "engines.declearn.aggregator": "ClippedAveraging",
        "engines.declearn.update_modules": "UpdateClipClient UpdateClipServer UpdateNorms",
        "clippers.base": "Clipper",
        **{f"clippers.{_WORDS.sub('_', name).lower()}": name for name in _CLIPPERS.split()},
        "core.records": "RoundRecord StepRecord",
        "core.toml": "to_toml",
    }.items()
    for name in names.split()
}
__all__ = sorted([*_HOMES, "__version__"])


# Type checkers, which read the imports above, would believe in any name with it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            if name.endswith("FederatedClient") and find_spec("declearn"):
                errors.require_federations(f"fedclip.{name}")
            try:
                if _HOMES[name].startswith("engines.declearn"):
                    # They need declearn. Import it here: two threads that import it from within
                    # different modules of fedclip would wait for each other.
                    import_module("declearn")
                value = getattr(import_module(f"fedclip.{_HOMES[name]}"), name)
            except ImportError as exc:
                if (exc.name or "").partition(".")[0] == "fedclip":
                    raise
                text = f"fedclip.{name} needs declearn, which cannot be imported: {exc}; "
                text += f"pip install '{errors.DECLEARN}'"
                raise ImportError(text, name=exc.name) from exc
            globals()[name] = value
            return value
        return errors.part_of(__name__, name, __all__)


__dir__ = errors.public_names(__name__)


def _register() -> None:
    """Register every plug-in by importing its module; a second call changes nothing."""
    files = "aggregator personal sample_clip samplers statistics_server update_modules"
    if errors.fits(errors.FEDERATIONS):
        files += " evaluation" + " network" * bool(find_spec("websockets"))
    for file in files.split():
        import_module(f"fedclip.engines.declearn.{file}")
    by_name()
    enter()


register_when_possible(_register)
