# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what a clip guarantees, noise, and what it costs.

Only `analyse` needs declearn, and is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedclip.engines.declearn.bounds import MAPS
from fedclip.errors import imported_when_used, public_names
from fedclip.privacy.maps import Context, Map
from fedclip.privacy.sensitivity import RELATIONS, Analysis

if TYPE_CHECKING:
    from fedclip.engines.declearn.pipeline import analyse

__all__ = ["MAPS", "RELATIONS", "Analysis", "Context", "Map", "analyse"]

__dir__ = public_names(__name__)

if not TYPE_CHECKING:
    __getattr__ = imported_when_used(__name__, {"analyse": "pipeline"})
