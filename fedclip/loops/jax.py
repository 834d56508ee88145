# SPDX-License-Identifier: Apache-2.0
"""Clippers in JAX loops, as optax transformations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard, TypeVar

from fedclip.errors import needing, public_names

with needing(__name__, "JAX and optax: pip install jax optax"):
    import jax
    import jax.numpy as jnp
    import optax

import numpy as np

from fedclip.arrays import Array
from fedclip.arrays.jax import JaxBackend
from fedclip.clippers.agc import AGC, Axes, Outputs
from fedclip.clippers.base import Clipper
from fedclip.core.scopes import Groups, resolve
from fedclip.dpsgd.persample.jax_records import RecordGradients
from fedclip.dpsgd.step import PrivateMean
from fedclip.loops import compiled
from fedclip.loops.clippers import Spec, Tensors, check_owner, clipper_of, skip_of_all, unique
from fedclip.loops.compiled import ClipState, empty, groups_of
from fedclip.transforms import DeviceState, NormClipping, SliceClipping, Transform, clip_on_device

T = TypeVar("T")
Tree: TypeAlias = Any
"""A pytree, of any containers."""

__all__ = [
    "ClipState",
    "ClipTransformation",
    "as_optax",
    "metrics",
    "on_round_start",
    "private_gradients",
    "set_state",
]

__dir__ = public_names(__name__)


class ClipTransformation(optax.GradientTransformationExtraArgs):
    """A clipper as optax's gradient transformation; made by `as_optax`.

    optax has no types; these are the types of its two functions.
    """

    init: Callable[[Tree], ClipState]
    update: Callable[..., tuple[Tree, ClipState]]


def as_optax(
    clipper: Spec,
    *,
    max_norm: object = None,
    axis_name: str | Sequence[str] | None = None,
    inner: optax.GradientTransformation | None = None,
) -> ClipTransformation:
    """Return the clipper as an optax gradient transformation.

    It works eagerly and under ``jit``, ``scan`` and ``vmap``, with donated states, on meshes with
    automatic or explicit axes, and for any pytree. ``jit`` compiles it once. Its state is a pytree
    that any checkpoint library saves. The transformation starts from the clipper's statistics if
    they belong to the same tensors, and never changes the clipper. Loaded statistics of other
    tensors are refused.

    Scopes name a leaf by its path, as in ``enc.w``; a second leaf with the same path is
    ``enc.w#1``. Complex numbers count by their absolute value. Leaves of dtype float0, the
    gradients of integers, do not change.

    Parameters
    ----------
    clipper
        A clipper that can be compiled, or its name or (name, config). For `AGC`, pass the
        parameters to ``update``.
    max_norm
        Replaces the clipper's `max_norm`: a number, or a traced array, so that a schedule can set
        it: ``optax.inject_hyperparams(as_optax)(NormClip(1.0), max_norm=schedule)``. Negative
        values count as 0.
    axis_name
        Inside a `shard_map`, leaves are shards, and norms are those of each shard. With the names
        of the axes that split the leaves, norms are those of the whole leaves, for one more
        all-reduce. With ``check_vma=False``, all axes must split every leaf.
    inner
        A transformation that uses the clipped gradient, such as ``optax.adamw(1e-3)``. A step that
        the clipper skips then returns zero updates, and the state of `inner` does not change. In a
        chain, a skipped step is a zero gradient, with which Adam still moves, decays and counts.

    Raises
    ------
    NotImplementedError
        If the clipper cannot be compiled; with `axis_name`, if it does not use L2 norms of whole
        tensors; with `inner`, if ``on_spike="skip"`` and the scope is not "global".
    TypeError
        If `max_norm` is given and the clipper has none. At an update, if the state is not from
        `init`, or from another clipper. At an update, if a leaf that is not excluded has another
        dtype, or is complex and the clipper does not use L2 norms of whole tensors.
    ValueError
        At an update: with `AGC`, if it gets no parameters; if the state has another number of
        groups; or without a state, if the clipper learns from past steps.

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
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    backend, clipper = JaxBackend(axes), clipper_of(clipper)
    compiled.check_compilable(clipper)

    @_promoting
    def init(params: Tree) -> ClipState:
        leaves = _parameters(clipper, params)
        groups = groups_of(clipper, leaves) if leaves else resolve("global", None, [])
        if leaves:
            check_owner(clipper, leaves)
        shown = {name: _shown(leaves[name]) for name in groups.names}
        first = compiled.first_state(clipper, groups, shown, backend)
        if not groups.names and compiled.kind_of(clipper, groups)[2]:
            # optax calls init with one placeholder for all parameters.
            one_leaf: Array = np.zeros(())
            first = DeviceState(first, one_leaf)
        # Two fields of one buffer could not be donated.
        norm, counts = np.zeros(len(groups)), np.zeros(3, np.int32)
        state = ClipState(first, norm, norm + np.inf, norm > 0, *counts)
        copied: ClipState = jax.tree.map(functools.partial(jnp.array, copy=True), state)
        return copied

    @_promoting
    def update(
        updates: Tree, state: ClipState | None, params: Tree | None = None, **extra: object
    ) -> tuple[Tree, ClipState]:
        leaves = _by_name(updates)
        groups = groups_of(clipper, leaves)
        if state is None:
            state = init(updates)
            if groups.names and jax.tree.leaves(state.statistics):
                raise ValueError(f"{clipper.name} learns from past steps: give update init's state")
        if not groups.names:
            return updates, state
        compiled.check_state(state, len(groups), compiled.kind_of(clipper, groups), clipper.name)
        weights = _by_name(params) if isinstance(clipper, AGC) and params is not None else None
        outputs = _outputs(clipper, params) if weights is not None else None
        transform = compiled.transform_of(clipper, groups, weights, backend, outputs)
        if max_norm is not None:
            transform = _limited(transform, clipper, jnp.maximum(backend.asarray(max_norm), 0.0))
        by_l2_norms = isinstance(transform, NormClipping) and transform.ord == 2
        if axes and not by_l2_norms:
            raise NotImplementedError(
                f"axis_name needs a clipper by L2 norms of whole tensors, not {clipper.name}"
            )
        floats = _as_floats(leaves, groups, by_l2_norms)
        statistics, policy = state.statistics, clipper.on_nonfinite
        clipped, step = clip_on_device(transform, floats, groups, backend, statistics, policy)
        news = iter([_like(leaf, clipped[name]) for name, leaf in leaves.items()])
        outputs = jax.tree.map(lambda u: u if _is_float0(u) else next(news), updates)
        return outputs, compiled.after(state, step)

    clipping = ClipTransformation(init, update)
    return clipping if inner is None else _around(clipping, inner, clipper)


