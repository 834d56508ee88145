# SPDX-License-Identifier: Apache-2.0
"""Norms and sums from what goes into layers and comes back: as those of gradients worked out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from dpsgd_models import calls
from helpers import require

pytestmark = pytest.mark.slow

torch: Any = require("torch")
nn = torch.nn
records: Any = __import__("fedclip.dpsgd.persample.torch_records", fromlist=["x"])
plans: Any = __import__("fedclip.dpsgd.persample.torch_plan", fromlist=["x"])


def tokens(**settings: Any) -> Any:
    """Return a module that embeds what it is given as numbers."""
    return calls(
        lambda net, x: net.table((x.abs() * 3).long() % 5), table=nn.Embedding(5, 4, **settings)
    )


def one_layer(call: Any) -> Any:
    return partial(calls, call, layer=nn.Linear(6, 2))


def twice() -> Any:
    return calls(
        lambda net, x: net.once(net.often(torch.tanh(net.often(x)))),
        often=nn.Linear(6, 6),
        once=nn.Linear(6, 2),
    )


def tied() -> Any:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return calls(lambda net, x: net.second(torch.tanh(net.first(x))), first=first, second=second)


def folded() -> Any:
    """Return a module that takes channels for records of their own."""
    return calls(
        lambda net, x: net.norm(net.conv(x.reshape(-1, 1, 6))).reshape(len(x), -1),
        conv=nn.Conv1d(1, 2, 3),
        norm=nn.GroupNorm(1, 2),
    )


def scaled() -> Any:
    number = nn.Parameter(torch.tensor(2.0))
    return calls(lambda net, x: net.layer(x * net.scale), scale=number, layer=nn.Linear(6, 2))


class Halved(nn.Linear):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return 0.5 * super().forward(x)


def weight_norm() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))


def hooked() -> Any:
    layer = nn.Linear(6, 2)
    layer.register_forward_hook(lambda layer, args, out: out * 3.0)
    return layer


def recurrent(
    kind: Any, given: bool = False, packed: bool = False, flat: bool = False, **settings: Any
) -> Any:
    """Return a module that uses the outputs and the last states of a recurrent layer."""
    folded = settings.pop("folded", False)
    layer = kind(6, 3, **settings)

    def call(net: Any, x: Any) -> Any:
        x = x[0] if flat else x.movedim(0, 1 - layer.batch_first)
        if folded:
            x = x.reshape(1, -1, 6)
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, [len(x)])
        output, states = net.layer(x, torch.ones(1, 1, 3)) if given else net.layer(x)
        output = output.data if packed else output
        states = states if isinstance(states, tuple) else (states,)
        return sum(((i + 1) * s.sin().sum() for i, s in enumerate(states)), output.sum())

    return calls(call, layer=layer)


def frozen() -> Any:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    net[0].weight.requires_grad_(False)
    return net


# Module, shape of a record, layers that are taken apart.
MODULES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
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
    "conv2d, same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 5), 0),
    "mirrored": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5), 0),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, (1, 2, 1)), (2, 4, 5, 3), 1),
    "conv3d, few places": (lambda: nn.Conv3d(6, 6, 3, 1), (6, 3, 3, 4), 1),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm((4, 6)), nn.Linear(6, 2)), (3, 4, 6), 2),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 4), 1),
    "twice": (twice, (6,), 1),
    "penalised": (
        one_layer(lambda net, x: net.layer(x) + x.sum() * net.layer.weight.square().sum()),
        *((6,), 0),
    ),
    "tied": (tied, (6,), 0),
    "mixing": (one_layer(lambda net, x: (y := net.layer(x)) * (1.0 + y.mean(0))), (6,), 1),
    "folded": (folded, (4, 6), 2),
    "a number": (scaled, (6,), 1),
    "another forward": (lambda: Halved(6, 2), (6,), 0),
    "weight norm": (weight_norm, (6,), 0),
    "hooked": (hooked, (6,), 1),
    "frozen": (frozen, (6,), 2),
    "cell": (lambda: nn.GRUCell(6, 3), (6,), 0),
    **{
        f"{kind.__name__} {settings}": (partial(recurrent, kind, **settings), (5, 6), 1)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for settings in (
            {},
            {"batch_first": True, "bidirectional": True, "num_layers": 2},
            {"num_layers": 2, "bias": False},
        )
    },
    "relu": (partial(recurrent, nn.RNN, nonlinearity="relu", bidirectional=True), (5, 6), 1),
    "long": (partial(recurrent, nn.LSTM, batch_first=True), (40, 6), 1),
    "projected": (partial(recurrent, nn.LSTM, proj_size=2), (5, 6), 0),
    "given states": (partial(recurrent, nn.GRU, given=True), (5, 6), 0),
    "packed": (partial(recurrent, nn.GRU, packed=True), (5, 6), 0),
    "unbatched": (partial(recurrent, nn.LSTM, flat=True, num_layers=2), (5, 6), 1),
    "channels as sequences": (partial(recurrent, nn.GRU, folded=True), (5, 6), 0),
}


def loss(run: Any, record: Any) -> Any:
    return (run((record["x"][None],)).sin() * record["scale"]).sum()


def of_each(module: Any, x: Any, scale: Any) -> list[dict[str, Any]]:
    """Return the gradients of records by themselves."""
    rows = []
    for a, s in zip(x, scale, strict=True):
        module.zero_grad()
        loss(lambda args: module(*args), {"x": a, "scale": s}).backward()
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        rows.append({n: p.grad.clone().double() for n, p in named})
    return rows


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:LSTM with projections")
@pytest.mark.parametrize("kind", MODULES)
def test_norms_and_sums_are_those_of_gradients(kind: str) -> None:
    torch.manual_seed(1)
    make, shape, known = MODULES[kind]
    module, x, scale = make(), torch.randn(7, *shape), torch.randn(7)
    right, start = of_each(module, x, scale), 0
    for parts in records.record_parts(module, loss, {"x": x, "scale": scale}, 3):
        some = right[start : start + 3]
        start += len(some)
        assert parts.keys() == some[0].keys()
        factors = torch.rand(len(some), dtype=torch.float64)
        for name, part in parts.items():
            rows = torch.stack([row[name] for row in some])
            squares = rows.square().reshape(len(rows), -1).sum(1)
            torch.testing.assert_close(part.squares(), squares, rtol=1e-4, atol=1e-10)
            total = torch.einsum("i,i...->...", factors, rows).flatten()
            torch.testing.assert_close(part.sum(factors).flatten(), total, rtol=1e-5, atol=1e-5)
            assert not part.only(torch.tensor([], dtype=int)).sum(factors[:0]).any()
            kept = torch.tensor([len(some) - 1])
            last = part.only(kept).sum(factors[kept]).flatten()
            right_last = (factors[-1] * rows[-1]).flatten()
            torch.testing.assert_close(last, right_last, rtol=1e-5, atol=1e-5)
    assert start == 7
    (plan,) = plans._PLANS[module].values()
    assert len(plan.layers) == known
    inside = {id(p) for layer in plan.layers for p in module.get_submodule(layer).parameters()}
    names = {n for n, p in module.named_parameters() if id(p) in inside}
    assert not names & {*plan.others}


def test_a_layer_that_is_exchanged_is_looked_at_again() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 2))
    records_of = {"x": torch.randn(4, 6), "scale": torch.randn(4)}
    for layer in (net[0], Halved(6, 2)):
        net[0] = layer
        (parts,) = records.record_parts(net, loss, records_of, 4)
        right = torch.stack([row["0.weight"] for row in of_each(net, *records_of.values())])
        ones = torch.ones(4, dtype=torch.float64)
        torch.testing.assert_close(parts["0.weight"].sum(ones).view(2, 6), right.sum(0))


def test_numbers_that_half_precision_does_not_hold_are_not_lost() -> None:
    module = nn.Linear(3, 2, bias=False).half()
    x = torch.full((1, 9, 3), 200.0, dtype=torch.float16)

    def large(run: Any, record: Any) -> Any:
        return (run((record[None],)).float() * 200.0).sum()

    (parts,) = records.record_parts(module, large, x, 1)
    # 9 positions of 200 * 200 are more than float16 holds.
    assert float(parts["weight"].squares()[0]) == pytest.approx(6 * (9 * 40_000.0) ** 2)
    assert np.isfinite(parts["weight"].sum(torch.ones(1, dtype=torch.float64)).numpy()).all()


def test_plans_do_not_keep_modules_alive() -> None:
    gone = weakref.ref(net := nn.Linear(6, 2))
    list(records.record_parts(net, loss, {"x": torch.randn(4, 6), "scale": torch.ones(4)}, 4))
    del net
    gc.collect()
    assert gone() is None


def test_as_many_records_at_once_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedclip.dpsgd.persample import base

    together = mock.Mock(side_effect=records._together)
    monkeypatch.setattr(records, "_together", together)
    x = {"x": torch.randn(70, 6), "scale": torch.ones(70)}
    list(records.record_parts(nn.Linear(6, 2), loss, x, 32))
    # Stored gradients of twelve float32 numbers and more each, and memory for sixty.
    monkeypatch.setattr(base, "MOST", 30)
    list(records.record_parts(weight_norm(), loss, x, 32))
    seen = [len(call.args[2][0]) for call in together.call_args_list]
    assert seen[:3] == [32, 32, 32]
    assert max(seen[3:]) <= 5


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

    (parts,) = records.record_parts(module, opposite, x, 3)
    (part,) = parts.values()
    for i in range(3):
        exact = part.only(torch.tensor([i])).sum(torch.ones(1, dtype=torch.float64)).square().sum()
        alone = part.only(torch.tensor([i])).squares()[0]
        assert not alone < exact
        # No other record changes how one is measured.
        assert torch.equal(part.squares()[i], alone) or not torch.isfinite(alone)
