# SPDX-License-Identifier: Apache-2.0
"""The clippers. Each is imported, and registered with declearn, when it is first used.

The server modules of clippers with federated statistics are in
`fedclip.engines.declearn.statistics_server`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from fedclip.core.plugins import PLUGINS


def by_name() -> dict[str, type]:
    """Return all clippers, those that users have written too."""
    for name in _homes():
        import_module(name)
    return {name: cls for (group, name), cls in PLUGINS.items() if group != "AuxVar"}


def _homes() -> list[str]:
    return [module.name for module in iter_modules(__path__, f"{__name__}.")]


def __getattr__(name: str) -> Any:
    """Return the class of a clipper, or a base of clippers."""
    # Tools ask modules for names of other kinds, for which nothing is to be imported.
    if name[:1].isupper():
        for home in map(import_module, _homes()):
            value = vars(home).get(name)
            if isinstance(value, type) and value.__module__ == home.__name__:
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
