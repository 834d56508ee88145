# SPDX-License-Identifier: Apache-2.0
"""Lists what fedclip has registered with declearn, and the installed versions."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections.abc import Mapping
from typing import Any

import fedclip
from fedclip import parameters

__all__ = [
    *("NEEDS_DECLEARN", "build", "catalogue", "documentation", "fits", "is_ours"),
    *("version", "versions"),
]

OLDEST_DECLEARN = (2, 9, 1)
_WANTED = f"declearn>={'.'.join(map(str, OLDEST_DECLEARN))},<3"
NEEDS_DECLEARN = f"this needs {_WANTED}: pip install '{_WANTED}'"

FRAMEWORKS = "torch tensorflow jax scikit-learn opacus dp-accounting matplotlib websockets"


def is_ours(cls: type) -> bool:
    """Whether a class comes with fedclip."""
    return cls.__module__.partition(".")[0] == "fedclip"


def registries() -> dict[str, Mapping[str, Any]]:
    """Return what is registered with declearn, by kind and name."""
    # Imported here: the versions are told without declearn, too.
    from declearn.aggregator import list_aggregators
    from declearn.optimizer import list_optim_modules, list_optim_regularizers

    return {
        "module": list_optim_modules(),
        "regularizer": list_optim_regularizers(),
        "aggregator": list_aggregators(),
    }


def build(kind: str, name: str, config: Mapping[str, Any]) -> Any:
    """Return a plug-in of fedclip or declearn, made as declearn makes it from a file."""
    return registries()[kind][name](**config)


def catalogue() -> list[dict[str, Any]]:
    """Return what fedclip has registered with declearn, as plain data."""
    return [
        _entry(kind, name, cls)
        for kind, registry in registries().items()
        for name, cls in sorted(registry.items())
        if is_ours(cls)
    ]


def documentation(kind: str, name: str) -> str:
    """Return what a plug-in says of itself."""
    return inspect.getdoc(registries()[kind][name]) or ""


def _entry(kind: str, name: str, cls: type) -> dict[str, Any]:
    known = parameters.signature_of(cls).items()
    own = {key: p.default for key, p in known if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    required = [key for key, default in own.items() if default is inspect.Parameter.empty]
    return {
        "name": name,
        "kind": kind,
        "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
        "parameters": {**own, **dict.fromkeys(required)},
        "required": required,
    }


def versions() -> dict[str, Any]:
    """Return the facts for a bug report: versions, frameworks, registered names."""
    try:
        registered = [entry["name"] for entry in catalogue()]
    except ImportError:
        registered = []
    return {
        "fedclip": fedclip.__version__,
        "declearn": version("declearn"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        **{name: version(name) for name in FRAMEWORKS.split()},
        "platform": f"{platform.system()} {platform.machine()}",
        "registered": registered,
    }


def fits(declearn: str | None) -> bool:
    """Whether fedclip works with this version of declearn, of which None is none."""
    if declearn is None:
        return False
    numbers = tuple(int(part) for part in declearn.split(".")[:3] if part.isdigit())
    return OLDEST_DECLEARN <= numbers < (3,)


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
