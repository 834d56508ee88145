# SPDX-License-Identifier: Apache-2.0
"""Clippers in TensorFlow loops, eager or in a ``tf.function``, and in Keras 3's ``fit``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "fedclip.adapters.tensorflow needs TensorFlow: pip install tensorflow"
    ) from error

from fedclip.adapters.keras import ClippedOptimizer
from fedclip.adapters.shared import Spec, check_clipper, clipped, clipper_of, unique
from fedclip.adapters.variables import HeldClipper, Operations
from fedclip.arrays import Array, backend_named
from fedclip.modules import AGC, Clipper
from fedclip.records import StepRecord

__all__ = ["ClippedOptimizer", "CompiledClipper", "clip"]

_compiled: weakref.WeakKeyDictionary[Clipper | AGC, CompiledClipper] = weakref.WeakKeyDictionary()


def clip(
    grads_and_vars: Iterable[tuple[Array, Any]], clipper: Clipper | AGC
) -> list[tuple[Array, Any]]:
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
        A clipper of fedclip; in a ``tf.function`` one whose ``on_nonfinite`` is "skip" or
        "propagate".

    Examples
    --------
    >>> import tensorflow as tf
    >>> from fedclip import NormClip
    >>> pairs = [(tf.constant([3.0, 4.0]), tf.Variable([0.0, 0.0]))]
    >>> [(gradient, _)] = clip(pairs, NormClip(1.0))
    >>> bool(tf.norm(gradient) <= 1.0)
    True
    """
    check_clipper(clipper)
    pairs = list(grads_and_vars)
    if not tf.executing_eagerly():
        return CompiledClipper.of(clipper)(pairs)
    names = _names([v for _, v in pairs])
    present = {n: g for n, (g, _) in zip(names, pairs, strict=True) if g is not None}
    if not present:
        return pairs
    variables = dict(zip(names, (v for _, v in pairs), strict=True))
    outputs = clipped(
        clipper, present, lambda: {n: tf.convert_to_tensor(v) for n, v in variables.items()}
    )
    return [(outputs.get(n), v) for n, v in variables.items()]


def _names(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable, all different: Keras' path, or TensorFlow's name."""
    return unique(getattr(v, "path", None) or v.name.removesuffix(":0") for v in variables)


class CompiledClipper(tf.Module):  # type: ignore[misc]
    """A clipper whose statistics are TensorFlow variables, for use in a ``tf.function``.

    It is a `tf.Module`, so ``tf.train.Checkpoint`` saves and restores it.

    Parameters
    ----------
    clipper
        As for `clip` in a ``tf.function``. Its own statistics are where these start.
    """

    def __init__(self, clipper: Spec) -> None:
        clipper = clipper_of(clipper)
        super().__init__(name=clipper.name.replace("-", "_"))
        self.clipper = clipper
        take = functools.partial(tf.gather, axis=-1)
        operations = Operations(self._make, tf.convert_to_tensor, take, tf.cast)
        self._held = HeldClipper(clipper, backend_named("tensorflow"), operations)
        # The module tracks the variables here.
        self._variables: list[Any] = []

    @classmethod
    def of(cls, clipper: Clipper | AGC) -> CompiledClipper:
        """Return the compiled form of a clipper; the first call makes it."""
        if clipper not in _compiled:
            _compiled[clipper] = cls(clipper)
        return _compiled[clipper]

    def __call__(self, grads_and_vars: Iterable[tuple[Array, Any]]) -> list[tuple[Array, Any]]:
        """Clip (gradient, variable) pairs, and update the statistics."""
        pairs = list(grads_and_vars)
        names = _names([v for _, v in pairs])
        present = {n: pair for n, pair in zip(names, pairs, strict=True) if pair[0] is not None}
        if not present:
            return pairs
        gradients = {name: g for name, (g, _) in present.items()}
        weights = {name: v for name, (_, v) in present.items()}
        if not self._variables:
            # Leave the function that is being traced: variables are made once.
            with tf.init_scope():
                if not tf.executing_eagerly():
                    raise RuntimeError(
                        f"{self.clipper.name} can not clip in the graph of a TensorFlow 1 session: "
                        "write the step as a tf.function, in a program that runs eagerly"
                    )
                self._held.build(weights)
            self._variables = self._held.variables
        outputs = self._held.clip(gradients, weights)
        return [(outputs.get(n), v) for n, (_, v) in zip(names, pairs, strict=True)]

    @property
    def last(self) -> StepRecord | None:
        """What the last step did; None before the first."""
        return self._held.last

    def stats(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger: of the last step, and of all (``round/...``)."""
        return self._held.stats(prefix)

    def state(self) -> dict[str, Any]:
        """Return the clipper's state, for its ``set_state``, also in a federation."""
        return self._held.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state of such a clipper."""
        self._held.load_state(state)

    def reset(self) -> None:
        """Forget all steps."""
        self._held.reset()

    @staticmethod
    def _make(values: Any, name: str) -> Any:
        return tf.Variable(values, dtype=values.dtype, trainable=False, name=name)
