# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: what may import what, without a circle; frameworks in some only."""

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
from checkouts import ROOT

parts: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "parts.py")))

FRAMEWORKS = (
    *("torch", "tensorflow", "keras", "jax", "haiku", "flax", "optax"),
    *("declearn.model.torch", "declearn.model.tensorflow", "declearn.model.haiku"),
)
# Those that know frameworks, the checks for users' clippers, and the projects of users.
KNOWING = ("arrays/", "loops/", "engines/", "dpsgd/persample/", "testing.py")


def test_rooms_import_what_the_table_allows_and_no_modules_each_other() -> None:
    assert not parts.forbidden()
    assert not parts.unused(), "take these out of ALLOWED in docs/parts.py"
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


def test_the_drawing_is_current_and_each_file_says_what_it_is_for() -> None:
    assert parts.PAGE.read_text(encoding="utf-8") == parts.page(), "run: python docs/parts.py"
    for file in sorted(parts.PACKAGE.rglob("*.py")):
        line = parts.summary(file)
        assert line.endswith((".", ":")), f"{file.relative_to(parts.ROOT)}: {line!r}"
