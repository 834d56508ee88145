"""What mkdocs adds to the pages of this folder: their order, and the reference of the code.

The navigation is the list at the end of ``index.md``, which the page itself does not show. The
reference has a page for every module of fedclip, from its docstrings, which are read and not
imported: no framework need be installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
# Where the list begins.
PAGES = "<!-- The pages by kind"
ROOT = DOCS.parent


class Docstrings(griffe.Extension):
    """Turn the reStructuredText of the docstrings into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring before its sections are looked for."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return text with blocks of code and tables as Markdown has them."""
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        table(block)
        if block.lstrip().startswith("====")
        else re.sub(r"^\s*::$|:(?=:$)", "", block, flags=re.MULTILINE)
        for block in blocks
    )


def table(block: str) -> str:
    """Return a simple table as a Markdown one."""
    lines = [line for line in block.splitlines() if line.strip()]
    starts = [found.start() for found in re.finditer(r"=+", lines[0])]
    rows: list[list[str]] = []
    for line in lines:
        if line.lstrip().startswith("==="):
            continue
        ends = [*starts[1:], None]
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(pair).strip() for pair in zip(rows[-1], cells, strict=True)]
    indent = lines[0][: starts[0]]
    shown = [f"{indent}| {' | '.join(row)} |" for row in rows]
    return "\n".join([shown[0], indent + "|" + "---|" * len(starts), *shown[1:]])


def modules() -> dict[str, griffe.Module]:
    """Return every public module of fedclip by its dotted name, the package first."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    found: dict[str, griffe.Module] = {}

    def add(module: griffe.Module) -> None:
        found[module.path] = module
        for name, inner in sorted(module.modules.items()):
            if not name.startswith("_") and not inner.is_alias:
                add(inner)

    package = loader.load("fedclip")
    assert isinstance(package, griffe.Module)
    add(package)
    return found


def page_of(module: griffe.Module) -> str:
    """Return the text of a module's page of the reference."""
    lines = [f"# `{module.path}`", "", f"::: {module.path}"]
    if module.path == "fedclip":
        # The names are imported when they are first used; each is described where it is at home.
        lines += ["    options:", "      members: false", "", "| name | where it is |", "|---|---|"]
        lines += [
            f"| [`{name}`][{alias.target_path}] | `{alias.target_path}` |"
            for name, alias in sorted(module.members.items())
            if alias.is_alias and alias.target_path == alias.target_path and name[0].isupper()
        ]
    return "\n".join(lines) + "\n"


def listed() -> list[Any]:
    """Return the navigation that the headings and lists of ``index.md`` make."""
    nav: list[Any] = ["index.md"]
    pages: list[Any] = []
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    for line in text.partition(PAGES)[2].splitlines():
        if line.startswith("## "):
            pages = []
            nav.append({line.removeprefix("## "): pages})
        elif found := re.match(r"- \[(.+?)\]\(([\w/.-]+\.md)\)", line):
            pages.append({found[1].strip("`"): found[2]})
    return nav


def on_config(config: Any) -> Any:
    """Set the navigation."""
    names = modules()
    parts: dict[str, list[Any]] = {}
    for name in names:
        parts.setdefault(".".join(name.split(".")[:2]), []).append({name: f"api/{name}.md"})
    reference = [pages[0] if len(pages) == 1 else {part: pages} for part, pages in parts.items()]
    config.nav = [*listed(), {"API": reference}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the reference."""
    for name, module in modules().items():
        files.append(File.generated(config, f"api/{name}.md", content=page_of(module)))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Name the files of the checkout, which the site does not have, without a link."""
    if page.file.src_uri == "index.md":
        text = text.partition(PAGES)[0]
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?:tests|examples)/[^)]*\)", r"`\1`", text)