def _around(
    clipping: ClipTransformation, inner: optax.GradientTransformation, clipper: Clipper | AGC
) -> ClipTransformation:
    """Return both, one after the other; the second leaves out the steps that the first skips."""
    spikes, inner = skip_of_all(clipper, "inner"), optax.with_extra_args_support(inner)

    def init(params: Tree) -> Tree:
        return clipping.init(params), inner.init(params)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: object
    ) -> tuple[Tree, Tree]:
        before, old = state
        clipped, after = clipping.update(updates, before, params, **extra)
        stepped, new = inner.update(clipped, old, params, **extra)
        skip = (after.nonfinite > before.nonfinite) & (clipper.on_nonfinite == "skip")
        skip |= after.over.all() & spikes

        def chosen(old: Tree, new: Tree) -> Tree:
            return new if _is_float0(new) else jnp.where(skip, old, new)

        nothing = jax.tree.map(lambda x: x if _is_float0(x) else jnp.zeros_like(x), stepped)
        return jax.tree.map(chosen, nothing, stepped), (after, jax.tree.map(chosen, old, new))

    return ClipTransformation(init, update)


def _promoting(function: T) -> T:
    """Return the function, with promotion of ranks and dtypes, which a session may forbid."""
    ranks, dtypes = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    promoting: T = ranks(dtypes(function))
    return promoting


def _limited(transform: Transform, clipper: Clipper | AGC, max_norm: Array) -> Transform:
    """Return the transform with another limit, or largest limit."""
    rule: Any = getattr(transform, "rule", None)
    if hasattr(clipper, "max_norm"):
        if isinstance(transform, SliceClipping):
            return replace(transform, limit=max_norm)
        if isinstance(transform, NormClipping) and len(getattr(rule, "limits", ())) == 1:
            return replace(transform, rule=replace(rule, limits=(max_norm,)))
        if isinstance(transform, NormClipping) and hasattr(rule, "max_norm"):
            return replace(transform, rule=replace(rule, max_norm=max_norm))
    raise TypeError(f"{clipper.name} has no single max_norm: leave max_norm out of as_optax")


