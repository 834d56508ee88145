# SPDX-License-Identifier: Apache-2.0
"""Count the values that a model trains and shares; only these get noise.

`label` writes a file next to a server's checkpoints about values that no client uses.
"""

from __future__ import annotations

import math
import runpy
import warnings
from pathlib import Path
from typing import NamedTuple

from declearn.model.api import Model
from declearn.utils import make_importable

from fedclip.engines.declearn.generics import AnyModel
from fedclip.engines.declearn.personal import (
    PersonalModel,
    frozen_problems,
    listed,
    statistics_problems,
)

LABEL = "about_these_models.txt"
"""A file next to a server's checkpoints, about values in them that no client uses."""


class Trained(NamedTuple):
    """The values of a model; made by `trained`.

    Attributes
    ----------
    shared
        How many are trained and shared.
    values
        How many it holds, with running statistics.
    wrong
        The problem with running statistics; "" without one.
    lacking
        Which weights clients would not have; "" if they have all.
    """

    shared: int
    values: int
    wrong: str
    lacking: str

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
    with make_importable(str(file.resolve().parent)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether there is a GPU here is of no interest
        model: object = runpy.run_path(str(file)).get(name)
    if not isinstance(model, Model) or model.required_data_info:
        why = "or one that takes its shapes from the clients' data"
        raise ValueError(f"{str(file)!r} has no model of declearn called {name!r}, {why}")
    sizes = [model.get_weights(trainable=trainable).shapes() for trainable in (True, False)]
    shared, values = (sum(map(math.prod, shapes.values())) for shapes in sizes)
    wrong, lacking = statistics_problems(model), frozen_problems(model)
    return Trained(shared, values, "".join(map(str, wrong)), "".join(map(str, lacking)))


def label(folder: str | Path, model: AnyModel) -> str:
    """Write which values of a server's checkpoints no client uses, and return the text."""
    sentences = [*map(str, statistics_problems(model))]
    if isinstance(model, PersonalModel) and model.own:
        sentences += [
            f"{listed(model.own)} have the values with which all sites began: they are trained at "
            "each site, whose checkpoints have the site's own"
        ]
    text, file = "; ".join(filter(None, sentences)), Path(folder, LABEL)
    file.unlink(missing_ok=True)
    if text:
        file.write_text(f"The server's models: {text}.\n", encoding="utf-8")
    return text
