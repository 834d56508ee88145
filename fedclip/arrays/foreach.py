# SPDX-License-Identifier: Apache-2.0
"""Many tensors of PyTorch on which an operation works as on one: on a device it is one launch.

::

    x = Foreach([a, b])
    abs(x), x * 2.0, torch.clamp(x, max=1.0)        torch._foreach_abs([a, b]), ...
    x < 0.0                                         one for each: torch has none for many

Numbers, one for each tensor, are `Foreach` too: one tensor, until they meet others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from fedclip.arrays.base import Call


def _method(function: Call) -> Call:
    return lambda self, *others: _apply(function, self, *others)


def _reflected(function: Call) -> Call:
    return lambda self, other: _apply(function, other, self)


class Foreach:
    """Tensors of one dtype and device, as one; `numbers`, if they are, as one tensor."""

    def __init__(
        self, tensors: Sequence[torch.Tensor] | None, numbers: torch.Tensor | None = None
    ) -> None:
        if tensors is not None and not any(t.dim() for t in tensors):
            numbers = torch.stack(list(tensors))
        self._tensors, self.numbers = tensors, numbers
        first: Any = numbers if tensors is None else tensors[0]
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors one by one."""
        if self._tensors is None:
            self._tensors = torch.unbind(self.numbers)  # type: ignore[arg-type]
        return list(self._tensors)

    @property
    def shape(self) -> tuple[torch.Size, ...]:
        """The shapes of all."""
        return tuple(t.shape for t in self.tensors)

    def to(self, dtype: torch.dtype) -> Foreach:
        """Return them in another dtype."""
        if dtype == self.dtype:
            return self
        if self.numbers is None and torch.promote_types(dtype, self.dtype) == dtype:
            # Torch has no cast for many; a product is of the wider dtype.
            ones = self.tensors[0].new_ones(1, dtype=dtype)
            return Foreach(torch._foreach_mul(self.tensors, [ones] * len(self.tensors)))
        return _apply(torch.Tensor.to, self, dtype)

    def amax(self) -> Foreach:
        """Return the largest element of each."""
        return self if self.numbers is not None else Foreach(torch._foreach_max(self.tensors))

    def norm(self, ord: float) -> Foreach:
        """Return the norm of each."""
        is_number = self.numbers is not None
        return abs(self) if is_number else Foreach(torch._foreach_norm(self.tensors, ord))

    def masked_fill(self, condition: Foreach, number: float) -> Foreach:
        """Return them with a number where the condition holds."""
        return _apply(torch.masked_fill, self, condition, number)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Foreach:
        return _apply(function, *args, **(kwargs or {}))

    __abs__, __neg__ = _method(torch.abs), _method(torch.neg)
    __add__ = __radd__ = _method(torch.add)
    __mul__ = __rmul__ = _method(torch.mul)
    __sub__, __rsub__ = _method(torch.sub), _reflected(operator.sub)
    __truediv__, __rtruediv__ = _method(torch.div), _reflected(operator.truediv)
    __pow__, __rpow__ = _method(torch.pow), _reflected(operator.pow)
    __lt__, __gt__ = _method(torch.lt), _method(torch.gt)
    __eq__ = _method(torch.eq)
    __hash__ = None  # type: ignore[assignment]


def _clamp(x: list[torch.Tensor], min: Any = None, max: Any = None) -> Sequence[torch.Tensor]:
    low: Any = x if min is None else torch._foreach_clamp_min(x, min)
    return list(low if max is None else torch._foreach_clamp_max(low, max))


_SINGLE: Any = (torch.abs, torch.neg, torch.add, torch.sub, torch.mul, torch.div, torch.pow)
_FORMS: dict[Any, Call] = {
    single: getattr(torch, f"_foreach_{single.__name__}") for single in (*_SINGLE, torch.trunc)
}
_FORMS[torch.clamp] = _clamp
"""Operations that torch has for many tensors at once."""


def _apply(function: Call, *args: Any, **kwargs: Any) -> Foreach:
    """Return a function of each: in one operation on numbers, or if torch has one for many."""
    many = [x for x in (*args, *kwargs.values()) if isinstance(x, Foreach)]
    if all(x.numbers is not None for x in many):
        return Foreach(None, _called(function, "numbers", args, kwargs))
    if function in _FORMS:
        return Foreach(_called(_FORMS[function], "tensors", args, kwargs))
    rows = zip(*(x.tensors if isinstance(x, Foreach) else repeat(x) for x in args), strict=False)
    return Foreach([function(*row, **kwargs) for row in rows])


def _called(function: Call, kind: str, args: Any, kwargs: Any) -> Any:
    """Call a function on the numbers, or the tensors, of all that are many."""

    def given(x: Any) -> Any:
        return getattr(x, kind) if isinstance(x, Foreach) else x

    return function(*map(given, args), **{name: given(x) for name, x in kwargs.items()})
