# SPDX-License-Identifier: Apache-2.0
"""Reports from the trackers of torch, Lightning, Keras, optax and others, replayed on ours.

The name of a test begins with the project and number of the report.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import require

from fedclip import AGC, FedclipWarning, NormClip, ZScoreClip

torch = require("torch")

from fedclip.loops.torch import attach, clip_, clip_grad_norm_  # noqa: E402


def layer(*gradient: float) -> Any:
    found = torch.nn.Linear(len(gradient), 1, bias=False)
    found.weight.grad = torch.tensor([gradient])
    return found


def norm_of(model: Any) -> float:
    return float(
        torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    )


@pytest.mark.parametrize("value", [1e20, 1e30])
def test_pytorch_46849_a_norm_that_overflows_is_clipped_not_erased(value: float) -> None:
    model = layer(value, value)
    assert clip_grad_norm_(model, 1.0).isfinite()
    assert norm_of(model) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_pytorch_46849_deepspeed_7171_what_is_not_finite_is_named_and_moves_nothing(
    value: float,
) -> None:
    model = layer(value, 1.0)
    optimizer, before = torch.optim.Adam(model.parameters()), model.weight.detach().clone()
    with attach(optimizer, 1.0, model), pytest.warns(FedclipWarning, match="infinity in 'weight'"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_lvsm_19_weathergenerator_356_slime_1762_a_scaler_goes_on_after_a_skipped_step() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    clipper = ZScoreClip(warmup=2, on_spike="skip")
    for factor in (1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1e6, 1.0):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.unscale_(optimizer)
        record, before = clip_(model, clipper), model.weight.detach().clone()
        assert record is not None
        assert math.isfinite(float(record))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor > 2)


def test_pytorch_67590_a_step_that_the_scaler_skips_is_none() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    handle = attach(optimizer, ZScoreClip(), model)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.metrics()["round/steps"] == 2


def test_pytorch_optimizer_431_zero_gradients_stay_zero() -> None:
    for clipper in (NormClip(1.0), AGC(), ZScoreClip()):
        model = layer(0.0, 0.0)
        clip_(model, clipper)
        assert not model.weight.grad.any()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("manual", [True, False])
def test_lightning_6328_7698_14598_19536_gsm_22_transformers_1563(
    manual: bool, tmp_path: Any
) -> None:
    """Manual optimization is clipped too; accumulated gradients once, not in each part."""
    lightning = pytest.importorskip("lightning.pytorch")
    from fedclip.loops.lightning import ClipCallback

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.automatic_optimization = torch.nn.Linear(2, 1), not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).sum() * 100.0
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    clipper, model = NormClip(1.0), Model()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    lightning.Trainer(
        max_epochs=1,
        callbacks=[ClipCallback(clipper)],
        accumulate_grad_batches=1 if manual else 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
    ).fit(model, torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=1))
    steps = 4 if manual else 2
    assert sum(r.steps for r in clipper.rounds) == steps
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    assert float(moved.norm()) == pytest.approx(steps, rel=1e-4)


def test_accelerate_641_each_accumulated_step_is_clipped_once() -> None:
    accelerate = pytest.importorskip("accelerate")
    engine = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    made, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    handle = attach(optimizer, NormClip(1.0), made)
    for _ in range(4):
        with engine.accumulate(made):
            engine.backward(made(torch.ones(1, 2)).sum() * 100)
            optimizer.step()
            optimizer.zero_grad()
    assert handle.metrics()["round/steps"] == 2
    assert float(handle.last) == pytest.approx(100 * 3**0.5)


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm"])
def test_keras_13575_14075_17278_tensorflow_29108_45146(option: str) -> None:
    """One norm of all variables, finite for large gradients; in a training step of one's own."""
    tf, keras = require("tensorflow"), pytest.importorskip("keras")
    from fedclip.loops.keras import ClippedOptimizer

    with pytest.raises(ValueError, match="would clip twice"):
        ClippedOptimizer(keras.optimizers.SGD(1.0, **{option: 1.0}), NormClip(1.0))
    variables = [keras.Variable([0.0, 0.0]), keras.Variable([0.0])]
    optimizer = ClippedOptimizer(keras.optimizers.SGD(1.0), NormClip(1.0))

    gradients = tf.constant([3e25, 0.0]), tf.constant([4e25])

    @tf.function
    def train_step() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    train_step()
    np.testing.assert_allclose(np.concatenate(variables), [-0.6, 0.0, -0.8], rtol=1e-5)


def test_optax_1752_spd_643_a_limit_of_zero_and_the_same_numbers_as_torch() -> None:
    jnp, optax = require("jax").numpy, pytest.importorskip("optax")
    from fedclip.loops.jax import as_optax

    scheduled = optax.inject_hyperparams(as_optax)(NormClip(1.0), max_norm=lambda step: 0.0)
    params = {"w": jnp.zeros(3)}
    for gradient in (params, {"w": jnp.ones(3)}):
        updates, _ = scheduled.update(gradient, scheduled.init(params), params)
        assert not updates["w"].any()
    model = layer(3.0, 4.0)
    clip_(model, 0.01)
    leaves = {"w": jnp.array([3.0, 4.0])}
    transform = as_optax(NormClip(0.01))
    ours, _ = transform.update(leaves, transform.init(leaves))
    np.testing.assert_allclose(ours["w"], model.weight.grad[0], rtol=1e-6)


def test_ranger21_1_nfnets_1_8_units_are_outputs_around_any_optimizer_but_the_last_layer() -> None:
    """The reports' code sums linear layers over axis 0, which are inputs in torch."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with attach(optimizer, AGC.preset("nfnets", exclude="1.*"), model):
        optimizer.step()
    moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(moved[0].norm(dim=1), 0.01 * before[0].norm(dim=1))
    assert all((change > 99).all() for change in moved[2:])


def test_opacus_413_433_pytorch_80951_tied_weights_have_one_gradient_of_a_record() -> None:
    from fedclip.dpsgd.step import PrivateMean
    from fedclip.loops.torch import private_gradients

    class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(6, 3), torch.nn.Linear(3, 6, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Any) -> Any:
            return self.head(self.table(x))

    model, loss = Tied(), torch.nn.CrossEntropyLoss()
    x, y = torch.arange(4), torch.arange(4) % 3
    mean = PrivateMean(max_norm=1e6, noise_multiplier=1e-12, expected_batch_size=4)
    found = private_gradients(model, loss, x, y, mean)
    loss(model(x), y).backward()
    torch.testing.assert_close(found["table.weight"], model.table.weight.grad)
