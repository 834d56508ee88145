# SPDX-License-Identifier: Apache-2.0
r"""Limits on the norm of each group.

::

    n      = measure of each group                                    (fedclip.core.measures)
    limit  = rule(n, state)                                           (fedclip.rules)
    k      = limit / (n + eps) (1 - margin)  where n + eps > limit, else 1
                                                                      (fedclip.transforms.action)
    output = k * array, and on the host the array itself where k = 1

Guarantees, for the L2 norm with ``eps = 0``
--------------------------------------------
- If the norm of a group, in float64 arithmetic, is at most the limit, the very same objects come
  back from the host. Close to the limit, where the fast measurement could decide wrongly, the norm
  is measured again in float64.
- A clipped group has a norm of at most the limit, and not more than ``2 * margin`` below it.
- The inputs are never changed; dtype and shape are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

from fedclip.arrays import NUMPY, Array
from fedclip.core.measures import MEANS, SQUARED, Order, measure
from fedclip.core.scopes import Groups
from fedclip.rules import Rule, State
from fedclip.transforms.action import SCALE_DOWN, Action
from fedclip.transforms.base import Gradient, Outcome, Transform


@dataclass(frozen=True)
class NormClipping(Transform):
    """Rule × measure × action; the scope comes with the groups of each call.

    If it is `dry`, it measures and decides, but changes nothing. With `only_measures` it asks no
    rule: nothing is over a limit.
    """

    rule: Rule
    ord: Order = 2
    action: Action = SCALE_DOWN
    dry: bool = False
    only_measures: bool = False

    runs_on_parts = True
    by_norms = True

    @property
    def dense(self) -> bool:
        # A mean is over all elements of a sparse array, its zeros included.
        return self.ord in MEANS

    def init(self, groups: Groups) -> State:
        return self.rule.init(len(groups), NUMPY)

    def step(self, gradient: Gradient, state: State) -> Outcome:
        """Clip one gradient by norms."""
        arrays, groups, xp = gradient.arrays, gradient.groups, gradient.xp
        if self.ord == 2:
            norms = xp.group_norms(arrays, groups.members)
        else:
            norms = measure(arrays, groups, self.ord, xp)
        norms = gradient.finite_norms(norms)
        if self.only_measures:
            return Outcome(arrays, state, norms, norms, norms < 0.0)
        return self.judged(gradient, norms, state)

    def judged(self, gradient: Gradient, norms: Array, state: State) -> Outcome:
        """Clip one gradient with these norms, which are finite."""
        arrays, xp = gradient.arrays, gradient.xp
        limits, after = self.rule(norms, state, xp)
        if self.ord == 2:
            exact = xp.recompute_near_limit(norms, limits, arrays, gradient.groups.members)
            if exact is not norms:
                norms = exact
                limits, after = self.rule(norms, state, xp)
        decision = self.action.decide(norms, limits, xp)
        factors = None
        # If the host sees that all factors are 1, it does not compute them.
        if not (self.dry or (gradient.on_host and not any(decision.is_scaled.tolist()))):
            groups, dtypes, peaks = gradient.groups, gradient.plan.dtypes, None
            if self.action.scales_up:
                peaks = xp.group_max(xp.max_abs(arrays), groups.owners, len(groups))
            numbers = [()] * len(groups.labels)
            each = decision.factors_of(dtypes, numbers, self.ord in SQUARED, xp, peaks)
            factors = [*map(getitem, map(each.__getitem__, dtypes), groups.owners)]
        return Outcome(arrays, after, norms, limits, decision.over, factors=factors)
