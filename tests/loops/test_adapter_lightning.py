# SPDX-License-Identifier: Apache-2.0
"""Lightning: gradients are clipped once before each optimizer step, as by its own clip."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import require

torch = require("torch")
lightning = pytest.importorskip("lightning.pytorch")
from torch_loops import total  # noqa: E402

from fedclip import AGC, EmaNormClip, FedclipWarning, NormClip, ValueClip, ZScoreClip  # noqa: E402
from fedclip.loops.lightning import ClipCallback  # noqa: E402

only_ours = pytest.mark.filterwarnings("ignore", "error::fedclip.FedclipWarning")
pytestmark = [pytest.mark.slow, only_ours]

LIMIT = 0.05


class Model(lightning.LightningModule):  # type: ignore[misc]
    """A small model with large gradients; it notes the norms that each optimizer steps with."""

    def __init__(self, *, manual: str = "", optimizers: int = 1, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 4) for _ in range(optimizers))
        self.automatic_optimization = not manual
        self.manual, self.fused = manual, fused
        self.norms: list[list[float]] = [[] for _ in range(optimizers)]

    def loss(self, batch: Any, layer: Any) -> Any:
        return 100 * layer(batch[0]).square().mean()

    def training_step(self, batch: Any, index: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch, self.layers[0])
        found = self.optimizers(use_pl_optimizer=self.manual != "torch's own")
        optimizers = found if isinstance(found, list) else [found]
        for layer, optimizer in zip(self.layers, optimizers, strict=True):

            def closure(optimizer: Any = optimizer, layer: Any = layer) -> None:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch, layer))

            if self.manual == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        made = []
        for layer, norms in zip(self.layers, self.norms, strict=True):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, fused=self.fused)
            optimizer.register_step_post_hook(
                lambda *_, layer=layer, norms=norms: norms.append(total(layer))
            )
            made.append(optimizer)
        return made if len(made) > 1 else made[0]


def batches() -> Any:
    values = np.random.default_rng(0).standard_normal((32, 5)).astype(np.float32)
    data = torch.utils.data.TensorDataset(torch.tensor(values))
    return torch.utils.data.DataLoader(data, batch_size=4)


QUIET = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    common = {**dict.fromkeys(QUIET, False), "accelerator": "cpu", "max_epochs": 1}
    common |= {"default_root_dir": folder, "callbacks": [*callbacks]}
    return lightning.Trainer(**{**common, **options})


def fit(folder: Path, model: Any, *callbacks: Any, **options: Any) -> Any:
    found = trainer(folder, *callbacks, **options)
    found.fit(model, batches())
    return found


def amp(precision: str) -> dict[str, Any]:
    """Return the option of mixed precision for the CPU; with float16 it scales the loss."""
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None
    return {"plugins": MixedPrecision(precision, "cpu", scaler)}


@pytest.mark.parametrize(
    ("by", "precision"), [("norm", ""), ("norm", "bf16-mixed"), ("value", "16-mixed")]
)
def test_it_does_what_gradient_clip_val_does(tmp_path: Path, by: str, precision: str) -> None:
    theirs, ours = Model(), Model()
    asked = {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": by}
    accumulated = {"accumulate_grad_batches": 4}
    fit(tmp_path, theirs, **asked, **(amp(precision) if precision else accumulated))
    callback = ClipCallback(NormClip(LIMIT) if by == "norm" else ValueClip(LIMIT))
    fit(tmp_path, ours, callback, **(amp(precision) if precision else accumulated))
    steps = 8 if precision else 2
    (record,) = (r for r in callback.clippers[0].rounds if r.steps)
    assert (record.steps, record.clipped) == (steps, steps)
    assert record.norm_min is not None
    # Scaled gradients would be longer by a factor of 256.
    assert 1 < record.norm_min < 1000
    np.testing.assert_allclose(ours.norms[0], theirs.norms[0], rtol=1e-4)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("manual", ["closure", "torch's own"])
def test_manual_optimization_clips_before_each_step(tmp_path: Path, manual: str) -> None:
    callback, model = ClipCallback(NormClip(LIMIT)), Model(manual=manual)
    fit(tmp_path, model, callback, **(amp("16-mixed") if manual == "closure" else {}))
    assert len(model.norms[0]) == 8
    assert max(model.norms[0]) <= LIMIT
    record = callback.clippers[0].rounds[-1]
    assert (record.steps, record.clipped) == (8, 8)
    assert 1 < record.norm_min < 1000


def test_several_optimizers_have_a_clipper_each(tmp_path: Path) -> None:
    clipper = ZScoreClip(warmup=3)
    callback, model = ClipCallback(clipper), Model(manual="step", optimizers=2)
    fit(tmp_path, model, callback)
    first, second = callback.clippers
    assert first is clipper
    assert [c.rounds[-1].steps for c in callback.clippers] == [8, 8]
    assert first.get_state()["groups"] != second.get_state()["groups"]
    fit(tmp_path, model, ClipCallback([NormClip(0.5), NormClip(0.25)]))
    assert (max(model.norms[0][8:]), max(model.norms[1][8:])) <= (0.5, 0.25)
    with pytest.raises(ValueError, match="2 clippers and 1 optimizers"):
        fit(tmp_path, Model(), ClipCallback([NormClip(), NormClip()]))


def test_what_can_not_be_clipped_once_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = Model(fused=True)
    with pytest.raises(ValueError, match=r"gradient_clip_val=1\.0: ClipCallback"):
        fit(tmp_path, model, ClipCallback(NormClip()), gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="without fused=True"):
        fit(tmp_path, model, ClipCallback(NormClip()), **amp("16-mixed"))
    fake = SimpleNamespace(gradient_clip_val=None, strategy=type("DeepSpeedStrategy", (), {})())
    with pytest.raises(NotImplementedError, match="DeepSpeed"):
        ClipCallback(NormClip()).setup(fake, None, "fit")
    assert model.norms == [[]]
    fit(tmp_path, model, ClipCallback(NormClip(LIMIT)), **amp("bf16-mixed"))
    assert max(model.norms[0]) <= LIMIT


def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    make = partial(EmaNormClip, scope="tensor", decay=0.5)
    whole, file = Model(), tmp_path / "one.ckpt"
    fit(tmp_path, whole, ClipCallback(make()), max_epochs=2)
    fit(tmp_path, Model(), ClipCallback(make())).save_checkpoint(file)
    # Statistics that are arrays are saved as tensors.
    torch.load(file, weights_only=True)
    resumed, callback = Model(), ClipCallback(make())
    trainer(tmp_path, callback, max_epochs=2).fit(resumed, batches(), ckpt_path=file)
    assert [r.round for r in callback.clippers[0].rounds if r.group == "all"] == [1, 2]
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_the_loggers_get_what_the_steps_did(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path)
    options = {"logger": logger, "log_every_n_steps": 4, "max_epochs": 2}
    # The second of two in a row.
    callback = ClipCallback(NormClip(LIMIT))
    found = fit(tmp_path, Model(), ClipCallback(AGC(0.01)), callback, **options)
    assert found.logged_metrics["clip/limit"] == pytest.approx(LIMIT)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",")[0] == "clip/clipped"
    assert len(rows) == 1 + 4
    assert [r.steps for r in callback.clippers[0].rounds if r.round] == [8, 8]


@pytest.mark.parametrize("first", [True, False])
def test_a_finder_of_the_learning_rate_is_clipped(tmp_path: Path, first: bool) -> None:
    class Finds(Model):
        lr = 0.01

        def train_dataloader(self) -> Any:
            return batches()

    clipper = ZScoreClip(max_norm=LIMIT)
    finder = lightning.callbacks.LearningRateFinder(num_training_steps=4)
    model, ours = Finds(), ClipCallback(clipper)
    trainer(tmp_path, *([finder, ours] if first else [ours, finder])).fit(model)
    assert len(model.norms[0]) > 8
    assert max(model.norms[0]) <= LIMIT
    # The checkpoint that the finder restores knows nothing of its steps.
    assert sum(r.steps for r in clipper.rounds) == len(model.norms[0]) - 4


def test_a_clipper_goes_from_one_trainer_to_the_next(tmp_path: Path) -> None:
    class Breaks(Model):
        def training_step(self, batch: Any, index: int) -> Any:
            assert index < 3
            return super().training_step(batch, index)

    clipper = ZScoreClip()
    broken = trainer(tmp_path, ClipCallback(clipper))
    with pytest.raises(AssertionError):
        broken.fit(Breaks(), batches())
    model, anew = Model(), "of another model or optimizer: it starts anew"
    with pytest.warns(FedclipWarning, match=anew):
        first = fit(tmp_path, model, ClipCallback(clipper))
    second = fit(tmp_path, model, ClipCallback(clipper))
    assert sum(r.steps for r in clipper.rounds) == 8 + 8
    for done in (first, second):
        done.save_checkpoint(tmp_path / "done.ckpt")
        saved = torch.load(tmp_path / "done.ckpt", weights_only=True)
        assert saved["optimizer_states"][0]["fedclip:zscore-clip"]["groups"]
