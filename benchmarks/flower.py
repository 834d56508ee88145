"""Flower's own adaptive clipping beside ours, in one table: ``python -m benchmarks.flower``.

Fifty clients whose updates have norms around 1, by Flower's own messages in one process. It runs
in the environment of the engines (``make engines``).
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from flower_loop import Loop, arrays_of, record
from flwr.clientapp.mod import adaptiveclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    FedAvg,
    Strategy,
)

from fedclip.engines.flower import UpdateClipMod, UpdateClipStrategy

CLIENTS, ROUNDS, Z = 50, 60, 1.0
NORMS = np.exp(np.random.default_rng(0).normal(0.0, 0.3, CLIENTS))
NORMS /= np.median(NORMS)
PAD = 40_000
"""Values that no client changes: what they become is noise."""

Update = Callable[[int, int], Mapping[str, Any]]


def moving(node: int, round_: int) -> dict[str, Any]:
    drawn = np.random.default_rng([node, round_]).normal(size=100)
    return {"w": NORMS[node - 1] * drawn / np.linalg.norm(drawn)}


def theirs(start: float, z: float) -> tuple[Strategy, Any]:
    return DifferentialPrivacyClientSideAdaptiveClipping(
        FedAvg(), z, CLIENTS, initial_clipping_norm=start
    ), adaptiveclipping_mod


def ours(start: float, z: float) -> tuple[Strategy, Any]:
    noise = {"noise_multiplier": z, "expected_clients": CLIENTS} if z else {}
    return UpdateClipStrategy(FedAvg(), {"start_norm": start, **noise}), UpdateClipMod()


Made = Callable[[float, float], tuple[Any, Any]]


def run(
    make: Made, start: float, z: float, rounds: int, update: Update = moving, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the strategy after so many rounds, and the model."""
    strategy, mod = make(start, z)
    loop = Loop(range(1, CLIENTS + 1), update, mods=lambda node: [mod])
    model = {"w": np.zeros(100), **more}
    result = strategy.start(loop, record(model), rounds)
    return strategy, arrays_of(result.arrays)


def last(start: float, make: Made) -> str:
    """Return the bound after all rounds."""
    strategy, _ = run(make, start, 0.0, ROUNDS)
    ours = isinstance(strategy, UpdateClipStrategy)
    return f"{strategy.server.bound.bound if ours else strategy.clipping_norm:.3g}"


def owed(start: float, make: Made) -> str:
    """Return the noise of one round, as a share of what the bound of its clients asks for."""
    strategy, model = run(make, start, Z, 1, pad=np.zeros(PAD))
    ours = isinstance(strategy, UpdateClipStrategy)
    z = strategy.server.bound.budget.update_noise if ours else strategy.noise_multiplier
    return f"{np.std(model['pad']) / (z * start / CLIENTS):.2f}"


def wrong(make: Made, update: Update, **more: Any) -> str:
    """Return what a model becomes of unusual updates."""
    try:
        _, model = run(make, 1.0, 0.0, 2, update, **more)
    except Exception as exc:
        return f"the run ends: {type(exc).__name__}"
    if not model:
        return "no model, as every reply is an error"
    if not np.isfinite(model["w"]).all():
        return "the model is NaN"
    kinds = {k: (model[k].dtype, x.dtype) for k, x in more.items()}
    changed = [f"{k} becomes {now}" for k, (now, was) in kinds.items() if now != was]
    return ", ".join(changed) or "as it should be"


def one_nan(node: int, round_: int) -> dict[str, Any]:
    return {"w": np.full(100, np.nan)} if node == 1 else moving(node, round_)


def main() -> None:
    """Print the table."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows: dict[str, Callable[[Made], str]] = {}
    for start in (0.1, 10.0):
        rows[f"bound after {ROUNDS} rounds from {start:g}, without noise"] = partial(last, start)
    for start in (0.1, 10.0):
        rows[f"noise / owed in a round with the bound {start:g}"] = partial(owed, start)
    rows["one client of 50 sends NaN"] = lambda make: wrong(make, one_nan)
    rows["the model has a counter (int64)"] = lambda make: wrong(make, moving, steps=np.array([3]))
    print(f"| the median norm is 1 | flwr {version('flwr')} | fedclip |\n|---|---|---|")
    for what, measure in rows.items():
        print(f"| {what} | {measure(theirs)} | {measure(ours)} |", flush=True)


if __name__ == "__main__":
    main()
