# SPDX-License-Identifier: Apache-2.0
"""`centralize`: subtract the mean."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.clippers.families import as_tuple
from fedclip.transforms.moment import Centralizing
from fedclip.transforms.slice import check_slices


class Centralize(own.Sliced, own.Clipper):
    """Subtract the mean of each slice, of each tensor, or of all tensors.

    ::

        Step(grads):
            for each slice, tensor or group of min_size elements or more:
                slice -= mean(slice)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    It is an orthogonal projection: linear, and no norm grows, except by the rounding of single
    elements. If all means are 0, the same object comes back.

    0-d tensors do not change, unless they share their mean with others. Sparse tensors become
    dense. If a difference is beyond the dtype, the largest finite number replaces it.

    In records, the norm is the largest absolute mean, and the limit 0. The state has only records.

    References
    ----------
    Yong, Huang, Hua & Zhang, 2020, arXiv:2004.01461.

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
    guarantee = own.guarantees.centred

    inverse_dims = own.parameter()
    """Slices span all dimensions except `dims`: ``dims=0, inverse_dims=True`` is the paper's rule
    for weights in torch's layout."""
    min_size = own.parameter(default=2)
    """Skip slices, tensors or groups with fewer elements."""
    scope = own.parameter(default="tensor")
    """Which tensors share a mean."""
    exclude = own.parameter()
    """Tensors to skip; the paper skips those of one dimension."""

    def build(self) -> own.Transform:
        # Groups have a size here too, so that `min_size` goes with every scope.
        check_slices(self.dims, self.scope, self.inverse_dims)
        if self.dims is None and self.scope == "tensor":
            # Each tensor is one slice, which spans all its dims.
            return Centralizing((), True, self.min_size)
        return Centralizing(as_tuple(self.dims), self.inverse_dims, self.min_size)
