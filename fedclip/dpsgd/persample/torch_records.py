# SPDX-License-Identifier: Apache-2.0
"""Gradients of single records of any torch module: by layers where they are known, else whole.

::

    once:            which layers are known, called once, and have their parameters to themselves
    each micro-batch:
        vmap over records:  run the module on a batch of one record, with
                            a tap of zeros added to what known layers put out,
                            and a copy of all other parameters
        gradients of the sum of losses by taps and copies:
                            those of single records, as no record meets another in the module

`vmap` keeps records apart, whatever the module does; random numbers are each record's own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedclip.dpsgd.persample.base import Float64, at_once
from fedclip.dpsgd.persample.torch_layers import Part, Rows, parts, takes

__all__ = ["Loss", "TorchStack", "check", "record_parts", "record_stacks", "restored", "trained"]

Loss: TypeAlias = Callable[[Callable[[tuple[Any, ...]], Any], Any], Tensor]
"""From a function that runs the module on its arguments, and one record, to the record's loss."""

Tensors: TypeAlias = dict[str, Tensor]

# Records taken together are filled up to a multiple of this.
_SIZES = 32


@dataclass(frozen=True)
class Plan:
    """Which layers are taken apart, with the shape and dtype of what they put out."""

    layers: dict[str, tuple[torch.Size, torch.dtype]]
    others: tuple[str, ...]
    elements: int


