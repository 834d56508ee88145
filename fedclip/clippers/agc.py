# SPDX-License-Identifier: Apache-2.0
"""`agc`: a limit relative to the norm of the weights, per output unit."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array, Backend, NumpyBackend, backend_of
from fedclip.arrays.base import FLOATS
from fedclip.arrays.blocks import UNCERTAINTY
from fedclip.clippers.core import Core, check_mapping
from fedclip.clippers.families import as_tuple
from fedclip.core.parameters import boolean, choice, non_negative, parameter, positive
from fedclip.core.plugins import Regularizer, V
from fedclip.core.scopes import Groups, check_exclude, resolve
from fedclip.errors import FedclipWarning
from fedclip.privacy import guarantees as kinds
from fedclip.rules.constant import Constant, Given
from fedclip.transforms import Action, NormClipping, SliceClipping, Transform
from fedclip.transforms.slice import Axes as Axes
from fedclip.transforms.slice import check_dims, spanned


def _check_axis(axis: object) -> int:
    """Return `axis` if it is an int."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        got = f"{axis!r} ({type(axis).__name__}); to sum over several dimensions, give dims"
        raise TypeError(f"axis must be an int or None, got {got}")
    return axis


Outputs: TypeAlias = Mapping[str, Axes]


class AGC(Core, Regularizer):
    """Clip gradients relative to the norm of their weights (AGC).

    ::

        Step(grads, weights):
            for each unit of each tensor:
                limit = ratio * (max(norm(weights of the unit), min_norm) + eps)
                n = norm(gradient of the unit)
                if n + eps > limit:
                    gradient of the unit *= limit / (n + eps)

    It is a declearn *regularizer*, because modules do not see the weights, and acts before them.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor, or the weights lack one or differ in shape.

    Notes
    -----
    With ``eps=0``, no output unit is above its limit in float64. If nothing is clipped, the same
    object comes back. For fixed weights it is a projection.

    Vectors are one unit, in "optax" also tensors with one dimension longer than 1. Weights with NaN
    or infinity count as zero, with a warning. With "output", sparse gradients count as dense, and
    records show a tensor's worst unit. declearn does not save the records.

    References
    ----------
    Brock, De, Smith & Simonyan, 2021, arXiv:2102.06171.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> agc = AGC(ratio=0.1, axis=0)
    >>> weights = NumpyVector({"w": np.array([[3.0, 4.0], [30.0, 40.0]])})
    >>> grads = NumpyVector({"w": np.array([[0.0, 1.0], [0.0, 1.0]])})
    >>> agc.run(grads, weights).coefs["w"].round(6)
    array([[0. , 0.5],
           [0. , 1. ]])
    """

    name = "agc"
    guarantee = kinds.weight_limit
    _follows_weights = True

    ratio: float = parameter(positive, default=1.0, kw_only=False)
    """Largest gradient norm, relative to the weights' norm, > 0; the paper's 0.01 is
    ``AGC.preset("nfnets")``."""
    unit: str = parameter(choice, ("output", "tensor", "global", "optax"), default="output")
    """What shares a norm: weights of one output ("output"), a tensor ("tensor"), or all ("global").
    "optax": axis 0 of 2 or 3 dimensions, all but the last of 4 or more."""
    axis: int | None = parameter(_check_axis, default=None)
    """Output axis. None: the layer's, if known; else 0 for torch and NumPy, -1 for TensorFlow and
    JAX."""
    dims: int | Sequence[int] | None = parameter(
        check_dims, default=None, kind="int, list of int or None"
    )
    """Instead of `axis`: sum over these dimensions. Tensors without them do not change."""
    min_norm: float = parameter(positive, default=1.0)
    """Smallest norm of weights, > 0, so that zero weights move."""
    eps: float = parameter(non_negative, default=0.0)
    """Added to both norms, >= 0; 1e-8 is smartclip."""
    skip_vectors: bool = parameter(boolean, default=False)
    """Skip tensors of one dimension or less."""
    exclude = parameter()
    """Tensors to skip; in the paper, the last layer."""

    def __post_init__(self) -> None:
        """Check what goes together, and begin without weights."""
        if self.unit != "output" and not (self.axis is None and self.dims is None):
            raise ValueError(f"axis and dims go with unit='output', got unit={self.unit!r}")
        if self.axis is not None and self.dims is not None:
            both = f"axis={self.axis!r}, dims={self.dims!r}"
            raise ValueError(f"give axis or dims, not both; got {both}")
        self._weights: Mapping[str, Array] = {}
        self._outputs: Outputs | None = None
        super().__post_init__()

    def build(self) -> Transform:
        return NormClipping(Constant((0.0,)))

    def run(self, gradients: V, weights: V) -> V:
        """Return the clipped gradients; the very same object if nothing is clipped."""
        coefs = self._coefs(gradients)
        outputs = self.clip(coefs, self._coefs(weights))
        make: Callable[[dict[str, Array]], V] = type(gradients)
        return gradients if outputs is coefs else make(dict(outputs))

    def clip(
        self,
        arrays: Mapping[str, Array],
        weights: Mapping[str, Array],
        *,
        backend: Backend | None = None,
        outputs: Outputs | None = None,
    ) -> Mapping[str, Array]:
        """Return the clipped arrays, by name; see `fedclip.Clipper.clip`.

        `outputs` holds the axes of the outputs of tensors whose layers are known, by name.
        """
        for mapping in (arrays, weights):
            check_mapping(mapping)
        for name, array in arrays.items():
            shape = getattr(weights.get(name), "shape", array.shape)
            if shape != array.shape:
                both = f"shape {tuple(array.shape)} and weights of shape {tuple(shape)}"
                raise ValueError(f"{name!r} has a gradient of {both}")
        with self.lock:
            self._weights, self._outputs = weights, outputs
            try:
                return self.clip_arrays(arrays, backend)
            finally:
                # Do not keep the weights after the step.
                self._weights = {}

    def _made(self, groups: Groups, backend: Backend | None) -> Transform:
        weights = weights_of(self._weights, groups)
        if not weights:
            return self._transform
        backend = backend or backend_of(weights[0])
        return self.transform(weights, groups, backend, outputs=self._outputs)

    def groups(self, shapes: Mapping[str, Sequence[int]]) -> Groups:
        """Return which tensors of these names and shapes share a norm."""
        scope = "global" if self.unit == "global" else "tensor"
        return resolve(scope, self.excluded(shapes), list(shapes))

    def excluded(self, shapes: Mapping[str, Sequence[int]]) -> list[str] | None:
        """Return the patterns of excluded tensors, with the names of vectors if they are too."""
        if not self.skip_vectors:
            return check_exclude(self.exclude)
        vectors = [name for name, shape in shapes.items() if len(shape) < 2]
        return [*(self.exclude or ()), *map(glob.escape, vectors)] or None

    def transform(
        self,
        weights: Sequence[Array],
        groups: Groups,
        backend: Backend,
        *,
        traced: bool = False,
        outputs: Outputs | None = None,
    ) -> NormClipping | SliceClipping:
        """Return the transform with limits for these weights, on their device.

        In `traced` code the host does not read the weights. `outputs` is as in `clip`.
        """
        # Of linear layers and convolutions. NumPy's arrays are those of scikit-learn.
        usual = (-1,) if backend.name in ("jax", "tensorflow") else (0,)
        known = [(outputs or {}).get(name, usual) for name in groups.names]
        views: Any = None if traced else backend.dense_views(weights)
        if views is None or not {view.dtype for view in views} <= FLOATS:
            native = [*map(backend.dense, backend.prepared(weights))]
            if not traced:
                native = [*map(backend.constant, native)]
            views = [None] if traced else backend.views(native)
            if any(view is None for view in views):
                return self._of(native, groups, backend, known)
        with np.errstate(all="ignore"):
            return self._of(views, groups, NumpyBackend(backend, views), known)

    def _of(
        self, arrays: Sequence[Array], groups: Groups, xp: Backend, known: Sequence[Axes]
    ) -> NormClipping | SliceClipping:
        """Return the transform for weights, which are views on the host."""
        if self.unit in ("tensor", "global"):
            limits = self._limits(xp.group_norms(arrays, groups.members), xp)
            return NormClipping(Given(limits), action=Action(self.eps))
        shapes, on_host = [tuple(array.shape) for array in arrays], isinstance(xp, NumpyBackend)
        spans = tuple([self._span(s or (1,), o) for s, o in zip(shapes, known, strict=True)])
        slices = SliceClipping((), None, action=Action(self.eps), spans=spans)
        layout = slices.layout(shapes, groups.owners, is_cached=on_host)
        if not layout.spans:
            return slices
        measure = partial(slices.measure, arrays, layout, xp, 2)
        if not xp.rounds or all(array.dtype.itemsize != 4 for array in arrays):
            return replace(slices, limit=self._limits(measure(), xp))
        # Of float32, the norms may be too large.
        limits = self._limits((1.0 - UNCERTAINTY) * measure(fast=True), xp)
        return replace(slices, limit=limits, exact_limit=lambda: self._limits(measure(), xp))

    def get_limit(self, weight_norm: float) -> float:
        """Return the limit of a unit with weights of this norm.

        >>> AGC(0.1).get_limit(2.0)
        0.2
        """
        return float(self._limits(np.array([weight_norm]), NUMPY)[0])

    def _limits(self, norms: Any, xp: Arithmetic) -> Any:
        if isinstance(xp, NumpyBackend) and not np.isfinite(norms).all():
            least = self.ratio * (self.min_norm + self.eps)
            message = f"agc: weights with NaN or infinity count as 0; their limit is {least!r}"
            warnings.warn(message, FedclipWarning, stacklevel=8)
        size = xp.maximum(xp.where(xp.isfinite(norms), norms, 0.0), self.min_norm)
        return self.ratio * (size + self.eps if self.eps else size)

    def axes(self, shape: tuple[int, ...], outputs: Axes = (0,)) -> Axes | None:
        """Return the dimensions that a unit of a tensor of this shape spans; None: not clipped.

        >>> AGC().axes((3, 2, 5, 5), outputs=(1,))
        (0, 2, 3)
        """
        return self._span(shape or (1,), outputs) or None

    @property
    def asks_layers(self) -> bool:
        """Whether its units depend on the layers of a model."""
        return self.unit == "output" and self.axis is None and self.dims is None

    def _span(self, shape: Sequence[int], outputs: Axes) -> Axes:
        ndim = len(shape)
        if self.dims is not None:
            return spanned(ndim, as_tuple(self.dims), False)
        if self.unit == "optax":
            is_vector = sum(n > 1 for n in shape) <= 1
            return tuple(range(ndim if is_vector else 1 if ndim < 4 else ndim - 1))
        if ndim < 2:
            return (0,)
        return spanned(ndim, outputs if self.axis is None else (self.axis,), True)


def weights_of(weights: Mapping[str, Array] | None, groups: Groups) -> list[Array]:
    """Return the weights of the tensors of these groups.

    Raises
    ------
    ValueError
        If some are missing.
    TypeError
        If weights are complex.
    """
    known = weights or {}
    missing = [name for name in groups.names if known.get(name) is None]
    if missing:
        names, known_names = (", ".join(map(repr, some)) for some in (missing, known))
        text = f"agc has no weights for {names}; it was given {known_names or 'none'}"
        raise ValueError(f"{text}: give the weights under the names of the gradients")
    found = [known[name] for name in groups.names]
    # A model has few dtypes.
    for i in {(type(w), getattr(w, "dtype", None)): i for i, w in enumerate(found)}.values():
        if (dtype := backend_of(found[i]).dtype(found[i])).startswith("complex"):
            hint = "agc takes norms of real weights: put the name in exclude"
            raise TypeError(f"the weights {groups.names[i]!r} are {dtype}, and {hint}")
    return found
