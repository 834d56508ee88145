"""The share of a training step that clipping takes: ``python -m benchmarks.training``.

A step is that of a declearn client (gradients of a batch, optimizer, new weights), or of a plain
torch loop; clipping is one call in it. Shares are medians over steps, in percent.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
from declearn.model.sklearn import SklearnSGDModel
from declearn.model.torch import TorchModel
from declearn.optimizer import Optimizer
from rich.console import Console
from rich.table import Table

import fedclip
from fedclip.loops.torch import clip_

Step = Callable[[], None]


class Timed:
    """A call, and the seconds that each took."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, [0.0]

    def __call__(self, *args: Any) -> Any:
        """Make the call."""
        start = time.perf_counter()
        result = self.call(*args)
        self.seconds.append(time.perf_counter() - start)
        return result


def client(model: Any, batch: tuple[Any, ...], clipper: Any) -> tuple[Step, Timed]:
    """Return a step of a declearn client, and the timed call in it."""
    optimizer = Optimizer(0.01, modules=[clipper])
    timed = Timed(clipper.run)
    clipper.run = timed

    def step() -> None:
        optimizer.apply_gradients(model, model.compute_batch_gradients(batch))

    return step, timed


def cnn(clipper: Any) -> tuple[Step, Timed]:
    """Return a step of a small network on 32 pictures of MNIST's size."""
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(3136, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    batch = torch.randn(32, 1, 28, 28), torch.randint(10, (32,)), None
    return client(TorchModel(layers, torch.nn.CrossEntropyLoss()), batch, clipper)


def linear(clipper: Any) -> tuple[Step, Timed]:
    """Return a step of scikit-learn's linear classifier on 32 records of 30 features."""
    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    model.initialize({"features_shape": (30,), "classes": np.arange(2)})
    rng = np.random.default_rng(0)
    return client(model, (rng.standard_normal((32, 30)), rng.integers(2, size=32), None), clipper)


def vit(clipper: Any) -> tuple[Step, Timed]:
    """Return a step of a plain torch loop over ViT-S's blocks, on 8 pictures of 224 x 224."""
    layer = torch.nn.TransformerEncoderLayer(
        384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(768, 384),
        torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
        torch.nn.Linear(384, 1000),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    patches, labels = torch.randn(8, 197, 768), torch.randint(1000, (8,))
    timed = Timed(clip_)

    def step() -> None:
        optimizer.zero_grad()
        output = model(patches)[:, 0]
        torch.nn.functional.cross_entropy(output, labels).backward()
        timed(model.named_parameters(), clipper)
        optimizer.step()

    return step, timed


LOOPS: dict[str, tuple[Callable[[Any], tuple[Step, Timed]], int]] = {
    "declearn, scikit-learn": (linear, 200),
    "declearn, torch CNN": (cnn, 50),
    "torch loop, ViT-S": (vit, 4),
}


def share(loop: str, clipper: Any, steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the percent that clipping takes."""
    step, timed = LOOPS[loop][0](clipper)
    step()
    whole = Timed(step)
    for _ in range(steps):
        whole()
    pairs = zip(whole.seconds[1:], timed.seconds[-steps:], strict=True)
    shares = [100 * part / all_ for all_, part in pairs]
    return 1e3 * statistics.median(whole.seconds[1:]), statistics.median(shares)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="default: as many as take a second")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="The share of a training step that clipping takes")
    for head in ("loop", "clipper", "step, ms", "clipping, %"):
        table.add_column(head, justify="right" if "," in head and head != "loop" else "left")
    for loop, (_, steps) in LOOPS.items():
        for clipper in (fedclip.NormClip(1e9), fedclip.NormClip(1e-3), fedclip.ZScoreClip()):
            name = clipper.name + (
                ", all clipped" if getattr(clipper, "max_norm", 0) == 1e-3 else ""
            )
            whole, percent = share(loop, clipper, options.steps or steps)
            table.add_row(loop, name, f"{whole:,.2f}", f"{percent:.2f}")
    Console(width=90).print(table)


if __name__ == "__main__":
    main()
