"""The loop of jax_loop.py on four devices of one host: python examples/loops/jax_mesh.py.

Each device has a quarter of the batch and a quarter of the weights. The clipper sees whole
gradients, so that the limits are those of one device.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import optax
import task
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedclip.loops.jax import as_optax, metrics


def train():
    """Return the limits of all steps."""
    mesh = jax.make_mesh((4,), ("devices",))
    with jax.enable_x64(True), jax.set_mesh(mesh):
        return _train(mesh)


def _train(mesh):
    def placed(values, *axes):
        return jax.device_put(jnp.asarray(values), NamedSharding(mesh, P(*axes)))

    weight, bias = placed(jnp.zeros((64, 10)), "devices"), placed(jnp.zeros(10))
    params, clipper = {"weight": weight, "bias": bias}, task.clipper()
    chain = optax.chain(as_optax(clipper), optax.sgd(task.LRATE))
    state = chain.init(params)

    def loss(params, images, labels):
        weight = jax.sharding.reshard(params["weight"], P())
        scores = images @ weight + params["bias"]
        chosen = jax.nn.one_hot(labels, 10)
        return -(chosen * jax.nn.log_softmax(scores)).sum(axis=1).mean()

    @jax.jit
    def step(params, state, images, labels):
        gradients = jax.grad(loss)(params, images, labels)
        updates, state = chain.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    limits = []
    for images, labels in task.batches():
        batch = placed(images, "devices"), placed(labels, "devices")
        params, state = step(params, state, *batch)
        limits.append(metrics(clipper, state, params).get("limit", float("inf")))
    images, labels = task.data()
    weight, bias = (jax.device_get(params[name]) for name in ("weight", "bias"))
    accuracy = ((images @ weight + bias).argmax(1) == labels).mean()
    task.report("jax mesh", accuracy, limits, metrics(clipper, state, params)["round/clipped"])
    return limits


if __name__ == "__main__":
    train()
