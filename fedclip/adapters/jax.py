# SPDX-License-Identifier: Apache-2.0
"""Clippers in JAX loops, as optax transformations."""

from __future__ import annotations

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
from fedclip.modules import AGC, Clipper
from fedclip.rules import NoState
from fedclip.scopes import Groups, resolve
from fedclip.transforms import clip_on_device

__all__ = ["ClipState", "as_optax", "load_state"]


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
        A clipper by L2 norms or values, or `AGC` (pass the parameters to ``update``), with
        ``on_nonfinite`` "skip" or "propagate".

    Raises
    ------
    NotImplementedError
        If the clipper works on the host only: another order than 2, or moving averages of
        arrays, or ``on_nonfinite="raise"``.
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
        first = start(clipper, groups) if isinstance(clipper, Clipper) else NoState()
        statistics = jax.tree.map(lambda c: jnp.atleast_1d(backend.asarray(c)), first)
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
            weights = dict(zip(names, jax.tree.leaves(params), strict=True))
            transform = clipper.transform([weights[n] for n in groups.names], groups, backend)
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
