# SPDX-License-Identifier: Apache-2.0
r"""PyTorch's DTensors: each process holds a part of each tensor, and all clip by the whole.

::

    s      = for each tensor, w * (what this process's part adds up to)
    s      = sum over all processes                                            one all-reduce
    output = this process's part, clipped

``w`` is 1 over the number of processes that hold the same part, so that each part counts once,
and NaN on one of them is NaN on all. A plain tensor counts as one that every process holds. So
groups, limits and statistics are the same on each process, and those of the unsharded run to
2^-46; parts may be uneven or empty. What needs whole arrays gets them on the host, all of a
gradient by one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fedclip.arrays.base import Array, Arrays, Call, HostView
from fedclip.arrays.torch import TorchBackend, TorchInPlace


def _meshes(arrays: Iterable[Array]) -> list[DeviceMesh]:
    """Return the meshes of the DTensors among some arrays, a largest one first."""
    meshes = {t.device_mesh for t in arrays if isinstance(t, DTensor)}
    return sorted(meshes, key=lambda mesh: mesh.size(), reverse=True)


def _mesh(arrays: Iterable[Array]) -> DeviceMesh | None:
    """Return the mesh of all processes that hold the arrays; None if there is no DTensor."""
    meshes = _meshes(arrays)
    ranks = [{*mesh.mesh.flatten().tolist()} for mesh in meshes] if len(meshes) > 1 else []
    if not all(ranks[0] >= some for some in ranks):
        why = "the parameters lie on several device meshes, and none holds the processes of all"
        raise TypeError(f"{why}: clip the parameters of each mesh with another clipper")
    return meshes[0] if meshes else None


def _weight(array: Array, size: int) -> float:
    """Return 1 over the number of processes, of `size`, that hold the same part of an array."""
    if not isinstance(array, DTensor):
        return 1.0 / size
    sizes = zip(array.placements, array.device_mesh.shape, strict=True)
    return math.prod(n for placement, n in sizes if not placement.is_replicate()) / size


def _local(array: Array) -> Any:
    return array.to_local() if isinstance(array, DTensor) else array


def _like(local: Any, array: Array) -> Array:
    """Return new local values as an array that is sharded like `array`; or that array itself."""
    if not isinstance(array, DTensor):
        return local
    if local is array.to_local():
        return array
    whole: Any = {"run_check": False, "shape": array.shape, "stride": array.stride()}
    return DTensor.from_local(local, array.device_mesh, array.placements, **whole)


def _own(values: Any, array: Array) -> Any:
    """Return this process's part of whole values that broadcast against an array."""
    if isinstance(array, DTensor) and values.dim():
        layout = array.shape, array.device_mesh, array.placements
        shape, offset = compute_local_shape_and_global_offset(*layout)
        for d, (start, length) in enumerate(zip(offset, shape, strict=True)):
            if values.shape[d] != 1:
                values = values[(slice(None),) * d + (slice(start, start + length),)]
    return values


