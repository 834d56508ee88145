# SPDX-License-Identifier: Apache-2.0
"""`norm-clip`: a fixed limit on a norm."""

from __future__ import annotations

import math
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

__all__ = ["NormClip"]


class NormClip(Clipper):
    """Fixed limit on a norm: global, per tensor, layer, name pattern, or slice.

    ::

        Init(max_norm):
            assign max_norm
        Step(grads):
            for each group of tensors:
                n = norm(group)
                if n > max_norm:
                    group *= max_norm / n

    Parameters
    ----------
    max_norm : float, default=1.0
        Largest norm of a group, > 0, in the units of the gradient. None (no upper limit) needs
        `min_norm`.
    min_norm : float or None, default=None
        Groups below this norm, unless they are zero, are scaled up to it.
    dims : int, list of int or None, default=None
        Measure and clip each slice that spans these dimensions (negative ones count from the
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
    Guarantees, with ``ord=2, eps=0``: the output's norm, in float64, is at most `max_norm` and,
    where it was above, not more than 2e-6 below (half precision: its own rounding); below the
    limit the very same Vector comes back; the direction of a clipped group is kept; applying
    it twice is applying it once.

    ====================  ======================================================
    input                 output
    ====================  ======================================================
    zero gradient         the same object
    norm equal to limit   the same object
    empty tensor, 0-d     as any other tensor; dtype and shape are kept
    1e20 in float32       clipped right: what overflows is measured scaled
    NaN or infinity       as `on_nonfinite` says
    ====================  ======================================================

    There is no state but the records of past rounds.

    References
    ----------
    Pascanu, Mikolov & Bengio, 2013, "On the difficulty of training recurrent neural networks",
    arXiv:1211.5063.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = NormClip(max_norm=1.0)
    >>> clip.run(NumpyVector({"w": np.array([3.0, 4.0])})).coefs["w"].round(6)
    array([0.6, 0.8])
    >>> clip.last.norm_before
    (5.0,)
    """

    name: ClassVar[str] = "norm-clip"
    guarantee = kinds.fixed_limit
    differs: ClassVar[Mapping[str, Parameter]] = {
        "scope": SCOPE_TABLE.but(
            meaning='Which tensors share a norm. A table ``{"head.*" = 0.1}`` gives groups their '
            "own limit; tensors that no pattern names form one more group, limited by `max_norm`."
        ),
        "ord": ORD_VAR,
        "eps": COMMON["eps"].but(
            meaning="Added to the norm in the factor ``max_norm / (n + eps)``; 1e-6 gives what "
            "`torch.nn.utils.clip_grad_norm_` gives, 0 is exact."
        ),
    }

    def __init__(
        self,
        max_norm: float | None = 1.0,
        *,
        min_norm: float | None = None,
        dims: int | Sequence[int] | None = None,
        inverse_dims: bool = False,
        min_size: int = 1,
        **common: Unpack[Exact],
    ) -> None:
        self.min_norm = parameters.optional(parameters.positive, min_norm=min_norm)
        self.max_norm = None
        if max_norm is not None or min_norm is None:
            self.max_norm = parameters.positive(max_norm=max_norm)
        limit = math.inf if self.max_norm is None else self.max_norm
        if self.min_norm is not None and self.min_norm > limit:
            raise ValueError(f"min_norm must be <= max_norm, got {min_norm!r} > {max_norm!r}")
        self.inverse_dims = parameters.boolean(inverse_dims=inverse_dims)
        self.min_size = parameters.integer(1, min_size=min_size)
        self.dims = dims
        super().__init__(**common)

    def build(self) -> Transform:
        """Return the transform of the clipper."""
        limit = math.inf if self.max_norm is None else self.max_norm
        self.dims = check_dims(self.dims, self.scope, self.inverse_dims, self.min_size)
        action = Action(self.eps, self.min_norm)
        if self.dims is None and self.min_size == 1:
            return NormClipping(Constant((limit,)), self.ord, action)
        dims = None if self.dims is None else tuple(self.dims)
        return SliceClipping(limit, dims, self.inverse_dims, self.min_size, self.ord, action)

    def transform(self, groups: Groups) -> Transform:
        """Return the transform, with the limit of each group."""
        if not isinstance(self.scope, Mapping):
            return self._transform
        limits = tuple(self.scope.get(label, self.max_norm or math.inf) for label in groups.labels)
        return replace(self._transform, rule=Constant(limits))  # type: ignore[type-var]
