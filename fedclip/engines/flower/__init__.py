# SPDX-License-Identifier: Apache-2.0
"""Update clipping in Flower, around any of its strategies: a mod for clients, and a strategy."""

from fedclip.engines.flower.clipping import UpdateClipMod, UpdateClipStrategy

__all__ = ["UpdateClipMod", "UpdateClipStrategy"]
