# SPDX-License-Identifier: Apache-2.0
"""Let a Python process find none of some modules, as if they were not installed; `helpers.hiding`.

Python imports this at its start where the folder is on its path; its children do the same.
"""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = os.environ["FEDCLIP_HIDDEN"].split(",")


class Hiding(PathFinder):
    """The finder of installed modules, but for those."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
