# SPDX-License-Identifier: Apache-2.0
"""The numbers of records arrive in TensorBoard, W&B and MLflow, in the packages themselves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE

from fedclip import NormClip
from fedclip.loops.loggers import log

NAMES = ["clip/clipped", "clip/limit", "clip/nonfinite", "clip/norm"]


def steps(to: Any) -> NormClip:
    """Log three steps, with norms 1, 2 and 3, and the round."""
    clipper = NormClip(2.0)
    clipper.on_round_start()
    for step in range(1, 4):
        clipper.clip({"w": np.array([float(step)])})
        log(clipper.last, to, step)
    log(clipper.rounds[0], to, 3, "round/")
    return clipper


def test_a_logger_needs_a_method() -> None:
    with pytest.raises(TypeError, match="add_scalar, log_metrics or log"):
        steps(print)
    log(None, print, 1)


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
        from tensorboard.backend.event_processing import event_accumulator
    steps(writer)
    writer.close()
    found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [name for name in sorted(found.Tags()["scalars"]) if name.startswith("clip/")] == NAMES
    read = [(event.step, event.value) for event in found.Scalars("clip/norm")]
    assert read == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [event.value for event in found.Scalars("round/clipped")] == [1.0]


@pytest.mark.slow
def test_wandb(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb")
        run = wandb.init(
            mode="offline", dir=str(tmp_path), settings={"silent": True, "init_timeout": PATIENCE}
        )
        clipper = steps(run)
        # W&B takes a step down when the next one comes.
        run.log({}, step=4)
        summary = dict(run.summary)
        run.finish()
    assert clipper.last is not None
    assert {name: summary[name] for name in NAMES} == clipper.last.as_dict("clip/")


@pytest.mark.slow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow")
        mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
        with mlflow.start_run() as run:
            steps(mlflow)
            # MLflow takes no "*" in a name.
            clipper = NormClip(scope={"head.*": 1.0})
            clipper.clip({"head.w": np.array([2.0]), "w": np.array([1.0])})
            log(clipper.last, mlflow, 1, "groups/")
        client = mlflow.MlflowClient()
        history = client.get_metric_history(run.info.run_id, "clip/norm")
        numbers = client.get_run(run.info.run_id).data.metrics
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert numbers["groups/head._/norm"] == 2.0