def _is_float0(leaf: object) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _as_floats(leaves: Tensors, groups: Groups, by_l2_norms: bool) -> dict[str, Array]:
    """Return leaves of floats; for complex numbers, their real and imaginary parts."""
    floats = dict(leaves)
    for name in groups.names:
        leaf = leaves[name]
        if by_l2_norms and jnp.iscomplexobj(leaf):
            floats[name] = jnp.stack([leaf.real, leaf.imag], axis=-1)
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            also = " or clip by L2 norms of whole tensors" if jnp.iscomplexobj(leaf) else ""
            raise TypeError(f"{name!r} is {leaf.dtype}, not a float: put its name in exclude{also}")
    return floats


def _like(leaf: Array, clipped: Array) -> Array:
    """Return a leaf of `_as_floats` in the dtype of the leaf again."""
    if jnp.iscomplexobj(leaf) and not jnp.iscomplexobj(clipped):
        return jax.lax.complex(clipped[..., 0], clipped[..., 1])
    return clipped


def metrics(
    clipper: Clipper | AGC, state: object, params: Tree, prefix: str = ""
) -> dict[str, float]:
    """Return plain numbers for a logger, of the last step and of all steps (``round/...``).

    Parameters
    ----------
    clipper, params
        Clipper and parameters of the transformation; they name the groups.
    state
        The transformation's state, or one that contains it, such as that of a chain.

    Raises
    ------
    ValueError
        If the state does not contain exactly one `ClipState`, or belongs to other parameters. For
        several clippers, the message names the part of each, which you can pass separately.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedclip import NormClip
    >>> clipper, params = NormClip(1.0), {"w": jnp.zeros(2)}
    >>> transformation = as_optax(clipper)
    >>> _, state = transformation.update({"w": jnp.array([3.0, 4.0])}, transformation.init(params))
    >>> metrics(clipper, state, params)["norm"]
    5.0
    """
    return compiled.of_state(*_labelled(clipper, state, params), prefix)


def on_round_start(state: T) -> T:
    """Return a state at the start of a round, such as an epoch: counts are 0, statistics continue.

    Parameters
    ----------
    state
        A transformation's state, or one that contains any number of them, such as that of a chain.
    """
    begin = lambda node: compiled.on_round_start(node) if _is_state(node) else node  # noqa: E731
    begun: T = jax.tree.map(begin, state, is_leaf=_is_state)
    return begun


def set_state(clipper: Clipper | AGC, state: object, params: Tree) -> None:
    """Write the statistics of a transformation's state, or of a chain's, to a clipper.

    A federated client can then continue from the statistics of a notebook. ``get_state`` of the
    clipper returns them as plain values, and a new transformation starts from them.

    Raises
    ------
    ValueError
        As `metrics`.
    """
    clip_state, labels = _labelled(clipper, state, params)
    compiled.load(clipper, clip_state.statistics, labels, _parameters(clipper, params))


