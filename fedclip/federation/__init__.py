# SPDX-License-Identifier: Apache-2.0
"""What concerns the whole federation: the clients' round updates, and the server's bound."""

from fedclip.federation.averaging import ClippedAveraging
from fedclip.federation.senders import NamedClients
from fedclip.federation.shared_server import (
    AdaptiveClipServer,
    AutoClipServer,
    EmaClipServer,
    PercentileNormClipServer,
    ZScoreClipServer,
)
from fedclip.federation.update_clip import UpdateClipClient, UpdateClipServer

__all__ = [
    "AdaptiveClipServer",
    "AutoClipServer",
    "ClippedAveraging",
    "EmaClipServer",
    "NamedClients",
    "PercentileNormClipServer",
    "UpdateClipClient",
    "UpdateClipServer",
    "ZScoreClipServer",
]
