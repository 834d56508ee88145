# SPDX-License-Identifier: Apache-2.0
"""A limit by a user's own function.

::

    limit = function(norm, what is known about past norms)        for each group

It works on the host: the function may branch on its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedclip.arrays import Arithmetic, Array, on_host
from fedclip.rules import NoState, Rule, State, known

Limit: TypeAlias = Callable[[float, Mapping[str, float]], float]
"""From a norm, and the statistics before it, to the limit of the norm."""


@dataclass(frozen=True)
class Own:
    """Limits by a function, which sees the statistics that another rule keeps, if any."""

    function: Limit
    past: Rule | None = None

    def init(self, groups: int, xp: Arithmetic) -> State:
        return NoState() if self.past is None else self.past.init(groups, xp)

    def __call__(self, norms: Array, state: State, xp: Arithmetic) -> tuple[Array, State]:
        after = state if self.past is None else self.past(norms, state, xp)[1]
        fields = known(self.past, state, xp)
        columns = {field: np.atleast_1d(on_host(value)) for field, value in fields.items()}
        # A window holds many numbers for each group.
        past = {field: column.tolist() for field, column in columns.items() if column.ndim == 1}
        limits = []
        for group, norm in enumerate(np.atleast_1d(on_host(norms)).tolist()):
            limit: Any = self.function(norm, {f: column[group] for f, column in past.items()})
            try:
                number = math.nan if isinstance(limit, str) else float(limit)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not number > 0:
                raise ValueError(f"a limit must be > 0, or infinity for none; got {limit!r:.100}")
            limits.append(number)
        return xp.asarray(limits, like=norms), after
