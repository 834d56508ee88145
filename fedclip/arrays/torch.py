# SPDX-License-Identifier: Apache-2.0
"""PyTorch: dense and sparse COO tensors, on any device.

One operation works on many tensors where torch has one (`fedclip.arrays.foreach`): on a device each
is a launch. This file knows tensors, but neither groups of them nor limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch

from fedclip.arrays.base import LARGEST, Array, Arrays, Backend, Call, HostView, Owners, Repeated
from fedclip.arrays.foreach import Foreach

# A table, not `functools.cache`: torch.compile can look into a table.
_DTYPES = {n: getattr(torch, n) for n in ("float16", "bfloat16", "float32", "float64")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Dtypes of host views: bfloat16 as bits.
_VIEWED = {torch.uint16, *_NAMES}
# How many elements are worked on together, on the CPU and elsewhere: so that what is in between
# stays in the cache, or takes little memory.
_MOST = {True: 1 << 17, False: 1 << 24}
_numpy = torch.Tensor.numpy
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def recorded(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether torch records derivatives with respect to one of these tensors."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    # While torch compiles, the stack always has an interpreter: the one that compiles.
    if torch.compiler.is_compiling():
        return False
    # A private name: torch has no public one.
    return _is_transformed() or torch.autograd.forward_ad._current_level >= 0


def _is_transformed() -> bool:
    """Return whether this is called in `torch.func`: `vmap`, `grad` and their like."""
    # A private name: torch has no public one.
    return torch._C._functorch.peek_interpreter_stack() is not None


class TorchBackend(Backend):
    """Tensors of PyTorch."""

    name = "torch"

    # -- arrays -------------------------------------------------------------------------------
    def traced(self, array: Array) -> bool:
        # A private name: torch has no public one.
        is_batched = bool(torch._C._functorch.is_functorch_wrapped_tensor(array))
        return is_batched or (array.requires_grad and torch.is_grad_enabled())

    def dtype(self, array: Array) -> str:
        return _NAMES.get(array.dtype) or str(array.dtype).removeprefix("torch.")

    def size(self, array: Array) -> Any:
        return self.values(array).numel()

    def prepared(self, arrays: Arrays) -> Arrays:
        # The very same, so that a step that changes nothing returns the same object.
        if {t.layout for t in arrays} <= {torch.strided}:
            return arrays
        return [t.coalesce() if t.layout is torch.sparse_coo else t for t in arrays]

    def dense(self, array: Array) -> Array:
        return array if array.layout == torch.strided else array.to_dense()

    def values(self, array: Array) -> Array:
        if array.layout == torch.strided and not array.is_nested:
            return array
        if array.layout == torch.sparse_coo:
            return array.coalesce().values()
        got = "a nested one" if array.is_nested else f"one of layout {array.layout}"
        ways = "convert it with .to_dense() or .to_sparse_coo() first"
        raise TypeError(f"fedclip reads dense and sparse COO tensors, got {got}; {ways}")

    def restored(self, values: Array, like: Array) -> Array:
        if like.layout is torch.strided:
            return values
        # As in `values`: rows that come twice are one.
        indices = like.coalesce().indices()
        options: Any = {"is_coalesced": True, "check_invariants": False}
        return torch.sparse_coo_tensor(indices, values, like.shape, **options)

    def dense_views(self, arrays: Arrays) -> Sequence[HostView] | None:
        try:
            return [*map(_numpy, arrays)]
        except (TypeError, RuntimeError):
            return None

    def views(self, arrays: Arrays) -> Sequence[HostView | None]:
        return [self._view(t) for t in arrays]

    def _view(self, tensor: torch.Tensor) -> HostView | None:
        tensor = self.values(tensor)
        if not tensor.is_cpu or torch.compiler.is_compiling() or self.traced(tensor):
            return None
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        # NumPy lacks other dtypes, which a clipper refuses by name.
        view: HostView | None = tensor.resolve_neg().numpy() if tensor.dtype in _VIEWED else None
        return view

    def to_host(self, array: Array) -> HostView:
        tensor = self.values(array).detach().cpu().resolve_neg()
        view: HostView = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return view

    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        result = []
        for value, like in zip(map(torch.from_numpy, values), likes, strict=True):
            # To ask is faster than to call torch, which takes its time for each small tensor.
            value = value if value.dtype == like.dtype else value.view(like.dtype)
            result.append(self.restored(value if like.is_cpu else value.to(like.device), like))
        return result

    def normal_pairs(self, uniforms: HostView, angles: HostView) -> HostView:
        radius, angle = torch.from_numpy(uniforms), torch.from_numpy(angles)
        radius.log_().mul_(-2.0).sqrt_()
        draws = torch.stack([angle.cos(), angle.sin()]).mul_(radius)
        view: HostView = draws.numpy()
        return view

    # -- arithmetic ---------------------------------------------------------------------------
    def asarray(self, values: Any, like: Array | None = None) -> Array:
        device = like.device if like is not None else torch.device("cpu")
        if isinstance(values, torch.Tensor) and values.device == device:
            return values.to(_widest(device))
        host = torch.as_tensor(values, dtype=_widest(device))
        if device.type == "cuda":
            # The host does not wait for a copy from pinned memory.
            return host.pin_memory().to(device, non_blocking=True)
        return host.to(device)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        if isinstance(x, float) and isinstance(y, float):
            # torch makes float32 of two Python numbers.
            y = self.asarray(y, like=condition)
        # Number and array in one operation, not two.
        if isinstance(x, float) and (y.shape == condition.shape or not condition.dim()):
            return y.masked_fill(condition, x)
        return torch.where(condition, x, y)

    def isfinite(self, x: Array) -> Array:
        # Half as many operations as `torch.isfinite` makes; NaN is not below anything.
        return torch.abs(torch.view_as_real(x) if x.is_complex() else x) < math.inf

    exp = staticmethod(torch.exp)

    sqrt: Call = staticmethod(torch.sqrt)
    stack = staticmethod(torch.stack)

    def minimum(self, x: Array, y: Any) -> Array:
        return torch.clamp(x, max=y)

    def maximum(self, x: Array, y: Any) -> Array:
        return torch.clamp(x, min=y)

    def sum(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        wide = _widest(x.device)
        if axes is None and x.numel() == 1:
            return x.reshape(()).to(wide)
        return x.sum(dtype=wide) if axes is None else x.sum(dim=axes, keepdim=True, dtype=wide)

    def max(self, x: Array, axes: tuple[int, ...] | None = None) -> Array:
        if axes is not None:
            return x.amax(dim=axes, keepdim=True)
        return x.amax() if isinstance(x, Foreach) or x.numel() else x.new_zeros(())

    def sort(self, table: Array) -> Array:
        return torch.sort(table, dim=0).values

    def pick(self, table: Array, row: Array) -> Array:
        return torch.gather(table, 0, row.round().long().reshape(1, -1))[0]

    def choose(self, conditions: Arrays, yes: Arrays, no: Arrays) -> Arrays:
        if not self._foreach([*yes, *no]):
            triples = zip(conditions, yes, no, strict=True)
            return [torch.where(c.to(n.device), y.to(n.dtype), n) for c, y, n in triples]
        chosen: list[Array] = [None] * len(no)
        for dtype in dict.fromkeys(tensor.dtype for tensor in no):
            places = [i for i, tensor in enumerate(no) if tensor.dtype == dtype]
            # As many operations for all pairs as for one. Between finite numbers, the weights 0
            # and 1 give one of the two to the bit.
            weights = {id(c): c.to(dtype) for c in {id(c): c for c in conditions}.values()}
            old, new = [no[i] for i in places], [yes[i].to(dtype) for i in places]
            each = [weights[id(conditions[i])] for i in places]
            _put(chosen, places, torch._foreach_lerp(old, new, each))
        return chosen

    # -- numbers ------------------------------------------------------------------------------
    def cast(self, x: Array, dtype: str) -> Array:
        kind = _DTYPES[dtype]
        return x.to(_widest(x.device) if kind == torch.float64 else kind)

    def constant(self, x: Array) -> Array:
        return x.detach()

    def group_max(self, values: Array, owners: Owners, groups: int) -> Array:
        if groups == 1:
            return values.amax(0, keepdim=True)
        if _are_single(owners, groups):
            return values
        lowest = values.new_full((groups,), -math.inf)
        return lowest.scatter_reduce(0, self._index(owners, values), values, "amax")

    def group_sum(self, values: Array, owners: Owners, groups: int) -> Array:
        if groups == 1:
            return values.sum(0, keepdim=True)
        if _are_single(owners, groups):
            return values
        return values.new_zeros(groups).index_add(0, self._index(owners, values), values)

    def take(self, values: Array, owners: Owners) -> Array:
        if len(values) == 1:
            return values.expand(sum(owners.times) if isinstance(owners, Repeated) else len(owners))
        return values if _are_single(owners, len(values)) else values[self._index(owners, values)]

    def _index(self, owners: Owners, like: Array) -> Array:
        numbers = [*map(list, owners)] if isinstance(owners, Repeated) else [*owners]
        table = self.asarray(numbers, like=like).long()
        if not isinstance(owners, Repeated):
            return table
        return table[0].repeat_interleave(table[1], output_size=sum(owners.times))

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> Arrays:
        if not any(shapes):
            return torch.unbind(flat)
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def joined(self, arrays: Arrays) -> Array:
        if not any(t.dim() for t in arrays):
            return torch.stack(list(arrays))
        values = map(self.values, arrays)
        flat = [t if t.dim() == 1 else t.reshape(-1) for t in values]
        return torch.cat([t.to(flat[0].device) for t in flat]) if len(flat) > 1 else flat[0]

    # -- measures of gradients ----------------------------------------------------------------
    def group_norms(self, arrays: Arrays, members: Sequence[Sequence[int]]) -> Array:
        values = [self.values(t) for t in arrays]
        per = self._norms(values)
        if all(tuple(m) == (i,) for i, m in enumerate(members)):
            return per
        # To index by a list of the host would make the host wait for the device.
        each = torch.unbind(per)
        parts = [per if len(members) == 1 else torch.stack([each[i] for i in m]) for m in members]
        if any(v.dtype == per.dtype for v in values):
            return self.slice_norms(parts, [(0,)] * len(parts))
        # Squares of what narrower numbers can add up to stay within the floats.
        norms = [torch.linalg.vector_norm(part, keepdim=True) for part in parts]
        return norms[0] if len(norms) == 1 else torch.cat(norms)

    def _norms(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of each tensor, in the widest float."""
        wide = _widest(values[0].device)
        if not self._foreach(values) or any(v.dtype == wide or not v.numel() for v in values):
            norms: Any = [self._norm(v.reshape(1, -1), (1,))[0] for v in values]
        else:
            norms = torch._foreach_norm(list(values), 2, dtype=wide)
        return torch.stack([n.to(values[0].device) for n in norms])

    def max_abs(self, arrays: Arrays) -> Array:
        parts = self._numbers(
            lambda x: x.norm(math.inf) if isinstance(x, Foreach) else self.max(abs(x)), [arrays]
        )
        # One dtype need not hold the numbers of another.
        like, wide = parts[0], _widest(parts[0].device)
        dtype = like.dtype if len({x.dtype for x in parts}) == 1 else wide
        return torch.stack([x.to(like.device, dtype) for x in parts]).to(wide)

    def summed(self, call: Call, columns: Sequence[Arrays]) -> Array:
        def total(first: Any, *row: Any) -> Any:
            x = call(self.cast(first, "float64"), *row)
            if not isinstance(x, Foreach):
                return self.sum(x)
            # Torch has no sum of many, but norms: of what is above 0, and of what is below.
            return self.maximum(x, 0.0).norm(1) - self.minimum(x, 0.0).norm(1)

        parts = self._numbers(total, columns)
        return torch.stack([x.to(parts[0].device) for x in parts])

    def _numbers(self, call: Call, columns: Sequence[Arrays]) -> list[Array]:
        """Return for each tensor the number that a call gives, of a tensor or of many."""
        values = [self.values(t) for t in columns[0]]
        numbers: list[Array] = [None] * len(values)
        for places in self._bundles(values):
            row = (_column(column, places) for column in columns[1:])
            _put(numbers, places, _each(call(_bundle([values[i] for i in places]), *row)))
        return numbers

    def slice_norms(
        self, arrays: Arrays, axes: Sequence[tuple[int, ...]], fast: bool = False
    ) -> Array:
        pairs = zip(arrays, axes, strict=True)
        return self.joined([self._norm(array, some) for array, some in pairs])

    def _norm(self, tensor: torch.Tensor, axes: tuple[int, ...]) -> Any:
        """Return the L2 norms along the axes, flat, in the widest float."""
        wide = _widest(tensor.device)
        if tensor.dtype == wide and tensor.numel():
            return super().slice_norms([tensor], [axes])
        # No square of a narrower dtype overflows or underflows.
        norms = torch.linalg.vector_norm(tensor, dim=axes, dtype=wide)
        return norms if norms.dim() == 1 else norms.reshape(-1)

    # -- new gradients ------------------------------------------------------------------------
    def scale(self, arrays: Arrays, factors: Arrays) -> Arrays:
        outputs: list[Array] = list(arrays)
        alike: dict[Any, list[int]] = {}
        for i, (array, k) in enumerate(zip(arrays, factors, strict=True)):
            # Those with a factor of their own, that broadcasts, are multiplied together too.
            alike.setdefault((id(k) if not k.dim() else 0, array.dtype, array.device), []).append(i)
        for places in alike.values():
            some = [arrays[i] for i in places]
            k = factors[places[0]]
            to = some[0].device, torch.float64 if some[0].dtype == torch.float64 else torch.float32
            wide: Any = [factors[i].to(*to) for i in places] if k.dim() else k.to(*to)
            _put(outputs, places, self._multiplied(some, wide))
        return outputs

    def _multiplied(self, tensors: Arrays, factors: Any) -> Arrays:
        """Return products of tensors of one dtype and device, with one factor or one for each."""
        times: Call = self._half if tensors[0].dtype == torch.float16 else torch.mul
        is_one = isinstance(factors, torch.Tensor)
        if not self._foreach(tensors):
            pairs = zip(tensors, repeat(factors) if is_one else factors, strict=False)
            values = [times(self.values(t), k).to(t.dtype) for t, k in pairs]
            products: Arrays = [*map(self.restored, values, tensors)]
        elif times is torch.mul:
            products = self._times(list(tensors), factors)
        else:
            products = self._half(Foreach(tensors), factors if is_one else Foreach(factors)).tensors
        return self._stored(products, tensors)

    def _half(self, values: Any, factor: Any) -> Any:
        """Return products of half precision in float32; of a tensor, or of many."""
        product = values.to(torch.float32) * factor
        # Below its smallest number, half precision has no digits that a margin could cover.
        return torch.trunc(product * 2.0**24) * 2.0**-24

    def _stored(self, values: Arrays, likes: Arrays) -> Arrays:
        """Return values rounded to the dtype of the tensors that they are the outputs for."""
        if not self._foreach(likes) or values[0].dtype == likes[0].dtype:
            return [v.to(x.dtype) for v, x in zip(values, likes, strict=True)]
        # A copy is the cast that torch has for many.
        outputs = torch._foreach_mul(list(likes), 1.0)
        torch._foreach_copy_(outputs, [*values])
        return list(outputs)

    def mapped(
        self, call: Call, columns: Sequence[Arrays], moved: Array = None, wide: bool = False
    ) -> Arrays:
        inputs = [*columns[0]]
        values = [self.values(t) for t in inputs]
        results: list[list[Array]] = []
        numbers: set[int] = set()
        for places in self._bundles(values):
            some = [values[i] for i in places]
            # What has no dimensions gets one, by which it differs from a number that is returned.
            first = _bundle([t if t.dim() else t[None] for t in some])
            first = first.to(torch.float32) if some[0].dtype.itemsize == 2 else first
            first = self.cast(first, "float64") if wide else first
            outcomes = call(first, *(_column(c, places) for c in columns[1:]))
            results = results or [[None] * len(inputs) for _ in outcomes]
            for j, x in enumerate(outcomes):
                if j == 0 and x is first:
                    _put(results[0], places, some)
                    continue
                parts = _each(x)
                if not parts[0].dim():
                    numbers.add(j)
                else:
                    pairs = zip(parts, some, strict=True)
                    parts = [p if v.dim() else p.reshape(()) for p, v in pairs]
                _put(results[j], places, parts if j else self._narrowed(parts, some))
        triples = zip(results[0], values, inputs, strict=True)
        columns = [[t if x is v else self.restored(x, t) for x, v, t in triples], *results[1:]]
        for j in numbers:
            joined = torch.stack([x.to(values[0].device) for x in results[j]])
            columns[j] = self.asarray(joined, like=joined)
        return columns

    def _narrowed(self, values: Arrays, likes: Arrays) -> Arrays:
        """Return values in the dtype of these tensors: half precision rounded towards zero."""
        dtype = likes[0].dtype
        if values[0].dtype != dtype:
            top = LARGEST[_NAMES[dtype]]
            bundles: Any = [Foreach(values)] if self._foreach(values) else values
            values = [v for x in bundles for v in _each(torch.clamp(x, -top, top))]
            if dtype.itemsize == 2:
                values = [_towards_zero(v, dtype) for v in values]
        return self._stored(values, likes)

    def keep_if(self, condition: Any, arrays: Arrays) -> Arrays:
        if condition is False:
            return self._stored([torch.zeros_like(t) for t in arrays], arrays)
        if not self._foreach(arrays):
            outputs = [Backend.keep_if(self, condition.to(t.device), [t])[0] for t in arrays]
            return self._stored(outputs, arrays)
        result = list(arrays)
        for dtype in dict.fromkeys(t.dtype for t in arrays):
            places = [i for i, t in enumerate(arrays) if t.dtype == dtype]
            # Torch has no operation for many that makes zeros of NaN: multiply the bits.
            number = _BITS[dtype.itemsize]
            factor = condition.to(arrays[0].device, number)
            bits = self._times([arrays[i].view(number) for i in places], factor)
            _put(result, places, [values.view(dtype) for values in bits])
        return arrays if self.in_place else result

    def _times(self, tensors: list[torch.Tensor], factor: Any) -> Arrays:
        return torch._foreach_mul(tensors, factor)

    # -- many tensors together ----------------------------------------------------------------
    def _foreach(self, arrays: Sequence[torch.Tensor]) -> bool:
        """Return whether one operation may work on all these tensors."""
        # `vmap` has no rules for such operations, and compilers fuse single ones by themselves.
        if torch.compiler.is_compiling() or not arrays or _is_transformed():
            return False
        dense = all(t.layout is torch.strided for t in arrays)
        return dense and len({t.device for t in arrays}) == 1

    def _bundles(self, arrays: Sequence[torch.Tensor]) -> list[list[int]]:
        """Return the places of the tensors that one operation can work on, together."""
        if not self._foreach(arrays):
            return [[i] for i in range(len(arrays))]
        result: list[list[int]] = []
        # Of each kind, the last bundle and its number of elements.
        last: dict[Any, tuple[list[int], int]] = {}
        for i, tensor in enumerate(arrays):
            size = tensor.numel()
            bundle, held = last.get(tensor.dtype, ([], 0))
            if not bundle or not size or held + size > _MOST[tensor.is_cpu]:
                bundle, held = [], 0
                result.append(bundle)
            bundle.append(i)
            # What is empty is by itself.
            if size:
                last[tensor.dtype] = bundle, held + size
        return result


