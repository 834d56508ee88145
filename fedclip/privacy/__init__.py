# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what a clip guarantees, noise, and what it costs."""

from fedclip.privacy.bounds import MAPS, Context, Map
from fedclip.privacy.sensitivity import RELATIONS, Analysis, analyse

__all__ = ["MAPS", "RELATIONS", "Analysis", "Context", "Map", "analyse"]
