# SPDX-License-Identifier: Apache-2.0
r"""PyTorch's DTensors: each process holds a part of each tensor, and all clip by the whole.

::

    s      = for each group, sum over its tensors of  w * (square sum of this process's part)
    s      = sum over all processes                                            one all-reduce
    norm   = sqrt(s)                                    the same number on each process
    output = this process's part, clipped

``w`` is 1 over the number of processes that hold the same part, so that each part counts once,
and NaN on one of several processes is NaN on all. A plain tensor among DTensors counts as one
that every process holds. Partial sums are added up first.

Guarantees
----------
- Groups, limits and statistics are the same on each process, and those of the unsharded run to
  2^-46; parts may be uneven or empty.
- Numbers of float64 neither overflow nor underflow in the sum (Blue, 1978, with three sums).
- Norms of other orders and means are as those of the unsharded run: of order 1 and "inf" by one
  all-reduce, of others by one gather of a few numbers for each group and process.
- What measures whole arrays on the host gets them whole, all of a gradient by one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fedclip.arrays.base import NOWHERE, Array, Host, HostView, Views
from fedclip.arrays.torch import TorchBackend, TorchInPlace

__all__ = ["ShardedBackend", "ShardedInPlace", "replicated", "summed"]

# Beyond these, squares of float64 are not normal numbers: they are added up scaled.
_BIG, _SMALL, _SCALE = 2.0**500, 2.0**-500, 2.0**600


class _Layout(NamedTuple):
    """The processes that hold the tensors of a gradient."""

    size: int
    groups: Sequence[Any]
    """Process groups; a sum over each in turn is one over all the processes."""
    device: str

    def reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the values, summed up over all processes, on the device where they were."""
        there = values if values.device.type == self.device else values.to(self.device)
        for group in self.groups:
            # The form that DTensors use, that compiled code can follow and that torch counts.
            found = functional.all_reduce(there, op, group)
            there = functional.wait_tensor(found)  # type: ignore[no-untyped-call]
        return there.to(values.device)

    def joined(
        self, numbers: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``call(rows)`` of the numbers of all processes, a row each, the same on each."""
        there = numbers if numbers.device.type == self.device else numbers.to(self.device)
        for group in self.groups:
            rows = [torch.empty_like(there) for _ in range(dist.get_world_size(group))]
            dist.all_gather(rows, there, group=group)
            there = call(torch.stack(rows))
        return there.to(numbers.device)


def _meshes(arrays: Iterable[Array]) -> list[DeviceMesh]:
    """Return the meshes of the DTensors among some arrays, a largest one first."""
    meshes = {t.device_mesh for t in arrays if isinstance(t, DTensor)}
    return sorted(meshes, key=lambda mesh: mesh.size(), reverse=True)


def _layout(arrays: Iterable[Array]) -> _Layout | None:
    meshes = _meshes(arrays)
    if not meshes:
        return None
    largest = meshes[0]
    if len(meshes) > 1:
        _check_within(largest, frozenset(meshes))
    groups: Sequence[Any] = [dist.group.WORLD]
    if largest.size() < dist.get_world_size():
        groups = [largest.get_group(d) for d in range(largest.ndim)]
    return _Layout(largest.size(), groups, largest.device_type)


@lru_cache(maxsize=64)
def _check_within(largest: DeviceMesh, meshes: frozenset[DeviceMesh]) -> None:
    ranks = {*largest.mesh.flatten().tolist()}
    if not all(ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes):
        raise TypeError(
            "the parameters lie on device meshes of which none holds all the others' processes, "
            "so that no process knows the whole gradient: clip the parameters of each mesh with a "
            "clipper of its own"
        )


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
    if not isinstance(array, DTensor) or local is array.to_local():
        return local if not isinstance(array, DTensor) else array
    return DTensor.from_local(
        local,
        array.device_mesh,
        array.placements,
        run_check=False,
        shape=array.shape,
        stride=array.stride(),
    )


def _own(values: Any, array: Array) -> Any:
    """Return this process's part of whole values that broadcast against an array."""
    if isinstance(array, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            array.shape, array.device_mesh, array.placements
        )
        for d, (start, length) in enumerate(zip(offset, shape, strict=True)):
            if values.shape[d] != 1:
                values = values[(slice(None),) * d + (slice(start, start + length),)]
    return values


class _OnShards(TorchBackend):
    """The operations on whole arrays, by what each process does with its parts.

    It works for one gradient, some of whose arrays are DTensors; or for any that has no others.
    """

    partial = True

    def __init__(self, gradient: Iterable[Array] = ()) -> None:
        self._gradient = [t for t in gradient if t.layout is torch.strided]
        self._known = _layout(self._gradient)
        self._wholes: list[HostView] = []

    def _layout(self, arrays: Iterable[Array]) -> _Layout:
        layout = self._known or _layout(arrays)
        if layout is None:
            raise TypeError("none of these arrays is a DTensor, and others of the gradient are")
        return layout

    def host(self, arrays: Sequence[Array]) -> Views:
        return Views([None] * len(arrays))

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return [summed(t) for t in arrays]

    # -- each process for itself --------------------------------------------------------------
    def _each(
        self, call: Callable[[list[Array]], Sequence[Array]], arrays: Sequence[Array]
    ) -> list[Array]:
        locals_ = call([_local(t) for t in arrays])
        return [_like(part, t) for part, t in zip(locals_, arrays, strict=True)]

    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        scale = super().scale
        return self._each(lambda parts: scale(parts, factor), arrays)

    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        clip = super().clip
        return self._each(lambda parts: clip(parts, low, high), arrays)

    def multiply(self, arrays: Sequence[Array], factor: Array) -> list[Array]:
        multiply = super().multiply
        return self._each(lambda parts: multiply(parts, factor), arrays)

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        keep_if = super().keep_if
        return self._each(lambda parts: keep_if(condition, parts), arrays)

    def rescale(self, arrays: Sequence[Array], factor: Array, keep: Array | None) -> list[Array]:
        rescale = super().rescale
        return self._each(lambda parts: rescale(parts, factor, keep), arrays)

    def zeros_like(self, array: Array) -> Array:
        return _like(super().zeros_like(_local(array)), array)

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        return _like(super().scale_slices(_local(array), _own(factors, array)), array)

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        multiply = super().multiply_slices
        own = [_own(k, t) for k, t in zip(factors, arrays, strict=True)]
        return self._each(lambda parts: multiply(parts, own), arrays)

    # -- whole arrays on the host -------------------------------------------------------------
    def to_host(self, array: Array) -> HostView:
        place = next((i for i, one in enumerate(self._gradient) if one is array), None)
        if place is None:
            return self._gathered([array])[0]
        self._wholes = self._wholes or self._gathered(self._gradient)
        return self._wholes[place]

    def _gathered(self, arrays: Sequence[Array]) -> list[HostView]:
        """Return whole arrays by one all-reduce, in which each process gives what it holds."""
        parts = [self._values(_local(t)) for t in arrays]
        wide = torch.float64 if any(t.dtype == torch.float64 for t in arrays) else torch.float32
        sizes = [math.prod(t.shape) for t in arrays]
        joined = torch.full((sum(sizes),), -math.inf, dtype=wide, device=parts[0].device)
        wholes = [w.view(t.shape) for w, t in zip(torch.split(joined, sizes), arrays, strict=True)]
        for whole, part, array in zip(wholes, parts, arrays, strict=True):
            if part.numel():
                # NaN in one of several copies counts on all processes. The maximum of some
                # communication libraries loses NaN, so infinity stands for it.
                _own(whole, array).copy_(torch.where(part.isfinite(), part, math.inf))
        joined = self._layout(arrays).reduce(joined, "max")
        wholes = [w.view(t.shape) for w, t in zip(torch.split(joined, sizes), arrays, strict=True)]
        pairs = zip(wholes, arrays, strict=True)
        return [super(_OnShards, self).to_host(whole.to(t.dtype)) for whole, t in pairs]

    def from_host(self, values: HostView, like: Array) -> Array:
        return _like(super().from_host(_own(values, like), _local(like)), like)

    # -- all processes together ---------------------------------------------------------------
    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        norms = self.group_norms(arrays, [(i,) for i in range(len(arrays))])
        squares: list[float] = norms.square().tolist()
        return squares

    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        parts = [self._values(_local(t)) for t in arrays]
        norms = torch.zeros(len(parts), dtype=torch.float64, device=parts[0].device)
        held = [i for i, part in enumerate(parts) if part.numel()]
        if held:
            found = self._norms([parts[i] for i in held], torch.float64)
            norms[held] = torch.stack([n.to(norms.device) for n in found])
        groups = torch.zeros(len(arrays), dtype=torch.long)
        for group, some in enumerate(members):
            groups[list(some)] = group
        return self._together(arrays, norms, [1] * len(arrays), groups, len(members))

    def parts(self, arrays: Sequence[Array]) -> list[Array]:
        return [self._values(_local(t)) for t in arrays]

    def joined_norms(
        self, arrays: Sequence[Array], norms: Array, members: Sequence[Sequence[int]], power: float
    ) -> Array:
        layout = self._layout(arrays)
        # A part that several processes hold counts once.
        weights = norms.new_tensor([_weight(t, layout.size) for t in arrays])
        pairs = ((norms[list(some)], weights[list(some)]) for some in members)
        own = torch.stack([_power_norm(n, power, w) for n, w in pairs])
        if power in (1, math.inf):
            # Nothing can overflow, so no process needs the others' numbers. The maximum of some
            # communication libraries loses NaN.
            own = own if power == 1 else torch.where(torch.isnan(own), math.inf, own)
            return layout.reduce(own, "sum" if power == 1 else "max")
        return layout.joined(own, lambda rows: _power_norm(rows, power))

    def joined_squares(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        layout = self._layout(arrays)
        rows = [_moments(self._values(_local(t)), _weight(t, layout.size)) for t in arrays]
        own = torch.stack([_pooled(torch.stack([rows[i] for i in some])) for some in members])
        _, unit, _, squares = layout.joined(own, _pooled).unbind(-1)
        return unit, squares

    def slice_norms(self, arrays: Sequence[Array], axes: Sequence[tuple[int, ...]]) -> Array:
        norms = []
        for array, spanned in zip(arrays, axes, strict=True):
            part = _local(array)
            shape = [1 if d in spanned else n for d, n in enumerate(array.shape)]
            whole = torch.zeros(shape, dtype=torch.float64, device=part.device)
            if part.numel():
                own = _own(whole, array)
                own.copy_(self._slice_norms(part, spanned).reshape(own.shape))
            norms.append(whole.reshape(-1))
        counts = [n.numel() for n in norms]
        joined = torch.cat([n.to(norms[0].device) for n in norms])
        return self._together(arrays, joined, counts, None, len(joined))

    def _together(
        self,
        arrays: Sequence[Array],
        norms: Array,
        counts: Sequence[int],
        groups: torch.Tensor | None,
        size: int,
    ) -> Array:
        """Return norms of groups over all processes; each array has so many of the norms."""
        layout = self._layout(arrays)
        weights = [_weight(t, layout.size) for t in arrays]
        squares = _squares(norms, any(t.dtype == torch.float64 for t in arrays))
        each = torch.tensor(weights, dtype=torch.float64).to(norms.device)
        squares = squares * each.repeat_interleave(torch.tensor(counts).to(norms.device))
        if groups is not None:
            sums = squares.new_zeros(len(squares), size)
            squares = sums.index_add_(1, groups.to(norms.device), squares)
        return _roots(layout.reduce(squares))

    def group_extremes(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        lows, highs = super().group_extremes([_local(t) for t in arrays], members)
        ends = torch.stack((-lows, highs))
        # The maximum of some communication libraries loses NaN.
        ends = torch.where(torch.isnan(ends), math.inf, ends)
        ends = self._layout(arrays).reduce(ends, "max")
        return -ends[0], ends[1]


def replicated(number: torch.Tensor, arrays: Iterable[Array]) -> torch.Tensor:
    """Return a number that each process has, as a DTensor if one of the arrays is."""
    meshes = _meshes(arrays)
    if not meshes:
        return number
    there, placements = number.to(meshes[0].device_type), [Replicate()] * meshes[0].ndim
    result: torch.Tensor = DTensor.from_local(there, meshes[0], placements, run_check=False)
    return result


def summed(array: Array) -> Array:
    """Return an array whose parts are not sums that still have to be added up."""
    if not isinstance(array, DTensor) or not any(p.is_partial() for p in array.placements):
        return array
    placements = [Replicate() if p.is_partial() else p for p in array.placements]
    return array.redistribute(placements=placements)


def _power_norm(
    norms: torch.Tensor, power: float, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the p-norm of each column of norms, each weighted in the sum of powers."""
    peak = norms.amax(dim=0)
    if math.isinf(power):
        return peak
    # Divide by the maximum: nothing can overflow.
    unit = torch.where(peak > 0, peak, 1.0)
    powers = (norms / unit) ** power
    total = (powers if weights is None else powers * weights).sum(dim=0)
    return unit * total ** (1 / power)


def _moments(part: torch.Tensor, weight: float) -> torch.Tensor:
    """Return number, unit, mean and squared deviations of elements, each counted by a weight.

    The unit is the largest absolute element; mean and squares are in that unit.
    """
    if not part.numel():
        return torch.zeros(4, dtype=torch.float64, device=part.device)
    values = part.reshape(-1).double()
    unit = values.abs().amax()
    values = values / torch.where(unit > 0, unit, 1.0)
    # Relative to one of them, equal numbers are 0, and their deviation is.
    origin = values[0]
    values = values - origin
    mean = values.mean()
    squares = weight * (values - mean).square().sum()
    number = torch.full_like(unit, weight * part.numel())
    return torch.stack((number, unit, origin + mean, squares))


def _pooled(rows: torch.Tensor) -> torch.Tensor:
    """Return the moments of all elements together, from `_moments` of some in each row.

    Chan, Golub & LeVeque, 1983, "Algorithms for computing the sample variance".
    """
    numbers, units, means, squares = rows.unbind(-1)
    unit = units.amax(dim=0)
    scale = units / torch.where(unit > 0, unit, 1.0)
    means, number = means * scale, numbers.sum(dim=0)
    # Relative to one of them, as above.
    origin = means.gather(0, numbers.argmax(dim=0, keepdim=True))
    away = torch.where(numbers > 0, means - origin, 0.0)
    mean = (numbers * away).sum(dim=0) / torch.where(number > 0, number, 1.0)
    total = squares * scale.square() + numbers * (away - mean).square()
    return torch.stack((number, unit, origin[0] + mean, total.sum(dim=0)), dim=-1)


def _squares(norms: torch.Tensor, wide: bool) -> torch.Tensor:
    """Return a row of squares; or three, of large, usual and small norms, scaled apart."""
    if not wide:
        return norms.square()[None]
    big, small = norms > _BIG, norms < _SMALL
    nothing = torch.zeros_like(norms)
    rows = (
        torch.where(big, norms / _SCALE, nothing),
        torch.where(big | small, nothing, norms),
        torch.where(small, norms * _SCALE, nothing),
    )
    return torch.stack(rows).square()


def _roots(sums: torch.Tensor) -> torch.Tensor:
    """Return the roots of sums of what `_squares` returned."""
    if len(sums) == 1:
        return sums[0].sqrt()
    big, usual, small = sums
    large = (big + usual / _SCALE / _SCALE).sqrt() * _SCALE
    middle = (usual + small / _SCALE / _SCALE).sqrt()
    rest = torch.where(usual > 0, middle, small.sqrt() / _SCALE)
    return torch.where(big > 0, large, torch.where(torch.isnan(usual), usual, rest))


class ShardedBackend(_OnShards):
    """DTensors of PyTorch."""


class ShardedInPlace(_OnShards, TorchInPlace):
    """DTensors that fedclip changes in place: the gradients of a training loop."""
