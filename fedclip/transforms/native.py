# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient that stays on its device, or is only traced: no Python branch on a value.

The same rules, on the framework's own arrays. Nothing here waits for a device, so it runs on
CUDA without a synchronisation, under ``jax.jit``, in a ``tf.function`` and under
``torch.compile``; the price is that every array is multiplied, by 1 where it is not clipped.

::

    n      = norm of each group, in the best float the framework has
    finite = all n are finite
    limit, state' = rule(n, state);     state' only where finite
    k      = limit / (n + eps) (1 - margin)  where n + eps > limit, else 1
    output = k * array                       (0 or NaN where not finite, as the policy says)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fedclip.arrays import Arena, Arithmetic, Array, Backend
from fedclip.rules import NoState
from fedclip.scopes import Groups
from fedclip.transforms.norm import MARGIN, NormClipping
from fedclip.transforms.slice import SliceClipping
from fedclip.transforms.value import ValueClipping

if TYPE_CHECKING:
    from fedclip.modules.agc import AGC

__all__ = ["NativeStep", "is_native", "native_step", "weight_step"]


class NativeStep(NamedTuple):
    """What one step did; arrays of the framework, one number for each group."""

    outputs: list[Array]
    state: Any
    norms: Array
    limits: Array
    clipped: Array
    finite: Array


def is_native(transform: Any) -> bool:
    """Return whether a transform has a form for devices and compiled code."""
    by_norm = isinstance(transform, (NormClipping, SliceClipping)) and transform.ord == 2
    return by_norm or isinstance(transform, ValueClipping)


def native_step(
    transform: Any,
    arrays: Sequence[Array],
    groups: Groups,
    backend: Backend,
    state: Any,
    on_nonfinite: str,
) -> NativeStep:
    """Clip one gradient in the framework's own operations, by norms or by values.

    Raises
    ------
    NotImplementedError
        If the transform works on the host only.
    """
    if not is_native(transform):
        raise NotImplementedError(
            f"{transform} works on the host only; on a device and in compiled code use a clipper "
            "by L2 norms (ord=2) or by values"
        )
    arguments = (arrays, groups, backend, state, on_nonfinite)
    if isinstance(transform, NormClipping):
        return norm_step(transform, *arguments)
    if isinstance(transform, SliceClipping):
        return slice_step(transform, *arguments)
    return value_step(transform, *arguments)


def norm_step(
    clipping: NormClipping,
    arrays: Sequence[Array],
    groups: Groups,
    backend: Backend,
    state: Any,
    on_nonfinite: str,
) -> NativeStep:
    """Clip one gradient by norms, in the framework's own operations.

    Parameters
    ----------
    clipping
        Rule, measure (L2 only) and action.
    arrays, groups, backend
        The arrays, which of them share a norm, and their framework.
    state
        The rule's state, as arrays of the framework.
    on_nonfinite
        "skip" or "propagate"; "raise" would have to wait for the device.
    """
    xp = backend
    norms = xp.group_norms(arrays, groups.members)
    fine = xp.isfinite(norms)
    finite = xp.all(fine)
    safe = xp.where(fine, norms, 0.0)
    limits, after = clipping.rule(safe, state, xp)
    after = type(state)(*(xp.where(finite, n, o) for o, n in zip(state, after, strict=True)))
    over = safe + clipping.eps > limits
    moved, target = over, limits
    if clipping.rescale:
        moved = safe > 0
    elif clipping.min_norm is not None:
        low = (safe < clipping.min_norm) & (safe > 0)
        moved, target = over | low, xp.where(low, xp.minimum(limits, clipping.min_norm), limits)
    ratio = target / xp.where(moved, safe + clipping.eps, 1.0)
    if clipping.skip:
        ratio = 0.0 * safe
    if on_nonfinite == "propagate":
        moved, ratio = moved | ~fine, xp.where(fine, ratio, norms * float("nan"))
    outputs = list(arrays)
    if clipping.dry:
        return NativeStep(outputs, after, norms, limits, over & finite, finite)
    for group, members in enumerate(groups.members):
        for dtype in {backend.dtype(arrays[i]) for i in members}:
            chosen = [i for i in members if backend.dtype(arrays[i]) == dtype]
            k = xp.where(moved, ratio * (1.0 - MARGIN[dtype]), 1.0)[group]
            keep = finite if on_nonfinite == "skip" else None
            scaled = backend.rescale([arrays[i] for i in chosen], k, keep)
            for i, output in zip(chosen, scaled, strict=True):
                outputs[i] = output
    return NativeStep(outputs, after, norms, limits, over & finite, finite)


