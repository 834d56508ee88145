# SPDX-License-Identifier: Apache-2.0
"""The model that the hospitals train: logistic regression."""

from declearn.model.sklearn import SklearnSGDModel

model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty="l2")
