# SPDX-License-Identifier: Apache-2.0
"""Clippers in TensorFlow loops, eager or in a ``tf.function``, and in Keras 3's ``fit``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import keras
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "fedclip.adapters.tensorflow needs TensorFlow: pip install 'fedclip[tensorflow]'"
    ) from error

import numpy as np

from fedclip.adapters.shared import check_compilable, clipper_of, load, start, unique
from fedclip.arrays import Array, backend_named
from fedclip.modules import Clipper
from fedclip.scopes import Groups, resolve
from fedclip.transforms import clip_on_device

__all__ = ["ClippedOptimizer", "CompiledClipper", "clip"]

_compiled: weakref.WeakKeyDictionary[Clipper, CompiledClipper] = weakref.WeakKeyDictionary()


def clip(grads_and_vars: Iterable[tuple[Array, Any]], clipper: Clipper) -> list[tuple[Array, Any]]:
    """Return (gradient, variable) pairs with the gradients clipped.

    In eager code the clipper itself acts and learns. In a ``tf.function`` the statistics are
    variables, which start from those of the clipper. `CompiledClipper.of` returns them, so that
    you can save them in a checkpoint or read them back into the clipper.

    Parameters
    ----------
    grads_and_vars
        Pairs, such as ``zip(tape.gradient(loss, variables), variables)``. Gradients may be None
        or IndexedSlices.
    clipper
        A clipper of fedclip; in a ``tf.function`` one by L2 norms or values, whose
        ``on_nonfinite`` is "skip" or "propagate".

    Examples
    --------
    >>> import tensorflow as tf
    >>> from fedclip import NormClip
    >>> pairs = [(tf.constant([3.0, 4.0]), tf.Variable([0.0, 0.0]))]
    >>> [(gradient, _)] = clip(pairs, NormClip(1.0))
    >>> bool(tf.norm(gradient) <= 1.0)
    True
    """
    pairs = list(grads_and_vars)
    if tf.inside_function():
        return CompiledClipper.of(clipper)(pairs)
    names = _names([v for _, v in pairs])
    present = {n: g for n, (g, _) in zip(names, pairs, strict=True) if g is not None}
    if not present:
        return pairs
    clipped = clipper.clip(present)
    return [(clipped.get(n), v) for n, (_, v) in zip(names, pairs, strict=True)]


def _names(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable, all different: Keras' path, or TensorFlow's name."""
    return unique(getattr(v, "path", None) or v.name.removesuffix(":0") for v in variables)


def _row(variable: str, row: int, doc: str) -> Any:
    """Return the property of a variable's row; None before a gradient has made the variable."""

    def get(self: CompiledClipper) -> Any:
        found = getattr(self, variable)
        return None if found is None else found[row]

    return property(get, doc=doc)


class CompiledClipper(tf.Module):  # type: ignore[misc]
    """A clipper whose statistics are TensorFlow variables, for use in a ``tf.function``.

    It is a `tf.Module`, so ``tf.train.Checkpoint`` saves and restores it.
    """

    def __init__(self, clipper: Clipper) -> None:
        super().__init__(name=clipper.name.replace("-", "_"))
        check_compilable(clipper)
        self.clipper = clipper
        self._backend = backend_named("tensorflow")
        self._labels: tuple[str, ...] = ()
        # Variables, made when the groups are known. Few: each costs an operation in every step.
        self._counts: Any = None
        self._last: Any = None
        self._statistics: list[Any] = []

    @classmethod
    def of(cls, clipper: Clipper) -> CompiledClipper:
        """Return the compiled form of a clipper; the first call makes it."""
        if clipper not in _compiled:
            _compiled[clipper] = cls(clipper)
        return _compiled[clipper]

    def __call__(self, grads_and_vars: Iterable[tuple[Array, Any]]) -> list[tuple[Array, Any]]:
        """Clip (gradient, variable) pairs, and update the statistics."""
        pairs = list(grads_and_vars)
        names = _names([v for _, v in pairs])
        present = [i for i, (g, _) in enumerate(pairs) if g is not None]
        groups = resolve(self.clipper.scope, self.clipper.exclude, [names[i] for i in present])
        if not groups.names:
            return pairs
        self.build(groups)
        transform = self.clipper.transform(groups)
        state_type = type(transform.init(groups))
        state = state_type(*(tf.convert_to_tensor(v) for v in self._statistics))
        gradients = {names[i]: pairs[i][0] for i in present}
        policy = self.clipper.on_nonfinite
        clipped, step = clip_on_device(transform, gradients, groups, self._backend, state, policy)
        for variable, value in zip(self._statistics, step.state, strict=True):
            variable.assign(value)
        self._last.assign(tf.stack([step.norms, step.limits]))
        happened = [True, tf.reduce_any(step.clipped), ~step.finite]
        self._counts.assign_add(tf.cast(tf.stack(happened), tf.int64))
        for i in present:
            pairs[i] = (clipped[names[i]], pairs[i][1])
        return pairs

    def build(self, groups: Groups) -> None:
        """Make the variables from the clipper's statistics."""
        if self._counts is not None:
            if groups.labels != self._labels:
                raise ValueError(
                    f"{self.clipper.name} was compiled for the groups {list(self._labels)}, and "
                    f"the gradients have {list(groups.labels)}"
                )
            return
        first = start(self.clipper, groups)
        self._labels = groups.labels
        # Leave the function that is being traced: variables are made once.
        with tf.init_scope():
            self._statistics = [
                self._variable(np.atleast_1d(value), field)
                for field, value in zip(first._fields, first, strict=True)
            ]
            self._last = self._variable(np.zeros((2, len(groups))), "norm_and_limit")
            self._counts = tf.Variable(np.zeros(3, np.int64), trainable=False, name="counts")

    steps = _row("_counts", 0, "Number of steps.")
    clipped = _row("_counts", 1, "Number of steps in which a group was clipped.")
    nonfinite = _row("_counts", 2, "Number of steps with NaN or infinity.")
    norm = _row("_last", 0, "Norms of the last step before clipping, one for each group.")
    limit = _row("_last", 1, "Limits of the last step, one for each group.")

    @staticmethod
    def _variable(values: Any, name: str) -> Any:
        return tf.Variable(values, dtype=tf.float64, trainable=False, name=name)

    def update_clipper(self) -> None:
        """Copy the statistics from compiled code back into the clipper."""
        groups = Groups(self._labels, self._labels, tuple((i,) for i in range(len(self._labels))))
        fresh = self.clipper.transform(groups).init(groups)
        load(self.clipper, type(fresh)(*(v.numpy() for v in self._statistics)), self._labels)