class ShardedBackend(TorchBackend):
    """DTensors of PyTorch: operations on whole arrays, by what each process does with its parts.

    It works for one gradient, some of whose arrays are DTensors; or for any that has no others.
    """

    partial = True

    def __init__(self, gradient: Iterable[Array] = ()) -> None:
        self._gradient = [t for t in gradient if t.layout is torch.strided]
        self._mesh = _mesh(self._gradient)
        self._wholes: list[HostView] = []

    def views(self, arrays: Arrays) -> Sequence[HostView | None]:
        return [None] * len(arrays)

    def prepared(self, arrays: Arrays) -> Arrays:
        return [summed(t) for t in arrays]

    # -- each process for itself --------------------------------------------------------------
    def scale(self, arrays: Arrays, factors: Arrays) -> Arrays:
        local_factors = [_own(k, t) for k, t in zip(factors, arrays, strict=True)]
        parts = super().scale([_local(t) for t in arrays], local_factors)
        return [_like(part, t) for part, t in zip(parts, arrays, strict=True)]

    def keep_if(self, condition: Any, arrays: Arrays) -> Arrays:
        parts = super().keep_if(condition, [_local(t) for t in arrays])
        return [_like(part, t) for part, t in zip(parts, arrays, strict=True)]

    # -- whole arrays on the host -------------------------------------------------------------
    def to_host(self, array: Array) -> HostView:
        place = next((i for i, other in enumerate(self._gradient) if other is array), None)
        if place is not None:
            self._wholes = self._wholes or self._gathered(self._gradient)
            return self._wholes[place]
        return self._gathered([array])[0] if isinstance(array, DTensor) else super().to_host(array)

    def _gathered(self, arrays: Arrays) -> list[HostView]:
        """Return whole arrays by one all-reduce, in which each process gives what it holds."""
        parts = [self.values(_local(t)) for t in arrays]
        wide = torch.float64 if any(t.dtype == torch.float64 for t in arrays) else torch.float32
        shapes = [tuple(t.shape) for t in arrays]
        size = sum(map(math.prod, shapes))
        joined = torch.full((size,), -math.inf, dtype=wide, device=parts[0].device)
        for full, part, array in zip(self.pieces(joined, shapes), parts, arrays, strict=True):
            if part.numel():
                # NaN, and -infinity, in one of several copies count on all processes.
                _own(full, array).copy_(torch.where(part.isfinite(), part, math.inf))
        pairs = zip(self.pieces(self._reduced(joined, arrays, "max"), shapes), arrays, strict=True)
        return [super(ShardedBackend, self).to_host(full.to(t.dtype)) for full, t in pairs]

    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        made = [torch.from_numpy(v).view(x.dtype) for v, x in zip(values, likes, strict=True)]
        parts = [_like(_own(v, x).to(x.device), x) for v, x in zip(made, likes, strict=True)]
        return [x.copy_(v) for v, x in zip(parts, likes, strict=True)] if self.in_place else parts

    # -- all processes together ---------------------------------------------------------------
    def _common(self, arrays: Arrays) -> DeviceMesh:
        mesh = self._mesh or _mesh(arrays)
        if mesh is None:
            raise TypeError("got no DTensor here, and other arrays of the gradient are DTensors")
        return mesh

    def _reduced(self, values: torch.Tensor, arrays: Arrays, op: str = "sum") -> torch.Tensor:
        """Return numbers of arrays, summed up over all processes, on the device where they were."""
        mesh = self._common(arrays)
        if op == "max":
            # The maximum of some communication libraries loses NaN, so infinity stands for it.
            values = torch.where(torch.isnan(values), math.inf, values)
        is_there = values.device.type == mesh.device_type
        moved_values = values if is_there else values.to(mesh.device_type)
        # A sum over each dimension in turn is one over all.
        world: Any = dist.group.WORLD
        is_part = mesh.size() < dist.get_world_size()
        for group in mesh.get_all_groups() if is_part else [world]:
            # The form that DTensors use, that compiled code can follow and that torch counts.
            reduced = functional.all_reduce(moved_values, op, group)
            moved_values = functional.wait_tensor(reduced)  # type: ignore[no-untyped-call]
        return moved_values.to(values.device)

    def _weighted(self, values: torch.Tensor, arrays: Arrays) -> torch.Tensor:
        size = self._common(arrays).size()
        weights: torch.Tensor = self.asarray([_weight(t, size) for t in arrays], like=values)
        return values * weights

    def group_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        norms = self._norms([self.values(_local(t)) for t in arrays])
        owners = {i: group for group, some in enumerate(members) for i in some}
        squares = self._weighted(norms * norms, arrays)
        sums = self.group_sum(squares, [owners[i] for i in range(len(arrays))], len(members))
        return self._reduced(sums, arrays).sqrt()

    def summed(self, call: Call, columns: Sequence[Arrays]) -> Array:
        arrays = columns[0]
        sums = super().summed(call, [[_local(t) for t in arrays], *columns[1:]])
        return self._reduced(self._weighted(sums, arrays), arrays)

    def max_abs(self, arrays: Arrays) -> Array:
        return self._reduced(super().max_abs([_local(t) for t in arrays]), arrays, "max")

    def slice_norms(
        self, arrays: Arrays, axes: Sequence[tuple[int, ...]], fast: bool = False
    ) -> Array:
        squares = []
        size = self._common(arrays).size()
        for array, spanned in zip(arrays, axes, strict=True):
            part = _local(array)
            shape = [1 if d in spanned else n for d, n in enumerate(array.shape)]
            full = torch.zeros(shape, dtype=torch.float64, device=part.device)
            if part.numel():
                local = _own(full, array)
                local.copy_(self._norm(part, spanned).reshape(local.shape))
            squares.append((full * full).reshape(-1) * _weight(array, size))
        return self._reduced(self.joined(squares), arrays).sqrt()

    def mapped(
        self, call: Call, columns: Sequence[Arrays], moved: Array = None, wide: bool = False
    ) -> Sequence[Any]:
        arrays = columns[0]
        columns = [[_local(t) for t in arrays], *columns[1:]]
        outputs, *numbers = super().mapped(call, columns, moved, wide)
        shared = [self._reduced(x, arrays, "max") for x in numbers]
        return [[_like(x, t) for x, t in zip(outputs, arrays, strict=True)], *shared]


class ShardedInPlace(ShardedBackend, TorchInPlace):
    """DTensors that fedclip changes in place: the gradients of a training loop."""


def replicated(number: torch.Tensor, arrays: Iterable[Array]) -> torch.Tensor:
    """Return a number that each process has, as a DTensor if one of the arrays is."""
    meshes = _meshes(arrays)
    if not meshes:
        return number
    local, placements = number.to(meshes[0].device_type), [Replicate()] * meshes[0].ndim
    result: torch.Tensor = DTensor.from_local(local, meshes[0], placements, run_check=False)
    return result


def summed(array: Array) -> Array:
    """Return an array whose parts are not sums that still have to be added up."""
    if not isinstance(array, DTensor) or not any(p.is_partial() for p in array.placements):
        return array
    placements = [Replicate() if p.is_partial() else p for p in array.placements]
    return array.redistribute(placements=placements)
