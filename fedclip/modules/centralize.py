# SPDX-License-Identifier: Apache-2.0
"""`centralize`: subtract the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.base import Clipper
from fedclip.modules.common import COMMON, Common, Parameter
from fedclip.privacy import kinds
from fedclip.transforms import Transform
from fedclip.transforms.moment import Centralizing
from fedclip.transforms.slice import check_dims

__all__ = ["Centralize"]


class Centralize(Clipper):
    """Subtract the mean: of each slice, each tensor, or all tensors together.

    ::

        Step(grads):
            for each slice, tensor or group of min_size elements or more:
                slice -= mean(slice)

    Parameters
    ----------
    dims : int, list of int or None, default=None
        Take the mean of each slice that spans these dimensions (negative ones count from the
        end) instead of each tensor; goes with the scopes "global" and "tensor", which then
        mean the same.
    inverse_dims : bool, default=False
        Let the slices span all dimensions but `dims`: ``dims=0, inverse_dims=True`` is the
        gradient centralisation of the paper, for torch's layout of weights.
    min_size : int, default=2
        Leave alone what has fewer elements: by slice, by tensor, or by group.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above; at the first gradient, if a pattern
        matches no tensor.

    Notes
    -----
    Guarantees: an orthogonal projection, hence linear, and the norm does not grow (but for the
    rounding of single elements); what has mean 0 comes back as the same object.

    ======================  ======================================================
    input                   output
    ======================  ======================================================
    zero gradient           the same object
    0-d tensor              left alone, unless it shares its mean with others
    empty tensor            left alone
    sparse tensor           a dense one, as its zeros do not stay zeros
    beyond the dtype        the largest finite number, if a difference is above it
    NaN or infinity         as `on_nonfinite` says
    ======================  ======================================================

    In the record of a step, the norm is the largest mean in absolute value, and the limit 0.
    There is no state but the records of past rounds.

    References
    ----------
    Yong, Huang, Hua & Zhang, 2020, "Gradient centralization: a new optimization technique for
    deep neural networks", arXiv:2004.01461.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> centralize = Centralize(dims=0, inverse_dims=True)
    >>> centralize.run(NumpyVector({"w": np.array([[1.0, 3.0], [4.0, 4.0]])})).coefs["w"]
    array([[-1.,  1.],
           [ 0.,  0.]])
    """

    name: ClassVar[str] = "centralize"
    guarantee = kinds.centred
    differs: ClassVar[Mapping[str, Parameter]] = {
        "scope": COMMON["scope"].but(default="tensor", meaning="Which tensors share a mean."),
        "exclude": COMMON["exclude"].but(
            meaning="Tensors left alone; the paper leaves out those of one dimension."
        ),
    }

    def __init__(
        self,
        *,
        dims: int | Sequence[int] | None = None,
        inverse_dims: bool = False,
        min_size: int = 2,
        **common: Unpack[Common],
    ) -> None:
        self.inverse_dims = parameters.boolean(inverse_dims=inverse_dims)
        self.min_size = parameters.integer(1, min_size=min_size)
        self.dims = dims
        super().__init__(**common)

    def build(self) -> Transform:
        """Return the transform of the clipper."""
        # Groups have a size here too, so that `min_size` goes with every scope.
        self.dims = check_dims(self.dims, self.scope, self.inverse_dims, 1)
        return Centralizing(
            None if self.dims is None else tuple(self.dims),
            self.inverse_dims,
            self.min_size,
            pooled=self.dims is None and self.scope != "tensor",
        )
