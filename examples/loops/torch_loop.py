"""A plain PyTorch loop with a clipper of fedclip: python examples/loops/torch_loop.py."""

import task
import torch

from fedclip.loops.torch import clip_


def train():
    """Return the limits of all steps."""
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LRATE)
    clipper = task.clipper()
    limits = []
    for images, labels in task.batches():
        optimizer.zero_grad()
        scores = model(torch.from_numpy(images))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels)).backward()
        record = clip_(model.named_parameters(), clipper)
        optimizer.step()
        limits.append(record.limit[0])
    images, labels = task.data()
    accuracy = (model(torch.from_numpy(images)).argmax(1).numpy() == labels).mean()
    task.report("torch", accuracy, limits, clipper.rounds[0].clipped)
    return limits


if __name__ == "__main__":
    train()
