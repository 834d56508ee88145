# SPDX-License-Identifier: Apache-2.0
"""PyTorch: dense and sparse COO tensors, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from fedclip.arrays.base import NOWHERE, Array, Backend, Host, HostView, Views, units
from fedclip.arrays.many import Many
from fedclip.arrays.numpy import written

__all__ = ["TorchBackend", "TorchInPlace", "TorchRecorded", "recorded"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_traits, _requires_grad = attrgetter("layout", "requires_grad"), attrgetter("requires_grad")
_USUAL = {(torch.strided, False)}
_size = attrgetter("size")
# A table, not `functools.cache`: torch.compile can look into a table.
_DTYPES = {n: getattr(torch, n) for n in ("float16", "bfloat16", "float32", "float64")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Dtypes that NumPy multiplies as torch does.
_COMPUTED = {torch.float32: np.float32, torch.float64: np.float64}
# Dtypes of host views: bfloat16 as bits.
_VIEWED = {torch.uint16, *_NAMES}
# Torch wakes threads for the product of a tensor of more elements.
_GRAIN = 1 << 15
# How many elements are worked on together, on the CPU and elsewhere: so that what is in between
# stays in the cache, or takes little memory.
_MOST = {True: 1 << 17, False: 1 << 24}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# One operation for many tensors: torch has none that makes numbers of NaN, so multiply the bits.
_LIBRARY: Any = torch.library.Library("fedclip", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("keep_if(Tensor[] tensors, Tensor condition) -> Tensor[]")
_LIBRARY.define("keep_if_(Tensor(a!)[] tensors, Tensor condition) -> ()")


def _bits(tensors: list[torch.Tensor]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Yield the places of tensors of one size of elements, and their bits as integers."""
    for size, dtype in _BITS.items():
        places = [i for i, t in enumerate(tensors) if t.dtype.itemsize == size]
        if places:
            yield places, [tensors[i].view(dtype) for i in places]


def _keep_if(tensors: list[torch.Tensor], condition: torch.Tensor) -> list[torch.Tensor]:
    result = list(tensors)
    for places, bits in _bits(tensors):
        kept = torch._foreach_mul(bits, condition.to(bits[0].dtype))
        for i, values in zip(places, kept, strict=True):
            result[i] = values.view(tensors[i].dtype)
    return result


def _keep_if_(tensors: list[torch.Tensor], condition: torch.Tensor) -> None:
    for _, bits in _bits(tensors):
        torch._foreach_mul_(bits, condition.to(bits[0].dtype))


_LIBRARY.impl("keep_if", _keep_if, "CompositeExplicitAutograd")
_LIBRARY.impl("keep_if_", _keep_if_, "CompositeExplicitAutograd")


