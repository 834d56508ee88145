# SPDX-License-Identifier: Apache-2.0
"""`growth-value-clip`: limit how fast every element may grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from fedclip import parameters
from fedclip.modules.base import Clipper
from fedclip.modules.common import SCOPE_ELEMENTS, Common, Parameter, Preset
from fedclip.privacy import kinds
from fedclip.rules.elementwise import GrowthValue
from fedclip.transforms import Transform
from fedclip.transforms.past import PastClipping


class GrowthValueClip(Clipper):
    """Limit on every element: by how much it may grow from one output to the next.

    ::

        Init(mul, add, min_value, max_decay):
            p = first gradient, which is not clipped
        Step(grads):
            for each element x:
                limit = min(abs(p) + add, max(abs(p), min_value) * mul)
                y = min(limit, max(-limit, x))
                p = y, or p / max_decay if x has fallen by more than that
                x = y

    Parameters
    ----------
    mul : float or None, default=1.5
        Largest factor from one output to the next, > 0; None for no such limit.
    add : float or None, default=None
        Largest difference from one output to the next, >= 0, in the units of the gradient;
        None for no such limit. With both, the tighter one counts; with none, nothing is
        clipped.
    min_value : float or None, default=None
        Past outputs below count as this, > 0, so that an element that was once small can grow
        again at once. With None an element whose last output was exactly 0 is not limited by `mul`.
    max_decay : float or None, default=2
        Largest factor by which the past output may fall in a step, >= 1, so that a single
        small gradient does not hold back those after it; None for no such limit.

    Notes
    -----
    {arrays}.

    Guarantees: no element of the output is above its limit; signs are kept; NaN and infinity
    never reach the state; if nothing is clipped the very same Vector comes back. There is no
    bound known in advance, and none on the first step.

    A sparse gradient (IndexedSlices, COO) is treated, and if clipped comes back, as the dense
    one that it stands for. In the record of a step, norm and limit are the largest of all
    elements.

    References
    ----------
    ``ClipValueGrowth`` of torchzero.

    Examples
    --------
    >>> clip = GrowthValueClip(mul=1.5)
    >>> for value in (1.0, 8.0, -8.0):
    ...     out = clip.run(NumpyVector({"w": np.array([value])}))
    >>> out.coefs["w"]
    array([-2.25])
    """

    name: ClassVar[str] = "growth-value-clip"
    presets: ClassVar[Mapping[str, Preset]] = {"torchzero": Preset("torchzero", "ClipValueGrowth")}
    guarantee = kinds.past_values
    differs: ClassVar[Mapping[str, Parameter]] = {"scope": SCOPE_ELEMENTS}

    def __init__(
        self,
        mul: float | None = 1.5,
        *,
        add: float | None = None,
        min_value: float | None = None,
        max_decay: float | None = 2.0,
        **common: Unpack[Common],
    ) -> None:
        self.mul = parameters.optional(parameters.positive, mul=mul)
        self.add = parameters.optional(parameters.non_negative, add=add)
        self.min_value = parameters.optional(parameters.positive, min_value=min_value)
        self.max_decay = parameters.optional(parameters.at_least_one, max_decay=max_decay)
        super().__init__(**common)

    def build(self) -> Transform:
        return PastClipping(GrowthValue(self.mul, self.add, self.min_value, self.max_decay))
