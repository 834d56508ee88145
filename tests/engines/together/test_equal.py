# SPDX-License-Identifier: Apache-2.0
"""The same task, seeds and settings on declearn, Flower, NVFlare and in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ended, free_port
from quickruns import write_config, write_sites

from fedclip.cli.privacy import read_spent
from fedclip.core.records import SERVED
from fedclip.report import read_report
from fedclip.updates.store import read

NOISE = {"noise_multiplier": 0.7, "expected_clients": 3, "generator": "insecure", "seed": 1}
HERE = Path(__file__).parent
DECLEARN = """
import asyncio, sys
from pathlib import Path
from fedclip.engines.declearn.quickrun import Federation
federation = Federation(Path(sys.argv[1]))
asyncio.run(federation.run(seed=3))
"""
PROCESS = "import sys\nfrom pathlib import Path\nfrom fedclip.engines.local.simulate import run\n"
PROCESS += "run(Path(sys.argv[1]), 3)"


def started(words: list[object], folder: Path, task: Path) -> None:
    folder.mkdir()
    paths = os.pathsep.join([str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    more = {"EQUAL_TASK": str(task), "PYTHONPATH": paths, "HOME": str(folder)}
    ended(*words, env=os.environ | more, cwd=folder, timeout=1200)


def of_declearn(folder: Path) -> tuple[list[float], Any, float]:
    """Return bounds, model and epsilon of a run of declearn, or of a simulation of one."""
    from declearn.utils.serialize import msgpack_load

    states = folder.glob("**/server/model_state_[0-9]*.mpk")
    coefs = msgpack_load(str(max(states, key=lambda path: path.name))).coefs
    rows = read_report(folder).select(module="update-clip-client")
    bounds = [row.record.limit for row in rows if row.node == rows[0].node]
    model = np.concatenate([np.ravel(coefs[name]) for name in sorted(coefs)])
    return bounds, model, epsilon_of(folder)


def of_engine(folder: Path) -> tuple[list[float], Any, float]:
    kept, model = read(folder / SERVED), np.load(folder / "model.npy")
    return [r["bound"] for r in kept.rounds], model, epsilon_of(folder)


def epsilon_of(folder: Path) -> float:
    """Return what was spent; 0 without noise."""
    try:
        (spent,) = read_spent(folder)
    except ValueError:
        return 0.0
    return float(spent.accountant.epsilon())


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        pytest.param({}, 3, id="bound"),
        pytest.param({}, 25, id="bound, 25 rounds", marks=pytest.mark.soak),
        pytest.param(NOISE, 25, id="noise, 25 rounds", marks=pytest.mark.soak),
    ],
)
def test_bounds_model_and_epsilon_are_the_same(
    settings: Mapping[str, Any], rounds: int, tmp_path: Path
) -> None:
    write_sites(tmp_path)

    def written(out: str) -> Path:
        server = ", ".join(f"{k} = {json.dumps(v)}" for k, v in settings.items())
        changes = {
            "port": free_port(),
            "lrate": 0.2,
            "server": f'[["update-clip-server", {{{server}}}]]',
            "rounds": rounds,
            "batch_size": 1000,
            "training": "drop_remainder = false\nn_epoch = 3",
            "more": "[simulate]\nseed = 3\n",
        }
        return write_config(tmp_path / f"{out}.toml", out, **changes)

    task = written("process")
    started(["-c", PROCESS, task], tmp_path / "process", task)
    started(["-c", DECLEARN, written("declearn")], tmp_path / "declearn", task)
    for engine in ("flower", "nvflare"):
        words = [HERE / f"equal_{engine}.py", tmp_path / engine, rounds, json.dumps(settings)]
        started(words, tmp_path / engine, task)
    found = {name: of_declearn(tmp_path / name) for name in ("process", "declearn")}
    found |= {name: of_engine(tmp_path / name) for name in ("flower", "nvflare")}
    bounds, model, epsilon = found["process"]
    assert len(bounds) == rounds
    assert (epsilon > 0) == bool(settings)
    for name, (its_bounds, its_model, its_epsilon) in found.items():
        assert its_epsilon == pytest.approx(epsilon, rel=1e-12), name
        # NVFlare's differences are those after training less those before, so that the same noise
        # takes the model the other way.
        if not (settings and name == "nvflare"):
            np.testing.assert_allclose(its_bounds, bounds, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(its_model, model, rtol=1e-5, atol=1e-7, err_msg=name)
