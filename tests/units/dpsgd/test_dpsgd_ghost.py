# SPDX-License-Identifier: Apache-2.0
"""Norms and sums from what goes into layers and comes back: as those of gradients worked out."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from dpsgd_models import assert_alone, calls
from helpers import require

pytestmark = pytest.mark.slow

torch: Any = require("torch")
nn = torch.nn
records: Any = __import__("fedclip.dpsgd.persample.torch_records", fromlist=["x"])
TorchModel: Any = __import__("declearn.model.torch", fromlist=["x"]).TorchModel
plans: Any = __import__("fedclip.dpsgd.persample.torch_plan", fromlist=["x"])
layers: Any = __import__("fedclip.dpsgd.persample.torch_layers", fromlist=["x"])


def tokens(**settings: Any) -> Any:
    """Return a module that embeds what it is given as numbers."""
    table = nn.Embedding(5, 4, **settings)
    return calls(lambda net, x: net.table((x.abs() * 3).long() % 5), table=table)


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=True)
    return calls(
        lambda net, x: net.out(net.mix(net.embed(x) + net.place).mean(1)),
        embed=nn.Embedding(11, 6),
        place=nn.Parameter(torch.randn(1, 7, 6)),
        mix=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        out=nn.Linear(6, 3),
    )


def images() -> Any:
    first = (nn.ConvTranspose2d(1, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2))
    return nn.Sequential(*first, nn.Conv2d(4, 3, 3), nn.PReLU(), nn.Flatten())


def buffers() -> Any:
    made = calls(lambda net, x: net.layer(input=x - net.mean), layer=nn.Linear(4, 3))
    made.register_buffer("mean", torch.randn(4))
    return made


def one_layer(call: Any) -> Any:
    return lambda: calls(call, layer=nn.Linear(6, 2))


def two_layers(call: Any, tied: bool = False) -> Any:
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight if tied else b.weight
    return calls(call, a=a, b=b)


def checkpointed(net: Any, x: Any) -> Any:
    return net.b(torch.utils.checkpoint.checkpoint(net.a, x, use_reentrant=False))


def penalised(net: Any, x: Any) -> Any:
    return net.layer(x) + x.sum() * net.layer.weight.square().sum()


def with_two_inputs() -> Any:
    a, b = nn.Embedding(11, 6), nn.Linear(4, 6)
    return calls(lambda net, x, y: net.a(x).mean(1) + net.b(y), a=a, b=b)


def folded() -> Any:
    """Return a module that takes channels for records of their own."""
    conv, norm = nn.Conv1d(1, 2, 3), nn.GroupNorm(1, 2)

    def call(net: Any, x: Any) -> Any:
        return net.norm(net.conv(x.reshape(-1, 1, 6))).reshape(len(x), -1)

    return calls(call, conv=conv, norm=norm)


class Halved(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 0.5 * super().forward(x)


def hooked() -> Any:
    layer = nn.Linear(6, 2)
    layer.register_forward_hook(lambda layer, args, out: out * 3.0)
    return layer


def recurrent(kind: Any, packed: bool = False, folded: bool = False, **settings: Any) -> Any:
    """Return a module that uses the outputs and the last states of a recurrent layer."""
    layer = kind(6, 3, **settings)

    def call(net: Any, x: Any) -> Any:
        x = x.reshape(1, -1, 6) if folded else x.movedim(0, 1 - layer.batch_first)
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, [len(x)])
        output, states = net.layer(x)
        assert isinstance(states, tuple) == isinstance(layer, nn.LSTM)
        output = output.data if packed else output
        states = states if isinstance(states, tuple) else (states,)
        return sum(((i + 1) * s.sin().sum() for i, s in enumerate(states)), output.sum())

    return calls(call, layer=layer)


def attention(*masks: Any, weights: bool = False, **settings: Any) -> Any:
    """Return a module of one attention layer, whose positions come first where settings say so."""
    layer = nn.MultiheadAttention(6, 2, **settings)

    def call(net: Any, x: Any) -> Any:
        x = x if layer.batch_first else x.transpose(0, 1)
        return net.layer(x, x, x, *masks, need_weights=weights)[0].mean(1 - layer.batch_first)

    return calls(call, layer=layer)


MASK = torch.tensor([[False, False, True, False, True]])
BOTH_WAYS = {"batch_first": True, "bidirectional": True}
# Module, shape of a record, layers that are taken apart.
MODULES: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (6,), 2),
    "short sequence": (lambda: nn.Linear(20, 20), (3, 20), 1),
    "long sequence": (lambda: nn.Linear(6, 2), (30, 6), 1),
    "planes": (lambda: nn.Linear(6, 2, bias=False), (3, 4, 6), 1),
    "embedding": (tokens, (7,), 1),
    "padding": (partial(tokens, padding_idx=1), (7,), 1),
    "by frequency": (partial(tokens, scale_grad_by_freq=True), (7,), 0),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, 2, 1, 2), (2, 15), 1),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), (1, 2), (1, 0)), (2, 7, 8), 1),
    "conv2d, few places": (lambda: nn.Conv2d(8, 8, 3, 2, 1, 2), (8, 5, 5), 1),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5), 1),
    "conv2d in groups, one place": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 3, 3), 1),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 5), 0),
    "mirrored": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5), 0),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, (1, 2, 1)), (2, 4, 5, 3), 1),
    "conv3d, few places": (lambda: nn.Conv3d(6, 6, 3, 1), (6, 3, 3, 4), 1),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm((4, 6)), nn.Linear(6, 2)), (3, 4, 6), 2),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 4), 1),
    "twice": (partial(two_layers, lambda net, x: net.b(net.a(net.a(x).tanh()))), (6,), 1),
    "penalised": (one_layer(penalised), (6,), 0),
    "tied": (partial(two_layers, lambda net, x: net.b(net.a(x).tanh()), tied=True), (6,), 0),
    "mixing": (one_layer(lambda net, x: (y := net.layer(x)) * (1.0 + y.mean(0))), (6,), 1),
    "folded": (folded, (4, 6), 2),
    "another forward": (lambda: Halved(6, 2), (6,), 0),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)), (6,), 0),
    "hooked": (hooked, (6,), 1),
    "frozen": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2).requires_grad_(False)),
        (6,),
        1,
    ),
    "encoder": (encoder, 7, 12),
    "attention": (partial(attention, batch_first=True), (5, 6), 1),
    "attention, many positions": (partial(attention, bias=False), (20, 6), 1),
    "attention, unknown": (partial(attention, add_zero_attn=True, batch_first=True), (5, 6), 0),
    "attention's weights": (partial(attention, weights=True, batch_first=True), (5, 6), 0),
    "masked": (partial(attention, MASK, batch_first=True), (5, 6), 0),
    "two inputs": (with_two_inputs, [7, (4,)], 2),
    "two outputs": (partial(two_layers, lambda net, x: (net.a(x), net.b(x))), (6,), 2),
    "images": (images, (1, 5, 5), 1),
    "buffers": (buffers, (4,), 0),
    "checkpointed": (partial(two_layers, checkpointed), (6,), 2),
    "in place": (one_layer(lambda net, x: net.layer(x.mul_(2.0))), (6,), 1),
    "branches": (one_layer(lambda net, x: net.layer(x if x.sum() > 0 else 2 * x)), (6,), 1),
    "cell": (lambda: nn.GRUCell(6, 3), (6,), 0),
    **{
        f"{kind.__name__} {settings}": (partial(recurrent, kind, **settings), (5, 6), 1)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for settings in ({"bias": False}, {**BOTH_WAYS, "num_layers": 2})
    },
    # Nothing passes between the layers; what the last one puts out is not dropped.
    "dropped": (partial(recurrent, nn.LSTM, num_layers=2, dropout=1.0), (5, 6), 1),
    "relu": (partial(recurrent, nn.RNN, nonlinearity="relu", bidirectional=True), (5, 6), 1),
    "long": (partial(recurrent, nn.LSTM, batch_first=True), (40, 6), 1),
    "projected": (partial(recurrent, nn.LSTM, proj_size=2), (5, 6), 0),
    "packed": (partial(recurrent, nn.GRU, packed=True), (5, 6), 0),
    "channels as sequences": (partial(recurrent, nn.GRU, folded=True), (5, 6), 0),
}

# What `vmap` has no rule for.
ONE_BY_ONE = {"branches", "channels as sequences", "packed", "projected"}


def model_of(module: Any) -> Any:
    """Return a model whose loss is the sum of sines of each number, times the target."""

    def sines(net: Any, out: Any, y: Any) -> Any:
        outs = out if isinstance(out, tuple) else (out,)
        return sum(one.sin().reshape(len(y), -1).sum(1) for one in outs) * y

    return TorchModel(module, calls(sines))


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:LSTM with projections")
@pytest.mark.parametrize("kind", MODULES)
def test_norms_and_sums_are_those_of_gradients(kind: str, monkeypatch: Any) -> None:
    torch.manual_seed(1)
    make, shape, known = MODULES[kind]
    alone, one_by_one = [], records._one_by_one
    monkeypatch.setattr(records, "_one_by_one", lambda *a: alone.append(1) or one_by_one(*a))
    shapes = shape if isinstance(shape, list) else [shape]
    x = [torch.randint(0, 11, (7, s)) if isinstance(s, int) else torch.randn(7, *s) for s in shapes]
    model = model_of(make())
    assert_alone(model, x if isinstance(shape, list) else x[0], torch.randn(7), 3)
    (plan,) = plans._PLANS[model._raw_model.module].values()
    assert len(plan.layers) == known
    assert bool(alone) == (kind in ONE_BY_ONE)


def test_a_layer_that_is_exchanged_is_looked_at_again_and_no_module_is_kept_alive() -> None:
    net = nn.Sequential(nn.Linear(6, 2))
    model = model_of(net)
    for layer in (net[0], Halved(6, 2)):
        net[0] = layer
        assert_alone(model, torch.randn(4, 6), torch.randn(4), 4)
    gone = weakref.ref(net)
    del net, model
    gc.collect()
    assert gone() is None


def test_numbers_that_half_precision_does_not_hold_are_not_lost() -> None:
    x = torch.full((1, 9, 3), 200.0, dtype=torch.float16)

    def large(run: Any, record: Any) -> Any:
        return (run((record[None],)).float() * 200.0).sum()

    (stack,) = records.record_stacks(nn.Linear(3, 2, bias=False).half(), large, x, 1)
    # 9 positions of 200 * 200 are more than float16 holds.
    assert float(stack.parts["weight"].squares()[0]) == pytest.approx(6 * (9 * 40_000.0) ** 2, 1e-5)
    assert np.isfinite(stack.parts["weight"].sum(torch.ones(1, dtype=torch.float64)).numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [1, 200, 5000])
def test_rows_of_any_length_are_measured_and_added_up(dtype: Any, numbers: int) -> None:
    torch.manual_seed(4)
    scale = 1.0 if dtype is torch.float16 else 1e30
    lengths = torch.tensor([scale, 1.0, 1 / scale] * 24)[:70, None]
    rows = (torch.randn(70, numbers) * lengths).to(dtype)
    factors = torch.rand(70, dtype=torch.float64)
    part, exact = layers.Rows(rows), rows.double().square().sum(1)
    squares = part.squares()
    assert ((squares >= exact * (1 - 1e-12)) & (squares <= exact * (1 + 1e-5))).all()
    expected = (factors[:, None] * rows.double()).sum(0)
    torch.testing.assert_close(part.sum(factors), expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("make", [lambda: nn.Linear(40, 40, bias=False), tokens])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-3, 1.0])
def test_no_norm_in_float32_is_below_the_exact_one(make: Any, scale: float, gap: float) -> None:
    """Two positions that cancel except for `gap`, at any scale, next to records of other scales."""
    torch.manual_seed(3)
    module = make()
    x = torch.randn(1, 40).expand(3, 2, 40) if isinstance(module, nn.Linear) else torch.ones(3, 2)
    x = x * torch.tensor([[1e-30], [1.0], [1e30]])[..., None] if x.dim() == 3 else x
    slope = torch.randn(4 if x.dim() == 2 else 40)

    def opposite(run: Any, record: Any) -> Any:
        output = run((record[None],))[0]
        return scale * (((1 + gap) * output[0] - output[1]) * slope).sum()

    (stack,) = records.record_stacks(module, opposite, x, 3)
    (part,) = stack.parts.values()
    for i in range(3):
        exact = part.only(torch.tensor([i])).sum(torch.ones(1, dtype=torch.float64)).square().sum()
        alone = part.only(torch.tensor([i])).squares()[0]
        assert not alone < exact
        # No other record changes how one is measured.
        assert torch.equal(part.squares()[i], alone) or not torch.isfinite(alone)


def test_gradients_that_are_held_are_not_written_over() -> None:
    layer, x, out = nn.Linear(16, 16), torch.randn(4, 32, 16), torch.randn(4, 32, 16)
    held = layers.parts(layer, x, out)["weight"].rows
    kept, again = held.clone(), layers.parts(layer, 2 * x, out)["weight"].rows
    assert torch.equal(held, kept)
    torch.testing.assert_close(again, 2 * kept)
    place = again.data_ptr()
    del again
    third = layers.parts(layer, 3 * x, out)["weight"].rows
    assert third.data_ptr() == place
    torch.testing.assert_close(third, 3 * kept)
