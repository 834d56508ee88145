# SPDX-License-Identifier: Apache-2.0
"""Writes a project from the templates next to this file; the user owns and edits what is written.

Templates are whole files. A project's model, client and configuration are each one of several.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedclip.errors import ToolError

PACKAGES = {
    "sklearn": ("sklearn", "scikit-learn"),
    "torch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "jax": ("haiku", "jax dm-haiku"),
}
"""For each model, the module that it imports, and what to install for it."""
TEMPLATES = Path(__file__).with_name("templates")


def write_project(folder: Path, model: str, privacy: str | None) -> list[str]:
    """Write a project, and return which packages its files need that are not installed.

    Parameters
    ----------
    folder
        Where to write; new or empty.
    model
        One of `PACKAGES`.
    privacy
        "records", "persons", or None for training without privacy.

    Raises
    ------
    ToolError
        If the folder is not empty, or cannot be written to.
    """
    kind = "private" if privacy else "plain"
    sources = {
        "config.toml": [f"config_{kind}.toml"],
        "columns.toml": ["columns.toml"],
        "model.py": [f"model_{model}.py"],
        "client.py": [f"client_{kind}.py"],
        "README.md": ["README.md", *(["privacy.md"] if privacy else [])],
        **{name: [name] for name in ("prepare.py", "server.py", "predict.py")},
    }
    texts = {
        name: "".join((TEMPLATES / part).read_text("utf-8") for part in parts)
        for name, parts in sources.items()
    }
    if privacy == "persons":
        texts["columns.toml"] = texts["columns.toml"].replace('unit = "record"', 'unit = "person"')
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ToolError(f"{folder} is not empty: give a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ToolError(f"cannot write to {folder}: {exc.strerror}") from None
    needed = [PACKAGES[model], *([("opacus", "opacus dp-accounting")] if privacy else [])]
    return [package for module, package in needed if find_spec(module) is None]