def _labelled(
    clipper: Clipper | AGC, state: object, params: Tree
) -> tuple[ClipState, tuple[str, ...]]:
    """Return the one `ClipState` in a state, and the labels of its groups."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_state)
    states = {f"state{jax.tree_util.keystr(p)}": s for p, s in leaves if _is_state(s)}
    if len(states) != 1:
        hint = f": give the one of this clipper, {' or '.join(states)}" if states else ""
        raise ValueError(f"the state must hold one ClipState, but it holds {len(states)}{hint}")
    clip_state = jax.tree.map(jnp.asarray, *states.values(), is_leaf=_is_variable)
    labels = groups_of(clipper, _parameters(clipper, params)).labels
    if clip_state.norm.shape != (len(labels),):
        raise ValueError(
            f"the state has norms of shape {clip_state.norm.shape}, but these parameters have "
            f"{len(labels)} groups: give the parameters of init, and the state of one model"
        )
    return clip_state, labels


def _is_state(node: object) -> TypeGuard[ClipState]:
    return isinstance(node, ClipState)


def _is_variable(node: object) -> bool:
    """Whether this is a variable of NNX around one array."""
    return hasattr(node, "__jax_array__") and len(jax.tree.leaves(node)) == 1


def _names(tree: object) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]
    return unique(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def _outputs(clipper: Clipper | AGC, params: object) -> Outputs | None:
    """Return the axes that hold the outputs of layers, by name; None if the clipper asks for none.

    Layers of Equinox are in the pytree, and have the axes of torch. Queries, keys and values in
    Flax' attention have two; transposed convolutions of Haiku the last but one; a bias is one
    unit; all others have the last.
    """
    if not isinstance(clipper, AGC) or not clipper.asks_layers:
        return None
    paths = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_variable)[0]
    named = zip(_names(params), paths, strict=True)
    return {name: _axes(params, path, np.ndim(leaf)) for name, (path, leaf) in named}


def _axes(tree: Any, path: Sequence[Any], ndim: int) -> Axes:
    keys = ["", *(jax.tree_util.keystr((key,), simple=True) for key in path)]
    if ndim == 3 and keys[-1] == "kernel" and keys[-2] in ("query", "key", "value"):
        return (-2, -1)
    if keys[-1] in ("b", "bias"):
        return ()
    if keys[-1] == "w" and "transpose" in keys[-2]:
        # Haiku's.
        return (-2,)
    layer, node = "", tree
    for key in path:
        if type(node).__module__.startswith("equinox.nn"):
            layer = type(node).__name__
        by_attribute = isinstance(key, jax.tree_util.GetAttrKey)
        place = getattr(key, "idx", getattr(key, "key", None))
        node = getattr(node, key.name) if by_attribute else node[place]
    return (0,) if layer and layer != "Embedding" else (-1,)


def _parameters(clipper: Clipper | AGC, params: object) -> dict[str, Array]:
    """Return the parameters by name, without integers unless they are excluded."""
    leaves = _by_name(params)
    excluded = groups_of(clipper, leaves).excluded if leaves else frozenset()
    chosen = {n for n, a in leaves.items() if jnp.issubdtype(a.dtype, jnp.inexact)}
    return {name: leaf for name, leaf in leaves.items() if name in excluded or name in chosen}


def _by_name(tree: object) -> dict[str, Array]:
    """Return the leaves by name, without those of float0."""
    pairs = zip(_names(tree), jax.tree.leaves(tree), strict=True)
    return {name: _array(name, leaf) for name, leaf in pairs if not _is_float0(leaf)}


def _array(name: str, leaf: object) -> Array:
    try:
        # The results of jax.eval_shape have only shape and dtype; see `_shown`.
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"{name!r} is not an array, but {leaf!r:.80}: pass only the arrays, as by eqx.filter"
        ) from error


def _shown(leaf: object) -> Array:
    """Return a leaf; if it has only shape and dtype, zeros that take no memory."""
    return empty(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def private_gradients(
    loss: Callable[[Tree, Tree], Array],
    params: Tree,
    batch: Tree,
    mean: PrivateMean,
    *,
    micro_batch: int = 128,
) -> Tree:
    """Return the gradients of one DP-SGD step, as a pytree like the parameters.

    ::

        (Σ min(1, max_norm / n_i) g_i  +  noise_multiplier max_norm normal) / expected_batch_size

    The gradients of records are compiled once for each loss. Noise comes from the operating
    system's secure generator, so do not compile the whole function. Draw Poisson samples
    (`fedclip.dpsgd.step.PoissonSampler`), call it for empty samples too, and account for each
    call with the mean's `noise_multiplier` (``fedclip privacy calibrate``).

    Parameters
    ----------
    loss
        A function of the parameters and one record (without its first axis) that returns a number.
        Use one function for all steps. If it needs random numbers, put a key in each record.
    params
        A pytree of arrays.
    batch
        A pytree of arrays with the records along the first axis; there may be no record.
    mean
        How records are clipped, the noise, and the divisor. Use one for all steps.
    micro_batch
        Largest number of records in memory at once.

    Raises
    ------
    TypeError, ValueError
        If a parameter is invalid.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedclip.dpsgd.step import PrivateMean
    >>> params, batch = {"w": jnp.ones(2)}, jnp.eye(2)
    >>> mean = PrivateMean(max_norm=1.0, noise_multiplier=1.1, expected_batch_size=2)
    >>> private_gradients(lambda p, x: jnp.sum(p["w"] * x) ** 2, params, batch, mean)["w"].shape
    (2,)
    """
    leaves, tree = jax.tree.flatten(params)
    named = dict(zip(_names(params), leaves, strict=True))
    stacks = _gradients(loss).stacks([*named], params, (), batch, micro_batch)
    average = mean(stacks, {name: leaf.shape for name, leaf in named.items()})
    gradients = [jnp.asarray(average[name], leaf.dtype) for name, leaf in named.items()]
    return jax.tree.unflatten(tree, gradients)


@functools.lru_cache(maxsize=8)
def _gradients(loss: Callable[[Tree, Tree], Array]) -> RecordGradients:
    return RecordGradients(lambda params, others, record: loss(params, record))
