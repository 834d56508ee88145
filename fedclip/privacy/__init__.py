# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what a clip guarantees, noise, and what it costs.

It knows no engine: `fedclip.analyse` looks up declearn's plug-ins by name. Start reading at
`maps` (what one map does to a norm) and `accounting` (epsilon of a run).
"""

from __future__ import annotations

from fedclip.errors import public_names
from fedclip.privacy.bounds import MAPS, analyse_plugins
from fedclip.privacy.maps import Context, Map
from fedclip.privacy.sensitivity import RELATIONS, Analysis

__all__ = ["MAPS", "RELATIONS", "Analysis", "Context", "Map", "analyse_plugins"]

__dir__ = public_names(__name__)
