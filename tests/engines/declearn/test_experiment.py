# SPDX-License-Identifier: Apache-2.0
"""The data and models of a quickrun file; scikit-learn's gradients of a batch at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import SklearnSGDModel

from fedclip.engines.declearn.quickrun import Experiment, vectorize_gradients


def made(classes: int, **config: Any) -> SklearnSGDModel:
    kind = "classifier" if classes else "regressor"
    model = SklearnSGDModel.from_parameters(kind=kind, **config)
    model.initialize({"features_shape": (4,), "classes": set(range(classes))})
    rng = np.random.default_rng(0)
    weights = model.get_weights()
    moved = {name: rng.normal(size=array.shape) for name, array in weights.coefs.items()}
    model.set_weights(weights + type(weights)(moved))
    return model


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    ("classes", "config"),
    [
        (0, {"loss": "huber", "penalty": "l1", "alpha": 0.05}),
        (2, {"loss": "log_loss", "alpha": 0.05}),
        (3, {"loss": "log_loss", "penalty": "elasticnet"}),
    ],
)
def test_they_are_those_of_declearn_and_so_are_the_losses(
    classes: int, config: dict[str, Any], weighed: bool, max_norm: float | None
) -> None:
    rng = np.random.default_rng(1)
    targets = rng.integers(0, classes, 9) if classes else rng.normal(size=9)
    batch = (rng.normal(size=(9, 4)), targets, rng.uniform(size=9) if weighed else None)
    plain, quick = made(classes, **config), made(classes, **config)
    vectorize_gradients(quick)
    wanted, found = (model.compute_batch_gradients(batch, max_norm) for model in (plain, quick))
    for name, values in wanted.coefs.items():
        np.testing.assert_allclose(found.coefs[name], values, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(quick.collect_training_losses(), plain.collect_training_losses())
    assert quick.get_config() == plain.get_config()
    batch[0][1, 2] = np.nan
    for model in (plain, quick):
        with pytest.raises(ValueError, match="NaN"):
            model.compute_batch_gradients(batch)


@pytest.mark.parametrize("config", [{}, {"class_weight": {0: 1.0, 1: 5.0}}, {"average": True}])
def test_only_what_has_a_closed_form_is_quickened(config: dict[str, Any]) -> None:
    model = made(2, loss="log_loss")
    model.get_wrapped_model().set_params(**config)
    vectorize_gradients(model)
    assert ("compute_batch_gradients" in vars(model)) == (not config)


@pytest.mark.parametrize(("row", "kind"), [("0.5,1.5", "float64"), ("0.5,1", None)])
def test_a_quickrun_tells_the_type_of_data_if_it_is_one(
    row: str, kind: Any, tmp_path: Path
) -> None:
    """Models of JAX can not be built without; columns of two types are no reason to raise."""
    folder = tmp_path / "data" / "north"
    folder.mkdir(parents=True)
    for of in ("train", "valid"):
        (folder / f"{of}_data.csv").write_text(f"a,b\n{row}\n{row}\n")
        (folder / f"{of}_target.csv").write_text("y\n0\n1\n")
    (tmp_path / "model.py").touch()
    (tmp_path / "config.toml").write_text("[data]\n")
    for found in Experiment(tmp_path / "config.toml").data("north"):
        assert found.get_data_specs().data_type == kind
