# SPDX-License-Identifier: Apache-2.0
"""The core runs where neither declearn nor a framework can be imported.

`test_without_declearn` of tests/project/test_wheel.py runs a round there.
"""

from pathlib import Path

import pytest
from helpers import python

PACKAGE = Path(__file__).parents[3] / "fedclip"
# All rooms but those that know frameworks or engines; `report`, too, reads files only.
ROOMS = (
    *("clippers", "core", "errors", "privacy", "report", "rules", "site", "statistics"),
    *("transforms", "translate", "updates"),
)
CODE = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("declearn", "torch", "tensorflow", "jax", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.slow
def test_every_file_of_the_core_is_imported_without_declearn() -> None:
    files = [file.relative_to(PACKAGE.parent).with_suffix("") for file in PACKAGE.rglob("*.py")]
    names = sorted({".".join(file.parts).removesuffix(".__init__") for file in files})
    names = [name for name in names if name.split(".")[1:2] and name.split(".")[1] in ROOMS]
    code = f"{CODE}\nfor name in {names!r}:\n    importlib.import_module(name)"
    python(code, "nothing", options=["-W", "error"])
