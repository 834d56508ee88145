# SPDX-License-Identifier: Apache-2.0
r"""nn.LSTM, nn.GRU and nn.RNN step by step, with taps on the gates.

::

    i_t, s_t   = W_ih x_t + b_ih + tap_t,   W_hh h_(t-1) + b_hh + tap'_t
    h_t        = gates(i_t, s_t)
    gradients  of W_ih and W_hh: Σ_t b_t x_t^T  and  Σ_t b'_t h_(t-1)^T
               of the biases:    Σ_t b_t        and  Σ_t b'_t

with b and b' the gradients of the taps. Except in a GRU both are the same tap. All records go
through a step together, outside of `vmap`, which would take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclip.dpsgd.persample.base import Data

Recurrent: TypeAlias = nn.LSTM | nn.GRU | nn.RNN

# Of each, how many gates it has, and how many taps.
RECURRENT: dict[type, tuple[int, int]] = {nn.LSTM: (4, 1), nn.GRU: (3, 2), nn.RNN: (1, 1)}


def supported(layer: Recurrent) -> bool:
    """Return whether the layer has no projection and no parameters but its own."""
    return not layer.proj_size and {*layer._parameters} == {*layer._flat_weights_names}


def tap_shape(
    layer: Recurrent, args: tuple[Tensor, ...], kwargs: dict[str, Data]
) -> torch.Size | None:
    """Return the shape of the tap for one record; None for inputs that are not one sequence."""
    if len(args) != 1 or kwargs:
        return None
    x = args[0]
    if not isinstance(x, Tensor) or (x.dim() == 3 and x.shape[1 - bool(layer.batch_first)] != 1):
        return None
    gates, taps = RECURRENT[type(layer)]
    steps = x.numel() // x.shape[-1]
    return torch.Size((len(_names(layer)), taps, steps, gates * layer.hidden_size))


def run(layer: Recurrent, tap: Tensor, x: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what the layer puts out for a record, and its inputs and states at all steps."""
    sequence = x.reshape(-1, x.shape[-1])
    output, hidden, cell, *seen = outside_vmap(_all_layers, layer, tap, sequence)
    states = [hidden, cell][: 1 + isinstance(layer, nn.LSTM)]
    if x.dim() == 3:
        output = output.unsqueeze(0 if layer.batch_first else 1)
        states = [state.unsqueeze(1) for state in states]
    return (output, tuple(states) if len(states) > 1 else states[0]), tuple(seen)


def made_up(layer: Recurrent, x: Tensor) -> tuple[Tensor, ...]:
    """Return zeros in the shapes of what `run` sees, for one record."""
    steps, width = x.numel() // x.shape[-1], (1 + layer.bidirectional) * layer.hidden_size
    inputs = [x.shape[-1], *[width] * (layer.num_layers - 1)]
    sizes = [size for size in inputs for _ in range(1 + layer.bidirectional)]
    pairs = ((x.new_zeros(1, steps, n) for n in (size, layer.hidden_size)) for size in sizes)
    return tuple(zeros for pair in pairs for zeros in pair)


def sides(
    layer: Recurrent, seen: tuple[Tensor, ...], taps: Tensor
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield names of weight and bias, what the weight multiplied, and the product's gradient."""
    for i, name in enumerate(_names(layer)):
        yield f"weight_ih_{name}", f"bias_ih_{name}", seen[2 * i], taps[:, i, 0]
        yield f"weight_hh_{name}", f"bias_hh_{name}", seen[2 * i + 1], taps[:, i, -1]


def _names(layer: Recurrent) -> list[str]:
    ends = ("", "_reverse")[: 1 + layer.bidirectional]
    return [f"l{i}{end}" for i in range(layer.num_layers) for end in ends]


def outside_vmap(
    function: Callable[..., tuple[Tensor, ...]], layer: nn.Module, tap: Tensor, x: Tensor
) -> Any:
    """Call `function(layer, tap, x)` on all records together, from within `vmap`."""
    return _Outside.apply(function, layer, tap, x)  # type: ignore[no-untyped-call]


class _Outside(torch.autograd.Function):
    """Takes records out of `vmap`; autograd follows the operations on all of them."""

    @staticmethod
    def forward(function: Any, layer: nn.Module, tap: Tensor, x: Tensor) -> Any:
        raise RuntimeError("this is for use in vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, function: Any, layer: nn.Module, tap: Tensor, x: Tensor
    ) -> Any:
        shared = in_dims[3] is None
        x = x.expand(info.batch_size, *x.shape) if shared else x.movedim(in_dims[3], 0)
        outputs = function(layer, tap.movedim(in_dims[2], 0), x)
        return outputs, (0,) * len(outputs)


def _all_layers(layer: Recurrent, taps: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    weights = {name: p.detach() for name, p in layer._parameters.items() if p is not None}
    hidden, cells, seen = [], [], list[Tensor]()
    names = _names(layer)
    for first in range(0, len(names), 1 + layer.bidirectional):
        outputs = []
        for i in range(first, first + 1 + layer.bidirectional):
            ends = [f"{side}_{names[i]}" for side in ("ih", "hh")]
            sides = [(weights[f"weight_{end}"], weights.get(f"bias_{end}")) for end in ends]
            reverse = names[i].endswith("_reverse")
            output, before, h, c = _direction(layer, x, sides, taps[:, i], reverse)
            outputs.append(output)
            hidden.append(h)
            cells.append(c)
            seen += [x, before]
        x = torch.cat(outputs, 2)
        if first + 1 + layer.bidirectional < len(names):
            x = functional.dropout(x, layer.dropout, layer.training)
    return (x, torch.stack(hidden, 1), torch.stack(cells, 1), *seen)


def _direction(
    layer: Recurrent, x: Tensor, weights: Any, taps: Tensor, reverse: bool
) -> tuple[Tensor, ...]:
    """Return outputs, the states before each step, and the last state and cell."""
    inputs = (functional.linear(x, *weights[0]) + taps[:, 0]).unbind(1)
    others = taps[:, 1].unbind(1) if taps.shape[1] > 1 else None
    h = c = x.new_zeros(len(x), layer.hidden_size)
    activation = torch.relu if layer.mode == "RNN_RELU" else torch.tanh
    steps = range(len(inputs))
    outputs, before = list[Tensor](), list[Tensor]()
    for t in reversed(steps) if reverse else steps:
        before.append(h)
        state = functional.linear(h, *weights[1])
        if others is not None:
            h = _gru(inputs[t], state + others[t], h)
        elif isinstance(layer, nn.LSTM):
            h, c = _lstm(inputs[t] + state, c)
        else:
            h = activation(inputs[t] + state)
        outputs.append(h)
    order = slice(None, None, -1) if reverse else slice(None)
    return torch.stack(outputs[order], 1), torch.stack(before[order], 1), h, c


def _lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    into, forget, new, out = gates.chunk(4, 1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(c), c


def _gru(inputs: Tensor, state: Tensor, h: Tensor) -> Tensor:
    size = h.shape[1]
    reset, update = torch.sigmoid(inputs[:, : 2 * size] + state[:, : 2 * size]).chunk(2, 1)
    new = torch.tanh(inputs[:, 2 * size :] + reset * state[:, 2 * size :])
    return new + update * (h - new)
