# SPDX-License-Identifier: Apache-2.0
"""Lists what fedclip has registered with declearn, and the installed versions."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections.abc import Mapping
from typing import Any

from declearn.aggregator import Aggregator
from declearn.optimizer import list_optim_modules, list_optim_regularizers
from declearn.utils import access_types_mapping

import fedclip
from fedclip import parameters

__all__ = ["OLDEST_DECLEARN", "build", "catalogue", "fits", "is_ours", "versions"]

OLDEST_DECLEARN = (2, 9, 1)

FRAMEWORKS = (
    "torch",
    "tensorflow",
    "jax",
    "scikit-learn",
    "opacus",
    "dp-accounting",
    "matplotlib",
    "websockets",
)


def is_ours(cls: type) -> bool:
    """Whether a class comes with fedclip."""
    return cls.__module__.partition(".")[0] == "fedclip"


def build(kind: str, name: str, config: Mapping[str, Any]) -> Any:
    """Return a plug-in of fedclip or declearn, made as declearn makes it from a file."""
    registries: dict[str, Mapping[str, Any]] = {
        "module": list_optim_modules(),
        "regularizer": list_optim_regularizers(),
        "aggregator": access_types_mapping(Aggregator.__name__),
    }
    return registries[kind][name](**config)


def catalogue() -> list[dict[str, Any]]:
    """Return what fedclip has registered with declearn, as plain data."""
    kinds: dict[str, dict[str, Any]] = {
        "module": dict(list_optim_modules()),
        "regularizer": dict(list_optim_regularizers()),
        "aggregator": access_types_mapping(Aggregator.__name__),
    }
    entries = []
    for kind, mapping in kinds.items():
        for name, cls in sorted(mapping.items()):
            if not is_ours(cls):
                continue
            entries.append(
                {
                    "name": name,
                    "kind": kind,
                    "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
                    "parameters": {
                        key: None if p.default is p.empty else p.default
                        for key, p in parameters.signature_of(cls).items()
                        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                    },
                    "required": [
                        key
                        for key, p in parameters.signature_of(cls).items()
                        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                    ],
                }
            )
    return entries


def versions() -> dict[str, Any]:
    """Return the facts for a bug report: versions, frameworks, registered names."""
    return {
        "fedclip": fedclip.__version__,
        "declearn": importlib.metadata.version("declearn"),
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        **{name: _version(name) for name in FRAMEWORKS},
        "platform": f"{platform.system()} {platform.machine()}",
        "registered": [entry["name"] for entry in catalogue()],
    }


def fits(declearn: str) -> bool:
    """Whether fedclip works with this version of declearn."""
    numbers = tuple(int(part) for part in declearn.split(".")[:3] if part.isdigit())
    return OLDEST_DECLEARN <= numbers < (3,)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
