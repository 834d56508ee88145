# SPDX-License-Identifier: Apache-2.0
r"""The effect of declearn's secure aggregation on an update: range, bits, and rounding.

A value x of a client is sent as an integer (`declearn.secagg.utils.Quantizer`)::

    step = 2 * clipval / (2^bits' - 1),   bits' = bitsize - ceil(log2(clients))   (masking)
                                          bits' = bitsize                         (joye-libert)
    q    = round((min(max(x, -clipval), clipval) + clipval) / step)

declearn silently clips values beyond ``clipval``. With 64 bits, q reaches 2^64 and wraps if x is
within one rounding of ``clipval``: +1 becomes -1. So fedclip moves such values inside, to
``clipval * (1 - 1e-14)`` (`inside`; in float32 and below to the next value within that). A value
that is sent is off by up to ``step / 2``, and by that move::

    error of one client's value   e = step / 2 + clipval * 2^-46
    added to a norm               e * sqrt(dimension)
    error of the average          2 e

The average is off by up to twice as much, because declearn subtracts the integer for 0 for all
clients but one, and 0 lies half-way between two integers. This shifts the average by
``(clients - 1) / clients * step / 2``, the same for all values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedclip.arrays import Array, backend_of
from fedclip.arrays.blocks import encode
from fedclip.core import parameters


class Plan(NamedTuple):
    """Settings of a secure aggregation, and their effect on a clipped update.

    Attributes
    ----------
    limit, clients, dimension, kind
        Norm to which updates are clipped, number of updates, number of values, and protocol.
    clipval, bitsize
        Settings for declearn's server; set the aggregator's `secagg_range` to `clipval`, too. It
        may equal the limit: values at the very edge are sent as 1e-14 inside it.
    step
        Distance between two values that can be sent.
    error
        Largest error of a value in the average over the clients.
    norm_added
        The most by which rounding can lengthen an update.
    """

    limit: float
    clients: int
    dimension: int
    kind: str
    clipval: float
    bitsize: int
    step: float
    error: float
    norm_added: float

    @property
    def tight_limit(self) -> float:
        """Clip to this bound, so that no update exceeds `limit` even after rounding."""
        return self.limit - self.norm_added

    def __str__(self) -> str:
        of, added = f"{self.kind} over {self.clients} clients", f"{self.norm_added:.3g} to the norm"
        share = f"{self.norm_added / self.limit:.2g} of the bound"
        return (
            f"{of}, {self.dimension:,} values, bound {self.limit:g}:\n"
            f"  clipval {self.clipval:g}, bitsize {self.bitsize}, step {self.step:.3g}\n"
            f"  a value of the average is off by at most {self.error:.3g}\n"
            f"  rounding adds at most {added} of an update ({share})"
        )


def plan(
    limit: float,
    clients: int,
    dimension: int,
    *,
    kind: str = "masking",
    clipval: float | None = None,
    bitsize: int | None = None,
    tolerance: float = 1e-3,
) -> Plan:
    """Return settings that let an update of norm `limit` pass, and the effect of rounding.

    Parameters
    ----------
    limit : float
        Largest norm of an update; for an adaptive bound, the `max_norm` of
        `update-clip-server`. No value of such an update is larger either.
    clients : int
        Number of updates in the sum.
    dimension : int
        Number of values in an update.
    kind : {"masking", "joye-libert"}, default="masking"
        declearn's protocol.
    clipval : float or None, default=None
        Largest absolute value that can be sent. None: the next power of two from `limit`.
        It also applies to everything else that is sent: losses and metrics of evaluation rounds.
    bitsize : int or None, default=None
        Bits of the integers. None: the least number of bytes that keeps the tolerance.
    tolerance : float, default=1e-3
        The most that rounding may add to the norm, relative to `limit`, > 0.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above; if `clipval` is below `limit`; if no `bitsize`, or not the
        given one, keeps the tolerance.

    Examples
    --------
    >>> settings = plan(1.0, clients=30, dimension=100_000)
    >>> settings.clipval, settings.bitsize
    (1.0, 24)
    >>> round(plan(1.0, 5, 10**6, clipval=1e5, bitsize=32, tolerance=1).norm_added, 2)
    0.19
    """
    limit = parameters.positive(limit=limit)
    clients = parameters.integer(1, clients=clients)
    dimension = parameters.integer(1, dimension=dimension)
    kind = parameters.choice(("masking", "joye-libert"), kind=kind)
    tolerance = parameters.positive(tolerance=tolerance)
    if clipval is None:
        clipval = 2.0 ** math.ceil(math.log2(limit))
    if parameters.positive(clipval=clipval) < limit:
        raise ValueError(f"clipval must be at least the bound {limit!r}, got {clipval!r}")
    lost = math.ceil(math.log2(clients)) if kind == "masking" else 0
    sizes = range(8, 65, 8) if bitsize is None else (parameters.integer(1, bitsize=bitsize),)
    if not (usable := [bits for bits in sizes if bits > lost]):
        raise ValueError(f"bitsize={bitsize} leaves no bit for the values of {clients} clients")
    for bits in usable:
        step = 2 * clipval / (2 ** (bits - lost) - 1)
        error = step / 2 + clipval * 2.0**-46
        added = error * math.sqrt(dimension)
        if added <= tolerance * limit:
            return Plan(limit, clients, dimension, kind, clipval, bits, step, 2 * error, added)
    text = f"clipval={clipval:g} with bitsize={bits} adds up to {added / limit:.3g} to a norm"
    raise ValueError(f"{text}, above the tolerance: lower clipval, or raise bitsize or tolerance")


_EDGE = 1.0 - 1e-14
_DTYPES = ("float64", "float32", "float16", "bfloat16")


def inside(arrays: Mapping[str, Array], clipval: float) -> Mapping[str, Array]:
    """Return the arrays with values beyond ``± clipval * (1 - 1e-14)`` moved to that.

    Arrays without such values come back as the same objects; the mapping too, if there are none.
    """
    changed, edge = {}, clipval * _EDGE
    for name, array in arrays.items():
        backend = backend_of(array)
        if (dtype := backend.dtype(array)) not in _DTYPES:
            continue
        like = backend.dense(*backend.prepared([array]))
        values = np.array(backend.to_host(like), dtype=np.float64)
        if np.max(np.abs(values), initial=0.0) <= edge:
            continue
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        clipped = encode(np.clip(values, -edge, edge), kind, towards_zero=True)
        (changed[name],) = backend.from_host([clipped], [like])
    return {**arrays, **changed} if changed else arrays
