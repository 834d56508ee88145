# SPDX-License-Identifier: Apache-2.0
"""The limits of an update, group by group, and whether a client's reply is within them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedclip.arrays import Float64, backend_of, on_host
from fedclip.core.measures import Order
from fedclip.core.scopes import Groups, Scope, in_table, resolve
from fedclip.rules import NoState
from fedclip.rules.constant import Constant
from fedclip.transforms import NormClipping, NotFiniteError, prepare, take_step
from fedclip.updates.averaging import finite_values
from fedclip.updates.protocol import COUNTS, Arrays, Reply, is_one_of

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes, in the order of names."""

OTHER_TENSORS = "its tensors are not the model's"

# A clipped update is below its limit by more than float32 rounding adds to the norm.
_SLACK = 1.0 + 1e-5


def signature(arrays: Arrays) -> Signature:
    """Return names and shapes.

    Dtypes are none of it: if one client's dtype decided about the updates of others, that client
    could move the average by more than its share.
    """
    return tuple(sorted((name, tuple(array.shape)) for name, array in arrays.items()))


def alike(arrays: Arrays, like: Arrays) -> bool:
    """Whether names and shapes are the same; False for what has none."""
    try:
        return signature(arrays) == signature(like)
    except Exception:  # a client may have sent anything
        return False


def check_whole(scope: Scope) -> None:
    """Refuse a table that gives some tensors no part of a bound of the whole update."""
    if isinstance(scope, Mapping) and "*" not in scope:
        raise ValueError(
            f"the table scope={dict(scope)!r} does not say what the other tensors may have: give "
            'max_norm, which is theirs; or, for a bound from update-clip-server, "*" = a number in '
            "the table, in proportion to which the bound is split"
        )


@dataclass(frozen=True)
class Limits:
    """Limits for the groups of a scope; `called` is what messages call this kind of clipping.

    Attributes
    ----------
    noise
        Standard deviation of the noise that each client adds to each value, in bounds.
    """

    scope: Scope
    exclude: Sequence[str] | None
    called: str
    noise: float = 0.0

    def of(self, groups: Groups, bound: float, whole: bool) -> tuple[float, ...]:
        """Return the limit of each group.

        A bound C of the `whole` update gives each of k groups C / sqrt(k); a group that has t in
        the table, ``C * t / sqrt(sum of t^2)``. Together they are C, which noise is scaled to.
        """
        table = self.scope if isinstance(self.scope, Mapping) else {}
        if not whole:
            return tuple(in_table(table, label, bound) for label in groups.labels)
        parts = [in_table(table, label, 0.0) if table else 1.0 for label in groups.labels]
        length = math.sqrt(sum(part * part for part in parts))
        return tuple(bound / (length / part) if part else 0.0 for part in parts)

    def groups(self, arrays: Arrays) -> Groups:
        """Return the groups of an update."""
        return resolve(self.scope, self.exclude, tuple(arrays))

    def fault(self, reply: Reply, like: Arrays, bound: float, whole: bool = True) -> str:
        """Return why no honest client can have sent a reply; "" if one can.

        It must have the names and shapes of `like`, and be within its bound, unless it is a sum of
        several clients: `projected` brings that within theirs. What clients send may be anything.
        """
        if reply.fault:
            return reply.fault
        if reply.clients == 1 and not is_one_of(COUNTS, (reply.clipped, reply.zeroed)):
            return "its counts are not of one client"
        if not alike(reply.arrays, like):
            return OTHER_TENSORS
        try:
            return self.excess(reply.arrays, bound, whole, reply.clients)
        except Exception as exc:
            return f"it can not be measured ({exc!r:.200})"

    def excess(self, arrays: Arrays, bound: float, whole: bool = True, clients: int = 1) -> str:
        """Return by how much an update is beyond its limit; of a sum, only what its dtypes are."""
        for name, array in arrays.items():
            dtype = backend_of(array).dtype(array)
            if not dtype.startswith(("float", "bfloat", "int", "uint")):
                return f"its tensor {name!r:.60} is of {dtype}"
        if clients > 1:
            return ""
        groups = self.groups(arrays)
        norms = norms_of(arrays, groups, self.called)
        if norms is None:
            return "it holds NaN or infinity"
        columns = groups.labels, norms, self.of(groups, bound, whole)
        noise = self._noise(arrays, bound, 1)
        for label, norm, limit in zip(*columns, strict=True):
            if norm > limit * _SLACK + noise:
                return f"its norm of {label!r} is {norm:.4g}, beyond the limit of {limit:.4g}"
        return ""

    def _noise(self, arrays: Arrays, bound: float, clients: int) -> float:
        """Return the length that the noise of clients has at most, but for once in 10^31 times."""
        size = sum(math.prod(array.shape) for array in arrays.values())
        return self.noise * bound * math.sqrt(clients) * (math.sqrt(size) + 12)

    def projected(
        self, arrays: Arrays, bound: float, whole: bool, clients: int, mass: float
    ) -> dict[str, Float64]:
        """Return the nearest sum within `mass` bounds, group by group, in float64.

        No two sums are further apart after it than before, whatever some of the clients sent. To
        refuse a sum would move it by the updates of all clients where that of one is beyond.
        """
        sums = {name: finite_values(array) for name, array in arrays.items()}
        groups = self.groups(sums)
        noise = self._noise(arrays, bound, clients)
        limits = tuple(limit * mass + noise for limit in self.of(groups, bound, whole))
        transform = NormClipping(Constant(limits))
        gradient = prepare(self.called, sums, groups, transform)
        outcome = take_step(transform, gradient, NoState(), "raise")
        return dict(gradient.result(sums, outcome.outputs))


def norms_of(arrays: Arrays, groups: Groups, called: str, ord: Order = 2) -> list[float] | None:
    """Return the norms of the groups of an update; None if an array holds NaN or infinity."""
    transform = NormClipping(Constant((math.inf,)), ord, dry=True)
    gradient = prepare(called, arrays, groups, transform)
    try:
        norms = take_step(transform, gradient, NoState(), "raise").norms
    except NotFiniteError:
        return None
    return [float(norm) for norm in on_host(norms)]
