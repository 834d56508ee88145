# SPDX-License-Identifier: Apache-2.0
"""`centralize`: subtract the mean."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import Sliced, as_tuple
from fedclip.core.parameters import parameter
from fedclip.privacy import guarantees as kinds
from fedclip.transforms import Transform
from fedclip.transforms.moment import Centralizing
from fedclip.transforms.slice import check_slices


class Centralize(Sliced, Clipper):
    """Subtract the mean: of each slice, each tensor, or all of them.

    ::

        Step(grads):
            for each slice, tensor or group of min_size elements or more:
                slice -= mean(slice)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    Guarantees: it is an orthogonal projection, so it is linear, and no norm grows (but for the
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

    name = "centralize"
    guarantee = kinds.centred

    inverse_dims = parameter()
    """Let the slices span all dimensions but `dims`: ``dims=0, inverse_dims=True`` is the
    gradient centralisation of the paper, for torch's layout of weights."""
    min_size = parameter(default=2)
    """Leave alone what has fewer elements: by slice, by tensor, or by group."""
    scope = parameter(default="tensor")
    """Which tensors share a mean."""
    exclude = parameter()
    """Tensors left alone; the paper leaves out those of one dimension."""

    def build(self) -> Transform:
        # Groups have a size here too, so that `min_size` goes with every scope.
        check_slices(self.dims, self.scope, self.inverse_dims)
        dims = as_tuple(self.dims)
        pooled = dims is None and self.scope != "tensor"
        return Centralizing(dims, self.inverse_dims, self.min_size, pooled)
