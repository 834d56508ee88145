# SPDX-License-Identifier: Apache-2.0
"""Which layers of a torch module can be taken apart: known ones, called once, that share nothing.

::

    run the module on one record, and look at what goes through known layers
    a layer is taken apart, if  it is called once, with one input;
                                no other layer has its parameters;
                                they are not used besides
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedclip.dpsgd.persample.base import Data
from fedclip.dpsgd.persample.torch_layers import RUN_HERE, parts, takes, tap_of

Args: TypeAlias = tuple[Tensor, ...]
Run: TypeAlias = Callable[[Args], Data]
"""Runs the module on its arguments."""

Loss: TypeAlias = Callable[[Run, Data], Tensor]
"""Of one record."""

Tensors: TypeAlias = dict[str, Tensor]

Kwargs: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class Model:
    """A module with its loss, copies of its buffers, and the weights that are trained."""

    module: nn.Module
    loss: Loss
    buffers: Tensors
    weights: Tensors


@dataclass(frozen=True)
class Plan:
    """Which layers are taken apart, with the shape and dtype of what they put out."""

    layers: dict[str, tuple[torch.Size, torch.dtype]]
    others: tuple[str, ...]
    elements: int


# To plan is to run the module once more: done once for a module and the shapes of its records.
_PLANS: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()


def full(layer: str, own: str) -> str:
    """Return the name of a layer's own parameter in the module."""
    return f"{layer}.{own}" if layer else own


def plan_of(model: Model, record: Callable[[], Data], leaves: list[Tensor], whole: bool) -> Plan:
    """Return how to take a module apart, for records of this shape."""
    module, weights = model.module, model.weights
    layers = (type(layer) for layer in module.modules())
    key = (whole, *weights, *layers, *((x.shape[1:], x.dtype) for x in leaves))
    plans = _PLANS.setdefault(module, {})
    if key not in plans:
        known = {} if whole else _known_layers(model, record())
        inside = {full(n, p) for n in known for p, _ in module.get_submodule(n).named_parameters()}
        others = tuple(n for n in weights if n not in inside)
        held = sum(weights[n].numel() * weights[n].element_size() // 8 for n in others)
        held += sum(entry[-1] for entry in known.values())
        plans[key] = Plan({n: entry[:2] for n, entry in known.items()}, others, held)
    return plans[key]


def _known_layers(model: Model, record: Data) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    """Return the layers that can be taken apart, and how much they hold of a record."""
    module = model.module
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    known = {
        name: layer
        for name, layer in module.named_modules()
        if takes(layer)
        and any(p.requires_grad for p in layer.parameters())
        and all(owners[id(p)] == 1 for p in layer.parameters())
    }
    seen: dict[str, list[tuple[Args, Kwargs, Data]]] = {name: [] for name in known}
    inside = [False]

    def look(name: str, layer: nn.Module, args: Args, kwargs: Kwargs, out: Data) -> Data:
        if inside[0]:
            return None
        seen[name].append((args, kwargs, out))
        inside[0] = True
        constants = {n: p.detach() for n, p in layer.named_parameters()}
        output = functional_call(layer, constants, args, kwargs)
        inside[0] = False
        return output

    with ExitStack() as hooks, torch.enable_grad():
        for name, layer in known.items():
            hook = layer.register_forward_hook(partial(look, name), prepend=True, with_kwargs=True)
            hooks.callback(hook.remove)
        value = model.loss(partial(functional_call, module, model.buffers), record)
    # The layers' own use of their parameters has no gradient here: what has one is used besides.
    layers = known.values() if value.requires_grad else ()
    used = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value, used, allow_unused=True) if used else ()
    besides = {id(p) for p, g in zip(used, gradients, strict=True) if g is not None}
    result = {}
    for name, layer in known.items():
        calls = seen[name]
        if len(calls) == 1 and not any(id(p) in besides for p in layer.parameters()):
            args, kwargs, out = calls[0]
            shape = tap_of(layer, args, kwargs, out)
            if shape is not None:
                x, tap = args[0].detach(), out
                seen_of_one: Data = x[None]
                if file := RUN_HERE.get(type(layer)):
                    seen_of_one, tap = file.made_up(layer, x), x.new_zeros(shape)
                held = parts(layer, seen_of_one, tap.detach()[None]).values()
                size = sum(part.numbers() for part in held)
                result[name] = (shape, tap.dtype, size)
    return result
