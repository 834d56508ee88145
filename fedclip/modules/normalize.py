# SPDX-License-Identifier: Apache-2.0
"""`normalize`: bring a norm to a fixed value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.base import Clipper
from fedclip.modules.common import COMMON, ORD_VAR, SCOPE_TABLE, Exact, Parameter
from fedclip.privacy import kinds
from fedclip.rules.constant import Constant
from fedclip.scopes import Groups
from fedclip.transforms import Action, NormClipping, SliceClipping, Transform
from fedclip.transforms.slice import check_dims

__all__ = ["Normalize"]


class Normalize(Clipper):
    """Rescale to a fixed norm: global, per tensor, layer, name pattern, or slice.

    ::

        Init(norm, eps):
            assign norm, eps
        Step(grads):
            for each group of tensors:
                n = norm(group)
                if n > 0:
                    group *= norm / (n + eps)

    Parameters
    ----------
    norm : float, default=1.0
        Norm that each group is brought to, > 0, in the units of the output.
    dims : int, list of int or None, default=None
        Measure and rescale each slice that spans these dimensions (negative ones count from the
        end) instead of each tensor; goes with the scopes "global" and "tensor", which then
        mean the same.
    inverse_dims : bool, default=False
        Let the slices span all dimensions but `dims`.
    min_size : int, default=1
        Leave alone what has fewer elements, by slice or (scope "tensor") by tensor.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above; at the first gradient, if a pattern
        matches no tensor.

    Notes
    -----
    Guarantees, with ``ord=2``: the norm of each group of the output, in float64, is at most
    `norm` and, with ``eps=0``, not more than 2e-6 below (half precision: its own rounding); the
    direction is kept. The output does not depend on the scale of the gradient (``eps=0``).

    ====================  ======================================================
    input                 output
    ====================  ======================================================
    zero gradient         the same object; a zero slice stays zero
    empty tensor, 0-d     as any other tensor; dtype and shape are kept
    1e20 in float32       rescaled right: what overflows is measured scaled
    NaN or infinity       as `on_nonfinite` says
    ====================  ======================================================

    The record of a step counts groups whose norm was above `norm` as clipped.
    There is no state but the records of past rounds.

    References
    ----------
    Hazan, Levy & Shalev-Shwartz, 2015, "Beyond convexity: stochastic quasi-convex
    optimization", arXiv:1507.02030.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> normalize = Normalize(norm=1.0)
    >>> normalize.run(NumpyVector({"w": np.array([0.03, 0.04])})).coefs["w"].round(6)
    array([0.6, 0.8])
    """

    name: ClassVar[str] = "normalize"
    guarantee = kinds.brought_to_norm
    differs: ClassVar[Mapping[str, Parameter]] = {
        "scope": SCOPE_TABLE.but(
            meaning='Which tensors share a norm. A table ``{"head.*" = 0.1}`` gives groups their '
            "own norm; tensors that no pattern names form one more group, brought to `norm`."
        ),
        "ord": ORD_VAR.but(
            meaning="What is measured (see `fedclip.measures`). The standard deviation or "
            "variance of fewer than two elements is not defined; they are left alone."
        ),
        "eps": COMMON["eps"].but(
            meaning="Added to the measure in the factor, >= 0: groups whose norm is not much "
            "larger than `eps` stay smaller than `norm`, instead of being blown up."
        ),
    }

    def __init__(
        self,
        norm: float = 1.0,
        *,
        dims: int | Sequence[int] | None = None,
        inverse_dims: bool = False,
        min_size: int = 1,
        **common: Unpack[Exact],
    ) -> None:
        self.norm = parameters.positive(norm=norm)
        self.inverse_dims = parameters.boolean(inverse_dims=inverse_dims)
        self.min_size = parameters.integer(1, min_size=min_size)
        self.dims = dims
        super().__init__(**common)

    def build(self) -> Transform:
        """Return the transform of the clipper."""
        self.dims = check_dims(self.dims, self.scope, self.inverse_dims, self.min_size)
        action = Action(self.eps, rescale=True)
        if self.dims is None and self.min_size == 1:
            return NormClipping(Constant((self.norm,)), self.ord, action)
        return SliceClipping(
            self.norm,
            None if self.dims is None else tuple(self.dims),
            self.inverse_dims,
            self.min_size,
            self.ord,
            action,
        )

    def transform(self, groups: Groups) -> Transform:
        """Return the transform, with the norms of a table."""
        if not isinstance(self.scope, Mapping):
            return self._transform
        norms = tuple(self.scope.get(label, self.norm) for label in groups.labels)
        return replace(self._transform, rule=Constant(norms))  # type: ignore[type-var]
