# SPDX-License-Identifier: Apache-2.0
"""What share of each client's norms a proposal would have clipped.

About so: another limit would have led to other gradients. What a fixed limit clips is counted.
A clipper that learns is played through, on so many norms of each round that it takes about a
second, in random order.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclip.privacy.maps import Plugin
from fedclip.records import RoundRecord
from fedclip.tools.suggest.norms import Norms

__all__ = ["above", "above_the_median", "learnt", "shared"]

# Steps of a learnt clipper, of all clients at once, and of a shared one, and norms in all of them.
_STEPS, _NORMS = 500, 50_000


def above(norms: Norms, limit: float) -> dict[str, float]:
    """Return the share of each client's norms that is above a limit."""
    return {name: _above(_array(record), limit) for name, record in norms.clients.items()}


def above_the_median(norms: Norms) -> dict[str, float]:
    """Return the share of each client's norms that is above the median of their round."""
    over, of = Counter[str](), Counter[str]()
    for records in norms.rounds().values():
        found = {name: _array(record) for name, record in records.items() if record.counts}
        bound = statistics.median_low(np.concatenate([*found.values()])) if found else 0.0
        for name, values in found.items():
            over[name] += int((values > bound).sum())
            of[name] += len(values)
    return {name: over[name] / of[name] for name in of}


def learnt(clipper: Plugin, norms: Norms) -> dict[str, float]:
    """Return what a clipper on each node, which learns from its own norms, would have clipped."""
    # Each client is a tensor with statistics of its own: one step for all of them.
    twin = type(clipper)(**{**clipper.get_config(), "scope": "tensor"})
    over, of = Counter[str](), Counter[str]()
    for columns in _drawn(norms, min(_STEPS, _NORMS // max(1, len(norms.clients)))):
        twin.on_round_start()
        for step in range(max(map(len, columns.values()), default=0)):
            chosen = {name: values[step] for name, values in columns.items() if step < len(values)}
            record = twin.update(chosen)
            over.update(n for n, c in zip(record.groups, record.clipped, strict=True) if c)
            of.update(chosen.keys())
    return {name: over[name] / of[name] for name in of}


def shared(clipper: Plugin, norms: Norms) -> dict[str, float]:
    """Return what a clipper with one limit for all clients, that of the round's start, would."""
    twin = type(clipper)(**{**clipper.get_config(), "shared": False})
    over, of = Counter[str](), Counter[str]()
    rng, rounds = np.random.default_rng(0), norms.rounds()
    each = max(1, _STEPS // max(1, len(rounds)))
    for records in rounds.values():
        found = {name: _array(record) for name, record in records.items() if record.counts}
        everybody = np.concatenate([*found.values(), np.zeros(0)])
        taken = rng.permutation(everybody)[:each]
        limits = [twin.update(float(norm)).limit[0] for norm in taken]
        for name, values in found.items():
            over[name] += int((values > limits[0]).sum())
            of[name] += len(values)
    return {name: over[name] / of[name] for name in of}


def _drawn(norms: Norms, steps: int) -> Any:
    """Yield for each round some norms of each client, so that the longest take so many steps."""
    rng, rounds = np.random.default_rng(0), norms.rounds()
    each, every = max(1, steps // max(1, len(rounds))), 1 + len(rounds) // max(1, steps)
    for records in [*rounds.values()][::every]:
        yield {n: rng.permutation(_array(r))[:each] for n, r in records.items() if r.counts}


def _array(record: RoundRecord) -> NDArray[np.float64]:
    return np.array(record.norms())


def _above(values: NDArray[np.float64], limit: float) -> float:
    return float((values > limit).mean()) if len(values) else 0.0
