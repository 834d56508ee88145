# SPDX-License-Identifier: Apache-2.0
"""A server goes on from the newest round that was saved as a whole."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.main.utils import Checkpointer
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from declearn.optimizer import Optimizer

from fedclip.engines.declearn.restart import load_round
from fedclip.errors import StateError

NAMES = [f"26-01-01_00-00-0{i}" for i in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with four rounds: weight and bound say which."""
    saver = Checkpointer(str(tmp_path))
    model = SklearnSGDModel.from_parameters(kind="regressor")
    model.initialize({"features_shape": (1,)})
    for i, name in enumerate(NAMES):
        weights = {"intercept": np.full(1, float(i)), "coef": np.full(1, float(i))}
        model.set_weights(NumpyVector(weights))
        optim = Optimizer(lrate=1.0, modules=[("update-clip-server", {"start_norm": 1.0 + i})])
        optim.modules[0].round = i  # type: ignore[attr-defined]
        saver.save_model(model, timestamp=name)
        saver.save_optimizer(optim, timestamp=name)
    saver.save_model(model, timestamp="best", config=False)
    return tmp_path


def loaded(folder: Path) -> tuple[float, float]:
    round_ = load_round(folder)
    state: Any = dict(round_.optimizer.get_state()["modules"])["update-clip-server"]
    return float(round_.model.get_weights().coefs["intercept"][0]), state["bound"] - 1.0


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("model", how) for how in ("gone", "half", "a link to nowhere")),
        *(("optimizer", how) for how in ("gone", "empty")),
    ],
)
def test_a_round_damaged_in_part_is_left_out(
    folder: Path, kind: str, how: str, caplog: Any
) -> None:
    file = folder / f"{kind}_state_{NAMES[3]}.mpk"
    content = file.read_bytes()
    if how in ("gone", "a link to nowhere"):
        file.unlink()
        if how != "gone":
            file.symlink_to(folder / "nowhere")
    else:
        file.write_bytes(content[: len(content) // 2] if how == "half" else b"")
        os.utime(folder / f"optimizer_state_{NAMES[3]}.mpk")
    assert loaded(folder) == (2.0, 2.0)
    assert "not saved as a whole" in caplog.text


def renamed(folder: Path, names: dict[str, str]) -> None:
    """Give rounds the names that they get when the clock is set back."""
    moves = [
        (folder / f"{kind}_state_{old}.mpk", folder / f"{kind}_state_{new}.mpk")
        for old, new in names.items()
        for kind in ("model", "optimizer")
    ]
    content = {new: old.read_bytes() for old, new in moves}
    for old, _ in moves:
        old.unlink()
    for new, data in content.items():
        new.write_bytes(data)


def test_the_newest_round_after_the_clock_was_set_back(folder: Path, caplog: Any) -> None:
    """As at the end of summer time: the last rounds have the names of an hour before."""
    renamed(folder, {NAMES[2]: "25-12-31_23-10-00", NAMES[3]: "25-12-31_23-20-00"})
    assert loaded(folder) == (3.0, 3.0)
    assert not caplog.records
    # A damaged file is older than others by its name, and told of.
    (folder / "optimizer_state_25-12-31_23-20-00.mpk").write_bytes(b"")
    assert loaded(folder) == (2.0, 2.0)
    assert "left out: 25-12-31_23-20-00" in caplog.text


@pytest.mark.parametrize("modules", [[], ["momentum"], ["norm-clip"]])
def test_a_server_without_counters(tmp_path: Path, modules: list[Any]) -> None:
    """Its rounds are told apart by the steps of a clipper, or by the order of the metrics."""
    saver = Checkpointer(str(tmp_path))
    model = SklearnSGDModel.from_parameters(kind="regressor")
    model.initialize({"features_shape": (1,)})
    optim = Optimizer(lrate=1.0, modules=modules)
    # The clock is set back before the last two.
    for i, name in enumerate([NAMES[2], NAMES[3], NAMES[0], NAMES[1]]):
        gradient = NumpyVector({"intercept": np.full(1, -1.0), "coef": np.full(1, 0.0)})
        optim.apply_gradients(model, gradient)
        saver.save_model(model, timestamp=name)
        saver.save_optimizer(optim, timestamp=name)
        if "norm-clip" not in modules:
            saver.save_metrics({"loss": 1.0 / (i + 1)}, timestamp=name)
    assert load_round(tmp_path).timestamp == NAMES[1]


def mix(folder: Path, name: str, second: float) -> None:
    """Let a model be younger than its optimizer: of another round."""
    for kind, later in (("optimizer", 0.1), ("model", 0.9)):
        os.utime(folder / f"{kind}_state_{name}.mpk", (second + later, second + later))


@pytest.mark.parametrize(("zone", "hour"), [("Europe/Paris", 1), ("Asia/Kathmandu", 0)])
def test_a_mixed_round_in_the_hour_that_comes_twice(
    folder: Path, hour: int, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was killed after it had written the model over that of an hour before.

    It starts again where it was, or in another time zone.
    """
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        name = "26-10-25_02-30-00"
        renamed(folder, {NAMES[3]: name})
        mix(folder, name, datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp() + 3600 * hour)
        assert loaded(folder) == (2.0, 2.0)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_two_rounds_within_a_second_have_one_name_and_a_kill_may_come_between(folder: Path) -> None:
    mix(folder, NAMES[3], datetime(2026, 1, 1, 0, 0, 3).timestamp())
    assert loaded(folder) == (2.0, 2.0)


def test_no_folder_or_no_round_in_it(folder: Path) -> None:
    for path in (folder / "typo", folder / "model_config.json"):
        with pytest.raises(StateError, match="is no folder: give the server's checkpoint folder"):
            load_round(path)
    assert not (folder / "typo").exists()
    for file in folder.glob("optimizer_state_*"):
        file.write_bytes(b"")
    with pytest.raises(StateError, match="holds no round whose model and optimizer both load"):
        load_round(folder)
    for file in folder.glob("optimizer_state_*"):
        file.unlink()
    with pytest.raises(StateError, match=r"holds no round .* 5 models and 0 optimizers"):
        load_round(folder)
