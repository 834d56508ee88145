# SPDX-License-Identifier: Apache-2.0
"""fedclip: the gradient-clipping library of federated learning.

Importing it registers its clippers with declearn::

    import fedclip
    Optimizer(lrate=0.1, modules=["l2-global-clipping", "zscore-clip"])
"""

from fedclip.errors import FedclipWarning, NonFiniteError, StateError
from fedclip.modules import (
    AdaptiveClip,
    AutoClip,
    Clipper,
    EmaClip,
    GrowthClip,
    NoOp,
    NormClip,
    PercentileNormClip,
    ValueClip,
    ZScoreClip,
)
from fedclip.records import RoundRecord, StepRecord

__version__ = "0.1.0"

__all__ = [
    "AdaptiveClip",
    "AutoClip",
    "Clipper",
    "EmaClip",
    "FedclipWarning",
    "GrowthClip",
    "NoOp",
    "NonFiniteError",
    "NormClip",
    "PercentileNormClip",
    "RoundRecord",
    "StateError",
    "StepRecord",
    "ValueClip",
    "ZScoreClip",
    "__version__",
]
