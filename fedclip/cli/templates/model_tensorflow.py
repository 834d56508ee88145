"""The model: a Keras network with one hidden layer, as large as columns.toml says."""

import tomllib
from pathlib import Path

import keras
from declearn.model.tensorflow import TensorflowModel

columns = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf-8"))
inputs = len(columns["number"]) + sum(map(len, columns["text"].values()))

# Weights are saved by the names of layers, which Keras would count up in each process.
keras.utils.set_random_seed(0)
network = keras.Sequential(
    [
        keras.layers.Input((inputs,)),
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.Dense(len(columns["classes"]), name="scores"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model = TensorflowModel(network, loss)
