# SPDX-License-Identifier: Apache-2.0
"""Statistics as plain values, and back.

The state of a transform is a NamedTuple of arrays, whose last axis is that of the groups. Some
transforms also keep arrays for each tensor. As plain values the statistics are::

    {"groups": {label: {field: number or list}}, "arrays": {tensor: {field: ndarray}}}

They are keyed by name, so that they do not depend on order or framework. All statistics are
finite; a field called ``count`` is an int, and numbers are >= 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np

from fedclip.arrays import Array, backend_of, on_host
from fedclip.errors import StateError

# The numbers of one group, or the arrays of one tensor, by field.
Fields: TypeAlias = dict[str, Any]
Statistics: TypeAlias = dict[str, Fields]


def dump(state: Any, labels: Sequence[str]) -> Statistics:
    """Return the numbers of each group; an empty dict if the state has no fields."""
    result: Statistics = {}
    for field, column in zip(state._fields, state, strict=True):
        for group, label in enumerate(labels):
            value = on_host(column)[..., group].tolist()
            result.setdefault(label, {})[field] = int(value) if field == "count" else value
    return result


def load(fresh: Any, statistics: Statistics, labels: Sequence[str]) -> Any:
    """Return the fresh state, filled in for the groups that have statistics."""
    columns = {f: np.array(getattr(fresh, f), dtype=np.float64, ndmin=1) for f in fresh._fields}
    for group, label in enumerate(labels):
        for field, value in statistics.get(label, {}).items():
            columns[field][..., group] = value
    return type(fresh)(**columns)


def fetched(arrays: Statistics) -> Statistics:
    """Return copies, in host memory, of arrays by tensor and field."""
    return each(arrays, lambda array: np.array(backend_of(array).to_host(array)))


def each(arrays: Mapping[str, Fields], turned: Callable[[Array], object]) -> Statistics:
    """Return ``turned(array)`` of each of some arrays by tensor and field."""
    return {
        name: {field: turned(array) for field, array in fields.items()}
        for name, fields in arrays.items()
    }


def check_count(name: str, value: object) -> int:
    """Return a whole number of a state if it is one, and not below 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"{name!r} must be an int >= 0, got {value!r}")
    return value


def check_owner(owner: object) -> dict[str, str] | None:
    """Return what statistics are of, by a fingerprint, if a state says so."""
    if owner is None:
        return None
    if not isinstance(owner, Mapping) or not all(isinstance(v, str) for v in owner.values()):
        raise StateError(f"'owner' must be a dict of strings, got {owner!r:.80}")
    return dict(owner)


def check_groups(groups: object, one: Any) -> Statistics:
    """Return statistics by group if they fit `one`, the fresh state of one group."""
    checked = _rows(groups, "groups", "group", one._fields)
    for label, values in checked.items():
        for field, value in values.items():
            _check_number(label, field, value, np.atleast_1d(getattr(one, field)).shape[:-1])
    return {str(label): dict(values) for label, values in checked.items()}


def _rows(rows: object, name: str, kind: str, fields: Sequence[str]) -> Mapping[str, Fields]:
    """Return a part of a state if it is a dict of dicts with these fields."""
    if not isinstance(rows, Mapping):
        raise StateError(f"{name!r} must be a dict, got {type(rows).__name__}")
    for label, values in rows.items():
        if not isinstance(values, Mapping) or set(values) != set(fields):
            got = f"{sorted(fields)}, got {values!r:.200}"
            raise StateError(f"the state of {kind} {label!r} must have {got}")
    return rows


def _check_number(label: object, field: str, value: object, shape: tuple[int, ...]) -> None:
    count, fits = field == "count", False
    if isinstance(value, (int, float, list, tuple)) and not isinstance(value, bool):
        with suppress(ValueError):
            values = np.asarray(value)
            kinds = "ui" if count else "uif"
            fits = values.dtype.kind in kinds and values.shape == shape
            fits = fits and bool((np.isfinite(values) & (values >= 0)).all())
    if not fits:
        what = "an int" if count else f"{shape[0]} finite numbers" if shape else "a finite number"
        raise StateError(f"{field!r} of group {label!r} must be {what} >= 0, got {value!r:.200}")


def check_arrays(arrays: object, fields: Sequence[str]) -> Statistics:
    """Return copies of arrays by tensor if each tensor has all the fields, finite."""
    result: Statistics = {}
    for name, values in _rows(arrays, "arrays", "tensor", fields).items():
        for field, value in values.items():
            is_array = isinstance(value, np.ndarray) and value.dtype.kind == "f"
            if not is_array or not np.isfinite(value).all():
                where = f"{field!r} of tensor {name!r}"
                raise StateError(f"{where} must be an ndarray of finite floats, got {value!r:.100}")
        result[str(name)] = {field: value.copy() for field, value in values.items()}
    return result
