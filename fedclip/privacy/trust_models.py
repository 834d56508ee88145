# SPDX-License-Identifier: Apache-2.0
r"""Compares the noise of a plan if the server, some clients or nobody is trusted to add it.

Of m clients, n = floor(honest * m) are counted on to add their noise, z_delta C / sqrt(n) each, so
that their sum is what the server would have added::

    trusted       a client adds          on the average         relative to the server's noise
    the server    nothing                z_delta C / m          1
    n clients     z_delta C / sqrt(n)    the same sqrt(m / n)   sqrt(m / n)
    nobody        z_delta C              the same sqrt(m)       sqrt(m)

The second row takes secure sums, of integers (`fedclip.privacy.discrete`): nobody sees a reply. In
cleartext a client has only its own noise to hide behind, which is n = 1. The noise on the votes
grows alike. If c clients tell the server their noise, or send none, a round has the multiplier
``z sqrt((m - c) / n)``.

Examples
--------
>>> from fedclip.privacy.planning import plan
>>> found = Prices(plan(8.0, 1e-5, rounds=100, clients=100), honest=0.75)
>>> [round(row.times, 3) for row in found.rows], found.epsilon(silent=25)
([1.0, 1.155, 10.0], 7.998...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.privacy import accounting
from fedclip.privacy.discrete import honest_sites
from fedclip.privacy.planning import Plan

__all__ = ["Prices", "Row", "by_silent", "in_words"]


def by_silent(epsilon: Callable[[int], float], clients: int, sites: int) -> dict[int, float | None]:
    """Return epsilon by how many clients tell their noise: none, all that may, half, all others.

    None stands for an infinite one.
    """
    epsilons = {c: epsilon(c) for c in sorted({0, clients - sites, clients // 2, clients - 1})}
    return {c: e if math.isfinite(e) else None for c, e in epsilons.items()}


def in_words(costs: Mapping[int, float | None]) -> str:
    """Return the result of `by_silent`, and its assumption, in two lines."""
    cases = ", ".join(
        ("infinite" if e is None else f"{e:.4g}") + f" if {c or 'no'} clients do"
        for c, e in costs.items()
    )
    return (
        "  epsilon with secure sums, by the number of clients that reveal their noise to the "
        f"server: {cases}. Without secure sums, epsilon is the last number\n"
        "  declearn's masks for secure sums use no cryptographic generator: see "
        "docs/secure-aggregation.md"
    )


class Row(NamedTuple):
    """The cost of trusting somebody with the noise.

    Attributes
    ----------
    trusted
        Who is.
    each, noise
        Standard deviation of what each client adds to each value, and of the noise on each value
        of the average, relative to the bound.
    times
        The latter, relative to the server's own noise.
    """

    trusted: str
    each: float
    noise: float
    times: float


@dataclass(frozen=True)
class Prices:
    """The prices of a plan without turns.

    Parameters
    ----------
    plan
        The plan.
    honest
        The share of the clients that surely add their noise, in (0, 1].

    Raises
    ------
    TypeError, ValueError
        If `honest` is not as above.
    """

    plan: Plan
    honest: float = 0.75

    def __post_init__(self) -> None:
        parameters.number("a number in (0, 1]", 0.0, 1.0, open_low=True, honest=self.honest)

    @property
    def sites(self) -> int:
        """How many clients surely add their noise."""
        return honest_sites(self.plan.clients, self.honest)

    @property
    def rows(self) -> list[Row]:
        """The server trusted with the noise, the sites, nobody."""
        clients, each, noise = self.plan.clients, self.plan.update_noise, self.plan.noise
        secure = f"{self.sites} of {clients} clients, secure sums"
        table = [Row("the server", 0.0, noise, 1.0)]
        for trusted, sites in ((secure, self.sites), ("nobody, without secure sums", 1)):
            times = math.sqrt(clients / sites)
            table.append(Row(trusted, each / math.sqrt(sites), noise * times, times))
        return table

    @property
    def configs(self) -> tuple[Config, Config]:
        """The parameters of `update-clip-client` and `update-clip-server`, with a `max_norm`."""
        server = {**self.plan.config, "noise_at": "clients", "honest": self.honest, "max_norm": 1.0}
        agreed = ("noise_multiplier", "expected_clients", "honest", "max_norm")
        return {"noise": {name: server[name] for name in agreed}}, server

    def epsilon(self, silent: int) -> float:
        """Return the epsilon of secure sums if `silent` clients tell the server their noise."""
        z = self.plan.noise_multiplier * math.sqrt((self.plan.clients - silent) / self.sites)
        release = accounting.Release(z, self.plan.rounds)
        return accounting.epsilon([release], self.plan.delta, self.plan.relation)

    def __str__(self) -> str:
        lines = [
            '  the same epsilon if clients add the noise (noise_at = "clients"), by whom you '
            "trust:",
            f"    {'trusted to add noise':34}{'a client adds':>13}{'in the average':>18}",
        ]
        for row in self.rows:
            each = f"{row.each:.3g} C" if row.each else "nothing"
            noise = f"{row.noise:.3g} C"
            lines.append(f"    {row.trusted:34}{each:>13}{noise:>18}   {row.times:.3g} times")
        lines.append(in_words(by_silent(self.epsilon, self.plan.clients, self.sites)))
        return "\n".join(lines)
