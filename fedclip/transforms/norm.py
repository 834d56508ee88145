# SPDX-License-Identifier: Apache-2.0
r"""Limits on the norm of each group.

::

    n      = measure of each group                                    (fedclip.measures)
    limit  = rule(n, state)                                           (fedclip.rules)
    k      = limit / (n + eps)  where n + eps > limit, else 1         (fedclip.transforms.action)
    output = the array itself where k = 1, else  k (1 - margin) * array

On a device every array is multiplied: by 1 if it is not clipped.

Guarantees, for the L2 norm with ``eps = 0``
--------------------------------------------
- If the norm of a group, in float64 arithmetic, is at most the limit, the very same objects come
  back. Close to the limit, where the fast measurement could decide wrongly, the norm is measured
  again in float64.
- A clipped group has a norm of at most the limit, and not more than ``2 * margin`` below it.
- The inputs are never changed; dtype and shape are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedclip.arrays import LARGEST, NUMBER, NUMPY, Array, Backend, Form, Views
from fedclip.measures import (
    FEW,
    MEANS,
    UNCERTAINTY,
    Numbers,
    Order,
    degree,
    exact_norm,
    l2_norms,
    lowered,
    measure,
    measure_on_device,
)
from fedclip.rules import Rule, State
from fedclip.rules.history import History
from fedclip.scopes import Groups
from fedclip.transforms.action import (
    FLOOR,
    SCALE_DOWN,
    SUBNORMAL,
    Action,
    Decision,
    most_factor,
    multiplied,
    replaced,
    split,
)
from fedclip.transforms.base import Bools, Gradient, Outcome, Transform

CLOSE = 2 * UNCERTAINTY["float32"]
"""Relative distance from a limit within which a norm is measured in float64."""
# Between these targets, products neither become subnormal nor too large for the dtype.
_ENDS = {
    np.dtype("uint16" if name == "bfloat16" else name): (FLOOR[name], LARGEST[name])
    for name in FLOOR
}
_NOWHERE = (math.inf, 0.0)


@lru_cache(maxsize=64)
def _ends(form: Form) -> tuple[float, float]:
    lows, highs = zip(*(_ENDS.get(dtype, _NOWHERE) for dtype in form.dtypes), strict=True)
    return max(lows), min(highs)


@dataclass(frozen=True)
class NormClipping(Transform):
    """Rule × measure × action; the scope comes with the groups of each call.

    If it is `dry`, it measures and decides, but changes nothing.
    """

    rule: Rule
    ord: Order = 2
    action: Action = SCALE_DOWN
    dry: bool = False

    def init(self, groups: Groups) -> State:
        return self.rule.init(len(groups), NUMPY)

    # -- on the host --------------------------------------------------------------------------
    def measure(self, gradient: Gradient) -> Numbers:
        """Return the norm of each group."""
        arrays, views, backend = gradient.arrays, gradient.views, gradient.backend
        if self.ord == 2:
            return l2_norms(arrays, views, gradient.groups, backend)
        local = []
        for array, view in zip(arrays, views, strict=True):
            # A mean is over all elements of a sparse array, its zeros included.
            whole = backend.dense(array) if self.ord in MEANS else array
            local.append(backend.to_host(whole) if view is None or whole is not array else view)
        norms = [measure([local[i] for i in m], self.ord) for m in gradient.groups.members]
        return norms[0] if len(norms) == 1 else np.array(norms)

    def step(self, gradient: Gradient, measured: Numbers, state: State) -> Outcome:
        """Clip one gradient, given its norms, which are all finite."""
        norms, limits, after = self._judge(gradient, measured, state)
        decision = self.action.decide(norms, limits, NUMBER if type(norms) is float else NUMPY)
        moved, outputs = decision.moved, None
        if not self.dry and (moved if isinstance(moved, bool) else moved.any()):
            outputs = self._apply(gradient, decision)
        return Outcome(outputs, after, norms, limits, decision.over)

    def _judge(
        self, gradient: Gradient, norms: Numbers, state: State
    ) -> tuple[Numbers, Numbers, State]:
        """Return norms, limits and new state; norms close to a limit are measured again."""
        limits, after = self._ask(norms, state)
        if self.ord == 2 and not self.action.rescale:
            close = abs(norms - limits) <= CLOSE * limits
            if close if isinstance(close, bool) else close.any():
                refined = self._measure_again(
                    np.atleast_1d(close), gradient.views, gradient.groups, norms
                )
                if refined is not None:
                    norms = refined
                    limits, after = self._ask(norms, state)
        return norms, limits, after

    def _ask(self, norms: Numbers, state: State) -> tuple[Array, State]:
        """Return the rule's limits and new state."""
        return self.rule(norms, state, NUMPY if isinstance(norms, np.ndarray) else NUMBER)

    @staticmethod
    def _measure_again(
        close: Bools, views: Views, groups: Groups, norms: Numbers
    ) -> Numbers | None:
        """Return the norms, those close to their limit in float64; None if nothing changed."""
        refined = np.array(norms, ndmin=1)
        changed = False
        for group in np.flatnonzero(close):
            local = [views[i] for i in groups.members[group]]
            narrow = any(view is not None and view.itemsize < 8 for view in local)
            # Arrays of float64, and those on a device, have been measured in float64 already.
            if narrow and all(view is not None for view in local):
                refined[group] = exact_norm(local)  # type: ignore[arg-type]
                changed = True
        if not changed:
            return None
        return float(refined[0]) if len(groups) == 1 else refined

    def _apply(self, gradient: Gradient, decision: Decision) -> list[Array]:
        arrays, backend, views = gradient.arrays, gradient.backend, gradient.views
        power = 1.0 / degree(self.ord)
        _, moved, target, base = decision
        # Where all is far from the ends of the dtypes, a step that clips takes a third less, and a
        # third less again for one group of one dtype ("20 tensors, 2.7k" of `make bench`).
        if not self._is_far(views, target):
            target = self._within(gradient, decision)
        form = views.form
        if len(gradient.groups) == 1 and not views.remote and len(form.dtypes) == 1:
            factor, exact = split(float(target), float(base), power), self._is_exact(form.count)
            return multiplied(arrays, factor, exact, backend, gradient.host(range(len(arrays))))
        factors: dict[int, tuple[Any, tuple[float, ...], bool]] = {}
        columns = (np.atleast_1d(column).tolist() for column in (moved, target, base))
        for members, chosen, top, bottom in zip(gradient.groups.members, *columns, strict=True):
            if chosen:
                factor = split(top, bottom, power)
                count = sum([form.pairs[i][1] for i in members])
                exact = not views.remote and self._is_exact(count)
                factors.update((i, (arrays[i].dtype, factor, exact)) for i in members)
        return replaced(
            arrays,
            factors,
            lambda some, places, key: multiplied(some, *key[1:], backend, gradient.host(places)),
        )

    def _is_exact(self, count: int) -> bool:
        """Whether a group of so many elements, in host memory, is measured in float64."""
        return self.ord != 2 or count < FEW

    def _is_far(self, views: Views, target: Any) -> bool:
        """Whether all targets are far from the smallest and largest numbers of the dtypes."""
        raises = self.action.raises
        if views.remote or (raises and self.ord in MEANS):
            return False
        low, high = _ends(views.form)
        least, most = (target, target) if type(target) is float else (target.min(), target.max())
        return bool(low <= least and (most <= high or not raises))

    def _within(self, gradient: Gradient, decision: Decision) -> Numbers:
        """Return the targets, adjusted so that the dtypes can represent the products."""
        columns = [np.atleast_1d(column).tolist() for column in decision[1:]]
        targets = []
        for members, moved, target, base in zip(gradient.groups.members, *columns, strict=True):
            targets.append(self._hold(gradient, members, target, base) if moved else target)
        return targets[0] if len(targets) == 1 else np.array(targets)

    def _hold(
        self, gradient: Gradient, members: Sequence[int], target: float, base: float
    ) -> float:
        # What is empty, as a sparse array without rows is, rounds nothing.
        pairs = [(gradient.arrays[i], gradient.views[i]) for i in members]
        pairs = [(array, view) for array, view in pairs if view is None or view.size]
        dtypes = {gradient.backend.dtype(array) for array, _ in pairs}
        norm = base - self.action.eps
        if target < max(FLOOR[dtype] for dtype in dtypes) and target:
            # With eps, the norm reached is less than the target.
            reached = target * (norm / base)
            error = max(SUBNORMAL[dtype] for dtype in dtypes)
            # A sparse array may not know its shape, and only what it stores is rounded.
            size = sum(math.prod(a.shape) if view is None else view.size for a, view in pairs)
            low = float(lowered(self.ord, reached, size, error, NUMBER))
            target = target * (low / reached) if reached else 0.0
        if self.action.raises and target > norm:
            largest = min(LARGEST[dtype] for dtype in dtypes)
            local = gradient.local()
            peak = measure([local[i] for i in members], "inf")
            most = largest / peak if degree(self.ord) == 1 else (largest / peak) * (largest / peak)
            if target / base > most:
                target = base * most
        return target

    # -- on a device, or in compiled code -----------------------------------------------------
    @property
    def runs_on_parts(self) -> bool:
        return True

    def device_step(self, gradient: Gradient, state: State, on_nonfinite: str) -> Outcome:
        """Clip one gradient by norms, in the framework's own operations."""
        norms = self.measure_on_device(gradient)
        return self.clip_measured(gradient, norms, state, on_nonfinite)

    def measure_on_device(self, gradient: Gradient) -> Array:
        """Return the norm of each group."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        if self.ord == 2:
            return xp.group_norms(arrays, groups.members)
        if xp.partial:
            return self._measure_parts(gradient)
        dense = [*map(xp.dense, arrays)]
        parts = ([dense[i] for i in members] for members in groups.members)
        return xp.stack([measure_on_device(some, self.ord, xp) for some in parts])

    def _measure_parts(self, gradient: Gradient) -> Array:
        """Return the norm of each group, of whose arrays each process holds a part."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        sizes = [sum(math.prod(arrays[i].shape) for i in some) for some in groups.members]
        if self.ord in ("std", "var"):
            unit, squares = xp.joined_squares(arrays, groups.members)
            freedom = xp.asarray([max(n - 1.0, 1.0) for n in sizes], like=unit)
            found = unit * xp.sqrt(squares / freedom)
            return found * found if self.ord == "var" else found
        power = {"inf": math.inf, "mad": 1.0, "rms": 2.0}.get(str(self.ord)) or float(self.ord)
        found = self._joined_norms(gradient, power, groups.members)
        if self.ord not in MEANS:
            return found
        return found / xp.asarray([max(n, 1) ** (1 / power) for n in sizes], like=found)

    @staticmethod
    def _joined_norms(gradient: Gradient, power: float, members: Sequence[Sequence[int]]) -> Array:
        """Return the p-norm over all processes of each of these groups."""
        arrays, xp = gradient.arrays, gradient.backend
        order: Order = "inf" if math.isinf(power) else power
        norms = [measure_on_device([part], order, xp) for part in xp.parts(arrays)]
        return xp.joined_norms(arrays, xp.stack(norms), members, power)

    def clip_measured(
        self, gradient: Gradient, norms: Array, state: State, on_nonfinite: str
    ) -> Outcome:
        """Clip one gradient with these norms."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.backend
        fine = norms < math.inf
        finite = gradient.all_fine(fine)
        # Nothing is learnt from a step that is not finite, and none of its groups is over a limit.
        safe = xp.sound(norms, fine) if len(groups) == 1 else xp.where(finite, norms, 0.0)
        over = None
        if isinstance(self.rule, History):
            judged, after = self.rule.step(safe, state, xp, finite)
            limits, over = judged.limits, judged.over
        else:
            limits, after = self.rule(safe, state, xp)
            after = type(state)(*xp.choose([finite] * len(state), after, state))
        decision = self.action.decide(safe, limits, xp, over)
        outputs = list(arrays)
        if self.dry:
            return Outcome(outputs, after, norms, limits, decision.over, finite)
        names = [xp.dtype(array) for array in arrays]
        # Other dtypes need to know only whether there are few.
        most = math.inf if {"float16", "float64"} & {*names} else FEW
        sizes = [_size([arrays[i] for i in members], most, xp) for members in groups.members]
        narrow = {
            i
            for i, array in enumerate(arrays)
            if names[i] == "float16" and not _is_empty(xp.size(array))
        }
        halves = [not narrow.isdisjoint(members) for members in groups.members]
        half = xp.asarray(halves, like=safe) > 0 if len({*halves}) > 1 else halves[0]
        keep = finite if on_nonfinite == "skip" else None
        of_dtype: dict[str, Array] = {}
        for group, members in enumerate(groups.members):
            for dtype in {names[i] for i in members}:
                if dtype not in of_dtype:
                    k = decision.factors(safe, sizes, dtype, xp, self.ord, half)
                    if self.action.raises:
                        k = xp.minimum(k, self._most(gradient, names, dtype))
                    if on_nonfinite == "propagate":
                        k = xp.where(fine, k, math.nan)
                    of_dtype[dtype] = k
                chosen = [i for i in members if names[i] == dtype]
                k = xp.of_group(of_dtype[dtype], group)
                products = xp.rescale([arrays[i] for i in chosen], k, keep)
                for i, output in zip(chosen, products, strict=True):
                    outputs[i] = output
        return Outcome(outputs, after, norms, limits, decision.over, finite)

    def _most(self, gradient: Gradient, names: Sequence[str], dtype: str) -> Array:
        """Return for each group the factor that brings its largest element to the dtype's end."""
        arrays, xp = gradient.arrays, gradient.backend
        members = [[i for i in m if names[i] == dtype] or m[:1] for m in gradient.groups.members]
        if xp.partial:
            return most_factor(self._joined_norms(gradient, math.inf, members), dtype, xp)
        peaks = [measure_on_device([xp.dense(arrays[i]) for i in m], "inf", xp) for m in members]
        return most_factor(xp.stack(peaks), dtype, xp)


def _is_empty(size: Any) -> bool:
    # What is empty rounds nothing. A traced size may be anything.
    return type(size) is int and not size


def _size(arrays: Sequence[Array], most: float, xp: Backend) -> Any:
    """Return the number of elements, counted up to `most`; a traced one in some graphs."""
    size: Any = 0
    for array in arrays:
        size = size + xp.size(array)
        if isinstance(size, int) and size >= most:
            break
    return size
