"""The model: logistic regression of scikit-learn, as large as columns.toml says."""

import tomllib
from pathlib import Path

from declearn.model.sklearn import SklearnSGDModel

columns = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf-8"))
inputs = len(columns["number"]) + sum(map(len, columns["text"].values()))
classes = list(range(len(columns["classes"])))

model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
model.initialize({"features_shape": (inputs,), "classes": classes})
