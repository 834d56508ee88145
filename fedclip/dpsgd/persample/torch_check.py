# SPDX-License-Identifier: Apache-2.0
"""Which torch modules mix records, or remember them outside of what is trained."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from logging import Logger
from types import FunctionType, MethodType, ModuleType
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from fedclip.dpsgd.persample.base import Data, Float64, Host, UnsupportedModelError
from fedclip.dpsgd.persample.torch_plan import full

Gradient: TypeAlias = Callable[[Data, Data], Float64]
"""From a model and a record to the gradient, all tensors in one row."""
# Of a gradient, how far it may differ from itself in a second pass.
_NOISE = 1e-5


def held(
    value: object, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, object]]:
    """Yield what a module holds in attributes, containers, closures and globals, and where."""
    seen = set() if seen is None else seen
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield name, repr(value)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield name, _digest(value)
    elif id(value) not in seen and not isinstance(value, (type, ModuleType)):
        seen.add(id(value))
        attributes = {**getattr(value, "__dict__", {})}
        parts: list[object] = []
        if isinstance(value, nn.Module):
            attributes |= attributes.pop("_modules")
            for kind in type(value).__mro__[: type(value).__mro__.index(nn.Module)]:
                attributes |= {k: v for k, v in vars(kind).items() if k not in attributes}
            for attribute, part in attributes.items():
                yield from held(part, full(name, attribute), seen)
        elif isinstance(value, Mapping):
            parts = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            parts = [len(value), *value]
        elif isinstance(value, MethodType):
            parts = [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            known = (value.__globals__.get(n) for n in value.__code__.co_names)
            parts = [cell.cell_contents for cell in value.__closure__ or ()]
            parts += [x for x in known if not (callable(x) or isinstance(x, Logger))]
            parts += [value.__defaults__, value.__kwdefaults__, attributes]
        elif isinstance(value, partial):
            parts = [value.func, value.args, value.keywords, attributes]
        else:
            slots = (n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()))
            parts = [*attributes.values(), *(getattr(value, n, None) for n in slots)]
        for part in parts:
            yield from held(part, name, seen)


def _digest(array: torch.Tensor | Host) -> object:
    try:
        tensor = torch.as_tensor(array).detach().cpu().contiguous().flatten()
        return sha256(tensor.view(torch.uint8).numpy().data).hexdigest()
    except (RuntimeError, TypeError):  # Of a `vmap` that is over, sparse, or of objects.
        return id(array)


def check(module: nn.Module) -> None:
    """Refuse layers that mix records, or remember them outside of the trained parameters."""
    for name, layer in module.named_modules():
        if why := _fault_of(layer):
            raise ValueError(f"the layer {name!r} ({type(layer).__name__}) {why}")


def _fault_of(layer: nn.Module) -> str:
    mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    if mixes or getattr(layer, "running_mean", None) is not None:
        return "mixes the records of a batch, or remembers them: use GroupNorm or LayerNorm"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
        return "has max_norm, and would change weights without noise: leave max_norm out"
    if isinstance(layer, nn.utils.parametrizations._SpectralNorm):
        return "is a spectral norm, and would stand still here: use weight_norm, or none"
    if isinstance(layer, torch.jit.ScriptModule):
        return "is compiled by torch.jit, which hides its weights: give the module as it was before"
    return ""


def try_out(
    model: Data, modules: Sequence[nn.Module], records: Sequence[Data], gradient: Gradient
) -> None:
    """Take the gradients of records there and back; refuse a model for which that matters.

    Parameters
    ----------
    model
        What `gradient` takes, and can be copied.
    modules
        What it consists of: the network and its loss.
    records
        Some that nobody protects.
    """
    devices = {p.device for m in modules for p in m.parameters() if p.device.type != "cpu"}

    def passed(of: Data, order: Sequence[Data]) -> list[Float64]:
        # Which layers are known is found out first, and takes random numbers too.
        return [
            (gradient(of, record), _settled(devices, gradient, of, record))[1] for record in order
        ]

    fresh = copy.deepcopy(model)
    forth, before = passed(model, records), {*held([*modules])}
    passed(model, records[::-1])
    back = passed(fresh, records[::-1])[::-1]
    changed = {name for name, _ in before ^ {*held([*modules])}}
    pairs = zip(forth, back, strict=True)
    if changed or any(np.abs(a - b).max() > _NOISE * np.abs(a).max() for a, b in pairs):
        what = ", ".join(sorted(changed)) or "a gradient is another one after other records"
        text = f"the model carries something from one record to the next ({what}): it must not keep"
        raise UnsupportedModelError(f"{text} what it sees, count, or have private random numbers")


def _settled(devices: set[torch.device], gradient: Gradient, model: Data, record: Data) -> Float64:
    """Return a gradient with random numbers that are the same each time."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(0)
            return gradient(model, record)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
