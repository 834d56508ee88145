# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's linear models in runs on one machine, with the gradient of a batch at once.

declearn asks `partial_fit` for the gradient of each record, and nearly all of the time goes into
scikit-learn's checks of a table of one row. The closed form of DP-SGD gives the same.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from declearn.model.sklearn import SklearnSGDModel
from declearn.typing import Batch

from fedclip.engines.declearn.generics import AnyModel, AnyVector
from fedclip.engines.declearn.persample import clipped_sum, vector


def quicken(model: AnyModel) -> None:
    """Let a model take the gradients of batches at once, if it is one of scikit-learn's.

    They are the same but for rounding, and its type and configuration stay as they are.
    """
    if type(model) is SklearnSGDModel:
        given = model.get_wrapped_model().get_params()
        if given.get("class_weight") is None and not given["average"]:
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
