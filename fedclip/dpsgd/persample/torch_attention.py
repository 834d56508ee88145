# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention of a sequence to itself, with a tap on both of its linear layers.

::

    q, k, v    = W_in x + b_in + tap_in
    output     = W_out attend(q, k, v) + b_out + tap_out

The gradients of weights and biases follow from x, what was attended to, and the gradients of the
taps, as for any linear layer. Masks, and weights that are asked for, are left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclip.dpsgd.persample.base import Data
from fedclip.dpsgd.persample.torch_recurrent import outside_vmap


def supported(layer: nn.MultiheadAttention) -> bool:
    """Return whether the layer has one matrix for queries, keys and values, and nothing added."""
    names = {name for name, _ in layer.named_parameters()}
    known = {f"{own}{kind}" for own in ("in_proj_", "out_proj.") for kind in ("weight", "bias")}
    return names <= known and "in_proj_weight" in names and not layer.add_zero_attn


def tap_shape(
    layer: nn.MultiheadAttention, args: tuple[Tensor, ...], kwargs: dict[str, Data]
) -> torch.Size | None:
    """Return the shape of the tap for one record; None for anything but a sequence to itself."""
    if not 1 <= len(args) <= 3:
        return None
    query = args[0]
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    alone = all(given.pop(name, None) is query for name in ("query", "key", "value"))
    # That attention is causal says nothing without a mask, and the layer refuses it.
    if not alone or given.pop("need_weights", True) or given.pop("is_causal", False):
        return None
    given.pop("average_attn_weights", None)
    if any(mask is not None for mask in given.values()):
        return None
    return torch.Size((*query.shape[:-1], 4 * layer.embed_dim))


def run(
    layer: nn.MultiheadAttention, tap: Tensor, x: Tensor
) -> tuple[tuple[Tensor, None], tuple[Tensor, Tensor]]:
    """Return what the layer puts out for a record, and what its two linear layers take in."""
    output, attended = outside_vmap(_attend, layer, tap, x)
    return (output, None), (x, attended)


def _attend(layer: nn.MultiheadAttention, tap: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    # Its gradient is one operation; that of `tensor_split` fills up each part with zeros.
    tap_in, tap_out = tap.split_with_sizes([3 * layer.embed_dim, layer.embed_dim], -1)
    packed = functional.linear(x, weights["in_proj_weight"], weights.get("in_proj_bias")) + tap_in
    heads = packed.reshape(*packed.shape[:-1], 3, layer.num_heads, layer.head_dim)
    # (records, ..., positions, 3, heads, numbers), where positions may come before sequences.
    swapped = x.dim() == 4 and not layer.batch_first
    heads = heads.transpose(1, 2) if swapped else heads
    # One axis for all but these: the kernel takes four.
    q, k, v = (part.transpose(-3, -2).flatten(0, -4) for part in heads.unbind(-3))
    dropout = layer.dropout if layer.training else 0.0
    attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    attended = attended.transpose(1, 2).reshape(heads.shape[:-3] + x.shape[-1:])
    attended = attended.transpose(1, 2) if swapped else attended
    output = functional.linear(attended, weights["out_proj.weight"], weights.get("out_proj.bias"))
    return output + tap_out, attended


def made_up(layer: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeros in the shapes of what the linear layers take in, for one record."""
    return torch.zeros_like(x[None]), torch.zeros_like(x[None])


def sides(
    layer: nn.MultiheadAttention, seen: tuple[Tensor, Tensor], taps: Tensor
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield names of weight and bias, what the weight multiplied, and the product's gradient."""
    gradients = taps.tensor_split([3 * layer.embed_dim], -1)
    for own, a, b in zip(("in_proj_", "out_proj."), seen, gradients, strict=True):
        yield f"{own}weight", f"{own}bias", a.flatten(1, -2), b.flatten(1, -2)
