# SPDX-License-Identifier: Apache-2.0
"""`value-clip`: a fixed limit on every element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedclip.clippers import own
from fedclip.clippers.families import SCOPE_TABLE
from fedclip.transforms.value import ValueClipping


class ValueClip(own.Clipper):
    """Clip every element to a fixed range, symmetric or not.

    ::

        Step(grads):
            for each element x:
                x = min(max_value, max(min_value, x))

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    No element of the output is outside the range. If nothing is clipped, the same object comes
    back. It is a projection: clipping twice equals clipping once, and no two gradients move apart.
    For d elements the L2 norm is at most ``max_value * sqrt(d)``; a range with one open end gives
    no bound.

    Repeated rows of an IndexedSlices are added up before clipping. In records, the norm is the
    largest absolute element. The state has only records.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = ValueClip(max_value=1.0)
    >>> clip.run(NumpyVector({"w": np.array([-3.0, 0.5])})).coefs["w"]
    array([-1. ,  0.5])
    """

    name = "value-clip"
    guarantee = own.guarantees.box

    max_value: float = own.parameter(default=1.0, kw_only=False)
    """Largest element, in units of the gradient, > 0. With `min_value` it may be any number, or
    infinity for no upper end."""
    min_value: float | None = own.parameter(default=None)
    """Smallest element, at most `max_value`. None: ``-max_value``; minus infinity: no lower end."""
    scope = SCOPE_TABLE
    """Which tensors share a record. A table ``{"head.*" = 0.1}`` sets symmetric limits of groups;
    the others keep `max_value` and `min_value`."""

    def build(self) -> own.Transform:
        if self.min_value is None:
            self.max_value = own.positive(max_value=self.max_value)
        else:
            self.min_value = _end(-math.inf, min_value=self.min_value)
            self.max_value = _end(math.inf, max_value=self.max_value)
            if math.isinf(self.min_value) and math.isinf(self.max_value):
                raise ValueError("min_value=-inf, max_value=inf limits nothing: make one finite")
            if self.min_value > self.max_value:
                got = f"{self.min_value!r} > {self.max_value!r}"
                raise ValueError(f"min_value must be <= max_value, got {got}")
        return self._box(1, {})

    def _box(self, groups: int, limits: Mapping[int, float]) -> ValueClipping:
        low = -self.max_value if self.min_value is None else self.min_value
        return ValueClipping(
            tuple(-limits[g] if g in limits else low for g in range(groups)),
            tuple(limits.get(g, self.max_value) for g in range(groups)),
        )

    def transform(self, groups: own.Groups) -> own.Transform:
        table = self.scope if isinstance(self.scope, Mapping) else {}
        limits = {g: table[label] for g, label in enumerate(groups.labels) if label in table}
        return self._box(len(groups), limits)


def _end(open_end: float, **values: Any) -> float:
    """Return the one keyword value as a finite float, or the infinity at its own end."""
    if open_end in values.values():
        return open_end
    return own.number(f"a finite number, or {open_end}", **values)
