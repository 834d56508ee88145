"""Lightning's fit with a clipper of fedclip: python examples/loops/lightning_fit.py."""

import task
import torch
from lightning.pytorch import LightningModule, Trainer

from fedclip.loops.lightning import ClipCallback


class Model(LightningModule):
    """Softmax regression."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10, dtype=torch.float64)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, index):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=task.LRATE)


def train():
    """Return the limits of all steps."""
    clipper, model, limits = task.clipper(), Model(), []
    clipper.on_record = lambda record: limits.append(record.limit[0])
    batches = [tuple(map(torch.from_numpy, batch)) for batch in task.batches()]
    trainer = Trainer(
        callbacks=[ClipCallback(clipper)], max_epochs=1, accelerator="cpu", barebones=True
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    images, labels = task.data()
    accuracy = (model.layer(torch.from_numpy(images)).argmax(1).numpy() == labels).mean()
    task.report("lightning", accuracy, limits, clipper.rounds[-1].clipped)
    return limits


if __name__ == "__main__":
    train()
