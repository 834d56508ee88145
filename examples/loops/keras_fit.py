"""Keras' fit with a clipper of fedclip, compiled: python examples/loops/keras_fit.py."""

import keras
import task

from fedclip.loops.keras import ClippedOptimizer


class Limits(keras.callbacks.Callback):
    """Notes down the limit of each step."""

    def __init__(self):
        super().__init__()
        self.limits = []

    def on_train_batch_end(self, batch, logs=None):
        self.limits.append(self.model.optimizer.last.limit[0])


def train():
    """Return the limits of all steps."""
    keras.config.set_floatx("float64")
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(10, kernel_initializer="zeros")]
    )
    optimizer = ClippedOptimizer(keras.optimizers.SGD(task.LRATE), task.clipper())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=True)
    images, labels = task.data()
    whole = len(images) - len(images) % task.BATCH
    noted = Limits()
    model.fit(
        images[:whole],
        labels[:whole],
        batch_size=task.BATCH,
        epochs=task.EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[noted],
    )
    accuracy = (model.predict(images, verbose=0).argmax(1) == labels).mean()
    task.report("keras", accuracy, noted.limits, optimizer.metrics()["round/clipped"])
    return noted.limits


if __name__ == "__main__":
    train()
