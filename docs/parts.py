"""Draw the rooms of the package, and write their table: ``python docs/parts.py``.

A room is a file or folder directly under ``fedclip/``. An arrow leads from a room to each other
room that it imports, wherever the import stands. The floor of a room is one above the highest
that it imports. ``tests/test_structure.py`` checks the drawing, and that the table in
``docs/how-it-is-built.md`` is current.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedclip"
PAGE = ROOT / "docs" / "how-it-is-built.md"
START = "<!-- from the docstrings; rewrite it with: python docs/parts.py -->"
END = "<!-- end of the parts -->"

Arrow = tuple[str, str]


def rooms(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the rooms by name: files, and folders that hold files of Python."""
    found = {file.stem: file for file in package.glob("*.py")}
    found.update({file.parent.name: file.parent for file in package.glob("*/*.py")})
    return found


@cache
def tree(file: Path) -> ast.Module:
    """Return what a file says, parsed once."""
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


def arrows(package: Path = PACKAGE) -> dict[Arrow, list[str]]:
    """Return each pair of rooms of which one imports the other, with the places where it does."""
    known = rooms(package)
    found: dict[Arrow, list[str]] = {}
    for name, path in known.items():
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for line, target in imports(file, package):
                root, *rest = target.split(".")
                if root != package.name:
                    continue
                # What is not a room is a name of the package itself.
                room = rest[0] if rest and rest[0] in known else "__init__"
                if room != name:
                    where = f"{file.relative_to(package.parent).as_posix()}:{line}"
                    found.setdefault((name, room), []).append(where)
    return found


def floors(names: Collection[str], drawn: Collection[Arrow]) -> tuple[dict[str, int], set[str]]:
    """Return the floor of each room, and the rooms that have none as a circle is below them."""
    targets = {name: {to for start, to in drawn if start == name} for name in names}
    found: dict[str, int] = {}
    while ready := [n for n in targets if n not in found and targets[n] <= found.keys()]:
        found.update({n: 1 + max((found[to] for to in targets[n]), default=0) for n in ready})
    return found, set(targets) - found.keys()


def summary(path: Path) -> str:
    """Return the first line of the docstring of a file or folder."""
    file = path if path.is_file() else path / "__init__.py"
    text = ast.get_docstring(tree(file)) or ""
    return text.partition("\n")[0]


def table(levels: Mapping[str, int], package: Path = PACKAGE) -> str:
    """Return the rooms from the lowest floor to the highest, with what each of them does."""
    rows = ["| floor | part | what it does |", "|---|---|---|"]
    for name, path in sorted(rooms(package).items(), key=lambda room: (levels[room[0]], room[0])):
        label = name + ("/" if path.is_dir() else ".py")
        rows.append(f"| {levels[name]} | `{label}` | {summary(path).replace('``', '`')} |")
    return "\n".join(rows)


def updated(page: str, rows: str) -> str:
    """Return a page with its table as it is now."""
    before, mark, rest = page.partition(START)
    if not mark or END not in rest:
        raise ValueError(f"the page lacks the marks {START!r} and {END!r}")
    return f"{before}{START}\n{rows}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Rewrite the table, and print the arrows."""
    drawn = arrows()
    levels, circling = floors(rooms(), drawn)
    for name in sorted(rooms(), key=lambda room: (levels.get(room, 99), room)):
        print(
            levels.get(name, "?"), name, "->", *sorted(to for start, to in drawn if start == name)
        )
    print(f"{len(rooms())} rooms, {len(drawn)} arrows")
    if circling:
        raise SystemExit(f"in or above a circle: {', '.join(sorted(circling))}")
    page = updated(PAGE.read_text(encoding="utf-8"), table(levels))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
