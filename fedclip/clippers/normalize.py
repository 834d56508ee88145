# SPDX-License-Identifier: Apache-2.0
"""`normalize`: bring a norm to a fixed value."""

from __future__ import annotations

from fedclip.clippers import own
from fedclip.core.parameters import limit


class Normalize(own.FixedLimit, own.Clipper):
    """Rescale to a fixed norm: global, by tensor, layer, pattern or slice.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                if n > 0:
                    group *= norm / (n + eps)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or two contradict each other. At a gradient,
        if a pattern matches no tensor.

    Notes
    -----
    With ``ord=2``, in float64: no output norm is above `norm`, and with ``eps=0`` at most 2e-6
    below (half precision: its rounding). Directions do not change. With ``eps=0`` the output does
    not depend on the gradient's scale.

    A zero gradient comes back as the same object, and a zero slice stays zero. Dtype and shape
    never change, also of empty and 0-d tensors. Records count norms above `norm` as clipped. The
    state has only records.

    References
    ----------
    Hazan, Levy & Shalev-Shwartz, 2015, arXiv:1507.02030.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> normalize = Normalize(norm=1.0)
    >>> normalize.run(NumpyVector({"w": np.array([0.03, 0.04])})).coefs["w"].round(6)
    array([0.6, 0.8])
    """

    name = "normalize"
    guarantee = own.guarantees.brought_to_norm

    norm: float = own.parameter(limit, default=1.0, kw_only=False)
    """Norm of each group of the output, > 0, in units of the output."""
    scope = own.parameter()
    """Which tensors share a norm. A table ``{"head.*" = 0.1}`` gives groups other norms; the other
    tensors are one group."""
    ord = own.parameter()
    """Order of the norm, see `fedclip.core.measures`. With "std" or "var", groups of fewer than two
    elements do not change."""
    eps = own.parameter()
    """Added to the norm in the factor, >= 0: norms near or below `eps` stay smaller."""

    def build(self) -> own.Transform:
        return self.with_limit(self.norm, own.Action(self.eps, rescale=True))

    def transform(self, groups: own.Groups) -> own.Transform:
        return self.with_table(self._transform, groups, self.norm)
