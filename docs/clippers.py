"""Write what the documentation takes from the clippers' docstrings: ``python docs/clippers.py``.

A page in ``docs/clippers/`` has a part written by hand, "When to use it". Above it is the first
sentence of the class docstring, and below it, between two marks, the rest of the docstring.
Parameters and guarantees of many clippers are described once, in ``docs/clippers/index.md``.
``tests/project/test_docs.py`` checks that the pages are current.
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
from fedclip.clippers import families, sharing
from fedclip.clippers.base import Clipper
from fedclip.core.docstrings import kind_of, meanings
from fedclip.core.parameters import Parameter, signature_of
from fedclip.core.toml import toml_value

DOCS = Path(__file__).parent
PAGES = DOCS / "clippers"
LISTS = {
    PAGES / "index.md": "- [`{name}`]({name}.md): {summary}",
    DOCS / "index.md": "- [`{name}`](clippers/{name}.md)",
}
"""Pages with a list of all clippers, and the form of its lines."""
START = "<!--docs/clippers.py-->"
END = "<!--end-->"
ADAPTIVE = "`auto-clip`, `ema-clip`, `mad-clip`, `percentile-norm-clip` and `zscore-clip`"
COMMON = {
    "All clippers; `agc` has the last two": ("scope", "keep_memory", "exclude", "on_nonfinite"),
    'Clippers of norms (`ord="var"` too, except for adaptive limits)': ("ord", "eps"),
    "`norm-clip`, `normalize` and `centralize`": ("dims", "inverse_dims", "min_size"),
    f"Adaptive limits: `adaptive-clip`, `growth-clip`, {ADAPTIVE}": ("max_norm", "on_spike"),
    "All these but `growth-clip`": ("shared", "shared_name"),
    "All these but `growth-clip` and `adaptive-clip`": (
        *("warmup", "warmup_norm", "warmup_factor", "include_current", "feedback"),
    ),
}
"""The parameters of many clippers, by the clippers that have them."""
EVERYWHERE = (
    "If nothing is clipped, the same object comes back.",
    "Dtype and shape never change, also of empty and 0-d tensors.",
    "NaN and infinity never enter the state.",
)
"""Guarantees of all clippers, which the index has once."""
MANY = 14
"""If a plug-in without common parameters has more, its page has their first sentences."""
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
    lines = [START, "", "## Rule", ""]
    lines += [f"![{pictures.alternative(name)}](../images/clippers/{name}.svg)", ""]
    notes = parts.get("Notes", "")
    if name.endswith("-clip-server") and name != "update-clip-server":
        lines += [markdown(notes.partition("\n\n")[0]), ""]
        lines += ["See [all server modules](index.md#server-modules)."]
        notes = ""
    else:
        lines += [markdown(body), "", "## Parameters", ""]
        lines += parameters(cls, parts.get("Parameters", "")) or ["None."]
    for clippers, shared in common_notes().items():
        if shared in notes:
            link = f"See [{clippers}](index.md#guarantees)."
            notes = f"{link}\n\n{notes.replace(shared, '').strip()}"
    notes = without_common(notes)
    # The fields of a state interest readers of the docstring only.
    notes = re.sub(r"\n\nState of each(.+\n?)*", "", notes)
    if notes:
        lines += ["", "## Guarantees", "", markdown(notes)]
    if parts.get("References"):
        lines += ["", "## Source", "", markdown(parts["References"])]
    lines += ["", END]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def common() -> dict[str, tuple[Parameter, str]]:
    """Return the parameters of many clippers, and what they mean."""
    parts: tuple[Any, ...] = (
        Clipper,
        families.Sliced,
        families.PastLimit,
        families.Warmup,
        sharing.Sharing,
    )
    known = {
        name: (declared, meanings(part).get(name, ""))
        for part in parts
        for name, declared in part.parameters.items()
    }
    known = {name: known[name] for name in sorted(known, key=Clipper._common_order.index)}
    usual: Any = plugin("module", "zscore-clip")
    return {**known, "feedback": (usual.parameters["feedback"], meanings(usual)["feedback"])}


def common_notes() -> dict[str, str]:
    """Return the guarantees that docstrings of several clippers have, by these clippers."""
    adaptive = sections(plugin("module", "zscore-clip"))["Notes"].split("\n\n")
    copies = sections(plugin("module", "ema-value-clip"))["Notes"].split("\n\n")
    return {
        "guarantees of adaptive limits": adaptive[0],
        "state of clippers with arrays": copies[-1],
    }


def without_common(notes: str) -> str:
    """Return the notes without the guarantees of all clippers."""
    for sentence in EVERYWHERE:
        notes = re.sub(r"\s*" + r"\s+".join(map(re.escape, sentence.split())), "", notes)
    return notes


def parameters(cls: type, text: str) -> list[str]:
    """Return a list of the clipper's own parameters, and a line that names the common ones."""
    written = {}
    for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head, _, meaning = entry.partition("\n")
        names, _, kind = head.partition(" :")
        values = re.sub(", default=.*|[{}]", "", kind).strip() if "{" in kind else ""
        for name in names.split(","):
            written[name.strip(" *")] = (" ".join(meaning.split()), values)
    known: Any = cls
    declared = getattr(cls, "parameters", {})
    # A server module has one entry for all parameters of its clipper.
    formal = inspect.signature(known.__init__).parameters if "settings" in written else None
    lines: list[str] = []
    links, many = False, len(written) > MANY and not hasattr(cls, "build")
    for name, parameter in (formal or signature_of(cls)).items():
        if name == "self":
            continue
        if name in declared and is_common(cls, name):
            links = True
            continue
        meaning, values = written.get(name, ("", ""))
        if name in declared and declared[name].common and "table" not in values:
            values = ""  # as in the index
        if many:
            meaning, values = meaning.partition(". ")[0].rstrip(".") + ".", ""
        lines.append(described(shown_default(name, parameter.default), meaning, values))
    if links:
        also = "Also " * bool(lines)
        lines += [""] * bool(lines) + [f"{also}[common parameters](index.md#common-parameters)."]
    if many and not links:
        lines += ["", f"`fedclip list {known.name}` says more."]
    return lines


