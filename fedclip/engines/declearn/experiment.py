# SPDX-License-Identifier: Apache-2.0
"""The data, the model and the results of a quickrun file, without the network."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from declearn.dataset import InMemoryDataset
from declearn.model.sklearn import SklearnSGDModel
from declearn.quickrun import DataSourceConfig, ExperimentConfig, ModelConfig, parse_data_folder
from declearn.typing import Batch
from declearn.utils import make_importable

from fedclip.engines.declearn.context import AnyModel, AnyVector
from fedclip.engines.declearn.persample import clipped_sum, vector
from fedclip.errors import ToolError
from fedclip.privacy.ledger import FILE

PERSONS = "train_persons.csv"
"""A file in a client's data folder: the person of each training record, one a line."""


class Experiment:
    """The data, the model and the results of a quickrun file, without the network.

    Attributes
    ----------
    toml, folder
        The file, and the folder that holds it.
    files
        The files of each client, by its name.
    metrics
        The metrics besides the loss.
    results
        The folder of checkpoints and logs.

    Raises
    ------
    ToolError
        If data or model are not where the file says.
    """

    def __init__(self, file: Path) -> None:
        self.toml, self.folder = str(file), file.resolve().parent
        data = DataSourceConfig.from_toml(self.toml, False, "data")
        experiment = ExperimentConfig.from_toml(self.toml, False, "experiment", True)
        model = ModelConfig.from_toml(self.toml, False, "model", True)
        self.metrics = experiment.metrics
        default = self.folder / time.strftime("result_%y-%m-%d_%H-%M")
        # Next to the file, from wherever it is run.
        self.results = str(self.folder / (experiment.checkpoint or default))
        self._name, self._file = model.model_name, model.model_file or self.folder / "model.py"
        try:
            # In order, so that a seed does not depend on that of the file system.
            folders: dict[str, dict[str, str]] = parse_data_folder(data, str(self.folder))
            self.files = dict(sorted(folders.items()))
        except (OSError, ValueError) as exc:
            raise ToolError(f"[data] {exc}") from None
        if not self.files:
            raise ToolError("[data] the data folder holds no client's folder")
        if not str(self._file).endswith(".py"):
            raise ToolError(f"[model] {str(self._file)!r} must be a Python file, model.py")
        if not os.path.isfile(self._file):
            raise ToolError(f"[model] there is no model file {str(self._file)!r}")

    def data(self, site: str, seed: int | None = None) -> tuple[InMemoryDataset, InMemoryDataset]:
        """Return training data, in batches that a seed decides, and validation data of a client."""
        train, valid = (
            InMemoryDataset(
                self.files[site][f"{of}_data"],
                target=self.files[site][f"{of}_target"],
                expose_classes=True,
                seed=seed if of == "train" else None,
            )
            for of in ("train", "valid")
        )
        for part in (train, valid):
            # Models of JAX need it. Where columns are of several types, declearn raises for it.
            types = getattr(part.feats, "dtypes", None)
            part.expose_data_type = types is None or len({*map(str, types)}) == 1
        return train, valid

    def persons(self, site: str, of: str = "train") -> Path | None:
        """Return the file with the person of each training record of a client, if it exists.

        With `of` = "valid", that of its validation records.
        """
        file = Path(self.files[site][f"{of}_data"]).with_name(PERSONS.replace("train", of))
        return file if file.exists() else None

    def ledger(self, site: str = "") -> Path:
        """Return the ledger of a client's records, next to them; or that of all clients."""
        records = Path(self.files[site or next(iter(self.files))]["train_data"])
        return (records if site else records.parent).resolve().with_name(FILE)

    def model(self) -> AnyModel:
        """Return a new model, made by the model file."""
        folder, name = os.path.split(os.path.abspath(self._file))
        # An earlier federation may have had another model of this name.
        sys.modules.pop(name.removesuffix(".py"), None)
        with make_importable(folder):
            module = importlib.import_module(name.removesuffix(".py"))
            made: AnyModel = getattr(module, self._name)
            return made


def draw_from(seed: int) -> None:
    """Seed Python, NumPy and torch, which draw such values as the weights of a new model."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # declearn has imported it, where it is installed.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def vectorize_gradients(model: AnyModel) -> None:
    """Make a linear model of scikit-learn compute the gradient of a whole batch at once.

    declearn calls `partial_fit` for each record, which takes far longer. The gradients differ by
    rounding only; type and configuration of the model do not change.
    """
    if type(model) is SklearnSGDModel:
        parameters = model.get_wrapped_model().get_params()
        if parameters.get("class_weight") is None and not parameters["average"]:
            vars(model)["compute_batch_gradients"] = partial(_gradients, model)


def _gradients(model: SklearnSGDModel, batch: Batch, max_norm: float | None = None) -> AnyVector:
    if max_norm:
        return SklearnSGDModel.compute_batch_gradients(model, batch, max_norm)
    sums, norms = clipped_sum(model, [batch], np.ones_like)
    # Records with NaN are left out of such a sum; scikit-learn refuses them.
    if np.isnan(norms).any():
        return SklearnSGDModel.compute_batch_gradients(model, batch)
    targets, predictions, _ = model.compute_batch_predictions(batch)
    model._loss_history.append(float(model.loss_function(targets, predictions).mean()))
    return vector(model, {name: total / len(norms) for name, total in sums.items()})
