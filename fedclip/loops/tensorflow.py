# SPDX-License-Identifier: Apache-2.0
"""Clippers in TensorFlow loops, eager or in a ``tf.function``, and in Keras 3's ``fit``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from fedclip.errors import needing, public_names

with needing(__name__, "TensorFlow: pip install tensorflow"):
    import tensorflow as tf

from fedclip.arrays import Array, backend_named
from fedclip.clippers.agc import AGC
from fedclip.clippers.base import Clipper
from fedclip.loops import clippers, compiled
from fedclip.loops.clippers import Spec
from fedclip.loops.compiled import HeldClipper, Variable
from fedclip.loops.keras import ClippedOptimizer

__all__ = ["ClippedOptimizer", "CompiledClipper", "clip"]

__dir__ = public_names(__name__)


Pair: TypeAlias = tuple[Array, Variable]
"""A gradient, which may be None, and its variable."""


def clip(grads_and_vars: Iterable[Pair], clipper: Clipper | AGC) -> list[Pair]:
    """Clip the gradients of (gradient, variable) pairs, and return the pairs.

    In eager code, the clipper itself learns. In a ``tf.function`` the statistics are variables,
    which start from those of the clipper. `CompiledClipper.of` returns them; save them in a
    checkpoint, or read them back into the clipper.

    Parameters
    ----------
    grads_and_vars
        Pairs, such as ``zip(tape.gradient(loss, variables), variables)``. Gradients may be None or
        IndexedSlices.
    clipper
        A clipper of fedclip; in a ``tf.function``, one with ``on_nonfinite`` "skip" or "propagate".

    Examples
    --------
    >>> import tensorflow as tf
    >>> from fedclip import NormClip
    >>> pairs = [(tf.constant([3.0, 4.0]), tf.Variable([0.0, 0.0]))]
    >>> [(gradient, _)] = clip(pairs, NormClip(1.0))
    >>> bool(tf.norm(gradient) <= 1.0)
    True
    """
    clippers.check_clipper(clipper)
    pairs = list(grads_and_vars)
    if not tf.executing_eagerly():
        # AutoGraph's decorator has no types.
        compiled_clipper: Any = CompiledClipper.of(clipper)
        return [*compiled_clipper(pairs)]
    present, variables = _by_name(pairs)
    if not present:
        return pairs
    clippers.check_members(clipper, variables, fixed=True)
    if not isinstance(clipper, AGC):
        after = clipper.clip(present)
    else:
        outputs = clippers.use_of(clipper).outputs
        if not outputs.keys() >= variables.keys():
            outputs.update(compiled.outputs_of(clipper, variables) or {})
        weights = {name: tf.convert_to_tensor(v) for name, v in variables.items()}
        after = clipper.clip(present, weights, outputs=outputs or None)
    return [(after.get(n), v) for n, v in variables.items()]


def _by_name(pairs: Sequence[Pair]) -> tuple[dict[str, Array], dict[str, Variable]]:
    """Return what gradients there are, and all variables, by Keras' path or TensorFlow's name."""
    names = compiled.names_of(v for _, v in pairs)
    gradients = {n: g for n, (g, _) in zip(names, pairs, strict=True) if g is not None}
    return gradients, {n: v for n, (_, v) in zip(names, pairs, strict=True)}


class CompiledClipper(compiled.Verbs, tf.Module):
    """A clipper with its statistics in TensorFlow variables, for use in a ``tf.function``.

    It is a `tf.Module`, so ``tf.train.Checkpoint`` saves and restores it.

    Parameters
    ----------
    clipper
        As for `clip` in a ``tf.function``. The variables start from its statistics.
    """

    def __init__(self, clipper: Spec) -> None:
        made = clippers.clipper_of(clipper)
        super().__init__(name=made.name.replace("-", "_"))
        self.clipper = made
        make = functools.partial(tf.Variable, trainable=False)
        operations = compiled.Operations(make, tf.convert_to_tensor, tf.gather, tf.cast)
        self.held = HeldClipper(made, backend_named("tensorflow"), operations)
        # The module tracks the variables here.
        self._variables: list[Variable] = []

    @classmethod
    def of(cls, clipper: Clipper | AGC) -> CompiledClipper:
        """Return the compiled form of a clipper; the first call creates it."""
        use = clippers.use_of(clipper)
        use.compiled = made = use.compiled or cls(clipper)
        return made

    # No branch depends on a tensor, so AutoGraph has nothing to rewrite.
    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        """Clip (gradient, variable) pairs, and update the statistics."""
        pairs = list(grads_and_vars)
        present, variables = _by_name(pairs)
        if not present:
            return pairs
        weights = {name: variables[name] for name in present}
        if not self._variables:
            # Outside of the function that is traced: variables are made once.
            with tf.init_scope():
                if not tf.executing_eagerly():
                    raise RuntimeError(
                        f"{self.clipper.name} clips in a tf.function, not in a session's graph"
                    )
                self.held.build(weights)
            self._variables = self.held.variables
        outputs = self.held.clip(present, weights)
        return [(outputs.get(n), v) for n, v in variables.items()]
