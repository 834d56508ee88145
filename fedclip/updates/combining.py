# SPDX-License-Identifier: Apache-2.0
"""How the clipped updates of a round become one: the mean, or one that resists hostile clients.

::

    clip each update to C                        before, on the client
    "mean"      sum of share * update            one client moves it by share * C
    "arc"       mean after `arc.py`              by 2 f C / n, and none is longer than the longest
                                                 of those that are not hostile
    "trimmed"   `trimmed.py`                     by C / (n - 2 f), and in no coordinate beyond the
                                                 values of those that are not hostile

That is against zeros in the place of its update, of n clients that replied, f of them hostile. The
mean and "arc" are no longer than C, and "trimmed" no longer than sqrt(n / (n - f)) C. A reply that
is refused counts as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedclip.arrays import Float64
from fedclip.core import parameters
from fedclip.core.scopes import resolve
from fedclip.updates.arc import arc_factors
from fedclip.updates.averaging import averaged
from fedclip.updates.limits import norms_of
from fedclip.updates.protocol import Arrays
from fedclip.updates.trimmed import trimmed_mean


class Combining:
    """How updates become one; the parameters are those of `clipped-averaging`."""

    def __init__(self, combine: str = "mean", n_hostile: int | None = None) -> None:
        self.kind = parameters.choice(("mean", "arc", "trimmed"), combine=combine)
        hostile = parameters.optional(parameters.integer, 1, n_hostile=n_hostile)
        if (self.kind == "mean") != (hostile is None):
            raise ValueError(
                "combine='arc' and combine='trimmed' go with n_hostile, and nothing else does; got "
                f"combine={combine!r} and n_hostile={n_hostile!r}"
            )
        self.n_hostile = hostile or 0

    @property
    def pull(self) -> str:
        """By how much one client moves the average, as a multiple of the bound, of n replies."""
        of = {"mean": "1 / n", "arc": f"{2 * self.n_hostile} / n"}
        return of.get(self.kind, f"1 / (n - {2 * self.n_hostile})")

    def unfit(self, *, weights: bool = False, noise: bool = False, secure: bool = False) -> str:
        """Return why updates can not be combined like this; "" if they can."""
        reasons = (
            (
                secure,
                "secure aggregation: the server sees the sum of the updates, and none of them",
            ),
            (noise, f"noise: that is sized on 1 / n of the bound, not on {self.pull}"),
            (weights, "weights: n_hostile counts clients, and one may have most of the weight"),
        )
        why = next((why for found, why in reasons if found), "") if self.n_hostile else ""
        return f"combine = {self.kind!r} does not go with {why}; take the mean" if why else ""

    def too_few(self, clients: int) -> str:
        """Return that there are too few clients in a round; "" if there are enough."""
        if not self.n_hostile or clients > 2 * self.n_hostile:
            return ""
        return (
            f"combine = {self.kind!r} with n_hostile = {self.n_hostile} needs more than "
            f"{2 * self.n_hostile} replies in a round, and there are {clients}"
        )

    def of(
        self, updates: Sequence[Arrays], clients: int, factors: Sequence[float]
    ) -> dict[str, Float64]:
        """Return the one update of so many clients; those of which there is none count as zeros.

        The mean is that of the updates times `factors`.
        """
        if self.kind == "trimmed":
            return trimmed_mean(updates, clients, self.n_hostile)
        if self.kind == "arc":
            norms = [0.0] * clients
            for i, update in enumerate(updates):
                norms[i] = sum(
                    norms_of(update, resolve("global", None, tuple(update)), "arc") or []
                )
            factors = arc_factors(norms, self.n_hostile)[: len(updates)]
        return averaged(updates, clients, factors)
