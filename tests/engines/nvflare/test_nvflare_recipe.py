# SPDX-License-Identifier: Apache-2.0
"""NVFlare: what `add_update_clipping` puts into a job, what it refuses, and a job that runs."""

import importlib.util
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ended
from nvflare.app_common.aggregators.collect_and_assemble_model_aggregator import (
    CollectAndAssembleModelAggregator,
)
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.app_common.np.recipes.lr.fedavg import FedAvgLrRecipe
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.client.config import TransferType
from report_runs import call

from fedclip.cli.check.configuration import check_config
from fedclip.engines.nvflare import add_update_clipping
from fedclip.updates.store import client_of, server_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "nvflare"
SCRIPT = str(EXAMPLE / "client.py")
FULL = {"params_transfer_type": TransferType.FULL}


def recipe(**changed: Any) -> Any:
    given = {"min_clients": 3, "params_transfer_type": TransferType.DIFF} | changed
    return NumpyFedAvgRecipe(name="job", model=[0.0, 0.0], train_script=SCRIPT, **given)


def test_an_exported_job_is_judged_before_it_runs(tmp_path: Path) -> None:
    for metric in ("accuracy", ""):
        job = recipe(key_metric=metric, num_rounds=2)
        add_update_clipping(job, noise_multiplier=2.0, expected_clients=3, delta=0.4)
        job.export(str(tmp_path / metric))
        found = check_config(tmp_path / metric / "job")
        levels = ["problem", *["leak"] * 2 * bool(metric), "note"]
        assert [finding.level for finding in found.findings] == levels
        assert "delta = 0.4 is not below 1 / 3 clients" in found.problems[0].message


def test_a_job_gets_its_parts_and_no_copy_of_fedclip(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"weights": {"site-1": 2.0, "site-2": 1.0}, "max_share": 0.5}
    job = recipe()
    add_update_clipping(job, folder="/srv/spent", **settings)
    job.export(str(tmp_path))
    files = (tmp_path / f"job/app/config/config_fed_{side}.json" for side in ("server", "client"))
    server, client = (json.loads(file.read_text()) for file in files)
    closes = server["workflows"][0]["args"]["aggregator"]
    (sends,), (receives,) = server["task_data_filters"], client["task_data_filters"]
    (clips,) = client["task_result_filters"]
    # Only of the training: evaluation is left alone.
    assert sends["tasks"] == receives["tasks"] == clips["tasks"] == ["train"]
    parts = [closes, *(part for one in (sends, receives, clips) for part in one["filters"])]
    names = [part["path"].removeprefix("fedclip.engines.nvflare.clipping.") for part in parts]
    assert names == ["CloseRound", "SendBound", "ReceiveBound", "ClipUpdate"]
    assert closes["args"] == {"settings": settings, "folder": "/srv/spent"}
    assert clips["filters"][0]["args"] == {"settings": settings}
    # What the page has an operator write into a list of classes.
    allowed = ComponentPathAuthorizer._path_matches_prefix
    assert all(allowed(part["path"], "fedclip.engines.nvflare") for part in parts)
    custom = tmp_path / "job" / "app" / "custom"
    assert [path.name for path in custom.rglob("*.py")] == ["client.py"]


def test_the_page_shows_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = EXAMPLE.parents[1] / "docs" / "nvflare.md"
    monkeypatch.chdir(EXAMPLE)
    names: dict[str, Any] = {}
    (block,) = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    exec(block, names)
    assert names["recipe"]._job


@pytest.mark.parametrize(
    ("given", "settings", "told"),
    [
        (FULL, {}, "give the recipe params_transfer_type="),
        (
            {"per_site_config": {"site-1": FULL}, "min_clients": 1},
            {},
            "give the recipe params_transfer_type=",
        ),
        ({"server_expected_format": "raw"}, {}, "give the recipe server_expected_format="),
        ({"aggregator": CollectAndAssembleModelAggregator("x")}, {}, "leave aggregator out"),
        ({"exclude_vars": "a"}, {}, "leave exclude_vars out: update clipping has exclude"),
        ({"aggregation_weights": {"site-1": 2.0}}, {}, "leave aggregation_weights out"),
        ({"stop_cond": "accuracy >= 80"}, {}, "leave stop_cond out"),
        ({}, {"start_nrom": 1.0}, "did you mean 'start_norm'"),
        ({}, {"start_norm": -1.0}, "start_norm must be"),
        ({}, {"folder": "spent"}, "folder must be an absolute path, got 'spent'"),
        ({}, {"noise_multiplier": 1.0}, "noise_multiplier needs expected_clients"),
        ({}, {"noise_multiplier": 1.0, "expected_clients": 4}, "give it min_clients=4"),
        (
            {},
            {"noise_multiplier": 1.0, "expected_clients": 3, "separation": 2},
            "NVFlare's FedAvg draws clients at random",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_can_not_be_clipped_is_refused(given: Any, settings: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        add_update_clipping(recipe(**given), **settings)
    other = FedAvgLrRecipe(min_clients=2, num_features=2, train_script=SCRIPT)
    with pytest.raises(ValueError, match="the workflow of this recipe is FedAvgLR"):
        add_update_clipping(other)


def by_the_core(rounds: int, clients: int) -> tuple[list[float], Any]:
    spec = importlib.util.spec_from_file_location("nvflare_example", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    server, client = server_of({"start_norm": 0.5}), client_of({})
    data, bounds = [script.load(part, 5) for part in range(clients)], []
    model = np.zeros((65, 10), "f4")  # as NVFlare keeps it
    for _ in range(rounds):
        sent, replies = server.open(), []
        for i, rows in enumerate(data):
            trained, steps = script.train(model, *rows)
            reply = client.clip({"numpy_key": trained - model}, sent, steps=steps)
            replies.append(replace(reply, sender=f"site-{i + 1}"))
        closed = server.close(replies, like={"numpy_key": model})
        model = model + closed.average["numpy_key"]
        bounds.append(closed.record["bound"])
    return bounds, model


@pytest.mark.parametrize("rounds", [4, pytest.param(25, marks=pytest.mark.soak)])
def test_the_simulator_runs_the_example(rounds: int, tmp_path: Path) -> None:
    # NVFlare writes below the home of its user.
    where = {"env": os.environ | {"HOME": str(tmp_path)}, "timeout": 900}
    ended(EXAMPLE / "job.py", "--folder", tmp_path, "--rounds", rounds, **where)
    server = tmp_path / "digits" / "server" / "simulate_job"
    kept = json.loads((server / "fedclip" / "update_clip.json").read_text())
    bounds, model = by_the_core(rounds, 3)
    np.testing.assert_allclose([r["bound"] for r in kept["rounds"]], bounds, rtol=1e-6)
    assert all(r["replies"] == 3 and not r["refused"] for r in kept["rounds"])
    np.testing.assert_allclose(np.load(server / "models" / "server.npy"), model, rtol=1e-5)
    assert "adaptive" in call("report", server / "fedclip").stdout
