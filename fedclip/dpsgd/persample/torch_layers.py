# SPDX-License-Identifier: Apache-2.0
r"""Norms and sums of single records' gradients, from what goes into a layer and comes back.

The gradient of a linear layer's weights is :math:`\sum_t b_t a_t^T`, with inputs a and gradients
b of the outputs, over positions t. Its norm needs no gradient at all (Goodfellow, 2015; Li et
al., 2022), and the weighted sum over records is one product (book-keeping; Bu et al., 2023)::

    ||g_i||^2     = Σ_tu (a_it . a_iu) (b_it . b_iu)          one position: ||a_i||^2 ||b_i||^2
    Σ_i f_i g_i   = Σ_i Σ_t (f_i b_it) a_it^T

Where a gradient is smaller than the products of its positions, it is worked out instead (`Rows`).
Its norm in float32 is raised by how much `fedclip.arrays.blocks` may be off. A convolution is a
linear layer of patches. Sums are those of float64. Products of positions may
cancel, so what rounding can hide is added to the norm, which is never too small::

    ||g_i||^2    <= computed + lost (Σ_t ||a_it|| ||b_it||)^2
    lost          = 1.1 (p + q + T + 8) / 2^24 in float32, for T positions of p and q numbers

Where that may be more than 1/1000 of the norm, products are those of float64, and TensorFloat-32 is
never used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.linalg import vecdot
from torch.nn import functional
from torch.nn import grad as gradients

from fedclip.arrays.base import UNDERFLOW
from fedclip.arrays.blocks import UNCERTAINTY, slice_norms
from fedclip.arrays.memory import Memory
from fedclip.dpsgd.persample import torch_attention, torch_recurrent
from fedclip.dpsgd.persample.base import Data, Float64, Host

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

# How many numbers are brought to float64 at once on a CPU.
_BLOCK = 1 << 17
# Gradients of up to so many numbers are written where the last ones were, if nobody holds them: new
# memory takes as long as the product.
_KEPT = 1 << 21
_MEMORY: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()
# Many positions, and the size of a gradient that is large.
_MANY, _LARGE = 16, 1 << 17
# Of what positions multiply to, how much float64 may lose where they cancel.
_LOST = 2.0**-42
# How much float32 may lose, and the lengths whose products neither overflow nor underflow in it.
_MOST_LOST, _SHORTEST, _LONGEST = 2.0**-10, 2.0**-60, 2.0**60


@dataclass(frozen=True)
class Part(ABC):
    """The gradients of one tensor, of each record."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Return the squared norm of each record, in float64."""

    @abstractmethod
    def sum(self, factors: Tensor) -> Tensor:
        """Return their sum, each times its factor, in float64; of the tensor's size."""

    def numbers(self) -> int:
        """Return how many numbers are in memory."""
        floats = [x for x in vars(self).values() if isinstance(x, Tensor) and x.is_floating_point()]
        return sum(-(-x.numel() * x.element_size() // 8) for x in floats)

    def only(self, kept: Tensor | slice) -> Self:
        """Return those of these records: a tensor of positions, or a slice."""
        tensors = {n: x[kept] for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True)
class Rows(Part):
    """Gradients themselves, of shape (records, ...)."""

    rows: Tensor

    def squares(self) -> Tensor:
        flat = self._flat()
        if flat.device.type == "cpu" and flat.dtype is torch.float32 and flat.numel():
            return torch.from_numpy(_raised(flat.numpy()))
        wide = flat.double()
        squares: Tensor = vecdot(wide, wide)
        return squares

    def sum(self, factors: Tensor) -> Tensor:
        flat = self._flat()
        if flat.device.type != "cpu":
            return factors @ flat.double()
        return torch.from_numpy(_weighted(flat.numpy(), factors.numpy()))

    def _flat(self) -> Tensor:
        """Return a row for each record; a gradient may be a number."""
        return _wide(self.rows.detach()[:, None].flatten(1))


def _weighted(rows: Host, factors: Host) -> Float64:
    """Return the sum of rows times factors: of some columns at once, which the caches hold."""
    sums = np.empty(rows.shape[1])
    width = max(1, _BLOCK // max(1, len(rows)))
    for start in range(0, len(sums), width):
        some = slice(start, start + width)
        np.dot(factors, rows[:, some].astype(np.float64), out=sums[some])
    return sums


def _raised(rows: Host) -> Float64:
    """Return the squared norms of rows in float32, or up to five times `UNCERTAINTY` above."""
    with np.errstate(all="ignore"):
        # A norm may be measured this much too low: 1 / (1 - u)^2 < 1 + 3 u.
        squares = slice_norms([rows], [(1,)], fast=True)[0] ** 2 * (1.0 + 3.0 * UNCERTAINTY)
        # Each record by its own numbers: no other record may change how it is measured.
        odd = np.flatnonzero(~((squares > UNDERFLOW) & (squares < math.inf)))
        if len(odd):
            squares[odd] = slice_norms([rows[odd]], [(1,)])[0] ** 2
    return squares


@dataclass(frozen=True)
class Products(Part):
    """Gradients Σ b a^T: `a` of shape (records, positions, p), `b` of (records, positions, q)."""

    a: Tensor
    b: Tensor

    def squares(self) -> Tensor:
        if self.a.shape[1] == 1:  # a third of the time, and nothing that could cancel
            a, b = self.a.double(), self.b.double()
            return torch.mul(vecdot(a, a), vecdot(b, b)).squeeze(1)
        return _squares(self, self.a.shape[2] + self.b.shape[2])

    def grams(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = self.a.to(dtype), self.b.to(dtype)
        return a @ a.mT, b @ b.mT

    def sum(self, factors: Tensor) -> Tensor:
        weighted = (self.b * factors[:, None, None]).flatten(0, 1)
        return weighted.T @ self.a.flatten(0, 1).double()


@dataclass(frozen=True)
class Looked(Part):
    """Gradients of a table of `size` rows: `b` (records, positions, q) goes to the rows `at`."""

    at: Tensor
    b: Tensor
    size: int

    def squares(self) -> Tensor:
        return _squares(self, self.b.shape[2])

    def grams(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        b = self.b.to(dtype)
        return (self.at[:, :, None] == self.at[:, None, :]).to(dtype), b @ b.mT

    def sum(self, factors: Tensor) -> Tensor:
        weighted = (self.b * factors[:, None, None]).flatten(0, 1)
        table = weighted.new_zeros(self.size, weighted.shape[1])
        return table.index_add_(0, self.at.flatten(), weighted)


def _squares(part: Products | Looked, terms: int) -> Tensor:
    """Return squared norms from products of positions, in float32 where that is safe."""
    positions, device = part.b.shape[1], part.b.device
    lost = 1.1 * (terms + positions + 8) * 2.0**-24
    exact = device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    if part.b.dtype is not torch.float32 or not exact or lost * positions > _MOST_LOST:
        return _enlarged(*part.grams(torch.float64), _LOST)
    grams = part.grams(torch.float32)
    result = _enlarged(*grams, lost)
    longest = torch.stack([gram.diagonal(dim1=1, dim2=2).amax(1) for gram in grams])
    within = ((longest >= _SHORTEST) & (longest <= _LONGEST)).all(0)
    # What underflows in a product is below 2^-126.
    result += (terms * positions**2 * 2.0**-125) * (1.0 + longest.double().sum(0))
    # Each record by its own numbers: no other record may change how it is measured.
    odd = (~within).nonzero().squeeze(1)
    if len(odd):
        result[odd] = _enlarged(*part.only(odd).grams(torch.float64), _LOST)
    return result


def _enlarged(first: Tensor, second: Tensor, lost: float) -> Tensor:
    """Return the sums of products (records, positions, positions), and what may be lost in them."""
    products = first * second
    lengths = products.diagonal(dim1=1, dim2=2).double().sqrt().sum(1)
    return products.sum(2).double().sum(1).clamp(min=0.0) + lost * lengths.square()


def _products(layer: nn.Module, weight: str, a: Tensor, b: Tensor) -> Part:
    """Return what takes less for a weight: products of positions, or gradients."""
    pair, gradient, positions = _pair(a, b), a.shape[2] * b.shape[2], a.shape[1]
    # Of many positions, float64 products take longer than gradients in float32, if these are small.
    if _smaller(positions, gradient) and (positions < _MANY or gradient > _LARGE):
        return pair
    shape, free = (len(a), b.shape[2], a.shape[2]), None
    if a.device.type == "cpu" and pair.a.dtype is torch.float32 and math.prod(shape) <= _KEPT:
        memory = _MEMORY.setdefault(layer, Memory())
        (free,) = memory.like([weight], {weight: np.empty(shape, np.float32)})
    out = None if free is None else torch.from_numpy(free)
    return Rows(torch.bmm(pair.b.mT, pair.a, out=out))


def _pair(a: Tensor, b: Tensor) -> Products:
    dtype = torch.promote_types(_wide(a).dtype, _wide(b).dtype)
    return Products(a.to(dtype), b.to(dtype))


def _smaller(positions: int, gradient: int) -> bool:
    return positions == 1 or 2 * positions**2 < gradient


def _wide(x: Tensor) -> Tensor:
    """Return at least float32, in which products of half precision do not overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """Return a sum along axes in at least float32, whose rounding is measured and released too."""
    return x.sum(axes, dtype=torch.promote_types(x.dtype, torch.float32))


def _linear(layer: nn.Linear, x: Tensor, out: Tensor) -> Iterator[Part]:
    yield _products(layer, "weight", _positions(x), _positions(out))
    yield Rows(_sum(_positions(out), 1))


def _convolution(layer: Convolution, x: Tensor, out: Tensor) -> Iterator[Part]:
    dims = len(layer.kernel_size)
    # (records, images, channels, *places)
    x, out = (v.reshape(len(v), -1, *v.shape[-dims - 1 :]) for v in (x, out))
    places = out.shape[1] * math.prod(out.shape[3:])
    if layer.groups == 1 and _smaller(places, layer.weight.numel()):
        yield _pair(_patches(layer, x), out.flatten(3).mT.flatten(1, 2))
    else:
        shape, backward = layer.weight.shape, getattr(gradients, f"conv{dims}d_weight")
        settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
        yield Rows(vmap(lambda x, out: backward(x, shape, out, *settings))(_wide(x), _wide(out)))
    yield Rows(_sum(out.flatten(3), (1, 3)))


def _patches(layer: Convolution, x: Tensor) -> Tensor:
    """Return what the kernel sees at each place, of shape (records, places, numbers)."""
    dims = len(layer.kernel_size)
    x = functional.pad(x, [int(size) for size in layer.padding[::-1] for _ in range(2)])
    settings = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, step, dilation) in enumerate(settings, 3):
        x = x.unfold(axis, (size - 1) * dilation + 1, step)[..., ::dilation]
    # (records, images, channels, *places, *kernel)
    return x.movedim(2, 2 + dims).flatten(2 + dims).flatten(1, 1 + dims)


def _embedding(layer: nn.Embedding, x: Tensor, out: Tensor) -> Iterator[Part]:
    at, b = x.flatten(1), _wide(_positions(out))
    if layer.padding_idx is not None:
        b = b.masked_fill((at == layer.padding_idx)[:, :, None], 0.0)
    yield Looked(at, b, layer.num_embeddings)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, out: Tensor) -> Iterator[Part]:
    shape = layer.normalized_shape
    plain = functional.layer_norm(x, shape, eps=layer.eps)
    for rows in (plain * out, out):
        yield Rows(_sum(rows.reshape(len(x), -1, math.prod(shape)), 1))


def _group_norm(layer: nn.GroupNorm, x: Tensor, out: Tensor) -> Iterator[Part]:
    images = x.flatten(0, 1)
    plain = functional.group_norm(images, layer.num_groups, eps=layer.eps).view(x.shape)
    for rows in (plain * out, out):
        # (records, images, channels, places)
        yield Rows(_sum(rows.reshape(*x.shape[:3], -1), (1, 3)))


def _positions(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, x.shape[-1])


LAYERS: dict[type[nn.Module], Callable[..., Iterator[Part]]] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}
"""Known layers, by their exact types."""

RUN_HERE: dict[type[nn.Module], ModuleType] = {
    **dict.fromkeys(torch_recurrent.RECURRENT, torch_recurrent),
    nn.MultiheadAttention: torch_attention,
}
"""The files of layers with several weights, which run there, with one tap for all."""


def takes(layer: nn.Module) -> bool:
    """Return whether a layer is one of these, and does nothing but what they do."""
    if "forward" in vars(layer):
        return False
    if file := RUN_HERE.get(type(layer)):
        return bool(file.supported(layer))
    if type(layer) not in LAYERS or not {*layer._parameters} <= {"weight", "bias"}:
        return False
    if isinstance(layer, Convolution):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return not getattr(layer, "scale_grad_by_freq", False)


def tap_of(
    layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Data], out: Tensor
) -> torch.Size | None:
    """Return the shape of the tap of a layer that is called so; None if it cannot have one."""
    if file := RUN_HERE.get(type(layer)):
        shape: torch.Size | None = file.tap_shape(layer, args, kwargs)
        return shape
    return out.shape if len(args) == 1 and not kwargs else None


def parts(layer: nn.Module, x: Any, out: Tensor) -> dict[str, Part]:
    """Return the gradients of a layer's own parameters, by their names in it.

    Parameters
    ----------
    layer
        One that `takes`.
    x, out
        What went into it, and the gradient of its tap, with the records as first axis. Of one that
        runs here, `x` is what `run` has seen.
    """
    if file := RUN_HERE.get(type(layer)):
        all_parts = dict[str, Part]()
        for weight, bias, a, b in file.sides(layer, x, out):
            all_parts |= {weight: _products(layer, weight, a, b), bias: Rows(_sum(b, 1))}
    else:
        all_parts = dict(zip(("weight", "bias"), LAYERS[type(layer)](layer, x, out), strict=False))
    trained = {n for n, p in layer.named_parameters() if p.requires_grad}
    return {name: part for name, part in all_parts.items() if name in trained}
