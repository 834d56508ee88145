"""Every clipper that fedclip registers, with parameters drawn at random."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer

from fedclip.cli.catalogue import catalogue


@cache
def known() -> dict[str, dict[str, Any]]:
    """Return what the catalogue says of each clipper of gradients."""
    return {
        entry["name"]: entry
        for entry in catalogue()
        if entry["kind"] != "aggregator"
        and not entry["name"].endswith("-server")
        and not entry["name"].startswith(("update-", "sample-clip"))
    }


def make(name: str, config: dict[str, Any]) -> Any:
    """Return a fresh clipper."""
    base: Any = OptiModule if known()[name]["kind"] == "module" else Regularizer
    return base.from_specs(name, config)


def draw(rng: np.random.Generator, scale: float, names: list[str]) -> tuple[str, dict[str, Any]]:
    """Return a name and parameters, with limits around gradients of some scale and these names."""
    # The plain clippers, on which the strictest promises are, come more often.
    extra = ["norm-clip"] * 6 + ["value-clip", "agc"] * 2
    name = str(rng.choice([*known(), *extra]))
    parameters = known()[name]["parameters"]
    config: dict[str, Any] = {}
    if rng.random() < 0.2:
        return name, config
    limit = float(scale * 10.0 ** rng.uniform(-3, 1.5))
    for parameter in ("max_norm", "max_value", "norm"):
        if parameter in parameters and rng.random() < 0.9:
            config[parameter] = limit
    if "scope" in parameters:
        patterns = sorted({n[0] + "*" for n in names})
        scopes: list[Any] = ["global", "global", "tensor", "layer", patterns]
        if name in ("norm-clip", "value-clip"):
            scopes.append({patterns[0]: limit / 2})
        config["scope"] = scopes[rng.integers(len(scopes))]
    if "ord" in parameters and rng.random() < 0.25:
        orders = [1, 3, 0.5, "inf", "rms", "mad"]
        config["ord"] = orders[rng.integers(len(orders))]
    if "warmup" in parameters and "window" not in parameters:
        config["warmup"] = int(rng.integers(1, 6))
    if "exclude" in parameters and len(names) > 1 and rng.random() < 0.15:
        config["exclude"] = names[-1]
    if name == "norm-clip" and rng.random() < 0.25:
        config.update(scope="tensor", dims=int(rng.integers(-1, 2)))
        config["inverse_dims"] = bool(rng.random() < 0.3)
    elif name == "norm-clip" and rng.random() < 0.1:
        config["min_norm"] = limit / 10
    if name == "agc":
        config["ratio"] = float(10.0 ** rng.uniform(-4, 0))
        config["unit"] = str(rng.choice(["output", "tensor", "global"]))
        config.pop("scope", None)
    if config.get("exclude") and isinstance(config.get("scope"), (list, dict)):
        # A pattern that is left without a name is refused.
        config.pop("exclude")
    return name, config
