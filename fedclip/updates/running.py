# SPDX-License-Identifier: Apache-2.0
"""Finds running statistics, such as those of BatchNorm, among the arrays of a model.

::

    by name       running_mean, moving_variance, mean_ema, batch_stats, num_batches_tracked
    by siblings   mean and var of one layer; with a counter in it, any two of one shape that are not
                  called like weights
    by form       arrays without names: of three vectors in a row of one length, the last alone is
                  positive everywhere, as in BatchNorm's beta, mean, variance; or a counter follows

Noise belongs on free numbers. A variance with noise turns negative, and a mean or variance is often
many times longer than all weights together, so that it takes the bound for itself.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedclip.arrays import backend_of
from fedclip.updates.protocol import Arrays

_MOMENT = "(?:mean|var|variance|std|avg|average)"
_NAMED = re.compile(
    rf"(?:running|moving|ema|population|tracked)_?(?:{_MOMENT}|stats?)(?![a-z])"
    rf"|(?<![a-z]){_MOMENT}_ema(?![a-z])|batch_?stats|num_batches_tracked"
)
_LEARNT = {"weight", "bias", "scale", "offset", "gamma", "beta", "kernel", "w", "b"}


def refuse_statistics(model: Arrays) -> None:
    """Refuse noise on a model that holds running statistics.

    Raises
    ------
    ValueError
        The message names them, and says what to do.
    """
    if found := statistics_of(model):
        named = ", ".join(map(repr, found[:4])) + (f" and {len(found) - 4} more" * (len(found) > 4))
        raise ValueError(
            f"the model holds running statistics ({named:.300}), and noise is for weights only: a "
            "variance with noise turns negative. Keep them at the clients (personal layers; or "
            "leave them out of the exchanged arrays), or use a layer without them, as GroupNorm"
        )


def statistics_of(model: Arrays) -> list[str]:
    """Return the names of the arrays that are running statistics, in the model's order.

    Parameters
    ----------
    model
        Arrays by name, of any framework; their values are looked at only if they have no names.

    Examples
    --------
    >>> ones = np.ones(2)
    >>> statistics_of({"bn.weight": ones, "bn.running_var": ones, "fc.weight": np.ones((2, 2))})
    ['bn.running_var']
    """
    layers: dict[str, dict[str, str]] = {}
    for name in model:
        *above, last = re.split(r"[/.:|]+|==", re.sub(r":\d+$", "", name.lower()))
        layers.setdefault("/".join(above), {})[last] = name
    found = {name for name in model if _NAMED.search(name.lower())}
    for prefix, layer in layers.items():
        found |= _siblings(layer, model) if prefix else set()
        found |= set(_in_rows(layer, model))
    return [name for name in model if name in found and not _is_whole(model[name])]


def _siblings(layer: Mapping[str, str], model: Arrays) -> set[str]:
    """Return the statistics of a layer that its other arrays give away."""
    found = {last for last in ("var", "variance", "std") if {last, "mean"} <= layer.keys()}
    found |= {"mean"} if found else set()
    if any(_is_counter(model[name]) for name in layer.values()):
        unknown = [last for last in layer if not (last in _LEARNT or last.isdecimal())]
        shapes = Counter(tuple(model[layer[last]].shape) for last in unknown)
        found |= {last for last in unknown if shapes[tuple(model[layer[last]].shape)] > 1}
    return {layer[last] for last in found}


def _in_rows(layer: Mapping[str, str], model: Arrays) -> Iterator[str]:
    """Yield the variances among arrays whose names are numbers."""
    names = [layer[last] for last in sorted(filter(str.isdecimal, layer), key=int)]
    for name, after in itertools.pairwise(names):
        if len(model[name].shape) == 1 and _is_counter(model[after]) and _is_positive(model[name]):
            yield name
    for shape, group in itertools.groupby(names, lambda name: tuple(model[name].shape)):
        row = [(name, _is_positive(model[name])) for name in group if len(shape) == 1 < shape[0]]
        for (_, beta), (_, mean), (name, variance) in zip(row, row[1:], row[2:], strict=False):
            if variance and not (beta or mean):
                yield name


def _is_counter(array: Any) -> bool:
    return bool(np.prod(array.shape) == 1 and _is_whole(array))


def _is_whole(array: object) -> bool:
    return "int" in backend_of(array).dtype(array)


def _is_positive(array: object) -> bool:
    return bool(np.all(np.asarray(backend_of(array).to_host(array)) > 0))
