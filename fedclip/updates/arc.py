# SPDX-License-Identifier: Apache-2.0
"""ARC: the longest updates of a round are brought to the length of the next longest.

::

    k      = floor(2 (f / n) (n - f))                  of n updates, f of them hostile
    limit  = norm of the (k + 1)-th longest update
    factor = min(1, limit / norm)                      of each update

As k >= f, no update is longer afterwards than the longest of those that are not hostile.

Allouah, Guerraoui, Gupta, Jellouli, Rizk & Stephan, 2024, "Adaptive gradient clipping for robust
federated learning", arXiv:2405.14432. They prove what it adds to a robust mean that follows; before
a plain mean, their guarantee does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence


def brought(clients: int, n_hostile: int) -> int:
    """Return how many updates are brought to the length of the next longest: k."""
    return 2 * n_hostile * (clients - n_hostile) // clients


def arc_factors(norms: Sequence[float], n_hostile: int) -> list[float]:
    """Return by what each update is multiplied; of n norms, 2 `n_hostile` < n.

    Examples
    --------
    >>> arc_factors([1.0, 4.0, 2.0], 1)
    [1.0, 0.5, 1.0]
    """
    limit = sorted(norms, reverse=True)[brought(len(norms), n_hostile)]
    return [limit / norm if norm > limit else 1.0 for norm in norms]
