# SPDX-License-Identifier: Apache-2.0
"""`growth-clip`: a limit on how fast a norm may grow."""

from __future__ import annotations

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import PastLimit
from fedclip.core.parameters import at_least_one, limit, parameter, positive
from fedclip.privacy import guarantees as kinds
from fedclip.rules.growth import Growth
from fedclip.transforms import Transform


class GrowthClip(PastLimit, Clipper):
    """Limit at the norm of the step before, times a factor, plus a step.

    ::

        Init(mul, add, min_norm, max_decay):
            previous = none
        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = warmup_norm, at the first step
                        min(previous * mul, previous + add), afterwards
                u = min(n, limit)
                previous = max(u, previous / max_decay, min_norm)
                group *= min(1, limit / n)

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or two do not go together; at a gradient, if
        a pattern matches no tensor.

    Notes
    -----
    State: the past norm of each group, after clipping; it goes on from one round of a client to the
    next, and a run that is saved and resumed gives the same outputs, bit for bit.

    Guarantees: no output norm is above its limit, nor above `max_norm`; where no norm is over its
    limit the very same Vector comes back; NaN and infinity are not remembered. For differential
    privacy only `max_norm` counts: the learnt limit depends on the data, and bounds no sensitivity.

    The first norm counts as at least `min_norm`, too. Without `min_norm`, the step after a norm of
    0 is a first step again.

    References
    ----------
    `ClipNormGrowth` of torchzero, https://github.com/inikishev/torchzero, whose `min_value` also
    divides every update, which is not done here.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> clip = GrowthClip()
    >>> for norm in (1.0, 10.0, 10.0):
    ...     out = clip.run(NumpyVector({"w": np.array([norm])}))
    ...     print(round(float(out.coefs["w"][0]), 4))
    1.0
    1.5
    2.25
    """

    name = "growth-clip"
    guarantee = kinds.learnt_limit

    mul: float | None = parameter(at_least_one, default=1.5, kw_only=False)
    """Factor by which a norm may grow from one step to the next, >= 1; None for no such limit."""
    add: float | None = parameter(positive, default=None)
    """Amount by which a norm may grow, > 0, in the units of the gradient; None for no such
    limit. With both, the lower limit holds; with neither, only `warmup_norm` and `max_norm`."""
    min_norm: float | None = parameter(positive, default=None)
    """Past norms count as at least this, so that a gradient can grow again from 0; None for no
    such floor."""
    max_decay: float | None = parameter(at_least_one, default=2.0)
    """Factor by which the past norm may fall from one step to the next, >= 1, so that the steps
    after one small gradient are not all spikes; None lets it fall at once."""
    warmup_norm: float | None = parameter(limit, default=None)
    """Fixed limit at the first step, which has no step before it; None for none."""

    def build(self) -> Transform:
        return self.with_rule(Growth)
