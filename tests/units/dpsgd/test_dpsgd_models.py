# SPDX-License-Identifier: Apache-2.0
"""Clipped sums of torch models as users have them: each is that of records alone, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import require

from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import check, clipped_sum

pytestmark = pytest.mark.slow

torch: Any = require("torch")
nn = torch.nn
C, N = 0.3, 9


def flat(norms: Any) -> Any:
    return SampleClipping().factors(norms, C)


def model_of(net: Any, loss: Any = None) -> Any:
    from declearn.model.torch import TorchModel

    return TorchModel(net, nn.CrossEntropyLoss() if loss is None else loss)


class Calls(nn.Module):  # type: ignore[misc]
    """Has layers, and is a function of them."""

    def __init__(self, call: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.call(self, *inputs)


def lstm() -> Any:
    return Calls(
        lambda net, x: net.out(net.cell(net.embed(x))[0][:, -1]),
        embed=nn.Embedding(11, 6),
        cell=nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True),
        out=nn.Linear(10, 3),
    )


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=True)
    return Calls(
        lambda net, x: net.out(net.mix(net.embed(x) + net.place).mean(1)),
        embed=nn.Embedding(11, 6),
        place=nn.Parameter(torch.randn(1, 7, 6)),
        mix=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        out=nn.Linear(6, 3),
    )


def two_inputs() -> Any:
    return Calls(
        lambda net, x, y: net.out(net.embed(x).mean(1) + net.wide(y)),
        embed=nn.Embedding(11, 6),
        wide=nn.Linear(4, 6),
        out=nn.Linear(6, 3),
    )


def two_outputs() -> Any:
    def call(net: Any, x: Any) -> Any:
        found = torch.tanh(net.body(x))
        return net.first(found), net.second(found)

    return Calls(call, body=nn.Linear(4, 8), first=nn.Linear(8, 3), second=nn.Linear(8, 1))


class TwoLosses(nn.Module):  # type: ignore[misc]
    """Is the sum of the losses of two outputs."""

    def forward(self, out: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(out[0], y, reduction="none") + out[1][:, 0] ** 2


class Centred(nn.Module):  # type: ignore[misc]
    """Has buffers that training does not change, and is given keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(input=(x - self.mean) * self.mask)


def in_place() -> Any:
    return Calls(lambda net, x: net.layer(x.mul_(2.0)), layer=nn.Linear(4, 3))


def branches() -> Any:
    return Calls(
        lambda net, x: net.low(x) if x.sum() > 0 else net.high(x),
        low=nn.Linear(4, 3),
        high=nn.Linear(4, 3),
    )


def checkpointed() -> Any:
    return Calls(
        lambda net, x: net.out(
            torch.utils.checkpoint.checkpoint(net.layer, x, use_reentrant=False).tanh()
        ),
        layer=nn.Linear(4, 4),
        out=nn.Linear(4, 3),
    )


# Module, shape of a record or what tokens it has, loss.
ZOO: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "lstm": (lstm, 7, None),
    "encoder": (encoder, 7, None),
    "two inputs": (two_inputs, [7, (4,)], None),
    "two outputs": (two_outputs, (4,), TwoLosses()),
    "images": (
        lambda: nn.Sequential(
            *(nn.ConvTranspose2d(1, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 3, 3), nn.PReLU(), nn.Flatten()),
        ),
        *((1, 5, 5), None),
    ),
    "buffers": (Centred, (4,), None),
    "in place": (in_place, (4,), None),
    "branches": (branches, (4,), None),
    "checkpointed": (checkpointed, (4,), None),
}


def data_of(shape: Any, many: int = N) -> Any:
    if isinstance(shape, list):
        return [data_of(one, many) for one in shape]
    if isinstance(shape, int):
        return torch.randint(0, 11, (many, shape))
    return torch.randn(many, *shape)


def some(x: Any, at: slice) -> Any:
    """Return copies: a module may change what it is given."""
    return [some(one, at) for one in x] if isinstance(x, list) else x[at].clone()


def alone(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Return the clipped sum of gradients of batches of one record."""
    net, loss, total = model._raw_model.module, model._loss_fn.module, {}
    for i in range(len(y)):
        given = some(x, slice(i, i + 1))
        net.zero_grad()
        out = net(*given) if isinstance(given, list) else net(given)
        loss(out, y[i : i + 1]).mean().backward()
        named = {n: p for n, p in net.named_parameters() if p.requires_grad}
        grads = {
            f"module.{n}": np.zeros(p.shape) if p.grad is None else p.grad.double().numpy()
            for n, p in named.items()
        }
        norm = np.sqrt(sum((a**2).sum() for a in grads.values()))
        for name, array in grads.items():
            total[name] = total.get(name, 0.0) + min(1.0, C / max(norm, 1e-30)) * array
    return total


@pytest.mark.parametrize(("kind", "many"), [("encoder", 1), *((kind, N) for kind in ZOO)])
def test_sums_are_those_of_records_alone(kind: str, many: int) -> None:
    torch.manual_seed(0)
    make, shape, loss = ZOO[kind]
    model = model_of(make(), loss)
    x, y = data_of(shape, many), torch.randint(0, 3, (many,))
    check(model)
    sums, norms = clipped_sum(model, [(some(x, slice(None)), y, None)], flat, micro_batch=4)
    assert norms.shape == (many, 1)
    for name, array in alone(model, x, y).items():
        np.testing.assert_allclose(sums[name], array, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), "is a spectral norm"),
        (lambda: nn.Linear(4, 3).requires_grad_(False), "the model has no trainable weights"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4)), r"layer '0' \(BatchNorm1d\) mixes the records"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "mixes the records"),
        (lambda: nn.InstanceNorm1d(4, track_running_stats=True), "mixes the records"),
    ],
)
def test_what_can_not_be_private_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(model_of(make()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_compiled_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compiled by torch\.jit"):
        check(model_of(torch.jit.script(nn.Linear(4, 3))))
