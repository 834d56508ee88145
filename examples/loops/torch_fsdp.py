"""The loop of torch_loop.py with the model spread over processes (FSDP2).

torchrun --standalone --nproc-per-node 2 examples/loops/torch_fsdp.py
"""

import task
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fedclip.loops.torch import attach


def train():
    """Return the limits of all steps, which are the same on each process."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LRATE)
    handle = attach(optimizer, task.clipper(), model)
    limits = []
    for images, labels in task.batches():
        # Each process has its share of the batch; FSDP averages the gradients.
        own = slice(rank, None, world)
        optimizer.zero_grad()
        scores = model(torch.from_numpy(images[own]))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels[own])).backward()
        optimizer.step()
        limits.append(handle.last.limit[0])
    images, labels = task.data()
    accuracy = (model(torch.from_numpy(images)).argmax(1).numpy() == labels).mean()
    if rank == 0:
        task.report("torch", accuracy, limits, handle.clipper.rounds[0].clipped)
    dist.destroy_process_group()
    return limits


if __name__ == "__main__":
    train()
