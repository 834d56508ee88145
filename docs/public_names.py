# SPDX-License-Identifier: Apache-2.0
"""Writes docs/public-names.txt: what a 0.1 release keeps; ``python docs/public_names.py``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import fedclip
from fedclip.cli.catalogue import catalogue, registries

FILE = Path(__file__).with_name("public-names.txt")

MODULES = (
    *("fedclip", "fedclip.testing", "fedclip.translate", "fedclip.privacy", "fedclip.report"),
    *(f"fedclip.loops.{name}" for name in ["torch", "jax", "keras", "tensorflow", "lightning"]),
    *("fedclip.loops.transformers", "fedclip.clippers.own"),
    *("fedclip.engines.flower", "fedclip.engines.nvflare", "fedclip.site.policy"),
    *("fedclip.updates.client", "fedclip.updates.server", "fedclip.updates.bound"),
    "fedclip.updates.votes",
)
"""The modules whose names are public: those in ``__all__``, or all without an underscore."""


def names_of(module: str) -> list[str]:
    """Return the public names of a module: read, as its framework may not be installed."""
    if module == "fedclip":
        return list(fedclip.__all__)
    path = Path(fedclip.__file__).parent.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    defined = [n.name for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    imports = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    exported = [alias.asname for alias in imports if alias.asname == alias.name]
    return [name for name in [*defined, *exported] if name and not name.startswith("_")]


def lines() -> Iterator[str]:
    """Yield a line for each public name, registered name and parameter."""
    for module in MODULES:
        yield from (f"{module}.{name}" for name in sorted(names_of(module)))
    for entry in sorted(catalogue(), key=lambda entry: (entry["kind"], entry["name"])):
        cls = registries()[entry["kind"]][entry["name"]]
        words = getattr(cls, "parameters", None) or inspect.signature(cls).parameters
        known = sorted({*words} - {"self", "args", "kwargs", "config", "parameters", "fedclip"})
        yield f"{entry['kind']} {entry['name']}: {' '.join(known)}".rstrip(": ")


def main() -> None:
    """Write the file."""
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
