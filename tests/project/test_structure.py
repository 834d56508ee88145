# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: few, on few floors, without a circle, frameworks in some only."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest


def drawing() -> Any:
    """Return the tool that draws the rooms and writes their table."""
    file = Path(__file__).parents[2] / "docs" / "parts.py"
    spec = importlib.util.spec_from_file_location("parts", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parts = drawing()

FRAMEWORKS = (
    *("torch", "tensorflow", "keras", "jax", "haiku", "flax", "optax"),
    *("declearn.model.torch", "declearn.model.tensorflow", "declearn.model.haiku"),
)
# Those that know frameworks, the checks for users' clippers, and the projects of users.
KNOWING = ("arrays/", "adapters/", "dpsgd/persample/", "testing.py", "tools/templates/")


def test_no_environment_is_tracked() -> None:
    # A tracked link of that name replaces the folder that make fills, wherever it is checked out.
    try:
        command = ["git", "ls-files", "--", ".venv"]
        tracked = subprocess.check_output(command, cwd=Path(__file__).parents[2], text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout")
    assert tracked == "", "take it out before this is merged: git rm --cached .venv"


@pytest.fixture(scope="module")
def drawn() -> Any:
    return parts.arrows()


@pytest.mark.slow
def test_few_rooms_and_few_arrows(drawn: Any) -> None:
    assert len(parts.rooms()) <= 22
    assert len(drawn) <= 86


@pytest.mark.slow
def test_few_floors_and_no_circle(drawn: Any) -> None:
    levels, circling = parts.floors(parts.rooms(), drawn)
    upward = {arrow: places for arrow, places in drawn.items() if set(arrow) <= circling}
    assert not circling, f"a circle is among {upward}"
    assert max(levels.values()) <= 10


@pytest.mark.slow
def test_frameworks_are_imported_in_their_rooms_only() -> None:
    found = [
        f"{name}:{line} imports {target}"
        for file in sorted(parts.PACKAGE.rglob("*.py"))
        if not (name := file.relative_to(parts.PACKAGE).as_posix()).startswith(KNOWING)
        for line, target in parts.imports(file)
        if target.startswith(FRAMEWORKS)
    ]
    assert not found


@pytest.mark.slow
def test_the_table_of_parts_is_the_tree(drawn: Any) -> None:
    levels, circling = parts.floors(parts.rooms(), drawn)
    assert not circling
    page = parts.PAGE.read_text(encoding="utf-8")
    assert page == parts.updated(page, parts.table(levels)), "run: python docs/parts.py"


@pytest.mark.slow
def test_each_file_says_what_it_is_for_in_its_first_line() -> None:
    for file in sorted(parts.PACKAGE.rglob("*.py")):
        line = parts.summary(file)
        assert line.endswith((".", ":")), f"{file.relative_to(parts.ROOT)}: {line!r}"


# -- the drawing itself ------------------------------------------------------------------------
def package(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "house"
    for name, text in {"__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    "text",
    [
        "import house.low",
        "from house import low",
        "from house.low import x",
        "from . import low",
        "from .low import x",
        "def f():\n    import house.low",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.low import x",
        "import importlib\nimportlib.import_module('house.low')",
    ],
)
def test_every_import_is_an_arrow(tmp_path: Path, text: str) -> None:
    root = package(tmp_path, {"low.py": "", "high.py": text})
    assert list(parts.arrows(root)) == [("high", "low")]
    assert parts.floors(parts.rooms(root), parts.arrows(root)) == (
        {"__init__": 1, "low": 1, "high": 2},
        set(),
    )


def test_a_circle_and_what_is_above_it_have_no_floor(tmp_path: Path) -> None:
    files = {"a.py": "import house.b", "b.py": "import house.a", "top.py": "import house.a"}
    root = package(tmp_path, {**files, "low.py": ""})
    levels, circling = parts.floors(parts.rooms(root), parts.arrows(root))
    assert levels == {"__init__": 1, "low": 1}
    assert circling == {"a", "b", "top"}
