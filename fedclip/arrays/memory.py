# SPDX-License-Identifier: Apache-2.0
"""Memory for new gradients that is there: a clipper's, used again when nobody holds it.

Where memory is new, the kernel maps and clears it page by page, which takes several times as long
as the multiplication. So a clipper keeps the memory of its last outputs, at most one gradient's
size. Clipping ViT-S then takes 14 ms of processor time, where the product alone takes 50 into new
memory (``python -m benchmarks --gradients vit``).

::

    owner  = bytes that the clipper keeps, and nobody else sees
    output = a view of the owner, made anew for each step

NumPy's views keep the owner alive, and the arrays of other frameworks keep the NumPy array alive
whose memory they share. So whatever holds an output or a part of it (views, transposes, ``p.grad``,
what autograd saved, variables, DLPack) holds a reference to the owner: if the clipper's is the only
one, the memory is free. Otherwise the output gets new memory, and the old belongs to those who hold
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedclip.arrays.base import HostView

# Bytes. Allocators have the memory of small gradients at hand, and that of small arrays.
_FROM = 1 << 20
_SMALL = 1 << 12

# TensorFlow and JAX share only memory that begins at a multiple of so many bytes.
_ALIGNED = 64

_Kept: TypeAlias = tuple[tuple[Any, ...], HostView]


def aligned(view: HostView) -> HostView:
    """Return new memory, laid out like an array without gaps, that all frameworks can share."""
    owner = np.empty(view.nbytes + _ALIGNED, np.uint8)
    start = -owner.__array_interface__["data"][0] % _ALIGNED
    return np.ndarray(view.shape, view.dtype, owner, start, view.strides)


def is_aligned(array: HostView) -> bool:
    """Return whether all frameworks can share the memory of an array."""
    place: int = array.__array_interface__["data"][0]
    return array.flags.c_contiguous and array.flags.writeable and place % _ALIGNED == 0


def _holders(kept: _Kept) -> int:
    return sys.getrefcount(kept[1].base)


_NOBODY = _holders(((), aligned(np.empty(1))))


class Memory:
    """The memory that a clipper keeps from step to step."""

    def __init__(self) -> None:
        self._sizes: Sequence[int] = ()
        self._kept: dict[Any, _Kept] = {}

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        """Return how to make an empty one: two clippers must not write to one memory."""
        return Memory, ()

    def like(self, places: Iterable[Any], views: Any) -> list[HostView | None]:
        """Return memory for some of the arrays, by place or name, laid out like them.

        None stands for memory that is not kept.
        """
        cached = self._kept
        outs: list[HostView | None] = []
        for i in places:
            view = views[i]
            if view.nbytes < _SMALL:
                outs.append(None)
                continue
            form = view.shape, view.dtype, view.strides
            known = cached.get(i)
            if known is None or known[0] != form or _holders(known) > _NOBODY:
                if in_memory_order(view) is None:
                    # Operations choose a layout of their own for what has gaps.
                    outs.append(None)
                    continue
                known = cached[i] = form, aligned(view)
            outs.append(known[1].view())
        return outs

    def serves(self, sizes: Sequence[int]) -> bool:
        """Whether memory is kept for outputs of these sizes; that of other sizes is released."""
        if self._kept and sizes != self._sizes:
            self._kept = {}
        self._sizes = sizes
        return sum(sizes) >= _FROM

    def release(self) -> None:
        """Keep nothing; what somebody holds lives as long as that."""
        self._sizes, self._kept = (), {}


def in_memory_order(array: HostView) -> HostView | None:
    """Return the array with its dimensions sorted as they lie in memory; None if it has gaps."""
    if array.flags.c_contiguous:
        return array
    ordered = array.transpose(sorted(range(array.ndim), key=lambda d: -array.strides[d]))
    return ordered if ordered.flags.c_contiguous else None
