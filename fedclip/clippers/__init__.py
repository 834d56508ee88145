# SPDX-License-Identifier: Apache-2.0
"""The clippers. Each is imported, and registered with declearn, when it is first used.

The server modules of clippers with federated statistics are in
`fedclip.engines.declearn.statistics_server`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fedclip.core.plugins import PLUGINS


def by_name() -> dict[str, type]:
    """Return all clippers, those that users have written too."""
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    return {name: cls for (group, name), cls in PLUGINS.items() if group != "AuxVar"}
