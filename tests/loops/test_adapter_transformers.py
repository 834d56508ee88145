# SPDX-License-Identifier: Apache-2.0
"""Transformers: clipped once a step, accumulated and unscaled, as by ``max_grad_norm``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import require

torch = require("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from loops.transformers_processes import trainer as make  # noqa: E402

from fedclip import EmaNormClip, FedclipWarning, NormClip, ZScoreClip  # noqa: E402
from fedclip.loops.transformers import ClipCallback, attach  # noqa: E402

only_ours = pytest.mark.filterwarnings("ignore", "error::fedclip.FedclipWarning")
pytestmark = [pytest.mark.slow, only_ours]

LIMIT = 0.05


class Noting(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes the norms that the optimizer steps with, and what is logged."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.logs: list[dict[str, Any]] = []

    def on_optimizer_step(self, *_: Any, model: Any, **kwargs: Any) -> None:
        self.norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))

    def on_log(self, *_: Any, logs: Any, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Accelerate scale the loss on the CPU, as it does with fp16 on a GPU."""
    init = accelerate.Accelerator.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.state._mixed_precision, self.native_amp = "fp16", True
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        # Nothing but the scale is that of fp16.
        self.autocast = lambda *a, **k: torch.autocast("cpu", enabled=False)

    monkeypatch.setattr(accelerate.Accelerator, "__init__", patched)
    monkeypatch.setattr(accelerate.Accelerator, "prepare_model", lambda self, model, **k: model)


def test_it_does_what_max_grad_norm_does(tmp_path: Path) -> None:
    theirs, ours = Noting(), Noting()
    options = {"gradient_accumulation_steps": 4, "logging_steps": 1}
    first = make(tmp_path, theirs, max_grad_norm=LIMIT, **options)
    first.train()
    second = make(tmp_path, ours, **options)
    callback = attach(second, NormClip(LIMIT))
    second.train()
    assert len(ours.norms) == callback.clipper.rounds[-1].steps == 4
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-4)
    for found, expected in zip(second.model.parameters(), first.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    norms = [float(row["grad_norm"]) for row in theirs.logs if "grad_norm" in row]
    logged = [row for row in ours.logs if "grad_norm" in row]
    np.testing.assert_allclose([row["grad_norm"] for row in logged], norms, rtol=1e-4)
    for row in logged:
        assert (row["limit"], row["clipped"], row["clipped_share"]) == (LIMIT, 1, 1.0)
    history = [row for row in second.state.log_history if "loss" in row]
    assert [row["limit"] for row in history] == [LIMIT] * 4
    assert "limit" not in second.state.log_history[-1]


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path: Path, monkeypatch: Any) -> None:
    plain = ClipCallback(NormClip(LIMIT))
    make(tmp_path, plain).train()
    scaled(monkeypatch)
    callback, noting = ClipCallback(NormClip(LIMIT)), Noting()
    make(tmp_path, callback, noting).train()
    (true,), (found,) = plain.clipper.rounds, callback.clipper.rounds
    assert (found.steps, found.clipped) == (16, 16)
    assert found.norm_max == pytest.approx(true.norm_max, rel=1e-3)
    assert max(noting.norms) <= LIMIT


def test_clipping_twice_or_too_late_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, ClipCallback(NormClip()), max_grad_norm=1.0)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(ValueError, match="would clip too: give max_grad_norm=0"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    deepspeed = type("DeepSpeedOptimizerWrapper", (), {})()
    told = make(tmp_path).args, trainer.state, trainer.control
    with pytest.raises(NotImplementedError, match="DeepSpeed"):
        ClipCallback(NormClip()).on_train_begin(*told, optimizer=deepspeed)
    trainer = make(tmp_path, ClipCallback(NormClip()))
    trainer.optimizer = transformers.trainer_pt_utils.LayerWiseDummyOptimizer()
    for parameter in trainer.model.parameters():
        # What GaLore, APOLLO and others do layer by layer, in hooks of their own.
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(RuntimeError, match="norm-clip found no gradient"):
        trainer.train()


@pytest.mark.parametrize("by_trainer", [True, False])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path, by_trainer: bool) -> None:
    def callbacks() -> list[ClipCallback]:
        first = ZScoreClip(warmup=3) if by_trainer else EmaNormClip(scope="tensor", decay=0.5)
        return [ClipCallback(first), ClipCallback(NormClip(1.0))]

    options: Any = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 12}
    options["restore_callback_states_from_checkpoint"] = by_trainer
    whole = make(tmp_path, *callbacks(), **options)
    whole.train()
    resumed = make(tmp_path, *callbacks(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    # Each callback gets its own state back.
    both = (
        [c.clipper.rounds for c in trainer.callback_handler.callbacks if type(c) is ClipCallback]
        for trainer in (resumed, whole)
    )
    assert next(both) == next(both)


def test_a_clipper_acts_in_one_trainer_at_a_time(tmp_path: Path) -> None:
    clipper = ZScoreClip()
    make(tmp_path, ClipCallback(clipper)).train()
    with pytest.warns(FedclipWarning, match="of another model or optimizer: it starts anew"):
        make(tmp_path, ClipCallback(clipper)).train()
    assert sum(r.steps for r in clipper.rounds) == 16
    clipper = ZScoreClip()
    with pytest.raises(ValueError, match="zscore-clip is already in the ClipCallback of a Trainer"):
        make(tmp_path, ClipCallback(clipper), ClipCallback(clipper)).train()
    with pytest.raises(ValueError, match="two ClipCallbacks have the same zscore-clip"):
        make(tmp_path, ClipCallback("zscore-clip"), ClipCallback("zscore-clip")).train()
