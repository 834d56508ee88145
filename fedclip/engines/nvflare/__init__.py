# SPDX-License-Identifier: Apache-2.0
"""Update clipping in NVFlare's recipes that send differences, and the policy of an NVFlare site."""

from fedclip.engines.nvflare.client import ClipUpdate, ReceiveBound
from fedclip.engines.nvflare.recipe import add_update_clipping
from fedclip.engines.nvflare.server import CloseRound, SendBound
from fedclip.engines.nvflare.site import SitePolicy

__all__ = [
    "ClipUpdate",
    "CloseRound",
    "ReceiveBound",
    "SendBound",
    "SitePolicy",
    "add_update_clipping",
]
