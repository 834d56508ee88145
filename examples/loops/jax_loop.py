"""A JAX loop with a clipper of fedclip in an optax chain: python examples/loops/jax_loop.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import task

from fedclip.loops.jax import as_optax


def train():
    """Return the limits of all steps."""
    with jax.enable_x64(True):
        return _train()


def _train():
    params = {"weight": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
    chain = optax.chain(as_optax(task.clipper()), optax.sgd(task.LRATE))
    state = chain.init(params)

    def loss(params, images, labels):
        scores = images @ params["weight"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    @jax.jit
    def step(params, state, images, labels):
        gradients = jax.grad(loss)(params, images, labels)
        updates, state = chain.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    limits = []
    for images, labels in task.batches():
        params, state = step(params, state, images, labels)
        limits.append(float(optax.tree.get(state, "limit")[0]))
    images, labels = task.data()
    scores = np.asarray(images @ params["weight"] + params["bias"])
    accuracy = (scores.argmax(1) == labels).mean()
    task.report("jax", accuracy, limits, int(optax.tree.get(state, "clipped")))
    return limits


if __name__ == "__main__":
    train()
