"""The model: a Haiku network on JAX with one hidden layer, as large as columns.toml says.

Importing declearn's Haiku models turns on 64-bit numbers for all of JAX in this process.
"""

import tomllib
from pathlib import Path

import haiku as hk
import jax
from declearn.model.haiku import HaikuModel

columns = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf-8"))
inputs = len(columns["number"]) + sum(map(len, columns["text"].values()))
outputs = len(columns["classes"])


def network(x: jax.Array) -> jax.Array:
    """Return a score for each class."""
    scores: jax.Array = hk.Sequential([hk.Linear(32), jax.nn.relu, hk.Linear(outputs)])(x)
    return scores


def cross_entropy(scores: jax.Array, target: jax.Array) -> jax.Array:
    """Return the loss of each record."""
    known = jax.nn.one_hot(target, outputs)
    return -(jax.nn.log_softmax(scores) * known).sum(axis=-1)


model = HaikuModel(network, cross_entropy, seed=0)
model.initialize({"features_shape": (inputs,), "data_type": "float32"})
