# SPDX-License-Identifier: Apache-2.0
"""Update clipping in NVFlare's recipes that send differences, and the policy of an NVFlare site."""

from fedclip.engines.nvflare.clipping import (
    ClipUpdate,
    CloseRound,
    ReceiveBound,
    SendBound,
    add_update_clipping,
)
from fedclip.engines.nvflare.site import SitePolicy

__all__ = [
    "ClipUpdate",
    "CloseRound",
    "ReceiveBound",
    "SendBound",
    "SitePolicy",
    "add_update_clipping",
]
