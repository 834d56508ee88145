# SPDX-License-Identifier: Apache-2.0
"""Clippers in JAX loops, as optax transformations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    raise ImportError(
        "fedclip.adapters.jax needs JAX and optax: pip install 'fedclip[jax]'"
    ) from error

from fedclip.adapters.shared import check_compilable, load, start, unique
from fedclip.arrays import Array, backend_named
from fedclip.dpsgd.persample.jax_records import JaxStack, micro_batches
from fedclip.dpsgd.step import private_mean
from fedclip.modules import AGC, Clipper
from fedclip.scopes import Groups, resolve
from fedclip.transforms import carried, clip_on_device

__all__ = ["ClipState", "as_optax", "load_state", "private_gradients"]


class ClipState(NamedTuple):
    """State of a clipper in a chain: a pytree of small arrays.

    ``optax.tree.get(state, "norm")`` finds the fields inside a chain's state.
    """

    statistics: Any
    """The rule's statistics of past norms: arrays over groups."""
    norm: Array
    """Norm of each group at the last step, before clipping."""
    limit: Array
    """Limit of each group at the last step."""
    steps: Array
    """Number of steps."""
    clipped: Array
    """Number of steps at which some group was clipped."""
    nonfinite: Array
    """Number of steps that held NaN or infinity."""


def as_optax(clipper: Clipper | AGC) -> optax.GradientTransformationExtraArgs:
    """Return the clipper as a gradient transformation.

    It works eagerly, under ``jit`` (compiled once), ``scan`` and ``vmap``. Its state is a pytree
    that any checkpoint library saves. The transformation starts from the clipper's statistics, if
    they are of the same tensors, and never changes the clipper. Scopes know a leaf by its path,
    as in ``enc.w``; if two leaves have the same one, the second is called ``enc.w#1``.

    Parameters
    ----------
    clipper
        Any clipper, with ``on_nonfinite`` "skip" or "propagate"; `AGC` needs the parameters in
        ``update``.

    Raises
    ------
    NotImplementedError
        With ``on_nonfinite="raise"``, or if the clipper is a user's own that works on the host
        only.
    ValueError
        At an update with `AGC`, if it gets no parameters.

    Examples
    --------
    >>> import jax.numpy as jnp, optax
    >>> from fedclip import NormClip
    >>> chain = optax.chain(as_optax(NormClip(1.0)), optax.sgd(0.1))
    >>> params = {"w": jnp.zeros(2)}
    >>> state = chain.init(params)
    >>> updates, state = chain.update({"w": jnp.array([3.0, 4.0])}, state, params)
    >>> round(float(optax.tree.get(state, "norm")[0]), 6)
    5.0
    """
    backend = backend_named("jax")
    check_compilable(clipper)

    def init(params: optax.Params) -> ClipState:
        groups = _groups(clipper, params)
        if isinstance(clipper, Clipper):
            first, kept = start(clipper, groups), clipper.get_state()["arrays"]
            leaves = dict(zip(_names(params), jax.tree.leaves(params), strict=True))
            transform = clipper.transform(groups)
            statistics = carried(transform, leaves, groups, backend, first, kept)
        else:
            statistics = _agc(clipper, params, groups, backend).init(groups)
        numbers = jnp.zeros(len(groups), float)
        zero = jnp.zeros((), jnp.int32)
        return ClipState(statistics, numbers, numbers, zero, zero, zero)

    def update(
        updates: optax.Updates,
        state: ClipState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ClipState]:
        leaves, tree = jax.tree.flatten(updates)
        groups = _groups(clipper, updates)
        names = _names(updates)
        if not groups.names:
            return updates, state
        if isinstance(clipper, Clipper):
            transform = clipper.transform(groups)
        else:
            if params is None:
                raise ValueError("agc needs the parameters: update(updates, state, params)")
            transform = _agc(clipper, params, groups, backend)
        clipped, step = clip_on_device(
            transform,
            dict(zip(names, leaves, strict=True)),
            groups,
            backend,
            state.statistics,
            clipper.on_nonfinite,
        )
        after = ClipState(
            step.state,
            step.norms,
            step.limits,
            state.steps + 1,
            state.clipped + jnp.any(step.clipped).astype(jnp.int32),
            state.nonfinite + (~step.finite).astype(jnp.int32),
        )
        return jax.tree.unflatten(tree, [clipped[name] for name in names]), after

    return optax.GradientTransformationExtraArgs(init, update)


