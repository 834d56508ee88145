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

from fedclip.errors import (
    DECLEARN,
    FEDERATIONS,
    fits,
    hint_at_imports,
    part_of,
    public_names,
    require_federations,
)
from fedclip.modules import by_name
from fedclip.registration import enter, register_when_possible

if TYPE_CHECKING:
    from fedclip.dpsgd.client import PrivateFederatedClient as PrivateFederatedClient
    from fedclip.dpsgd.sample_clip import SampleClip as SampleClip
    from fedclip.errors import FedclipWarning as FedclipWarning
    from fedclip.errors import NonFiniteError as NonFiniteError
    from fedclip.errors import StateError as StateError
    from fedclip.federation.personal import PersonalModel as PersonalModel
    from fedclip.federation.personal_client import (
        PersonalFederatedClient as PersonalFederatedClient,
    )
    from fedclip.federation.round_robin import RoundRobin as RoundRobin
    from fedclip.federation.senders import NamedClients as NamedClients
    from fedclip.federation.update.aggregator import ClippedAveraging as ClippedAveraging
    from fedclip.federation.update.client import UpdateClipClient as UpdateClipClient
    from fedclip.federation.update.measuring import UpdateNorms as UpdateNorms
    from fedclip.federation.update.server import UpdateClipServer as UpdateClipServer
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
    from fedclip.records import RoundRecord as RoundRecord
    from fedclip.records import StepRecord as StepRecord
    from fedclip.toml import to_toml as to_toml

__version__ = "0.1.0"

_CLIPPERS = (
    "AGC AdaptiveClip AutoClip Centralize EmaClip EmaNormClip EmaNormalize EmaValueClip "
    "GrowthClip GrowthValueClip MadClip NoOp NormClip Normalize OwnLimit PercentileClip "
    "PercentileNormClip Standardize ValueClip ZScoreClip"
)

# The module of each name. A test compares it with the imports above, which type checkers read.
_HOMES = {
    name: home
    for home, names in {
        "dpsgd.client": "PrivateFederatedClient",
        "dpsgd.sample_clip": "SampleClip",
        "errors": "FedclipWarning NonFiniteError StateError",
        "federation.personal": "PersonalModel",
        "federation.personal_client": "PersonalFederatedClient",
        "federation.round_robin": "RoundRobin",
        "federation.senders": "NamedClients",
        "federation.update.aggregator": "ClippedAveraging",
        "federation.update.client": "UpdateClipClient",
        "federation.update.measuring": "UpdateNorms",
        "federation.update.server": "UpdateClipServer",
        "modules.base": "Clipper",
        "records": "RoundRecord StepRecord",
        "toml": "to_toml",
    }.items()
    for name in names.split()
}
_HOMES |= {
    name: f"modules.{re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()}"
    for name in _CLIPPERS.split()
}

__all__ = sorted([*_HOMES, "__version__"])


# Type checkers, which read the imports above, would believe in any name with it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            if name.endswith("FederatedClient") and find_spec("declearn"):
                require_federations(f"fedclip.{name}")
            try:
                if _HOMES[name].startswith(("dpsgd", "federation")):
                    # They need declearn. Import it here: two threads that import it from within
                    # different modules of fedclip would wait for each other.
                    import_module("declearn")
                value = getattr(import_module(f"fedclip.{_HOMES[name]}"), name)
            except ImportError as exc:
                package = (exc.name or "").partition(".")[0]
                if package == "fedclip":
                    raise
                raise ImportError(
                    f"fedclip.{name} needs declearn, which cannot be imported: {exc}; "
                    f"pip install '{DECLEARN}'",
                    name=exc.name,
                ) from exc
            globals()[name] = value
            return value
        return part_of(__name__, name, __all__)


__dir__ = public_names(__name__)


def _register() -> None:
    """Register every plug-in by importing its module; a second call changes nothing."""
    import fedclip.dpsgd.sample_clip
    import fedclip.federation.personal
    import fedclip.federation.round_robin
    import fedclip.federation.senders
    import fedclip.federation.update.aggregator
    import fedclip.federation.update.client
    import fedclip.federation.update.measuring
    import fedclip.federation.update.server
    import fedclip.modules.servers

    if fits(FEDERATIONS):
        import fedclip.dpsgd.evaluation

        if find_spec("websockets"):
            import fedclip.federation.network  # noqa: F401
    by_name()
    enter()


hint_at_imports()
register_when_possible(_register)
