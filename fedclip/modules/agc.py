# SPDX-License-Identifier: Apache-2.0
"""`agc`: a limit relative to the norm of the weights, per output unit."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedclip.arrays import NUMPY, Arithmetic, Array, Backend, NumpyBackend, backend_of
from fedclip.errors import FedclipWarning
from fedclip.modules.core import Core
from fedclip.modules.families import as_tuple
from fedclip.parameters import boolean, choice, non_negative, parameter, positive
from fedclip.privacy import kinds
from fedclip.registration import Regularizer
from fedclip.rules.constant import Constant, Given
from fedclip.scopes import Groups, check_exclude, resolve
from fedclip.transforms import Action, Gradient, NormClipping, SliceClipping, Transform
from fedclip.transforms.slice import check_dims, spanned

if TYPE_CHECKING:
    from declearn.model.api import Vector


def _check_axis(axis: object) -> int:
    """Return `axis` if it is an int."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(
            f"axis must be an int or None, got {axis!r} ({type(axis).__name__}); to sum over "
            "several dimensions, give dims"
        )
    return axis


class AGC(Core, Regularizer):
    """Adaptive gradient clipping: a limit relative to the weights' norm.

    ::

        Init(ratio, min_norm, eps):
            assign ratio, min_norm, eps
        Step(grads, weights):
            for each unit of each tensor:
                limit = ratio * (max(norm(weights of the unit), min_norm) + eps)
                n = norm(gradient of the unit)
                if n + eps > limit:
                    gradient of the unit *= limit / (n + eps)

    It is a *regularizer* of declearn's, ``Optimizer(regularizers=["agc"])``, because modules do
    not see the weights; regularizers act on the raw gradient, before all modules.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a
        gradient, if a pattern matches no tensor, or the weights lack one or differ in shape.

    Notes
    -----
    Guarantees, with ``eps=0``: the norm of each unit of the output, in float64, is at most its
    limit; if all norms are, the very same Vector comes back; with the same weights, applying it
    twice is applying it once. For fixed weights it is a projection on a product of balls.

    ======================  ======================================================
    input                   output
    ======================  ======================================================
    zero gradient           the same object
    weights of zero         clipped to ``ratio * min_norm``
    weights not finite      count as zero, with a warning
    0-d, empty tensor       as any other tensor; dtype and shape are kept
    sparse gradient         as the dense one that it stands for, with "output"
    NaN or infinity         as `on_nonfinite` says
    ======================  ======================================================

    There is no state but `rounds` and `last`, the records that modules have, which declearn
    does not save with the optimizer. With "output" the record of a tensor is that of its
    worst unit.

    References
    ----------
    Brock, De, Smith & Simonyan, 2021, "High-performance large-scale image recognition without
    normalization", arXiv:2102.06171.

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

    ratio: float = parameter(positive, default=1.0, kw_only=False)
    """Largest norm of a gradient relative to that of its weights, > 0. With 1, a step of plain
    gradient descent changes a unit by at most the learning rate times its norm. The paper uses
    0.01 for batches of 4096, larger values for smaller ones, and `min_norm` 0.001:
    ``AGC.preset("nfnets")``."""
    unit: str = parameter(choice, ("output", "tensor", "global"), default="output")
    """A unit has its own norm: all weights that lead to one output of a layer; one tensor; or
    all tensors together."""
    axis: int | None = parameter(_check_axis, default=None)
    """With "output": the axis of the outputs, 0 for the layers of torch, -1 for those of
    TensorFlow and JAX; tensors of one dimension or less are one unit. None follows the NFNets
    code: sums over axis 0 of two or three dimensions, over all but the last of four or more;
    tensors that have only one dimension longer than 1 are one unit."""
    dims: int | Sequence[int] | None = parameter(
        check_dims, default=None, kind="int, list of int or None"
    )
    """With "output": sum over these dimensions, for layouts that `axis` can not describe. A 0-d
    tensor counts as one of shape (1,); tensors without these dimensions are left alone."""
    min_norm: float = parameter(positive, default=1.0)
    """Smaller norms of weights count as this, > 0, so that weights that start at zero can move. 1
    is about what usual initialisations give a unit."""
    eps: float = parameter(non_negative, default=0.0)
    """Added to both norms, >= 0; 1e-8 gives the results of smartclip, 0 is exact."""
    skip_vectors: bool = parameter(boolean, default=False)
    """Leave alone tensors of one dimension or less: biases, scales of normalisation layers."""
    exclude = parameter()
    """Tensors left alone; the paper leaves out the last layer."""

    def __post_init__(self) -> None:
        """Check what goes together, and begin without weights."""
        if self.unit != "output" and not (self.axis is None and self.dims is None):
            raise ValueError(f"axis and dims go with unit='output', got unit={self.unit!r}")
        if self.axis is not None and self.dims is not None:
            raise ValueError(
                f"give axis or dims, not both; got axis={self.axis!r}, dims={self.dims!r}"
            )
        self._weights: Mapping[str, Array] = {}
        super().__post_init__()

    def build(self) -> Transform:
        return NormClipping(Constant((0.0,)))

    def run(self, gradients: Vector[Any], weights: Vector[Any]) -> Vector[Any]:
        """Return the clipped gradients; the very same object if nothing is clipped."""
        coefs = self._coefs(gradients)
        outputs = self.clip(coefs, self._coefs(weights))
        return gradients if outputs is coefs else type(gradients)(dict(outputs))

    def clip(
        self,
        arrays: Mapping[str, Array],
        weights: Mapping[str, Array],
        *,
        backend: Backend | None = None,
    ) -> Mapping[str, Array]:
        """Return the clipped arrays, by name; see `fedclip.Clipper.clip`."""
        self._checked(weights)
        for name, array in self._checked(arrays).items():
            shape = getattr(weights.get(name), "shape", array.shape)
            if shape != array.shape:
                raise ValueError(
                    f"{name!r} has a gradient of shape {tuple(array.shape)} and weights of shape "
                    f"{tuple(shape)}"
                )
        with self.lock:
            self._weights = weights
            try:
                return self._clip(arrays, backend)
            finally:
                # Do not keep the weights after the step.
                self._weights = {}

    def _grouped(self, arrays: Mapping[str, Array]) -> Groups:
        return self.groups({name: array.shape for name, array in arrays.items()})

    def _made(self, groups: Groups, backend: Backend | None) -> Transform:
        weights = weights_of(self._weights, groups)
        if not weights:
            return self._transform
        return self.transform(weights, groups, backend or backend_of(weights[0]))

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
        self, weights: Sequence[Array], groups: Groups, backend: Backend, *, traced: bool = False
    ) -> NormClipping | SliceClipping:
        """Return the transform with the limits for these weights, where they are.

        In code that is `traced` they are not looked at on the host.

        Raises
        ------
        TypeError
            If weights are complex.
        """
        _check_real(weights, groups, backend)
        native = [*map(backend.dense, backend.prepared(weights))]
        if not traced:
            native = [*map(backend.constant, native)]
        views: Any = [None] if traced else backend.views(native)
        if any(view is None for view in views):
            return self._of(Gradient(native, groups, backend))
        with np.errstate(all="ignore"):
            return self._of(Gradient(native, groups, backend, None, views))

    def _of(self, weights: Gradient) -> NormClipping | SliceClipping:
        arrays, groups, xp = weights.arrays, weights.groups, weights.xp
        if self.unit != "output":
            limits = self._limits(xp.group_norms(arrays, groups.members), xp)
            return NormClipping(Given(limits), action=Action(self.eps))
        if all(self.axes(tuple(weight.shape)) is None for weight in arrays):
            return self._slices(())
        return self._slices(self._limits(self._slices(()).measure(arrays, xp), xp))

    def get_limit(self, weight_norm: float) -> float:
        """Return the limit of a unit whose weights have this norm.

        >>> AGC(0.1).get_limit(2.0)
        0.2
        """
        return float(self._limits(np.array([weight_norm]), NUMPY)[0])

    def _limits(self, norms: Any, xp: Arithmetic) -> Any:
        if isinstance(xp, NumpyBackend) and not np.isfinite(norms).all():
            warnings.warn(
                "agc: weights hold NaN or infinity, and count as 0: the limit of their gradients "
                f"is {self.ratio * (self.min_norm + self.eps)!r}",
                FedclipWarning,
                stacklevel=8,
            )
        size = xp.maximum(xp.where(xp.isfinite(norms), norms, 0.0), self.min_norm)
        return self.ratio * (size + self.eps if self.eps else size)

    def axes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the dims over which a unit of a tensor of this shape spans; None: left alone."""
        return self._slices(()).axes(shape)

    def _slices(self, limits: object) -> SliceClipping:
        return SliceClipping(limits, None, action=Action(self.eps), span=self._span)

    def _span(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the dims over which a unit of a tensor of this shape spans."""
        ndim = len(shape)
        if self.dims is not None:
            return spanned(ndim, as_tuple(self.dims), False)
        if self.axis is not None:
            return spanned(ndim, (self.axis,), True) or (0,)
        if sum(n > 1 for n in shape) <= 1:
            return tuple(range(ndim))
        return (0,) if ndim in (2, 3) else tuple(range(ndim - 1))


def weights_of(weights: Mapping[str, Array] | None, groups: Groups) -> list[Array]:
    """Return the weights of the tensors of these groups.

    Raises
    ------
    ValueError
        If some are missing.
    """
    given = weights or {}
    missing = [name for name in groups.names if given.get(name) is None]
    if missing:
        raise ValueError(
            f"agc has no weights for {', '.join(map(repr, missing))}; it was given "
            f"{', '.join(map(repr, given)) or 'none'}: it takes its limits from the weights, by "
            "the names of the gradients"
        )
    return [given[name] for name in groups.names]


def _check_real(weights: Sequence[Array], groups: Groups, backend: Backend) -> None:
    for name, weight in zip(groups.names, weights, strict=True):
        if (dtype := backend.dtype(weight)).startswith("complex"):
            raise TypeError(
                f"agc takes the norms of real weights; those of {name!r} are {dtype}: put its "
                "name in exclude"
            )