def _each(x: Any) -> list[Array]:
    return x.tensors if isinstance(x, Foreach) else [x]


def _bundle(tensors: Sequence[torch.Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else Foreach(tensors)


def _column(column: Any, places: Sequence[int]) -> Any:
    """Return the part of a column for some tensors."""
    if isinstance(column, torch.Tensor):
        if len(places) == 1:
            return column[places[0]]
        return Foreach(None, column if len(places) == len(column) else column[[*places]])
    some = [column[i] if column[i].dim() else column[i][None] for i in places]
    return some[0] if len(some) == 1 else Foreach(some)


def _put(column: list[Array], places: Sequence[int], values: Arrays) -> None:
    for i, value in zip(places, values, strict=True):
        column[i] = value


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _are_single(owners: Owners, groups: int) -> bool:
    """Return whether each number is a group, in order."""
    return not isinstance(owners, Repeated) and [*owners] == [*range(groups)]


def _towards_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values in half precision, rounded towards zero."""
    near = values.to(dtype)
    wide, bits = near.detach().to(values.dtype), near.detach().view(torch.int16)
    # Floats of one sign are ordered like their bits.
    less = (bits - (wide.abs() > values.detach().abs()).to(torch.int16)).view(dtype)
    result: torch.Tensor = near + (less - near.detach())
    return result


class TorchRecorded(TorchBackend):
    """Tensors whose derivatives torch records, by autograd or `torch.func`, or that it batches.

    All operations have first and second derivatives, also where a norm or deviation is 0 and
    nothing follows from it.
    """

    def prepared(self, arrays: Arrays) -> Arrays:
        if any(t.layout is not torch.strided for t in arrays):
            ways = "make them dense, detach them, or clip under torch.no_grad()"
            raise NotImplementedError(f"torch has no second derivatives of sparse tensors: {ways}")
        return arrays

    def _foreach(self, arrays: Sequence[torch.Tensor]) -> bool:
        # `vmap` has no rules for operations on many tensors, and autograd none for those in place.
        return False

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        dtype = next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), torch.float64)
        x, y = (v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=dtype) for v in (x, y))
        return torch.where(condition, x, y)

    def sqrt(self, x: Array) -> Array:
        nothing = x == 0
        return torch.sqrt(x.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)

    def _half(self, values: Any, factor: Any) -> Any:
        product = values.to(torch.float32) * factor
        return product + (super()._half(values, factor) - product).detach()

    # All tensors of a group together: the norm of one that is zero has no derivative.
    group_norms, slice_norms = Backend.joint_norms, Backend.slice_norms


class TorchInPlace(TorchBackend):
    """Tensors that fedclip changes in place: the gradients of a training loop."""

    in_place = True

    def prepared(self, arrays: Arrays) -> Arrays:
        for tensor in arrays:
            if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
                tensor.copy_(tensor.coalesce())
        return arrays

    def from_host(self, values: Sequence[HostView], likes: Arrays) -> Arrays:
        return self._stored(super().from_host(values, likes), likes)

    def _times(self, tensors: list[torch.Tensor], factor: Any) -> Arrays:
        torch._foreach_mul_(tensors, factor)
        return tensors

    def _stored(self, values: Arrays, likes: Arrays) -> Arrays:
        if not self._foreach(likes):
            return [like.copy_(value) for value, like in zip(values, likes, strict=True)]
        if values[0] is not likes[0]:
            torch._foreach_copy_([*likes], [*values])
        return likes
