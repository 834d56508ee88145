# SPDX-License-Identifier: Apache-2.0
"""Clippers in Keras 3's ``fit``, on TensorFlow, JAX and torch."""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeAlias

from fedclip.arrays import HostView
from fedclip.errors import needing, public_names

with needing(__name__, "Keras 3 and a backend: pip install keras, and tensorflow, torch or jax"):
    import keras

import numpy as np

from fedclip.arrays import Array, Arrays, backend_named
from fedclip.clippers.agc import AGC
from fedclip.clippers.base import Clipper
from fedclip.loops.clippers import Spec, Theirs, clipper_of, skip_of_all, skips
from fedclip.loops.compiled import HeldClipper, Operations, Variable, Verbs, names_of

__all__ = ["ClipHistory", "ClippedOptimizer"]

__dir__ = public_names(__name__)

Optimizer: TypeAlias = Any
"""Of Keras, which has no types."""

_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def _chain(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those inside of it; the last one steps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, *_chain(inner)]


def _checked(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps; raise an error if it would not be clipped once."""
    *outer, stepping = _chain(optimizer)
    if hasattr(stepping, "optimizers"):
        raise ValueError(
            f"{type(stepping).__name__} has several optimizers: put a ClippedOptimizer around each"
        )
    _check_options(stepping)
    apply = getattr(type(stepping), "apply", None)
    hooks = all(hasattr(stepping, m) for m in ("_clip_gradients", "_backend_apply_gradients"))
    if apply is not keras.optimizers.Optimizer.apply or not hooks:
        raise TypeError(
            f"{type(stepping).__name__} does not step as Keras' optimizers do: derive it from "
            "keras.optimizers.Optimizer, of Keras 3.4 or newer, and do not override apply"
        )
    clipped = next((o for o in outer if isinstance(o, ClippedOptimizer)), None)
    owner = getattr(stepping._clip_gradients, "__self__", None)
    if owner is not getattr(clipped, "_hook", stepping):
        raise ValueError(f"{stepping.name!r} is already in another ClippedOptimizer: make another")
    return stepping


def _check_options(stepping: Optimizer) -> None:
    for option in _CLIPS:
        if getattr(stepping, option, None) is not None:
            raise ValueError(f"{option} of the inner optimizer would clip twice: remove it")


# The value of a variable of Keras or TensorFlow, as a tensor.
_value = keras.ops.stop_gradient


class _Hook:
    """Called by the inner optimizer where Keras clips.

    Keras calls ``_clip_gradients`` on gradients that are unscaled, averaged over accumulated
    steps, and not for variables that they overwrite; `_apply` notes for which variables.
    """

    def __init__(self, stepping: Optimizer, clipper: Clipper | AGC) -> None:
        self.stepping, backend = stepping, backend_named(keras.backend.backend())
        self._float = backend.dtype(backend.asarray([0.0]))
        operations = Operations(self._make, _value, keras.ops.take, keras.ops.cast)
        self.held = HeldClipper(clipper, backend, operations)
        self._spikes = skip_of_all(clipper, "a Keras optimizer")
        self._names: dict[Variable, str] = {}
        # Strategies of TensorFlow run each replica in a thread.
        self._now = threading.local()
        self._apply, self._clip = stepping._backend_apply_gradients, stepping._clip_gradients
        stepping._backend_apply_gradients = self.apply
        stepping._clip_gradients = self.clip

    def _make(self, values: HostView, name: str) -> Variable:
        return self.stepping.add_variable(
            values.shape,
            initializer=lambda shape, dtype=None: keras.ops.convert_to_tensor(values, dtype),
            dtype="int" if values.dtype.kind == "i" else self._float,
            aggregation="only_first_replica",
            name=re.sub(r"\W", "_", f"{self.held.clipper.name}_{name}"),
        )

    def build(self, variables: Sequence[Variable]) -> None:
        """Make the variables of the clipper."""
        named = dict(zip(names_of(variables), variables, strict=True))
        self._names = {self.stepping._var_key(v): name for name, v in named.items()}
        clipped = {
            n: v for n, v in named.items() if not getattr(v, "overwrite_with_gradient", False)
        }
        self.held.build(clipped, type(self.stepping).__name__)

    def apply(self, gradients: Sequence[Array], variables: Sequence[Variable]) -> None:
        """Note the variables, then step."""
        if any(self.stepping._var_key(v) not in self._names for v in variables):
            why = "is inside of a ClippedOptimizer that was not built for these variables"
            raise ValueError(f"{self.stepping.name!r} {why}: call its apply first")
        self._now.variables, self._now.clipped = variables, False
        with self._undoing(variables) if skips(self.held.clipper) else nullcontext():
            self._apply(gradients, variables)
        # Eager code clips in the last of the accumulated steps only.
        if not (self._now.clipped or self.stepping.gradient_accumulation_steps):
            raise RuntimeError(f"{self.stepping.name!r} stepped without a call of _clip_gradients")

    @contextmanager
    def _undoing(self, weights: Sequence[Variable]) -> Iterator[None]:
        """Undo the step inside, if the clipper skips it.

        Keras has no hook that could leave out a step after the clip.
        """
        stepping, held = self.stepping, self.held
        gathered = getattr(stepping, "_accumulated_gradients", None) or ()
        excluded = {*map(id, (stepping._iterations, *held.variables, *gathered))}
        chosen = [v for v in (*weights, *stepping.variables) if id(v) not in excluded]
        old, before = [keras.ops.copy(v) for v in chosen], keras.ops.copy(held.counts)
        yield
        steps, _, nonfinite = keras.ops.unstack(_value(held.counts) - before)
        skip = (nonfinite > 0) & (held.clipper.on_nonfinite == "skip")
        if self._spikes:
            skip = skip | ((steps > 0) & keras.ops.all(_value(held.last)[2] > 0))
        pairs = zip(old, chosen, strict=True)
        _assign(chosen, [keras.ops.where(skip, o, _value(v)) for o, v in pairs])
        # Keras counts the step after this.
        iterations, accumulated = stepping._iterations, stepping.gradient_accumulation_steps or 1
        iterations.assign_sub(keras.ops.cast(skip, iterations.dtype) * accumulated)

    def clip(self, gradients: Sequence[Array]) -> Array:
        """Return the clipped gradients."""
        variables, self._now.clipped = self._now.variables, True
        names = [self._names[self.stepping._var_key(v)] for v in variables]
        sums, context = _tensors(gradients), _replicas()
        if context is not None:
            sums = context.all_reduce("SUM", sums)
        weights = dict(zip(names, variables, strict=True))
        after = self.held.clip(dict(zip(names, sums, strict=True)), weights)
        clipped = [after[name] for name in names]
        if context is not None:
            # Keras adds the replicas' gradients up after the clip.
            tf, share = import_module("tensorflow"), 1.0 / context.num_replicas_in_sync
            clipped = [tf.math.scalar_mul(share, gradient) for gradient in clipped]
        return self._clip(clipped)


def _tensors(gradients: Sequence[Array]) -> list[Array]:
    """Return NumPy's arrays and JAX's sparse ones as tensors, and other gradients unchanged."""
    turned = functools.partial(keras.ops.convert_to_tensor, sparse=False)
    others = [isinstance(g, np.ndarray) or hasattr(g, "todense") for g in gradients]
    return [turned(g) if other else g for g, other in zip(gradients, others, strict=True)]


def _replicas() -> Any:
    """Return TensorFlow's replica context, if several replicas step together."""
    if keras.backend.backend() != "tensorflow":
        return None
    context = import_module("tensorflow").distribute.get_replica_context()
    return context if context and context.num_replicas_in_sync > 1 else None


def _assign(variables: Sequence[Variable], values: Sequence[Array]) -> None:
    """Assign a value to each variable, the same in all replicas."""

    def assign(strategy: Any, values: Sequence[Array]) -> None:
        for variable, value in zip(variables, values, strict=True):
            inside = getattr(variable, "value", variable)
            strategy.extended.update(inside, lambda v, new: v.assign(new), args=(value,))

    if (context := _replicas()) is not None:
        context.merge_call(assign, args=(list(values),))
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _inner(option: str) -> property:
    """Return a property that is the inner optimizer's."""

    def get(self: Optimizer) -> object:
        return getattr(self.inner_optimizer, option)

    def put(self: Optimizer, value: object) -> None:
        if option in _CLIPS and value is not None:
            raise ValueError(f"{option} of a ClippedOptimizer would clip nothing: use its clipper")
        # Keras' constructor sets defaults, before there is an inner optimizer.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, option, value)

    return property(get, put, doc=f"``{option}`` of the inner optimizer.")


@keras.saving.register_keras_serializable(package="fedclip")
class ClippedOptimizer(Verbs, keras.optimizers.Optimizer):
    """A Keras optimizer that clips gradients before the inner optimizer's step.

    ::

        unscale the gradients, and average those of accumulated steps
        clip them                           instead of clipnorm, global_clipnorm, clipvalue
        weight decay, step, moving averages, constraints

    The inner optimizer does everything else: learning rate and schedule, loss scale, gradient
    accumulation, weight decay and its exclusions, moving averages of the weights. Variables with
    ``overwrite_with_gradient`` are neither measured nor clipped. `variables` includes the
    statistics, norms, limits and counts, and ``model.save`` saves them.

    Under a ``tf.distribute`` strategy it clips the sum of the replicas' gradients, for one more
    all-reduce. (Keras' clipnorm clips each replica's part.)

    Parameters
    ----------
    inner_optimizer
        The optimizer that makes the step, or its name in Keras; do not use it elsewhere. A
        LossScaleOptimizer may be inside or outside. It may be a ClippedOptimizer, which clips
        second. Do not set its clipnorm, global_clipnorm or clipvalue.
    clipper
        A clipper of fedclip, or its name or (name, config) as in a declearn configuration.

    Raises
    ------
    ValueError
        If the inner optimizer also clips, is already in another ClippedOptimizer, or is a
        MultiOptimizer.
    TypeError
        If it does not clip where Keras' optimizers do.
    NotImplementedError
        If the clipper cannot be compiled.

    Examples
    --------
    >>> import keras
    >>> from fedclip import ZScoreClip
    >>> optimizer = ClippedOptimizer(keras.optimizers.SGD(0.1), ZScoreClip())
    """

    def __init__(
        self, inner_optimizer: Optimizer, clipper: Spec, name: str = "clipped_optimizer"
    ) -> None:
        if isinstance(inner_optimizer, str):
            inner_optimizer = keras.optimizers.get(inner_optimizer)
        stepping = _checked(inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)
        # States that are loaded before the first step change this copy only.
        self.clipper = copy.deepcopy(clipper_of(clipper))
        self._hook = _Hook(stepping, self.clipper)
        self.held = self._hook.held
        self.inner_optimizer = inner_optimizer
        self.built = False

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the variables of the inner optimizer and of the clipper."""
        if self.built:
            return
        _check_options(self._hook.stepping)
        self.inner_optimizer.build(variables)
        self._hook.build(variables)
        self.built = True

    @property
    def variables(self) -> list[Variable]:
        """The variables of the inner optimizer, including those of the clipper."""
        return [*self._variables, *self.inner_optimizer.variables]

    def apply(self, grads: Arrays, trainable_variables: Arrays | None = None) -> None:
        """Make the inner optimizer's step with clipped gradients."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        self.inner_optimizer.apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Array]) -> list[Array]:
        # Keras' own method would clip nothing here.
        raise RuntimeError(f"{self.clipper.name} clips in steps only: call apply")

    def stateless_apply(
        self, optimizer_variables: Arrays, grads: Arrays, trainable_variables: Arrays
    ) -> tuple[list[Array], list[Array]]:
        """Return new weights and new variables, as Keras on JAX needs them."""
        count = len(self._variables)
        weights, inner = self.inner_optimizer.stateless_apply(
            optimizer_variables[count:], grads, trainable_variables
        )
        return weights, [*map(_value, optimizer_variables[:count]), *inner]

    def exclude_from_weight_decay(self, var_list: object = None, var_names: object = None) -> None:
        """Exclude variables from the inner optimizer's weight decay."""
        self._hook.stepping.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence[Variable]) -> None:
        """Set all `variables`."""
        count = len(self._variables)
        super().set_weights(weights[:count])
        self.inner_optimizer.set_weights(weights[count:])

    def get_config(self) -> dict[str, object]:
        """Return inner optimizer and clipper, as Keras saves them."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        clipper = [self.clipper.name, self.clipper.get_config()]
        return {"name": self.name, "inner_optimizer": inner, "clipper": clipper}

    @classmethod
    def from_config(cls, config: Theirs, custom_objects: object = None) -> ClippedOptimizer:
        """Return the optimizer of a configuration."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        return cls(inner, config["clipper"], name=config["name"])


# Callbacks and other optimizers read these, and a LossScaleOptimizer outside sets one.
for _option in (
    *_CLIPS,
    "learning_rate",
    "iterations",
    "weight_decay",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "scale_loss",
    "finalize_variable_values",
    "gradient_accumulation_steps",
    "_iterations",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_model_variables_moving_average",
):
    setattr(ClippedOptimizer, _option, _inner(_option))


class ClipHistory(keras.callbacks.Callback):
    """Add norm, limit and counts to the logs after each epoch, and so to ``fit``'s history.

    ::

        history = model.fit(x, y, callbacks=[ClipHistory()])
        history.history["clip/norm"]

    The names are those of `ClippedOptimizer.metrics`; an epoch is a round. Put it before callbacks
    that read them.
    """

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Start a round."""
        for optimizer in self._clipped():
            optimizer.on_round_start()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Add the numbers of the last step, and of this epoch."""
        for optimizer in self._clipped():
            if logs is not None:
                logs.update(optimizer.metrics("clip/"))

    def _clipped(self) -> list[ClippedOptimizer]:
        return [o for o in _chain(self.model.optimizer) if isinstance(o, ClippedOptimizer)]
