# SPDX-License-Identifier: Apache-2.0
"""The clippers. Each is imported, and registered with declearn, when it is first used.

`servers` has the counterparts of shared ones, which need declearn.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fedclip.registration import PLUGINS


def by_name() -> dict[str, type]:
    """Return all clippers, those that users have written too."""
    for module in iter_modules(__path__, f"{__name__}."):
        if not module.name.endswith(".servers"):
            import_module(module.name)
    return {name: cls for (_, name), cls in PLUGINS.items()}
