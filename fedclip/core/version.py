# SPDX-License-Identifier: Apache-2.0
"""The version of fedclip that wrote a configuration or a message, for readers with another."""

from __future__ import annotations

from importlib import metadata
from typing import Self

from fedclip.core import parameters

try:
    VERSION = metadata.version("fedclip")
except metadata.PackageNotFoundError:  # not installed: run from its folder
    VERSION = "unknown"


def other(theirs: object) -> str:
    """Say that something is of another fedclip than this one; "" if it is not."""
    if not isinstance(theirs, str) or theirs == VERSION:
        return ""
    return f"; it is of fedclip {theirs!s:.30}, and this is {VERSION}: install one on all nodes"


class Versioned(parameters.Configured):
    """Base of plug-ins that a server sets up for its clients, with its own version of fedclip."""

    def __new__(cls, *args: object, **config: object) -> Self:
        """Refuse unknown parameters, and say whose they may be."""
        try:
            return super().__new__(cls, *args, **config)
        except TypeError as exc:
            raise TypeError(f"{exc}{other(config.get('fedclip'))}") from None

    @property
    def fedclip(self) -> str:
        """The version that wrote the configuration: this one."""
        return VERSION
