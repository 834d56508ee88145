"""Write what ``fedclip list`` says, from what is registered: ``python docs/clippers.py``."""

from __future__ import annotations

import inspect
import json
from typing import Any

from fedclip.cli.catalogue import FILE, is_ours, registries
from fedclip.core.parameters import signature_of


def registered() -> list[dict[str, Any]]:
    """Return what fedclip has registered with declearn, as plain data."""
    return [
        entry(kind, name, cls)
        for kind, registry in registries().items()
        for name, cls in sorted(registry.items())
        if is_ours(cls)
    ]


def entry(kind: str, name: str, cls: type) -> dict[str, Any]:
    """Return what is listed of one plug-in."""
    known = signature_of(cls).items()
    own = {key: p.default for key, p in known if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    required = [key for key, default in own.items() if default is inspect.Parameter.empty]
    return {
        "name": name,
        "kind": kind,
        "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
        "parameters": {**own, **dict.fromkeys(required)},
        "required": required,
    }


def write() -> None:
    """Write the file: a line for each plug-in."""
    lines = ",\n".join(json.dumps(found, default=str) for found in registered())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