@keras.saving.register_keras_serializable(package="fedclip")
class ClippedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer that clips before another one steps; for ``model.compile``.

    It also works in compiled code, and ``model.save`` saves the clipper with its statistics.

    Parameters
    ----------
    inner_optimizer
        The optimizer that steps. Do not set its clipnorm, global_clipnorm or clipvalue.
    clipper
        A clipper of fedclip by L2 norms or values, or its (name, config).

    Examples
    --------
    >>> import keras
    >>> from fedclip import ZScoreClip
    >>> optimizer = ClippedOptimizer(keras.optimizers.SGD(0.1), ZScoreClip())
    """

    def __init__(
        self,
        inner_optimizer: Any,
        clipper: Clipper | Sequence[Any],
        name: str = "clipped_optimizer",
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                f"ClippedOptimizer needs Keras on TensorFlow, and it runs on "
                f"{keras.backend.backend()}: use that framework's adapter"
            )
        for option in ("clipnorm", "global_clipnorm", "clipvalue"):
            if getattr(inner_optimizer, option, None) is not None:
                raise ValueError(f"{option} of the inner optimizer would clip twice: leave it out")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.clipper = clipper_of(clipper)
        self.compiled_clipper = CompiledClipper(self.clipper)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables of the inner optimizer and of the clipper."""
        self.inner_optimizer.build(variables)
        super().build(variables)
        compiled = self.compiled_clipper
        names = _names(variables)
        compiled.build(resolve(self.clipper.scope, self.clipper.exclude, names))

    @property
    def variables(self) -> list[Any]:
        """The variables of the inner optimizer."""
        return list(self._variables) + list(self.inner_optimizer.variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Clip, and let the inner optimizer step."""
        if not self.built:
            self.build(list(trainable_variables or []))
        variables = trainable_variables or self._trainable_variables
        pairs = self.compiled_clipper(list(zip(grads, variables, strict=True)))
        self.inner_optimizer.apply([g for g, _ in pairs], trainable_variables)

    @property
    def learning_rate(self) -> Any:
        """That of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """That of the inner optimizer."""
        return self.inner_optimizer.iterations

    def save_own_variables(self, store: Any) -> None:
        """Save the statistics too."""
        super().save_own_variables(store)
        for key, variable in self._clip_variables().items():
            store[key] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load the statistics too."""
        keys = [key for key in list(store.keys()) if not key.startswith("fedclip_")]
        rest = {key: store[key] for key in keys}
        super().load_own_variables(rest)
        for key, variable in self._clip_variables().items():
            variable.assign(store[key])

    def _clip_variables(self) -> dict[str, Any]:
        compiled = self.compiled_clipper
        named = {"fedclip_norm_and_limit": compiled._last, "fedclip_counts": compiled._counts}
        for i, variable in enumerate(compiled._statistics):
            named[f"fedclip_statistics_{i}"] = variable
        return named

    def get_config(self) -> dict[str, Any]:
        """Return inner optimizer and clipper, as Keras saves them."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "clipper": [self.clipper.name, self.clipper.get_config()],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ClippedOptimizer:
        """Return the optimizer of a configuration."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(inner, config["clipper"], name=config["name"])
