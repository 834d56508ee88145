"""Check which rooms import which, and draw it: ``python docs/parts.py``.

A room is a folder of ``fedclip/``; `engines` is four rooms. `ALLOWED` states which rooms a room may
import, wherever in a file the import stands. ``tests/project/test_structure.py`` compares the
table with the code, and checks that ``docs/developers/rooms.md`` is current.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedclip"
PAGE = ROOT / "docs" / "developers" / "rooms.md"

ALLOWED = {
    "errors": "",
    "arrays": "",
    "rules": "arrays",
    "core": "arrays errors",
    "privacy": "arrays core errors",
    "transforms": "arrays core rules",
    "statistics": "arrays core errors rules",
    "translate": "core errors privacy",
    "report": "core errors",
    "clippers": "arrays core errors privacy rules statistics transforms translate",
    "dpsgd": "arrays core privacy rules",
    "updates": "arrays core errors privacy rules transforms",
    "site": "arrays core errors privacy updates",
    "loops": "arrays clippers core dpsgd errors transforms",
    "engines/declearn": (
        "arrays clippers core dpsgd errors privacy report rules site statistics updates"
    ),
    "engines/flower": "errors site updates",
    "engines/nvflare": "errors site updates",
    "engines/local": "core dpsgd engines/declearn errors privacy report updates",
}
"""The rooms that each room may import. `cli`, `testing` and the package itself may import all."""

ABOVE = ("__init__", "__main__", "cli", "testing")


def module(file: Path, package: Path = PACKAGE) -> str:
    """Return the full name of a file's module."""
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def room_of(name: str, package: str = PACKAGE.name) -> str:
    """Return the room of a module.

    >>> room_of("fedclip.engines.declearn.server"), room_of("fedclip.core.scopes")
    ('engines/declearn', 'core')
    """
    parts = name.removeprefix(package).strip(".").split(".")
    if parts[0] == "engines" and len(parts) > 1:
        return f"engines/{parts[1]}"
    return parts[0] or "__init__"


def files(package: Path = PACKAGE) -> list[Path]:
    """Return the files of the package, but for the templates, which become projects of users."""
    return [file for file in sorted(package.rglob("*.py")) if "templates" not in file.parts]


@cache
def tree(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path, package: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """Yield line and full name of all that a file imports, within functions too.

    A string that is the name of a module counts: such strings are imported when they are needed.
    """
    here = file.relative_to(package.parent).with_suffix("").parts
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Constant) and is_module(str(node.value), package):
            yield node.lineno, str(node.value)


def is_module(text: str, package: Path) -> bool:
    """Return whether a text is the full name of a file or folder of the package."""
    if not text.startswith(f"{package.name}.") or not text.replace(".", "").isidentifier():
        return False
    path = package.parent / text.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def graph(package: Path = PACKAGE) -> dict[str, dict[str, int]]:
    """Return what each module imports of the package, with the line of the import."""
    modules = {module(file, package): file for file in files(package)}
    result: dict[str, dict[str, int]] = {}
    for name, file in modules.items():
        targets = result.setdefault(name, {})
        for line, target in imports(file, package):
            known = target if target in modules else target.rpartition(".")[0]
            if known in modules and known != name:
                targets.setdefault(known, line)
    return result


def arrows(package: Path = PACKAGE) -> dict[tuple[str, str], list[str]]:
    """Return each pair of rooms of which one imports the other, with the places where it does.

    An import of the package itself, for a name in its `__init__`, is no arrow.
    """
    result: dict[tuple[str, str], list[str]] = {}
    for name, targets in graph(package).items():
        for target, line in targets.items():
            pair = room_of(name, package.name), room_of(target, package.name)
            if pair[0] != pair[1] and pair[1] != "__init__":
                result.setdefault(pair, []).append(f"{name}:{line}")
    return result


def forbidden(
    allowed: Mapping[str, str] = ALLOWED, package: Path = PACKAGE
) -> dict[str, list[str]]:
    """Return the arrows that the table does not allow, with their places."""
    return {
        f"{room} -> {target}": places
        for (room, target), places in arrows(package).items()
        if room not in ABOVE and target not in allowed.get(room, "").split()
    }


def unused(allowed: Mapping[str, str] = ALLOWED, package: Path = PACKAGE) -> list[str]:
    """Return the arrows of the table that no import needs."""
    drawn = arrows(package)
    return [
        f"{room} -> {target}"
        for room, targets in allowed.items()
        for target in targets.split()
        if (room, target) not in drawn
    ]


def cycle(links: Mapping[str, object]) -> list[str]:
    """Return names that import each other in a circle, or an empty list.

    >>> cycle({"a": ["b"], "b": ["a"]}), cycle({"a": ["b"]})
    (['a', 'b', 'a'], [])
    """
    try:
        TopologicalSorter({name: list(targets) for name, targets in links.items()}).prepare()  # type: ignore[call-overload]
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def summary(path: Path) -> str:
    """Return the first line of the docstring of a file or folder."""
    file = path if path.is_file() else path / "__init__.py"
    return (ast.get_docstring(tree(file)) or "").partition("\n")[0]


def page() -> str:
    """Return the page that draws the rooms."""
    rows = ["| room | what it is for | may import |", "|---|---|---|"]
    for room, targets in ALLOWED.items():
        path = PACKAGE / room
        path = path if path.is_dir() else path.with_suffix(".py")
        rows.append(f"| `{room}` | {summary(path)} | {targets.replace(' ', ', ') or 'none'} |")
    rows.append(f"| `cli` | {summary(PACKAGE / 'cli')} | all |")
    return PAGE_TEXT.format(table="\n".join(rows))


PAGE_TEXT = """# The rooms of the code

This page shows which folder of `fedclip/` may import which. `python docs/parts.py` writes it from
the table `ALLOWED` in that file and from the docstrings; `tests/project/test_structure.py` compares
the table with every import, those within functions too. Imports point up in this table only, and no
two files import each other in a circle.

{table}

Only `arrays/`, `loops/`, `engines/` and `dpsgd/persample/` import a framework. Only
`engines/declearn/` imports declearn; `testing.py`, `engines/local/`, `cli/` and its templates are
exceptions.
"""


def main() -> None:
    """Write the page, and print what the table does not allow."""
    for arrow, places in forbidden().items():
        print(arrow, *places)
    print("circle:", *cycle(graph()))
    print("unused:", *unused())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
