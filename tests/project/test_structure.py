# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: what may import what, without a circle; frameworks in some only."""

from __future__ import annotations

import importlib.util
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
KNOWING = ("arrays/", "loops/", "engines/", "dpsgd/persample/", "testing.py")


def test_rooms_import_what_the_table_allows() -> None:
    assert not parts.forbidden()
    assert not parts.unused(), "take these out of ALLOWED in docs/parts.py"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not parts.cycle(parts.graph())
    assert not parts.cycle({room: targets.split() for room, targets in parts.ALLOWED.items()})


# `core/plugins.py` imports it for type checkers only.
DECLEARN = ("engines/declearn/", "engines/local/", "cli/", "testing.py", "core/plugins.py")


@pytest.mark.parametrize(("names", "rooms"), [(FRAMEWORKS, KNOWING), (("declearn",), DECLEARN)])
def test_frameworks_and_declearn_are_imported_in_their_rooms_only(names: Any, rooms: Any) -> None:
    found = [
        f"{name}:{line} imports {target}"
        for file in parts.files()
        if not (name := file.relative_to(parts.PACKAGE).as_posix()).startswith(rooms)
        for line, target in parts.imports(file)
        if any(f"{target}.".startswith(f"{each}.") for each in names)
    ]
    assert not found


def test_the_drawing_is_current() -> None:
    assert parts.PAGE.read_text(encoding="utf-8") == parts.page(), "run: python docs/parts.py"


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
        "from house import low",
        "from .low import x",
        "def f():\n    import house.low",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.low import x",
        "import importlib\nimportlib.import_module('house.low')",
    ],
)
def test_every_import_is_an_arrow(tmp_path: Path, text: str) -> None:
    root = package(tmp_path, {"low.py": "", "high.py": text})
    assert [*parts.arrows(root)] == [("high", "low")]
    assert parts.forbidden({"high": ""}, root).keys() == {"high -> low"}
    assert parts.unused({"high": "low", "low": "high"}, root) == ["low -> high"]
