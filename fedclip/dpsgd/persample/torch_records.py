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

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from fedclip.dpsgd.persample.base import Data, Float64, Host, UnsupportedModelError, at_once
from fedclip.dpsgd.persample.torch_layers import RUN_HERE, Part, Rows, parts, tap_of
from fedclip.dpsgd.persample.torch_plan import Loss, Model, Plan, Tensors, full, plan_of

# Records taken together are filled up to a multiple of this.
_SIZES = 32

_COPIES = 8


def trained(module: nn.Module) -> Tensors:
    """Return the parameters that are trained, each once."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def restored(arrays: Mapping[str, Float64], weights: Tensors) -> Tensors:
    """Return float64 arrays as tensors of the weights' dtypes, on their devices."""
    # Arithmetic makes a number of an array without dimensions.
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    return {n: t.to(weights[n].device, weights[n].dtype) for n, t in tensors.items()}


def record_stacks(
    module: nn.Module, loss: Loss, records: Data, size: int, whole: bool = False, prefix: str = ""
) -> Iterator[TorchStack]:
    """Yield the gradients of each micro-batch.

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
    prefix
        Put before the names of the parameters.
    """
    leaves, tree = tree_flatten(records)
    if not leaves or not len(leaves[0]):
        return
    # The module's own buffers are never written to.
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    model = Model(module, loss, buffers, trained(module))

    def of(part: slice | int) -> Data:
        # A module may change what it is given in place.
        return tree_unflatten([leaf[part].clone() for leaf in leaves], tree)

    plan = plan_of(model, partial(of, 0), leaves, whole)
    weights = {prefix + name: weight for name, weight in model.weights.items()}
    together = at_once(size, plan.elements)
    # Full stacks need no filling up.
    together -= together % _SIZES if together > _SIZES else 0
    many = len(leaves[0])
    for start in range(0, many, together):
        count = min(together, many - start)
        # A record more or less shall not change how the others are rounded: sizes are few.
        padded = min(together, -(-count // _SIZES) * _SIZES)
        part = [leaf[start : start + count].clone() for leaf in leaves]
        if padded > count:
            part = [torch.cat([x, x[-1:].expand(padded - count, *x.shape[1:])]) for x in part]
        try:
            named = _together(model, plan, part, tree)
            named = {name: each.only(slice(count)) for name, each in named.items()}
        except RuntimeError:
            # No rule for `vmap` (recurrent layers, branches on values); a fault of the module
            # comes again.
            named = _one_by_one(model, [of(start + i) for i in range(count)])
        _unchanged(module, buffers)
        yield TorchStack({prefix + name: part for name, part in named.items()}, weights)


def _together(model: Model, plan: Plan, leaves: list[Tensor], tree: TreeSpec) -> dict[str, Part]:
    module, weights = model.module, model.weights
    count, device = len(leaves[0]), leaves[0].device
    layers = {name: module.get_submodule(name) for name in plan.layers}
    taps = [
        torch.zeros((), dtype=dtype, device=device).expand(count, *shape).requires_grad_()
        for shape, dtype in plan.layers.values()
    ]
    copies = [weights[n].expand(count, *weights[n].shape).requires_grad_() for n in plan.others]

    def of_record(*arguments: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(arguments)
        own_taps = {name: next(remaining) for name in plan.layers}
        own_copies = {name: next(remaining) for name in plan.others}
        came: dict[str, Data] = {}

        def tap_at(name: str, shape: object) -> Tensor:
            if name in came or shape != own_taps[name].shape:
                raise RuntimeError(f"{name} is not called as it was for another record")
            return own_taps[name]

        def tap(name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            tapped = out + tap_at(name, out.shape)
            came[name] = args[0]
            return tapped

        def step(name: str, layer: nn.Module, *args: Tensor, **kwargs: Data) -> Data:
            tap_here = tap_at(name, tap_of(layer, args, kwargs, own_taps[name]))
            out, came[name] = RUN_HERE[type(layer)].run(layer, tap_here, args[0])
            return out

        instead = {**own_copies, **model.buffers}
        run = partial(functional_call, module, instead) if instead else lambda args: module(*args)
        with ExitStack() as hooks:
            for name, layer in layers.items():
                if type(layer) in RUN_HERE:
                    vars(layer)["forward"] = partial(step, name, layer)
                    hooks.callback(vars(layer).pop, "forward")
                    continue
                hook = layer.register_forward_hook(partial(tap, name), prepend=True)
                hooks.callback(hook.remove)
            value = model.loss(run, tree_unflatten([*remaining], tree))
        if len(came) < len(taps):
            raise RuntimeError("a layer is not called that was for another record")
        return value, *(came[name] for name in plan.layers)

    with torch.enable_grad(), warnings.catch_warnings():
        # Slower than it might be, where a layer has no rule: right all the same.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        values, *came = vmap(of_record, randomness="different")(*taps, *copies, *leaves)
        grads = torch.autograd.grad(values.sum(), [*taps, *copies], materialize_grads=True)
    result: dict[str, Part] = {}
    for (name, layer), x, out in zip(layers.items(), came, grads, strict=False):
        x = tree_map(torch.Tensor.detach, x)
        for parameter, part in parts(layer, x, out).items():
            result[full(name, parameter)] = part
    for name, rows in zip(plan.others, grads[len(taps) :], strict=True):
        result[name] = Rows(rows)
    return result


def _one_by_one(model: Model, records: list[Data]) -> dict[str, Part]:
    rows = []
    for record in records:
        fresh = {n: p.clone().requires_grad_() for n, p in model.weights.items()}
        with torch.enable_grad():
            instead = {**fresh, **model.buffers}
            value = model.loss(partial(functional_call, model.module, instead), record)
            rows.append(torch.autograd.grad(value, [*fresh.values()], materialize_grads=True))
    columns = zip(model.weights, zip(*rows, strict=True), strict=True)
    return {n: Rows(torch.stack([g.to_dense() for g in column])) for n, column in columns}


def check_tracked(module: nn.Module, loss: Loss, record: Data) -> None:
    """Refuse a module whose records' gradients are not those of a plain backward.

    Parameters
    ----------
    record
        One that nobody protects, in the form of `record_stacks`, with a first axis of 1.

    Raises
    ------
    UnsupportedModelError
        If a parameter is used past what is followed here, which would get noise alone.
    """
    # Of several copies, as dropout may leave nothing of one.
    many = tree_map(lambda x: x.expand(_COPIES, *x.shape[1:]), record)
    # Of a copy: what a module keeps of a pass under `vmap` cannot be copied any more.
    stacks = [*record_stacks(copy.deepcopy(module), loss, many, _COPIES)]
    single = tree_map(lambda x: x[0], record)
    first, again = (_plain(module, loss, single, seed) for seed in (0, 1))
    same = all(torch.equal(first[n], again[n]) for n in first)
    for name, plain in first.items():
        mean = torch.zeros_like(plain)
        for part in (stack.parts[name] for stack in stacks):
            each = plain.new_full((len(part.squares()),), 1.0 / _COPIES)
            mean += part.sum(each).reshape(plain.shape)
        largest = float(plain.abs().max()) if plain.numel() else 0.0
        # With random numbers the two differ, but what is used has a gradient in both.
        off = float((mean - plain).abs().max()) if same and largest else 0.0
        if largest and (not mean.any() or off > 0.02 * largest):
            raise UnsupportedModelError(
                f"the gradient of {name!r} for one record is not that of backward(). If the model "
                "uses it in a checkpoint, set use_reentrant=False; else do not train it"
            )


def _plain(module: nn.Module, loss: Loss, record: Data, seed: int) -> Tensors:
    """Return the gradients of a backward pass over a copy of the module."""
    twin = copy.deepcopy(module)
    devices = {p.device for p in twin.parameters() if p.device.type != "cpu"}
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        twin.zero_grad()
        torch.autograd.backward(loss(lambda args: twin(*args), record))
    return {
        n: torch.zeros_like(p).double() if p.grad is None else p.grad.to_dense().double()
        for n, p in twin.named_parameters()
        if p.requires_grad
    }


def _unchanged(module: nn.Module, buffers: Tensors) -> None:
    for name, buffer in module.named_buffers() if buffers else ():
        if not torch.equal(buffers[name].nan_to_num(), buffer.nan_to_num()):
            raise UnsupportedModelError(
                f"training changes the buffer {name!r}, which would keep records: use another layer"
            )


class TorchStack:
    """Gradients by parameter, on the device of the module."""

    def __init__(self, parts: dict[str, Any], weights: Tensors) -> None:
        self.parts, self._weights = parts, weights

    def squares(self, names: tuple[str, ...]) -> Float64:
        squared = torch.stack([self.parts[name].squares() for name in names], 1)
        return np.asarray(squared.cpu().numpy())

    def add(self, totals: Tensors, factors: Mapping[str, Float64], finite: Host) -> None:
        counting = None if finite.all() else torch.from_numpy(np.flatnonzero(finite))
        for name, factor in factors.items():
            part, scale, like = self.parts[name], torch.from_numpy(factor), self._weights[name]
            if counting is not None:
                part, scale = part.only(counting.to(like.device)), scale[counting]
            total = part.sum(scale.to(like.device)).view(like.shape)
            totals[name] = totals[name] + total if name in totals else total

    def arrays(self) -> dict[str, Host]:
        rows = {n: part.rows.detach().cpu() for n, part in self.parts.items()}
        return {n: (r.float() if r.dtype is torch.bfloat16 else r).numpy() for n, r in rows.items()}
