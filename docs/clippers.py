"""Write what the documentation takes from the clippers' docstrings: ``python docs/clippers.py``.

A page in ``docs/clippers/`` has a part written by hand, "When to use it". Above it stands the first
sentence of the docstring of its class, and below it, between two marks, the rest of the docstring,
so that page and docstring can not differ.
``tests/project/test_docs.py`` checks that it is current.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import catalogue
import pictures
from website import table

import fedclip  # noqa: F401  (registers the clippers)
from fedclip.core.parameters import signature_of
from fedclip.core.toml import toml_value

DOCS = Path(__file__).parent
PAGES = DOCS / "clippers"
LISTS = {
    PAGES / "index.md": "| [`{name}`]({name}.md) | {summary} |",
    DOCS / "index.md": "- [`{name}`](clippers/{name}.md)",
}
"""Pages with a list of all clippers, and the form of its lines."""
START = "<!-- from the docstring; rewrite it with: python docs/clippers.py -->"
END = "<!-- end of the docstring -->"
HEAD = ("| parameter | default | meaning |", "|---|---|---|")
NEW = "# `{name}`\n\n## When to use it\n\nTo be written.\n\n{start}\n{end}\n"


def plugin(kind: str, name: str) -> type:
    """Return the class that is registered under the name."""
    from declearn.utils import access_registered

    group = {"module": "OptiModule", "regularizer": "Regularizer", "aggregator": "Aggregator"}
    found: type = access_registered(name, group[kind])
    return found


def sections(cls: type) -> dict[str, str]:
    """Return the parts of a numpydoc docstring, the text before the first heading as ``""``."""
    pieces = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.getdoc(cls) or "", flags=re.MULTILINE)
    found = {"": pieces[0].strip()}
    found.update(
        (head, text.strip("\n")) for head, text in zip(pieces[1::2], pieces[2::2], strict=True)
    )
    return found


def render(kind: str, name: str) -> str:
    """Return the part of a page that comes from the docstring, marks included."""
    cls = plugin(kind, name)
    parts = sections(cls)
    _, _, body = parts[""].partition("\n\n")
    lines = [START, "", "## How it works", ""]
    lines += [f"![{pictures.alternative(name)}](../images/clippers/{name}.svg)", ""]
    lines += [markdown(body), "", "## Parameters", ""]
    lines += parameters(cls, parts.get("Parameters", ""))
    if kind != "regularizer":
        lines += ["", f"`fedclip list {name}` shows the same; `nan` in TOML is None."]
    if parts.get("Notes"):
        lines += ["", "## State, guarantees, edge cases", "", markdown(parts["Notes"])]
    if parts.get("Examples"):
        known = f">>> from fedclip import {cls.__name__}"
        lines += ["", "## Example", "", "```pycon", known, parts["Examples"].strip(), "```"]
    if parts.get("References"):
        lines += ["", "## Source", "", markdown(parts["References"])]
    lines += ["", END]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def parameters(cls: type, text: str) -> list[str]:
    """Return the parameters as tables: the clipper's own, and those of most clippers."""
    meanings = {}
    for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head, _, meaning = entry.partition("\n")
        names, _, kind = head.partition(" :")
        words = meaning.split()
        if "{" in kind:
            words.append(f"Values: {re.sub(', default=.*|[{}]', '', kind).strip()}.")
        for name in names.split(","):
            meanings[name.strip(" *")] = " ".join(words)
    own: list[str] = []
    shared: list[str] = []
    known: Any = cls
    common = [n for n, declared in getattr(cls, "parameters", {}).items() if declared.common]
    # A counterpart has its clipper's parameters, and says so in one entry for all of them.
    shown = inspect.signature(known.__init__).parameters if "settings" in meanings else None
    for name, parameter in (shown or signature_of(cls)).items():
        if name == "self":
            continue
        default = (
            "" if parameter.default is parameter.empty else f"`{toml_value(parameter.default)}`"
        )
        meaning = inline(meanings.get(name, "")).replace("|", "\\|")
        (shared if name in common else own).append(f"| `{name}` | {default} | {meaning} |")
    between = ["", "Other clippers have these as well:", ""] if own and shared else []
    tables = [[*HEAD, *rows] if rows else [] for rows in (own, shared)]
    return [*tables[0], *between, *tables[1]]


def markdown(text: str) -> str:
    """Return reStructuredText of our docstrings as Markdown, one sentence a line."""
    done: list[str] = []
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    position = 0
    while position < len(blocks):
        block = blocks[position].rstrip()
        position += 1
        if block.strip() == "::" or block.endswith("::"):
            before = block.strip().removesuffix("::").strip()
            if before:
                done.append(sentences(before + ":"))
            code = []
            while position < len(blocks) and blocks[position].startswith("    "):
                code.append(inspect.cleandoc("\n" + blocks[position]))
                position += 1
            done.append("```text\n" + "\n\n".join(code) + "\n```")
        elif block.startswith("===="):
            done.append(inline(table(block)))
        elif re.match(r"[-*] ", block):
            items = re.split(r"^[-*] ", block, flags=re.MULTILINE)[1:]
            done.append("\n".join("- " + inline(" ".join(item.split())) for item in items))
        else:
            done.append(sentences(block))
    return "\n\n".join(done)


def sentences(text: str) -> str:
    """Return a paragraph with every sentence on a line of its own."""
    flat = inline(" ".join(text.split()))
    return re.sub(r"(?<=[a-z0-9`)][.]) (?=[A-Z`])", "\n", flat)


def inline(text: str) -> str:
    """Return the marks for code as Markdown has them."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def updated(page: str, kind: str, name: str) -> str:
    """Return a page with the docstring's parts as they are now."""
    before, mark, rest = page.partition(START)
    if not mark or END not in rest:
        raise ValueError(f"the page of {name!r} lacks the marks {START!r} and {END!r}")
    title, _, written = before.partition("\n")
    summary = markdown(sections(plugin(kind, name))[""].partition("\n\n")[0])
    written = written[written.index("## ") :]
    return f"{title}\n\n{summary}\n\n{written}{render(kind, name)}{rest.partition(END)[2]}"


def listed(page: str, row: str) -> str:
    """Return a page with its list of clippers as it is now; `row` is the form of one line."""
    rows = "".join(row.format(**entry) + "\n" for entry in catalogue.registered())
    first = re.escape(row.partition("{")[0])
    changed, count = re.subn(rf"(^{first}[\w-]+`\]\(.*\n)+", lambda _: rows, page, flags=re.M)
    if count != 1:
        raise ValueError(f"the page has {count} lists of clippers, not one")
    return changed


def main() -> None:
    """Rewrite all pages, and start those that are missing."""
    catalogue.write()
    entries = catalogue.registered()
    for file, row in LISTS.items():
        file.write_text(listed(file.read_text(encoding="utf-8"), row), encoding="utf-8")
    for entry in entries:
        file = PAGES / f"{entry['name']}.md"
        page = NEW.format(name=entry["name"], start=START, end=END)
        if file.exists():
            page = file.read_text(encoding="utf-8")
        else:
            print(f"new: {file.name}; write its section 'When to use it'", file=sys.stderr)
        file.write_text(updated(page, entry["kind"], entry["name"]), encoding="utf-8")


if __name__ == "__main__":
    main()
