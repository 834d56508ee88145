# SPDX-License-Identifier: Apache-2.0
"""fedclip: the gradient-clipping library of federated learning.

Importing it registers its clippers with declearn::

    import fedclip
    Optimizer(lrate=0.1, modules=["l2-global-clipping", "zscore-clip"])
"""

from fedclip.errors import FedclipWarning, NonFiniteError, StateError
from fedclip.federation.senders import NamedClients
from fedclip.federation.update.aggregator import ClippedAveraging
from fedclip.federation.update.client import UpdateClipClient
from fedclip.federation.update.server import UpdateClipServer
from fedclip.modules import (
    AGC,
    AdaptiveClip,
    AutoClip,
    Centralize,
    Clipper,
    EmaClip,
    EmaNormalize,
    EmaNormClip,
    EmaValueClip,
    GrowthClip,
    GrowthValueClip,
    NoOp,
    Normalize,
    NormClip,
    PercentileClip,
    PercentileNormClip,
    Standardize,
    ValueClip,
    ZScoreClip,
)
from fedclip.records import RoundRecord, StepRecord
from fedclip.toml import to_toml

__version__ = "0.1.0"

__all__ = [
    "AGC",
    "AdaptiveClip",
    "AutoClip",
    "Centralize",
    "ClippedAveraging",
    "Clipper",
    "EmaClip",
    "EmaNormClip",
    "EmaNormalize",
    "EmaValueClip",
    "FedclipWarning",
    "GrowthClip",
    "GrowthValueClip",
    "NamedClients",
    "NoOp",
    "NonFiniteError",
    "NormClip",
    "Normalize",
    "PercentileClip",
    "PercentileNormClip",
    "RoundRecord",
    "Standardize",
    "StateError",
    "StepRecord",
    "UpdateClipClient",
    "UpdateClipServer",
    "ValueClip",
    "ZScoreClip",
    "__version__",
    "to_toml",
]
