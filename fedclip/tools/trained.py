# SPDX-License-Identifier: Apache-2.0
"""What a model file trains and shares: that many values have noise, and not those it holds."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any, NamedTuple

from declearn.model.api import Model
from declearn.utils import make_importable

from fedclip.federation.personal import astray

__all__ = ["Trained", "trained"]


class Trained(NamedTuple):
    """The values of a model; made by `trained`.

    Attributes
    ----------
    shared
        How many are trained and shared.
    values
        How many it holds, with running statistics.
    wrong
        What goes wrong with running statistics; "" if nothing does.
    """

    shared: int
    values: int
    wrong: str

    def __str__(self) -> str:
        return f"{self.shared:,} of the model's {self.values:,} values are trained and shared"


def trained(file: Path, name: str = "model") -> Trained:
    """Return what the model of a file trains and shares; the file is run.

    Raises
    ------
    ValueError
        If there is no such model, or its shapes come from the clients' data.
    Exception
        Whatever the file raises.
    """
    with make_importable(str(file.resolve().parent)):
        model: Any = runpy.run_path(str(file)).get(name)
    if not isinstance(model, Model) or model.required_data_info:
        why = "or one that takes its shapes from the clients' data"
        raise ValueError(f"{str(file)!r} has no model of declearn called {name!r}, {why}")
    sizes = [model.get_weights(trainable=trainable).shapes() for trainable in (True, False)]
    shared, values = (sum(map(math.prod, shapes.values())) for shapes in sizes)
    return Trained(shared, values, astray(model))
