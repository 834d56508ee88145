# SPDX-License-Identifier: Apache-2.0
"""Clips a client's round update, and averages the updates of all, as mappings of arrays.

::

    client   zeros, if it is not finite or far out of range; else each group clipped to its limit
    server   replies that no honest client can have sent count as zeros; average, equal weights
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedclip.arrays import Array, backend_of
from fedclip.errors import FedclipWarning, NonFiniteError
from fedclip.federation.update.coupling import ClientRound
from fedclip.measures import Float64, Order, measure
from fedclip.measures.l2 import narrowed
from fedclip.rules import NoState
from fedclip.rules.constant import Constant
from fedclip.scopes import Groups, Scope, resolve
from fedclip.transforms import Gradient, NormClipping

Arrays = Mapping[str, Array]

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes, in the order of names."""

# A clipped update is below its limit by more than float32 rounding adds to the norm.
_SLACK = 1.0 + 1e-5
# Under secure aggregation the sum has rounding errors, too: look for gross lies only.
_SUM_SLACK = 2.0


class Clipped(NamedTuple):
    """The update to share, and why it is zeros, if it is."""

    arrays: Arrays
    zeroed: str = ""


class UpdateClipping:
    """The limits of an update, group by group; the parameters are those of `clipped-averaging`."""

    def __init__(
        self,
        scope: Scope,
        exclude: Sequence[str] | None,
        *,
        zeroing_norm: float | None,
        zeroing_ord: Order,
        zeroing_factor: float | None,
        on_nonfinite: str,
    ) -> None:
        self.scope, self.exclude = scope, exclude
        self.zeroing_norm, self.zeroing_ord = zeroing_norm, zeroing_ord
        self.zeroing_factor = zeroing_factor
        self.on_nonfinite = on_nonfinite

    def limits(self, groups: Groups, bound: float, whole: bool) -> tuple[float, ...]:
        """Return the limit of each group.

        A bound C from the server is for the whole update: each of k groups gets C / sqrt(k).
        """
        if whole:
            return (bound / math.sqrt(max(1, len(groups))),) * len(groups)
        table = self.scope if isinstance(self.scope, Mapping) else {}
        return tuple(table.get(label, bound) for label in groups.labels)

    # -- on a client --------------------------------------------------------------------------
    def prepare(self, arrays: Arrays, round_: ClientRound, whole: bool) -> Clipped:
        """Return the update to share, and note in the round what was done to it.

        Raises
        ------
        NonFiniteError
            If the update is not finite and ``on_nonfinite="raise"``; the message names the tensors.
        TypeError
            If a tensor is of a type that can not be clipped.
        """
        gradient = self._gradient(arrays)
        limits = self.limits(gradient.groups, round_.bound, whole)
        outcome = gradient.outcome(NormClipping(Constant(limits)), NoState())
        if outcome is None:
            return Clipped(zeros(arrays), self._not_finite(gradient))
        round_.clipped = bool(np.any(outcome.clipped))
        # The factor by which the bound would have to grow to leave the update alone.
        pairs = zip(np.atleast_1d(outcome.norms).tolist(), limits, strict=True)
        need = max((n / c for n, c in pairs), default=0.0)
        round_.norm = need * round_.bound
        if far := self._far(arrays, round_):
            return Clipped(zeros(arrays), far)
        outputs = outcome.outputs
        return Clipped(arrays if outputs is None else gradient.result(arrays, outputs, {}))

    def _gradient(self, arrays: Arrays) -> Gradient:
        groups = resolve(self.scope, self.exclude, tuple(arrays))
        return Gradient.of("clipped-averaging", arrays, groups)

    def _not_finite(self, gradient: Gradient) -> str:
        names = gradient.names
        named = ", ".join(repr(names[i]) for i in gradient.nonfinite())
        text = f"NaN or infinity in {named}" if named else "a norm beyond float64"
        if self.on_nonfinite == "raise":
            raise NonFiniteError(f"clipped-averaging: {text}")
        warnings.warn(
            f"clipped-averaging: {text}; zeros are shared for the update",
            FedclipWarning,
            # Point to the caller of `prepare_for_sharing`.
            stacklevel=4,
        )
        return text

    def _far(self, arrays: Arrays, round_: ClientRound) -> str:
        """Return a sentence if a finite update is far out of range, else ""."""
        if self.zeroing_norm is not None:
            norm = measure(_views(arrays), self.zeroing_ord)
            if norm > self.zeroing_norm:
                return f"its norm is {norm:.4g}, above zeroing_norm={self.zeroing_norm!r}"
        if self.zeroing_factor is not None and round_.norm is not None:
            times = round_.norm / round_.bound
            if times > self.zeroing_factor:
                return f"it is {times:.4g} times the bound, above {self.zeroing_factor!r}"
        return ""

    # -- on the server ------------------------------------------------------------------------
    def excess(self, arrays: Arrays, bound: float, whole: bool, clients: int = 1) -> str:
        """Return by how much an update, or a sum of several clients', is beyond its limit.

        `whole` says whether the bound is for the whole update.
        """
        for name, array in arrays.items():
            dtype = backend_of(array).dtype(array)
            if not dtype.startswith(("float", "bfloat", "int", "uint")):
                return f"its tensor {name!r:.60} is of {dtype}"
        gradient = self._gradient(arrays)
        groups = gradient.groups
        limits = self.limits(groups, bound, whole)
        norms = gradient.measured(NormClipping(Constant(limits)))
        if norms is None:
            return "it holds NaN or infinity"
        slack = _SLACK if clients == 1 else _SUM_SLACK
        columns = groups.labels, np.atleast_1d(norms).tolist(), limits
        for label, norm, limit in zip(*columns, strict=True):
            if norm > limit * clients * slack:
                return f"its norm of {label!r} is {norm:.4g}, beyond the limit of {limit:.4g}"
        return ""


