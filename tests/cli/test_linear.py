# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's models, whose gradients runs on one machine take at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import SklearnSGDModel

from fedclip.engines.local.linear import quicken


def made(classes: int, **config: Any) -> SklearnSGDModel:
    kind = "classifier" if classes else "regressor"
    model = SklearnSGDModel.from_parameters(kind=kind, **config)
    info: dict[str, Any] = {"features_shape": (4,), "classes": set(range(classes))}
    model.initialize(info)
    rng = np.random.default_rng(0)
    weights = model.get_weights()
    model.set_weights(
        weights + type(weights)({k: rng.normal(size=v.shape) for k, v in weights.coefs.items()})
    )
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
    quicken(quick)
    wanted, found = (model.compute_batch_gradients(batch, max_norm) for model in (plain, quick))
    for name, values in wanted.coefs.items():
        np.testing.assert_allclose(found.coefs[name], values, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(quick.collect_training_losses(), plain.collect_training_losses())
    assert quick.get_config() == plain.get_config()


@pytest.mark.parametrize("config", [{}, {"class_weight": {0: 1.0, 1: 5.0}}, {"average": True}])
def test_only_what_has_a_closed_form_is_quickened(config: dict[str, Any]) -> None:
    model = made(2, loss="log_loss")
    model.get_wrapped_model().set_params(**config)
    quicken(model)
    assert ("compute_batch_gradients" in vars(model)) == (not config)


def test_a_record_that_scikit_learn_refuses_is_refused() -> None:
    model = made(2, loss="log_loss")
    quicken(model)
    features = np.ones((3, 4))
    features[1, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        model.compute_batch_gradients((features, np.array([0, 1, 0]), None))