def load_state(clipper: Clipper, state: ClipState, params: optax.Params) -> None:
    """Put the statistics of a transformation's state into a clipper.

    A federated client can then continue with what a notebook has learnt.
    """
    load(clipper, state.statistics, _groups(clipper, params).labels)


def _agc(clipper: AGC, params: optax.Params, groups: Groups, backend: Any) -> Any:
    weights = dict(zip(_names(params), jax.tree.leaves(params), strict=True))
    return clipper.device_transform([weights[name] for name in groups.names], groups, backend)


def _names(tree: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return unique(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def _groups(clipper: Clipper | AGC, tree: Any) -> Groups:
    names = _names(tree)
    if isinstance(clipper, Clipper):
        return resolve(clipper.scope, clipper.exclude, names)
    shapes = {n: leaf.shape for n, leaf in zip(names, jax.tree.leaves(tree), strict=True)}
    scope = "global" if clipper.unit == "global" else "tensor"
    return resolve(scope, clipper.excluded(shapes), names)


def private_gradients(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    max_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    micro_batch: int = 128,
    **settings: Any,
) -> Any:
    """Return the gradients of one step of DP-SGD, as a pytree like the parameters.

    ::

        (Σ min(1, max_norm / n_i) g_i  +  noise_multiplier max_norm normal) / expected_batch_size

    The gradients of records are compiled, once for a loss; noise comes from the operating
    system's secure generator, so that the whole can not be compiled. Give it Poisson samples
    (`fedclip.dpsgd.sampling.PoissonSampler`), also those without a record, and account for each
    with the same `noise_multiplier` (``fedclip privacy calibrate``).

    Parameters
    ----------
    loss
        From the parameters and one record (without its first axis) to a number. Give the same
        function at each step. Random numbers need a key in each record.
    params
        A pytree of arrays.
    batch
        A pytree of arrays whose first axis is the records; there may be none.
    max_norm, noise_multiplier, expected_batch_size
        As above: > 0, >= 0, > 0.
    micro_batch
        How many records are in memory at once, at most.
    **settings
        ``mode`` ("flat", "tensor", "layer", "automatic" or a list of patterns) and ``noise``, an
        object that adds it; see `fedclip.dpsgd.step.private_mean`.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> params, batch = {"w": jnp.ones(2)}, jnp.eye(2)
    >>> step = {"max_norm": 1.0, "noise_multiplier": 1.1, "expected_batch_size": 2}
    >>> private_gradients(lambda p, x: jnp.sum(p["w"] * x) ** 2, params, batch, **step)["w"].shape
    (2,)
    """
    leaves, tree = jax.tree.flatten(params)
    names = _names(params)

    def stacks() -> Iterator[JaxStack]:
        for records, count in micro_batches(batch, micro_batch, sum(leaf.size for leaf in leaves)):
            grads = jax.tree.leaves(_gradients(loss)(params, records))
            yield JaxStack(dict(zip(names, grads, strict=True)), count)

    shapes = {name: leaf.shape for name, leaf in zip(names, leaves, strict=True)}
    sizes = (max_norm, noise_multiplier, expected_batch_size)
    found = private_mean(stacks(), shapes, *sizes, **settings)
    pairs = zip(names, leaves, strict=True)
    return jax.tree.unflatten(tree, [jnp.asarray(found[n], like.dtype) for n, like in pairs])


@functools.lru_cache(maxsize=8)
def _gradients(loss: Callable[[Any, Any], Any]) -> Any:
    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))
