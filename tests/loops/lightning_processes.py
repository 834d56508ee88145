"""A Lightning run on two processes; writes what each of them has in the end."""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from fedclip import ZScoreClip
from fedclip.loops.lightning import ClipCallback


class Model(LightningModule):
    """A linear model, which each process gives targets of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        spike = 100.0 if index == 6 else 1.0
        return (
            (self.layer(batch[0]).squeeze() - spike * (1 + self.trainer.local_rank)).pow(2).mean()
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    """Train, and write weights, statistics and metrics of this process."""
    model, callback = Model(), ClipCallback(ZScoreClip(warmup=3))
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    trainer = Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=1))
    (clipper,) = callback.clippers
    found = {
        "weights": model.layer.weight.detach().flatten().tolist(),
        "state": clipper.get_state()["groups"],
        "stats": callback._handles[0].metrics(),
    }
    Path(sys.argv[1], f"{trainer.local_rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
