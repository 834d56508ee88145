# SPDX-License-Identifier: Apache-2.0
"""Records of Flower's messages: the one of arrays, and what of it is clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

RECORD = "fedclip"
"""The name of fedclip's own record in a message: the bound in one, the votes in the other."""

Record = Mapping[str, Any]


def one_record(content: RecordDict, who: str) -> tuple[str, Record]:
    """Return the one record of arrays, and its name; raise a ValueError if there are others."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise ValueError(
            f"{who} holds {len(found)} ArrayRecords: a bound is for one update, in one record"
        )
    return str(found[0][0]), found[0][1]


def floats_of(record: Record) -> dict[str, Any]:
    """Return the tensors that are clipped: those of real numbers. Whole numbers are counters.

    Raises
    ------
    TypeError
        If there are other tensors, such as complex ones.
    """
    kinds = {name: np.dtype(array.dtype).kind for name, array in record.items()}
    other = [name for name, kind in kinds.items() if kind not in "fiub"]
    if other:
        raise TypeError(f"the tensor {other[0]!r} is of {record[other[0]].dtype}: no real numbers")
    return {name: record[name].numpy() for name, kind in kinds.items() if kind == "f"}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return a record of NumPy arrays."""
    return ArrayRecord({name: Array(np.asarray(x)) for name, x in arrays.items()})
