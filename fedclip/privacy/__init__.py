# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what a clip guarantees, noise, and what it costs.

Only `analyse` needs declearn; it is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedclip.privacy.bounds import MAPS
from fedclip.privacy.maps import Context, Map
from fedclip.privacy.sensitivity import RELATIONS, Analysis

if TYPE_CHECKING:
    from fedclip.privacy.pipeline import analyse

__all__ = ["MAPS", "RELATIONS", "Analysis", "Context", "Map", "analyse"]


def __getattr__(name: str) -> Any:
    if name != "analyse":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedclip.privacy.pipeline import analyse

    return analyse