def is_common(cls: Any, name: str) -> bool:
    """Return whether a class has a common parameter as the list of them describes it."""
    if name not in common():
        return False
    usual, meaning = common()[name]
    own = meanings(cls).get(name, "")
    return bool(cls.parameters[name].default == usual.default and own == meaning)


def shown_default(name: str, default: object) -> str:
    """Return a parameter with its default, if it has one."""
    if default is inspect.Parameter.empty:
        return f"`{name}`"
    return f"`{name}={'None' if default is None else toml_value(default)}`"


def described(shown: str, meaning: str, values: str) -> str:
    """Return the line of a parameter; with its values, if the meaning does not name them all."""
    if not all(word in meaning for word in re.findall('"\\w+"', values)):
        meaning += f" Values: {values}."
    return f"- {shown}: {inline(meaning)}"


def index() -> str:
    """Return the part of the index that describes common parameters and guarantees."""
    lines = [START, "", "## Common parameters"]
    for clippers, names in COMMON.items():
        lines += ["", f"{clippers}:", ""]
        for name in names:
            declared, meaning = common()[name]
            kind = kind_of(declared)
            values = kind.replace("{", "").replace("}", "") if "{" in kind else ""
            meaning = meaning.replace("`{name}-server`", "its server module")
            lines.append(described(shown_default(name, declared.default), meaning, values))
    lines += ["", "## Guarantees"]
    lines += ["", "Of all clippers:", "", " ".join(EVERYWHERE)]
    for clippers, shared in common_notes().items():
        heading = f"{clippers[0].upper()}{clippers[1:]}:"
        lines += ["", heading, "", markdown(without_common(shared))]
    cls = plugin("module", "zscore-clip-server")
    parts = sections(cls)
    lines += ["", "## Server modules", "", markdown(parts[""].partition("\n\n")[2]), ""]
    lines += parameters(cls, parts["Parameters"].replace("`zscore-clip`", "the clipper"))
    lines += ["", markdown(parts["Notes"].partition("\n\n")[2])]
    return "\n".join([*lines, "", END])


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
    before, rest = marked(page, name)
    title, _, written = before.partition("\n")
    summary = markdown(sections(plugin(kind, name))[""].partition("\n\n")[0])
    written = written[written.index("## ") :]
    return f"{title}\n\n{summary}\n\n{written}{render(kind, name)}{rest}"


def marked(page: str, name: str) -> tuple[str, str]:
    """Return what is before the generated part of a page, and what is after it."""
    before, mark, rest = page.partition(START)
    if not mark or END not in rest:
        raise ValueError(f"the page of {name!r} lacks the marks {START!r} and {END!r}")
    return before, rest.partition(END)[2]


def listed(page: str, row: str) -> str:
    """Return a page with its list of clippers as it is now; `row` is the form of one line."""
    rows = "".join(row.format(**entry) + "\n" for entry in catalogue.registered())
    first = re.escape(row.partition("{")[0])
    changed, count = re.subn(rf"(^{first}[\w-]+`\]\(.*\n)+", lambda _: rows, page, flags=re.M)
    if count != 1:
        raise ValueError(f"the page has {count} lists of clippers, not one")
    if START in changed:
        before, after = marked(changed, "index")
        changed = f"{before}{index()}{after}"
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