# To plan is to run the module once more: done once for a module and the shapes of its records.
_PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def check(module: nn.Module) -> None:
    """Refuse layers that mix records, or remember them outside of the trained parameters."""
    for name, layer in module.named_modules():
        mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if mixes or getattr(layer, "running_mean", None) is not None:
            raise ValueError(
                f"the layer {name!r} ({type(layer).__name__}) mixes the records of a batch, or "
                "remembers them unclipped and without noise: use GroupNorm or LayerNorm"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ValueError(
                f"the layer {name!r} ({type(layer).__name__}) has max_norm, and would change the "
                "weights that a record looks up, without noise: leave max_norm out"
            )
        if isinstance(layer, nn.utils.parametrizations._SpectralNorm):
            raise ValueError(
                f"{name!r} is a spectral norm, whose vectors follow the weights in training, and "
                "would stand still here: use weight_norm, or none"
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise TypeError(
                f"the layer {name!r} is compiled by torch.jit, and can not be given a copy of its "
                "weights for each record: give the module as it was before"
            )


def trained(module: nn.Module) -> Tensors:
    """Return the parameters that are trained, each once."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def restored(arrays: Mapping[str, Float64], weights: Tensors) -> Tensors:
    """Return float64 arrays as tensors of the weights' dtypes, on their devices."""
    return {
        n: torch.from_numpy(a).to(weights[n].device, weights[n].dtype) for n, a in arrays.items()
    }


def record_parts(
    module: nn.Module, loss: Loss, records: Any, size: int, whole: bool = False
) -> Iterator[dict[str, Part]]:
    """Yield the gradients of each micro-batch, by parameter.

    Parameters
    ----------
    module
        In training mode, on the device of the records.
    loss
        A scalar for one record; both get the record without its first axis.
    records
        Nested tuples, lists and dicts of tensors whose first axis is the records.
    size
        How many records are taken together at most; fewer, if they hold large gradients.
    whole
        Give the gradients themselves, as `Rows`.
    """
    leaves, tree = torch.utils._pytree.tree_flatten(records)
    if not leaves or not len(leaves[0]):
        return
    # The module's own buffers are never written to.
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}

    def of(part: slice | int) -> Any:
        # A module may change what it is given in place.
        return torch.utils._pytree.tree_unflatten([leaf[part].clone() for leaf in leaves], tree)

    weights = trained(module)
    plan = _plan(module, loss, of(0), buffers, leaves, weights, whole)
    together = at_once(size, plan.elements)
    many = len(leaves[0])
    for start in range(0, many, together):
        count = min(together, many - start)
        # A record more or less shall not change how the others are rounded: sizes are few.
        padded = min(together, -(-count // _SIZES) * _SIZES)
        part = [leaf[start : start + count].clone() for leaf in leaves]
        if padded > count:
            part = [torch.cat([x, x[-1:].expand(padded - count, *x.shape[1:])]) for x in part]
        try:
            filled = _together(module, loss, part, tree, buffers, plan, weights)
            found = {name: each.only(slice(count)) for name, each in filled.items()}
        except RuntimeError:
            # No rule for `vmap` (recurrent layers, branches on values); a fault of the module
            # comes again.
            alone = [of(start + i) for i in range(count)]
            found = _one_by_one(module, loss, alone, buffers, weights)
        _unchanged(module, buffers)
        yield found


def _plan(
    module: nn.Module,
    loss: Loss,
    record: Any,
    buffers: Tensors,
    leaves: list[Tensor],
    weights: Tensors,
    whole: bool,
) -> Plan:
    layers = (type(layer) for layer in module.modules())
    key = (whole, *weights, *layers, *((x.shape[1:], x.dtype) for x in leaves))
    plans = _PLANS.setdefault(module, {})
    if key not in plans:
        known = {} if whole else _known_layers(module, loss, record, buffers)
        inside = {_full(n, p) for n in known for p in module.get_submodule(n)._parameters}
        others = tuple(n for n in weights if n not in inside)
        held = sum(weights[n].numel() for n in others)
        held += sum(entry[-1] for entry in known.values())
        plans[key] = Plan({n: entry[:2] for n, entry in known.items()}, others, held)
    return plans[key]


def _known_layers(
    module: nn.Module, loss: Loss, record: Any, buffers: Tensors
) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    """Return the layers that can be taken apart, and how much they hold of a record."""
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    known = {
        name: layer
        for name, layer in module.named_modules()
        if takes(layer)
        and any(p is not None and p.requires_grad for p in layer._parameters.values())
        and all(p is None or owners[id(p)] == 1 for p in layer._parameters.values())
    }
    seen: dict[str, list[Any]] = {name: [] for name in known}
    inside = [False]

    def look(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Any:
        if inside[0]:
            return None
        seen[name].append((args, kwargs, out.detach()))
        inside[0] = True
        constants = {n: p.detach() for n, p in layer._parameters.items() if p is not None}
        found = functional_call(layer, constants, args, kwargs)
        inside[0] = False
        return found

    with ExitStack() as hooks, torch.enable_grad():
        for name, layer in known.items():
            hook = layer.register_forward_hook(partial(look, name), prepend=True, with_kwargs=True)
            hooks.callback(hook.remove)
        value = loss(partial(functional_call, module, buffers), record)
    # The layers' own use of their parameters has no gradient here: what has one is used besides.
    used = [p for layer in known.values() for p in layer.parameters() if p.requires_grad]
    besides: set[int] = set()
    if used and value.requires_grad:
        found = torch.autograd.grad(value, used, allow_unused=True)
        besides = {id(p) for p, g in zip(used, found, strict=True) if g is not None}
    result = {}
    for name, layer in known.items():
        calls = seen[name]
        if len(calls) == 1 and not any(id(p) in besides for p in layer.parameters()):
            args, kwargs, out = calls[0]
            if len(args) == 1 and not kwargs:
                held = parts(layer, args[0].detach()[None], out[None]).values()
                size = sum(part.numbers() for part in held)
                result[name] = (out.shape, out.dtype, size)
    return result


def _together(
    module: nn.Module,
    loss: Loss,
    leaves: list[Tensor],
    tree: Any,
    buffers: Tensors,
    plan: Plan,
    weights: Tensors,
) -> dict[str, Part]:
    count, device = len(leaves[0]), leaves[0].device
    layers = {name: module.get_submodule(name) for name in plan.layers}
    taps = [
        torch.zeros(count, *shape, dtype=dtype, device=device, requires_grad=True)
        for shape, dtype in plan.layers.values()
    ]
    copies = [weights[n].expand(count, *weights[n].shape).requires_grad_() for n in plan.others]

    def alone(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        mine = {name: next(rest) for name in plan.layers}
        own = {name: next(rest) for name in plan.others}
        came: Tensors = {}

        def tap(name: str, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
            if name in came or out.shape != mine[name].shape:
                raise RuntimeError(f"{name} is not called as it was for another record")
            came[name] = args[0]
            return out + mine[name]

        instead = {**own, **buffers}
        run = partial(functional_call, module, instead) if instead else lambda args: module(*args)
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hook = layer.register_forward_hook(partial(tap, name), prepend=True)
                hooks.callback(hook.remove)
            value = loss(run, torch.utils._pytree.tree_unflatten([*rest], tree))
        if len(came) < len(taps):
            raise RuntimeError("a layer is not called that was for another record")
        return value, *(came[name] for name in plan.layers)

    with torch.enable_grad(), warnings.catch_warnings():
        # Slower than it might be, where a layer has no rule: right all the same.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        values, *came = vmap(alone, randomness="different")(*taps, *copies, *leaves)
        found = torch.autograd.grad(values.sum(), [*taps, *copies], allow_unused=True)
    result: dict[str, Part] = {}
    given = zip([*taps, *copies], found, strict=True)
    grads = [torch.zeros_like(like) if grad is None else grad for like, grad in given]
    for (name, layer), x, out in zip(layers.items(), came, grads, strict=False):
        for own, part in parts(layer, x.detach(), out).items():
            result[_full(name, own)] = part
    for name, rows in zip(plan.others, grads[len(taps) :], strict=True):
        result[name] = Rows(rows)
    return result


def _full(layer: str, own: str) -> str:
    return f"{layer}.{own}" if layer else own


def _one_by_one(
    module: nn.Module, loss: Loss, records: list[Any], buffers: Tensors, weights: Tensors
) -> dict[str, Part]:
    rows = []
    for record in records:
        fresh = {n: p.clone().requires_grad_() for n, p in weights.items()}
        with torch.enable_grad():
            value = loss(partial(functional_call, module, {**fresh, **buffers}), record)
            found = torch.autograd.grad(value, [*fresh.values()], allow_unused=True)
        pairs = zip(fresh.items(), found, strict=True)
        rows.append({n: torch.zeros_like(p) if g is None else g.to_dense() for (n, p), g in pairs})
    return {n: Rows(torch.stack([row[n] for row in rows])) for n in weights}


def _unchanged(module: nn.Module, buffers: Tensors) -> None:
    for name, buffer in module.named_buffers() if buffers else ():
        if not torch.equal(buffers[name].nan_to_num(), buffer.nan_to_num()):
            raise ValueError(
                f"training changes the buffer {name!r}, which would keep "
                "records unclipped and without noise: use a layer without such a memory"
            )


def record_stacks(
    module: nn.Module, loss: Loss, records: Any, size: int, whole: bool = False, prefix: str = ""
) -> Iterator[TorchStack]:
    """Yield what `record_parts` does, to be asked for norms and sums, under longer names."""
    weights = {prefix + name: weight for name, weight in trained(module).items()}
    for found in record_parts(module, loss, records, size, whole):
        yield TorchStack({prefix + name: part for name, part in found.items()}, weights)


class TorchStack:
    """Gradients by parameter, on the device of the module."""

    def __init__(self, found: dict[str, Part], weights: Tensors) -> None:
        self._parts, self._weights = found, weights

    def squares(self, names: tuple[str, ...]) -> Float64:
        found = torch.stack([self._parts[name].squares() for name in names], 1)
        return np.asarray(found.cpu().numpy())

    def add(self, totals: dict[str, Any], factors: Mapping[str, Float64], sound: Any) -> None:
        kept = None if sound.all() else torch.from_numpy(np.flatnonzero(sound))
        for name, factor in factors.items():
            part, scale, like = self._parts[name], torch.from_numpy(factor), self._weights[name]
            if kept is not None:
                part, scale = part.only(kept.to(like.device)), scale[kept]
            found = part.sum(scale.to(like.device)).view(like.shape)
            totals[name] = totals[name].add_(found) if name in totals else found

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: _host(part) for name, part in self._parts.items()}


def _host(part: Any) -> np.ndarray[Any, Any]:
    rows = part.rows.detach().cpu()
    return np.asarray((rows.float() if rows.dtype is torch.bfloat16 else rows).numpy())
