# SPDX-License-Identifier: Apache-2.0
"""Update clipping in NVFlare's recipes that send differences, and the policy of an NVFlare site."""

from fedclip.engines.nvflare.clipping import ClipUpdate as ClipUpdate
from fedclip.engines.nvflare.clipping import CloseRound as CloseRound
from fedclip.engines.nvflare.clipping import ReceiveBound as ReceiveBound
from fedclip.engines.nvflare.clipping import SendBound as SendBound
from fedclip.engines.nvflare.clipping import add_update_clipping as add_update_clipping
from fedclip.engines.nvflare.site import SitePolicy as SitePolicy
