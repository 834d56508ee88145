"""The model that all train: logistic regression over the ten digits."""

from declearn.model.sklearn import SklearnSGDModel

model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty="l2")
