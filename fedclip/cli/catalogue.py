# SPDX-License-Identifier: Apache-2.0
"""The plug-ins of fedclip, and the installed versions."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedclip

if TYPE_CHECKING:
    from fedclip.core.parameters import Config
    from fedclip.privacy.guarantees import Plugin


FILE = Path(__file__).with_name("catalogue.json")
"""One line for each plug-in; written by ``python docs/clippers.py``."""

FRAMEWORKS = "torch tensorflow jax scikit-learn opacus dp-accounting matplotlib websockets"


def is_ours(cls: type) -> bool:
    """Whether a class comes with fedclip."""
    return cls.__module__.partition(".")[0] == "fedclip"


def registries() -> dict[str, Mapping[str, type]]:
    """Return the plug-ins registered with declearn, by kind and name."""
    # Imported here: versions are shown without declearn, too.
    from declearn.aggregator import list_aggregators
    from declearn.optimizer import list_optim_modules, list_optim_regularizers

    return {
        "module": list_optim_modules(),
        "regularizer": list_optim_regularizers(),
        "aggregator": list_aggregators(),
    }


def build(kind: str, name: str, config: Mapping[str, object]) -> Plugin:
    """Return a plug-in of fedclip or declearn, made as declearn makes it; or a site's policy."""
    if kind == "policy":
        from fedclip.site.policy import Policy

        policy: type[Any] = Policy
        return policy(**config)
    return registries()[kind][name](**config)


def catalogue() -> list[Config]:
    """Return the entries of `FILE`; no clipper is imported."""
    entries: list[Config] = json.loads(FILE.read_text(encoding="utf-8"))
    return entries


def documentation(kind: str, name: str) -> str:
    """Return the documentation of a plug-in."""
    # By its class, because most are imported without declearn.
    plain = name.replace("-", "")
    known = [cls for cls in fedclip.__all__ if cls.lower() == plain]
    plugin = getattr(fedclip, known[0]) if known else registries()[kind][name]
    return inspect.getdoc(plugin) or ""


def versions() -> Config:
    """Return the facts for a bug report: versions, also of frameworks. Nothing is imported."""
    return {
        "fedclip": fedclip.__version__,
        "declearn": version("declearn"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        **{name: version(name) for name in FRAMEWORKS.split()},
        "platform": f"{platform.system()} {platform.machine()}",
    }


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