def weight_step(
    agc: AGC,
    arrays: Sequence[Array],
    weights: Sequence[Array],
    groups: Groups,
    backend: Backend,
) -> NativeStep:
    """Clip one gradient relative to weights, in the framework's own operations."""
    if agc.unit == "output":
        clipping = agc.slices(())
        limits: list[Any] = []
        for weight in weights:
            axes = clipping.axes(tuple(weight.shape))
            matrix = weight if len(weight.shape) else weight[None]
            sizes = backend.slice_norms(matrix, axes) if axes is not None else None
            limits.append(None if sizes is None else _weight_limit(agc, sizes, backend))
        return slice_step(
            replace(clipping, limit=tuple(limits)),
            arrays,
            groups,
            backend,
            NoState(),
            agc.on_nonfinite,
        )
    limit = _weight_limit(agc, backend.group_norms(weights, groups.members), backend)
    clipping_ = NormClipping(_Given(limit), eps=agc.eps)
    return norm_step(clipping_, arrays, groups, backend, NoState(), agc.on_nonfinite)


def _weight_limit(agc: AGC, sizes: Array, xp: Backend) -> Array:
    sizes = xp.where(xp.isfinite(sizes), sizes, 0.0 * sizes)
    return agc.ratio * (xp.maximum(sizes, agc.min_norm) + agc.eps)


@dataclass(frozen=True)
class _Given:
    """The rule of limits that are known already."""

    limits: Array

    def init(self, groups: int, xp: Arithmetic) -> NoState:
        return NoState()

    def __call__(self, norms: Array, state: NoState, xp: Arithmetic) -> tuple[Array, NoState]:
        return self.limits, state


def value_step(
    clipping: ValueClipping,
    arrays: Sequence[Array],
    groups: Groups,
    backend: Backend,
    state: Any,
    on_nonfinite: str,
) -> NativeStep:
    """Clip one gradient element by element, in the framework's own operations."""
    lows, highs = backend.group_extremes(arrays, groups.members)
    least = backend.asarray(clipping.lows, like=arrays[0])
    most = backend.asarray(clipping.highs, like=arrays[0])
    finite = backend.all(backend.isfinite(lows) & backend.isfinite(highs))
    clipped = ((lows < least) | (highs > most)) & finite
    outputs = list(arrays)
    for group, members in enumerate(groups.members):
        low, high = clipping.lows[group], clipping.highs[group]
        boxed = backend.clip([arrays[i] for i in members], low, high, Arena())
        if on_nonfinite == "skip":
            boxed = backend.keep_if(finite, boxed)
        for i, output in zip(members, boxed, strict=True):
            outputs[i] = output
    norms = backend.maximum(-lows, highs)
    return NativeStep(outputs, state, norms, backend.maximum(-least, most), clipped, finite)


def slice_step(
    clipping: SliceClipping,
    arrays: Sequence[Array],
    groups: Groups,
    backend: Backend,
    state: Any,
    on_nonfinite: str,
) -> NativeStep:
    """Clip one gradient slice by slice, in the framework's own operations.

    The limit may be a list of arrays of the framework, one for each array.
    """
    xp = backend
    norms: dict[int, Array] = {}
    for i, array in enumerate(arrays):
        axes = clipping.axes(tuple(array.shape))
        if axes is not None:
            norms[i] = backend.slice_norms(array if len(array.shape) else array[None], axes)
    finite = xp.asarray([1.0], like=arrays[0])[0] > 0
    for sizes in norms.values():
        finite = finite & xp.all(xp.isfinite(sizes))
    outputs = list(arrays)
    worst = [xp.asarray([0.0], like=arrays[0])[0] for _ in groups.labels]
    limits = [xp.asarray([math.inf], like=arrays[0])[0] for _ in groups.labels]
    for i, sizes in norms.items():
        array, group = arrays[i], groups.index[i]
        limit = clipping.limit if isinstance(clipping.limit, float) else clipping.limit[i]
        k = _slice_factors(clipping, sizes, limit + 0.0 * sizes, MARGIN[backend.dtype(array)], xp)
        if on_nonfinite == "propagate":
            k = xp.where(xp.isfinite(sizes), k, float("nan") * sizes)
        output = backend.multiply_slices(array if len(array.shape) else array[None], k)
        outputs[i] = output if len(array.shape) else output[0]
        # For the record: the slice that is furthest over its limit, or nearest to it.
        excess = xp.max(sizes / (limit + 0.0 * sizes))
        ahead = excess > worst[group] / limits[group]
        largest = xp.max(sizes)
        worst[group] = xp.where(ahead, largest, worst[group])
        limits[group] = xp.where(ahead, largest / excess, limits[group])
    if on_nonfinite == "skip":
        outputs = backend.keep_if(finite, outputs)
    sizes, bounds = xp.stack(worst), xp.stack(limits)
    return NativeStep(outputs, state, sizes, bounds, (sizes > bounds) & finite, finite)


def _slice_factors(
    clipping: SliceClipping, sizes: Array, limit: Array, margin: float, xp: Backend
) -> Array:
    over = sizes + clipping.eps > limit
    moved, target = over, limit
    if clipping.rescale:
        moved = sizes > 0
    elif clipping.min_norm is not None:
        low = (sizes < clipping.min_norm) & (sizes > 0)
        moved, target = over | low, xp.where(low, xp.minimum(limit, clipping.min_norm), limit)
    ratio = target / xp.where(moved, sizes + clipping.eps, 1.0)
    return xp.where(moved, ratio * (1.0 - margin), 1.0)
