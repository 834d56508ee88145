# SPDX-License-Identifier: Apache-2.0
"""Which torch modules mix records, or remember them outside of what is trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from logging import Logger
from types import FunctionType, MethodType, ModuleType

import numpy as np
import torch
from torch import nn

from fedclip.dpsgd.persample.base import Host
from fedclip.dpsgd.persample.torch_plan import full


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