def averaged(updates: Sequence[Arrays], clients: int) -> dict[str, Float64]:
    """Return the sum of updates, tensor by tensor, divided by the number of clients.

    In float64: a sum in the dtype of the updates is rounded at each client, so that with noise
    one client could move it by more than the bound, and without noise many small updates in half
    precision would add up to too little.
    """
    means = {}
    for name, first in updates[0].items():
        total = np.zeros(tuple(first.shape))
        for update in updates:
            backend = backend_of(update[name])
            total += backend.to_host(backend.dense(update[name]))
        means[name] = np.asarray(total / clients)
    return means


def rounded(means: Mapping[str, Float64], like: Arrays) -> dict[str, Array]:
    """Return averages as arrays like those of an update, but dense."""
    return {
        name: narrowed(mean, backend_of(like[name]).dense(like[name]))
        for name, mean in means.items()
    }


def zeros(arrays: Arrays) -> dict[str, Array]:
    """Return zeros of the same shapes, whatever the arrays hold."""
    return {name: backend_of(array).zeros_like(array) for name, array in arrays.items()}


def peaks(arrays: Arrays, limit: float) -> dict[str, float]:
    """Return the tensors that hold a value beyond ±limit, or NaN, and their largest values."""
    found = {}
    for name, array in arrays.items():
        peak = measure(_views({name: array}), "inf")
        if not peak <= limit:
            found[name] = peak
    return found


def signature(arrays: Arrays) -> Signature:
    """Return names and shapes.

    Dtypes are none of it: if one client's dtype decided about the updates of others, that client
    could move the average by more than its share.
    """
    return tuple(sorted((name, tuple(array.shape)) for name, array in arrays.items()))


def _views(arrays: Arrays) -> list[Any]:
    views = []
    for array in arrays.values():
        backend = backend_of(array)
        (view,) = backend.host([array])
        views.append(backend.to_host(array) if view is None else view)
    return views