def _is_batched(tensor: torch.Tensor) -> bool:
    # A private name: torch has no public one.
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def recorded(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether torch records derivatives with respect to one of these tensors."""
    # Private names: torch has no public ones.
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(map(_requires_grad, tensors)))
    )


class TorchBackend(Backend):
    """Tensors of PyTorch."""

    name = "torch"
    writes = True

    def host(self, arrays: Sequence[Array]) -> Views:
        try:
            # The usual case: dense CPU tensors of a dtype that NumPy has.
            return Views([t.numpy() for t in arrays], dense=True)
        except (TypeError, RuntimeError):
            return Views([self._view(t) for t in arrays])

    def traced(self, array: Array) -> bool:
        return _is_batched(array) or (array.requires_grad and torch.is_grad_enabled())

    def _view(self, tensor: torch.Tensor) -> HostView | None:
        tensor = self._values(tensor)
        if not tensor.is_cpu or torch.compiler.is_compiling() or _is_batched(tensor):
            return None
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        # NumPy lacks other dtypes, which a clipper refuses by name.
        view: HostView | None = tensor.resolve_neg().numpy() if tensor.dtype in _VIEWED else None
        return view

    @staticmethod
    def _values(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and not tensor.is_nested:
            return tensor
        if tensor.layout == torch.sparse_coo:
            return tensor.coalesce().values()
        raise TypeError(
            "fedclip reads dense and sparse COO tensors, got "
            f"{'a nested one' if tensor.is_nested else f'one of layout {tensor.layout}'}; "
            "convert it with .to_dense() or .to_sparse_coo() first"
        )

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return [t.coalesce() if t.layout is torch.sparse_coo else t for t in arrays]

    def size(self, array: Array) -> Any:
        return self._values(array).numel()

    def dtype(self, array: Array) -> str:
        return _NAMES.get(array.dtype) or str(array.dtype).removeprefix("torch.")

    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        if host.views and self._may_write(arrays):
            kind = _COMPUTED.get(arrays[0].dtype)
            if kind is None and host.outs:
                pairs = zip(arrays, host.outs, strict=True)
                return [torch.mul(t, factor, out=self._on(out, t)) for t, out in pairs]
            if kind is not None and (host.outs or max(map(_size, host.views)) > _GRAIN):
                # The same products as torch's own. Few elements are not worth waking a thread, and
                # many go over all cores.
                results = written(np.multiply, host.views, np.asarray(factor, kind), host.outs)
                return [*map(torch.from_numpy, results)]
        k = self._number(factor, arrays[0])
        if arrays[0].dtype.itemsize == 2:
            return [self._multiply_one(t, factor) for t in arrays]
        products: Sequence[torch.Tensor] = torch._foreach_mul(list(arrays), k)
        return list(products)

    @staticmethod
    def _may_write(arrays: Sequence[torch.Tensor]) -> bool:
        """Return whether results of the host may be NumPy's: dense, and without autograd."""
        return {*map(type, arrays)} <= _PLAIN and {*map(_traits, arrays)} == _USUAL

    @staticmethod
    def _on(memory: HostView | None, like: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor over memory of NumPy, of the dtype of `like`."""
        return None if memory is None else torch.from_numpy(memory).view(like.dtype)

    @staticmethod
    def _multiply_one(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
        if tensor.layout is torch.strided:
            return torch.mul(tensor, factor)
        # Multiply the values: for a sparse tensor, torch would round the factor to half precision.
        return TorchBackend._sparse(torch.mul(tensor._values(), factor), tensor)

    @staticmethod
    def _sparse(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a sparse tensor with new values at the indices of `like`."""
        return torch.sparse_coo_tensor(
            like._indices(),
            values,
            like.shape,
            is_coalesced=like.is_coalesced(),
            check_invariants=False,
        )

    @staticmethod
    def _number(factor: float, like: torch.Tensor) -> Any:
        # On the CPU, torch multiplies faster by a 0-d tensor than by a Python float. Half
        # precision needs the Python float: only then does torch multiply in float32 and round
        # once. So do other devices, to which a tensor would have to be copied first.
        wide = like.dtype in (torch.float32, torch.float64) and like.layout == torch.strided
        return torch.scalar_tensor(factor, dtype=like.dtype) if wide and like.is_cpu else factor

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        k = torch.from_numpy(np.asarray(factors, order="C")).to(array.device)
        if array.dtype == torch.float64:
            return torch.mul(array, k)
        return torch.mul(array.float(), k.float()).to(array.dtype)

    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        if not arrays[0].is_cpu and self._foreach(arrays):
            clamped = torch._foreach_clamp_min(list(arrays), low)
            torch._foreach_clamp_max_(clamped, high)
            return list(clamped)
        if not host.outs or not self._may_write(arrays):
            return [self._clip(t, low, high) for t in arrays]
        pairs = zip(arrays, host.outs, strict=True)
        return [self._clip(t, low, high, self._on(out, t)) for t, out in pairs]

    @staticmethod
    def _clip(
        array: torch.Tensor, low: float, high: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if array.layout == torch.sparse_coo:
            return TorchBackend._sparse(torch.clamp(array._values(), low, high), array)
        return torch.clamp(array, low, high, out=out)

    def zeros_like(self, array: Array) -> Array:
        return torch.zeros_like(array)

    def square_sums(self, arrays: Sequence[Array]) -> list[float]:
        sums = [self._square_sum(self._values(t)) for t in arrays]
        # One transfer from each device.
        result = [0.0] * len(sums)
        for device in {s.device for s in sums}:
            rows = [i for i, s in enumerate(sums) if s.device == device]
            values = torch.stack([sums[i] for i in rows]).cpu().tolist()
            for i, value in zip(rows, values, strict=True):
                result[i] = value
        return result

    @staticmethod
    def _square_sum(tensor: torch.Tensor) -> torch.Tensor:
        # MPS has no float64: divide by the maximum, so that no square overflows.
        if tensor.device.type == "mps":
            peak = tensor.abs().amax().float() if tensor.numel() else tensor.new_zeros(())
            scale = torch.where(peak > 0, peak, torch.ones_like(peak))
            return (
                tensor.float() / scale
            ).square().sum().cpu().double() * scale.cpu().double() ** 2
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        return norm.square()

    def to_host(self, array: Array) -> HostView:
        tensor = self._values(array).detach().cpu().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        view: HostView = tensor.numpy()
        return view

    def dense(self, array: Array) -> Array:
        return array if array.layout == torch.strided else array.to_dense()

    def from_host(self, values: HostView, like: Array) -> Array:
        tensor = torch.from_numpy(values)
        if like.dtype == torch.bfloat16:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(like.device)

    def asarray(self, values: Any, like: Array | None = None) -> Array:
        device = like.device if like is not None else torch.device("cpu")
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(values, torch.Tensor) and values.device == device:
            return values.to(dtype)
        host = torch.as_tensor(values, dtype=dtype)
        # The host does not wait for a copy from pinned memory to CUDA.
        return (
            host.pin_memory().to(device, non_blocking=True)
            if device.type == "cuda"
            else (host.to(device))
        )

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        if isinstance(x, float) and isinstance(y, float):
            # torch makes float32 of two Python numbers.
            y = self.asarray(y, like=condition)
        # Number and array in one operation, not two.
        if isinstance(x, float) and y.shape == condition.shape:
            return y.masked_fill(condition, x)
        if isinstance(y, float) and y == 1.0 and x.dtype == torch.float64:
            # To the power of 1 or 0.
            return torch.pow(x, condition)
        return torch.where(condition, x, y)

    def finite(self, x: Array) -> Array:
        return torch.nan_to_num(x)

    def either(self, condition: Array, x: Array) -> Array:
        return torch.logical_or(condition, x)

    def sound(self, x: Array, fine: Array) -> Array:
        return torch.nan_to_num(x, 0.0, 0.0, 0.0)

    def isfinite(self, x: Array) -> Array:
        # Half as many operations as `torch.isfinite` makes; NaN is not below anything.
        return torch.abs(torch.view_as_real(x) if x.is_complex() else x) < math.inf

    def sqrt(self, x: Array) -> Array:
        return torch.sqrt(x)

    def exp(self, x: Array) -> Array:
        return torch.exp(x)

    def unit(self, peak: Array) -> Array:
        # One operation less.
        return torch.clamp(peak, *units(self.dtype(peak)))

    def minimum(self, x: Array, y: Any) -> Array:
        return torch.clamp(x, max=y)

    def maximum(self, x: Array, y: Any) -> Array:
        return torch.clamp(x, min=y)

    def sum(self, x: Array) -> Array:
        return torch.sum(x)

    def max(self, x: Array) -> Array:
        return torch.amax(x)

    def choose(
        self,
        conditions: Sequence[Array],
        yes: Sequence[Array],
        no: Sequence[Array],
        also: Array | None = None,
    ) -> Sequence[Array]:
        if not self._foreach(no):
            return super().choose(conditions, yes, no, also)
        # As many operations for all pairs as for one: on a device, each is a launch. Between
        # finite numbers, the weights 0 and 1 give one of the two to the bit.
        each = {id(c): c for c in conditions}
        one = no[0].new_ones(()) if also is None else also.to(no[0].dtype)
        weights = dict(zip(each, torch._foreach_mul([*each.values()], one), strict=True))
        chosen: Sequence[torch.Tensor] = torch._foreach_lerp(
            list(no), list(yes), [weights[id(c)] for c in conditions]
        )
        return chosen

    def chosen(
        self, condition: Array, yes: Sequence[Array], no: Sequence[Array]
    ) -> Sequence[Array]:
        if not self._foreach([*yes, *no]):
            return super().chosen(condition, yes, no)
        # What is not chosen is 0, whatever it held.
        condition = condition.to(yes[0].device)
        kept: list[torch.Tensor] = torch.ops.fedclip.keep_if(list(yes), condition)
        torch._foreach_add_(kept, torch.ops.fedclip.keep_if(list(no), ~condition))
        return kept

    def each(self, function: Callable[[Array], Array], numbers: Sequence[Array]) -> Sequence[Array]:
        if not self._foreach(numbers):
            return super().each(function, numbers)
        results: Sequence[torch.Tensor] = torch.unbind(function(torch.stack(list(numbers))))
        return results

    def blends(
        self, old: Sequence[Array], new: Sequence[Array], weights: Sequence[Any]
    ) -> Sequence[Array]:
        if not self._foreach([*old, *new]):
            return super().blends(old, new, weights)
        halves = torch._foreach_mul(list(weights), 0.5)
        moves = torch._foreach_mul(list(new), halves)
        torch._foreach_sub_(moves, torch._foreach_mul(list(old), halves))
        moved = torch._foreach_add(list(old), moves)
        torch._foreach_add_(moved, moves)
        # The product of two 0-d tensors is as wide as the weight.
        return [m.to(o.dtype) for m, o in zip(moved, old, strict=True)]

    def median(self, values: Sequence[Array]) -> Array:
        if values[0].device.type == "mps":
            return super().median(values)
        # Four operations in the place of many: the median of what is not NaN, the lower one of two.
        held = torch.threshold(torch.stack(list(values)), 0.0, math.nan)
        return held.nanmedian(dim=0).values.nan_to_num(math.inf)

    def products(self, pairs: Sequence[tuple[Array, float]]) -> Sequence[Array]:
        arrays, numbers = zip(*pairs, strict=True)
        if not self._foreach(arrays):
            return super().products(pairs)
        products: Sequence[torch.Tensor] = torch._foreach_mul(arrays, list(numbers))
        return products

    def add(self, x: Array, y: Array, times: float) -> Array:
        return torch.add(x, y, alpha=times)

    def without(self, x: Array, share: Any) -> Array:
        if isinstance(share, torch.Tensor):
            return torch.addcmul(x, x, share, value=-1.0)
        return super().without(x, share)

    def inverse(self, x: Array) -> Array:
        return torch.reciprocal(x)

    def lerp(self, old: Sequence[Array], new: Sequence[Array], weight: Any) -> Sequence[Array]:
        if not self._foreach(old) or not isinstance(weight, torch.Tensor):
            return [torch.lerp(x, y, weight) for x, y in zip(old, new, strict=True)]
        moved: Sequence[torch.Tensor] = torch._foreach_lerp(
            list(old), list(new), [weight] * len(old)
        )
        return moved

    def ratio(self, x: Array, y: Array, counts: Array) -> Array:
        return x / y

    def full_like(self, x: Array, number: float) -> Array:
        return torch.full_like(x, number)

    def zero_below(self, x: Array, least: float) -> Array:
        return torch.threshold(x, least, 0.0)

    def sort(self, table: Array) -> Array:
        return torch.sort(table, dim=0).values

    def pick(self, table: Array, row: Array) -> Array:
        return torch.gather(table, 0, row.round().long().reshape(1, -1))[0]

    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        values = [self._values(t) for t in arrays]
        wide = torch.float32 if values[0].device.type == "mps" else torch.float64
        first = values[0].device
        per = torch.stack([n.to(first) for n in self._norms(values, wide)])
        # Squares of what narrower numbers can add up to stay within the floats.
        far = any(v.dtype == wide for v in values)
        whole = partial(self._norm, wide=wide) if far else torch.linalg.vector_norm
        if len(members) == 1:
            norm: torch.Tensor = whole(per)
            return norm
        if all(tuple(m) == (i,) for i, m in enumerate(members)):
            return per
        return torch.stack([whole(per[list(m)]) for m in members])

    def _norms(self, values: Sequence[torch.Tensor], wide: torch.dtype) -> Sequence[torch.Tensor]:
        if not self._foreach(values) or any(v.dtype == wide or not v.numel() for v in values):
            return [self._norm(v, wide) for v in values]
        norms: Sequence[torch.Tensor] = torch._foreach_norm(list(values), 2, dtype=wide)
        return norms

    def _norm(self, values: torch.Tensor, wide: torch.dtype) -> Any:
        if values.dtype != wide or not values.numel():
            norm = torch.linalg.vector_norm(values, dtype=wide)
        else:
            # There is no wider dtype.
            unit = self.unit(values.abs().amax())
            norm = unit * torch.linalg.vector_norm(values / unit)
        return norm

    # Of a single group, norm and state are numbers of shape (), as they are on the host: this
    # saves an operation here and there.
    def column(self, numbers: Any, like: Array) -> Array:
        return self.asarray(numbers, like=like)

    def of_group(self, numbers: Array, group: int) -> Array:
        return numbers[group] if numbers.dim() else numbers

    def all(self, x: Array) -> Array:
        return torch.all(x) if x.dim() else x

    def multiply(self, arrays: Sequence[Array], factor: Array) -> list[Array]:
        products: list[torch.Tensor] = []
        if not self._foreach(arrays):
            products += [self._multiply_one(t, self._factor(factor, t)) for t in arrays]
        elif arrays:
            # One kernel launch for many tensors.
            products += torch._foreach_mul(list(arrays), self._factor(factor, arrays[0]))
        # Cast back: the product of two 0-d tensors is as wide as the factor.
        return [p.to(t.dtype) for p, t in zip(products, arrays, strict=True)]

    def rescale(self, arrays: Sequence[Array], factor: Array, keep: Array | None) -> list[Array]:
        products = self.multiply(arrays, factor)
        if keep is None or not self._foreach(products):
            return products if keep is None else self.keep_if(keep, products)
        torch.ops.fedclip.keep_if_(products, keep.to(products[0].device))
        return products

    @staticmethod
    def _alike(arrays: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are dense and on one device."""
        return (
            all(t.layout is torch.strided for t in arrays) and len({t.device for t in arrays}) == 1
        )

    @staticmethod
    def _factor(factor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        # A 0-d tensor does not widen the product.
        return factor.to(like.device, TorchBackend._product_dtype(like))

    @staticmethod
    def _product_dtype(tensor: torch.Tensor) -> torch.dtype:
        # Half precision is multiplied in float32.
        return torch.float64 if tensor.dtype == torch.float64 else torch.float32

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        if self._foreach(arrays):
            kept: list[torch.Tensor] = torch.ops.fedclip.keep_if(
                list(arrays), condition.to(arrays[0].device)
            )
            return kept
        nothing = torch.zeros((), device=condition.device)
        # A 0-d tensor does not widen the result, but it may be wider than one of half precision.
        return [
            torch.where(condition.to(t.device), t, nothing.to(t.device, t.dtype))
            if t.layout is torch.strided
            else self._sparse(self.keep_if(condition, [t._values()])[0], t)
            for t in arrays
        ]

    def group_extremes(
        self, arrays: Sequence[Array], members: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        zero = self.asarray(0.0, like=arrays[0])
        pairs = [torch.aminmax(v) if v.numel() else (zero, zero) for v in map(self._values, arrays)]
        lows, highs = (
            self.asarray(torch.stack([x.to(zero.device) for x in ends]), like=zero)
            for ends in zip(*pairs, strict=True)
        )
        lows, highs = torch.clamp(lows, max=0.0), torch.clamp(highs, min=0.0)
        return self._ends(torch.amin, lows, members), self._ends(torch.amax, highs, members)

    def group_peaks(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        if not self._foreach(arrays):
            return super().group_peaks(arrays, members)
        return self._ends(torch.amax, self.asarray(self._peaks(arrays), like=arrays[0]), members)

    @staticmethod
    def _ends(
        end: Callable[..., torch.Tensor], each: torch.Tensor, members: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Return the least or the largest number of each group, of one for each array."""
        if len(members) == 1:
            return end(each, 0, True)
        if all(tuple(m) == (i,) for i, m in enumerate(members)):
            return each
        return torch.stack([end(each[list(m)], 0) for m in members])

    def _peaks(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the largest absolute element of each of some arrays; 0 of one without any."""
        peaks: list[Any] = [None] * len(arrays)
        for places in self.bundles(arrays):
            bundle = self.bundle([arrays[i] for i in places])
            if isinstance(bundle, Many):
                found = self.unbundled(self.largest(bundle))
            else:
                # One pass over what is large.
                found = [super().group_peaks([bundle], [(0,)])[0]]
            for i, peak in zip(places, found, strict=True):
                peaks[i] = peak
        return torch.stack(peaks)

    def stack(self, arrays: Sequence[Array]) -> Array:
        return torch.stack(list(arrays))

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(_DTYPES[dtype])

    def bundles(self, arrays: Sequence[Array]) -> list[list[int]]:
        if not self._foreach(arrays):
            return super().bundles(arrays)
        result: list[list[int]] = []
        # Of each kind, the last bundle and its number of elements.
        last: dict[Any, tuple[list[int], int]] = {}
        for i, tensor in enumerate(arrays):
            size = tensor.numel()
            kind = tensor.dtype, tensor.dim() > 0, size > 0
            bundle, held = last.get(kind, ([], 0))
            if not bundle or not size or held + size > _MOST[tensor.is_cpu]:
                bundle, held = [], 0
                result.append(bundle)
            bundle.append(i)
            last[kind] = bundle, held + size
        return result

    def bundle(self, arrays: Sequence[Array]) -> Array:
        return arrays[0] if len(arrays) == 1 else Many(arrays)

    def numbers(self, values: Sequence[float], like: Array) -> Any:
        return values[0] if len(values) == 1 else Many(None, self.asarray(values, like=like))

    def unbundled(self, array: Array) -> Sequence[Array]:
        return array.tensors if isinstance(array, Many) else (array,)

    def store(self, values: Array, likes: Sequence[Array]) -> Sequence[Array]:
        if len(likes) == 1 or values.dtype == likes[0].dtype or not self._foreach(likes):
            return super().store(values, likes)
        # A copy is the cast that torch has for many.
        outputs = torch._foreach_clone(list(likes))
        torch._foreach_copy_(outputs, list(self.unbundled(values)))
        return list(outputs)

    def anchor(self, array: Array) -> Array:
        return array.highest() if isinstance(array, Many) else super().anchor(array)

    def total_from_anchor(self, array: Array) -> Array:
        # No difference is above 0: their sum is a norm, which torch has for many.
        return -array.norm(1) if isinstance(array, Many) else self.total(array)

    def square_total(self, array: Array) -> Array:
        if not isinstance(array, Many):
            return super().square_total(array)
        norms = array.norm(2)
        return norms * norms

    def largest(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        if isinstance(array, Many) and axes is None:
            # On the CPU, vectors are faster.
            return abs(array).highest() if array.device.type == "cpu" else array.norm(math.inf)
        return array.abs().amax() if axes is None else array.abs().amax(dim=axes, keepdim=True)

    def peak(self, arrays: Sequence[Array]) -> Array:
        if len(arrays) == 1 or not self._foreach(arrays):
            return super().peak(arrays)
        return self.wide(self._peaks(arrays).amax())

    def total(self, array: Array, axes: tuple[int, ...] | None = None) -> Array:
        wide = self._widest(array)
        if axes is None:
            return array.sum(dtype=wide)
        return array.sum(dim=axes, keepdim=True, dtype=wide)

    def wide(self, array: Array) -> Array:
        return array.to(self._widest(array))

    @staticmethod
    def _widest(like: torch.Tensor) -> torch.dtype:
        return torch.float32 if like.device.type == "mps" else torch.float64

    def joined(self, arrays: Sequence[Array]) -> Array:
        first = arrays[0].device
        values = [self._values(t).to(first) for t in arrays]
        flat = [v if v.dim() == 1 else v.reshape(-1) for v in values]
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    def _slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        if array.dtype != torch.float64 and array.device.type != "mps":
            # No square of a narrower dtype overflows or underflows in float64.
            array = self._values(array)
            return torch.linalg.vector_norm(array, dim=axes, dtype=torch.float64)
        wide = self.wide(array)
        unit = self.unit(wide.abs().amax(dim=axes, keepdim=True))
        return unit * torch.sqrt((wide / unit).square().sum(dim=axes, keepdim=True))

    def pieces(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        parts = flat.split([math.prod(shape) for shape in shapes])
        # What has one dimension longer than 1, the last, broadcasts as it is.
        return [
            part if len(part) == shape[-1] else part.reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return array.reshape(shape)

    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        if self._foreach(arrays) and len({t.dtype for t in arrays}) == 1:
            products: Sequence[torch.Tensor] = torch._foreach_mul(list(arrays), list(factors))
        else:
            products = [torch.mul(t, k.to(t.device)) for t, k in zip(arrays, factors, strict=True)]
        return [p.to(t.dtype) for p, t in zip(products, arrays, strict=True)]

    @staticmethod
    def _foreach(arrays: Sequence[torch.Tensor]) -> bool:
        """Return whether one operation may work on all these tensors."""
        # `vmap` has no rules for such operations, and compilers fuse single ones by themselves.
        batched = torch._C._functorch.peek_interpreter_stack() is not None
        if torch.compiler.is_compiling() or batched or not arrays:
            return False
        return TorchBackend._alike(arrays)

    def repeated(self, numbers: Sequence[int], times: Sequence[int], like: Array) -> Array:
        table = self.asarray([list(numbers), list(times)], like=like).long()
        return table[0].repeat_interleave(table[1], output_size=sum(times))

    def take(self, values: Array, index: Array) -> Array:
        return values[index]

    def group_max(self, values: Array, index: Array, groups: int) -> Array:
        lowest = values.new_full((groups,), -math.inf)
        return lowest.scatter_reduce(0, index, values, "amax")


class TorchRecorded(TorchBackend):
    """Tensors whose derivatives torch records, by autograd or `torch.func`, or that it batches.

    All operations have first and second derivatives, also where a norm or deviation is 0 and
    nothing follows from it.
    """

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        if any(t.layout is not torch.strided for t in arrays):
            raise NotImplementedError(
                "torch has no second derivatives of sparse tensors: make them dense, detach them, "
                "or clip under torch.no_grad()"
            )
        return arrays

    @staticmethod
    def _foreach(arrays: Sequence[torch.Tensor]) -> bool:
        # `vmap` has no rules for operations on many tensors, and autograd none for those in place.
        return False

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        dtype = next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), torch.float64)
        x, y = (v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=dtype) for v in (x, y))
        return torch.where(condition, x, y)

    def sqrt(self, x: Array) -> Array:
        nothing = x == 0
        return torch.sqrt(x.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)

    def ratio(self, x: Array, y: Array, counts: Array) -> Array:
        return x / y.masked_fill(~counts, 1.0)

    def unit(self, peak: Array) -> Array:
        # Nothing depends on the unit.
        return super().unit(peak.detach())

    def group_norms(self, arrays: Sequence[Array], members: Sequence[Sequence[int]]) -> Array:
        # All tensors of a group together: the norm of one that is zero has no derivative.
        zero = arrays[0].new_zeros(1)
        joined = [self.joined([zero, *(arrays[i] for i in some)]) for some in members]
        norms = torch.cat([self._slice_norms(values, (0,)) for values in joined])
        return norms[0] if len(members) == 1 else norms

    def _slice_norms(self, array: Array, axes: tuple[int, ...]) -> Array:
        wide = self.wide(array)
        unit = self.unit(wide.abs().amax(dim=axes, keepdim=True))
        return unit * self.sqrt((wide / unit).square().sum(dim=axes, keepdim=True))


class TorchInPlace(TorchBackend):
    """Tensors that fedclip changes in place: the gradients of a training loop."""

    writes = False

    def prepared(self, arrays: Sequence[Array]) -> Sequence[Array]:
        for tensor in arrays:
            if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
                tensor.copy_(tensor.coalesce())
        return arrays

    def scale(self, arrays: Sequence[Array], factor: float, host: Host = NOWHERE) -> list[Array]:
        like = arrays[0]
        k: Any = factor
        if like.is_cpu:
            # In place, torch would round a Python float to half precision before multiplying.
            k = torch.scalar_tensor(factor, dtype=self._product_dtype(like))
        values = [t if t.layout is torch.strided else t._values() for t in arrays]
        torch._foreach_mul_(values, k)
        return list(arrays)

    def scale_slices(self, array: Array, factors: np.ndarray[Any, Any]) -> Array:
        return array.copy_(super().scale_slices(array, factors))

    def clip(
        self, arrays: Sequence[Array], low: float, high: float, host: Host = NOWHERE
    ) -> list[Array]:
        if not arrays[0].is_cpu and self._foreach(arrays):
            torch._foreach_clamp_min_(list(arrays), low)
            torch._foreach_clamp_max_(list(arrays), high)
            return list(arrays)
        for tensor in arrays:
            if tensor.layout == torch.sparse_coo:
                tensor.copy_(self._clip(tensor, low, high))
            else:
                tensor.clamp_(low, high)
        return list(arrays)

    def zeros_like(self, array: Array) -> Array:
        return array.zero_()

    def from_host(self, values: HostView, like: Array) -> Array:
        return like.copy_(super().from_host(values, like))

    def stored(self, values: Array, like: Array) -> Array:
        # A sparse tensor becomes a dense one, which is new.
        return like.copy_(values) if like.layout is torch.strided else super().stored(values, like)

    def store(self, values: Array, likes: Sequence[Array]) -> Sequence[Array]:
        if not self._foreach(likes):
            return super().store(values, likes)
        torch._foreach_copy_(list(likes), list(self.unbundled(values)))
        return likes

    def multiply(self, arrays: Sequence[Array], factor: Array) -> list[Array]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in arrays:
            if tensor.layout == torch.strided:
                by_device.setdefault(tensor.device, []).append(tensor)
            else:
                tensor._values().mul_(self._factor(factor, tensor))
        for tensors in by_device.values():
            # One kernel launch for many tensors.
            torch._foreach_mul_(tensors, self._factor(factor, tensors[0]))
        return list(arrays)

    def keep_if(self, condition: Array, arrays: Sequence[Array]) -> list[Array]:
        if self._foreach(arrays):
            torch.ops.fedclip.keep_if_(list(arrays), condition.to(arrays[0].device))
            return list(arrays)
        lost = ~condition
        for tensor in arrays:
            values = tensor if tensor.layout == torch.strided else tensor._values()
            values.masked_fill_(lost.to(tensor.device), 0.0)
        return list(arrays)

    def multiply_slices(self, arrays: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
        if self._foreach(arrays):
            torch._foreach_mul_(list(arrays), list(factors))
            return list(arrays)
        products = super().multiply_slices(arrays, factors)
        return [t.copy_(product) for t, product in zip(arrays, products, strict=True)]
