# SPDX-License-Identifier: Apache-2.0
"""Update clipping in Flower, around any of its strategies: a mod for clients, and a strategy."""

from fedclip.engines.flower.mod import UpdateClipMod
from fedclip.engines.flower.strategy import UpdateClipStrategy

__all__ = ["UpdateClipMod", "UpdateClipStrategy"]
