"""A Trainer for tests; started on two processes, it writes what each has in the end."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from fedclip import ZScoreClip
from fedclip.loops.transformers import ClipCallback


class Model(torch.nn.Module):
    """Two layers, with targets that differ from row to row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)

    def forward(self, x, y):
        return {"loss": (self.second(self.first(x)).squeeze(-1) - y).square().mean()}


class InOrder(Trainer):
    """Takes the rows in their order, so that the processes have those of one step together."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(folder, *callbacks, rows=64, **options):
    """Return a Trainer, for as many processes as there are."""
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, 3, generator=made), torch.randn(rows, generator=made)
    y[24:28] = 100.0
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", "1")),
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 4,
    }
    arguments = TrainingArguments(**{**common, **options})
    data = [{"x": x[i], "y": y[i]} for i in range(rows)]
    return InOrder(Model(), arguments, train_dataset=data, callbacks=[*callbacks])


def trained(folder):
    """Return a model that the Trainer has trained, and its clipper."""
    callback = ClipCallback(ZScoreClip(warmup=3))
    made = trainer(folder, callback, rows=32)
    made.train()
    return made.model, callback.clipper


def shard(monkeypatched=Accelerator.__init__):
    """Let Accelerate shard models on the CPU, as it does on GPUs only."""

    def patched(self, *args, **options):
        monkeypatched(self, *args, **options)
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    Accelerator.__init__ = patched


def main():
    """Train with whole and with sharded models, and write weights and statistics."""
    (folder,) = sys.argv[1:]
    runs = {"whole": trained(folder)}
    AcceleratorState._reset_state()
    shard()
    runs["sharded"] = trained(folder)
    found = {}
    for kind, (model, used) in runs.items():
        values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        found[kind] = {
            "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
            "weights": [v.detach().flatten().tolist() for v in values],
            "state": used.get_state()["groups"],
            "clipped": used.rounds[-1].clipped,
        }
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
