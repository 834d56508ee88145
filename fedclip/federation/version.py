# SPDX-License-Identifier: Apache-2.0
"""The version of fedclip that wrote a configuration or a message, for readers with another."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fedclip import parameters

try:
    VERSION = metadata.version("fedclip")
except metadata.PackageNotFoundError:  # not installed: run from its folder
    VERSION = "unknown"


def other(theirs: object) -> str:
    """Say that something is of another fedclip than this one; "" if it is not."""
    if theirs in (None, VERSION):
        return ""
    return f"; it is of fedclip {theirs!s:.30}, and this is {VERSION}: install one on all nodes"


def refuse_unknown(cls: Any, config: Mapping[str, Any]) -> None:
    """Raise a TypeError for a parameter that a plug-in does not have, and say whose it may be."""
    try:
        parameters.refuse_unknown(cls, config)
    except TypeError as exc:
        raise TypeError(f"{exc}{other(config.get('fedclip'))}") from None
