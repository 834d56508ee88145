"""Accuracy of DP-SGD for persons with several records: ``python -m benchmarks.dpsgd_persons``.

Each of scikit-learn's 1,797 digits is a person, who comes 1 to 10 times: each visit is the digit
with other noise on its pixels. A fifth of the persons is at no client, and what is measured is the
accuracy on one visit of each of them. Three clients, ten rounds of seven steps, each person or
record in a step with the same probability; a linear model; mean and standard deviation over five
seeds, which choose split, visits and first weights.

Protected by records, whoever has k of them is protected by k times epsilon (and a delta that is
larger still); so that ten records cost 3 together, each may cost .3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from declearn.dataset import InMemoryDataset
from declearn.utils import set_device_policy

from benchmarks.dpsgd_accuracy import (
    BATCH,
    CLIENTS,
    SEEDS,
    Data,
    Setting,
    digits,
    manager,
    new_model,
    trained,
)
from fedclip.dpsgd.persons import Persons
from fedclip.engines.declearn.persample import Records

MOST = 10
NOISE = 0.3


class Row(NamedTuple):
    """What is protected, and by how much; None: nothing is."""

    what: str
    epsilon: float | None
    persons: bool = False
    max_records: int | None = None


ROWS = (
    Row("nothing", None),
    Row("each record, epsilon 3", 3.0),
    Row("each record, epsilon .3", 0.3),
    Row("each person, epsilon 3", 3.0, True),
    Row("each person, epsilon 3, max_records = 1", 3.0, True, 1),
    Row("each person, epsilon 3, max_records = 3", 3.0, True, 3),
)


def accuracy(row: Row, seed: int) -> float:
    """Train, and return the accuracy on persons that no client has."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    x, y = digits()
    held, kept = np.split(rng.permutation(len(x)), [len(x) // 5])

    def visits(of: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Data:
        seen = x[of] + NOISE * rng.normal(size=(len(of), x.shape[1]))
        return seen.astype("float32"), y[of]

    server, nodes = new_model("linear", x.shape[1]), []
    batch = BATCH if row.persons else round(BATCH * (MOST + 1) / 2)
    setting = Setting("none", 0.5) if row.epsilon is None else Setting("flat", 1.0, 2.0)
    for part in np.array_split(kept, CLIENTS):
        whose = np.repeat(part, rng.integers(1, MOST + 1, len(part)))
        model, data = new_model("linear", x.shape[1]), visits(whose)
        private = {}
        if row.persons:
            records = Records(InMemoryDataset(data[0], target=data[1]))
            private = {"records": Persons(records, whose, row.max_records)}
        nodes.append(manager(setting, model, data, row.epsilon or 0.0, batch, **private))
    return trained(server, nodes, batch, visits(held))


def main() -> None:
    """Print the table."""
    set_device_policy(gpu=False)
    for row in ROWS:
        found = [accuracy(row, seed) for seed in SEEDS]
        print(f"{row.what:42} {np.mean(found):.3f} ± {np.std(found):.3f}", flush=True)


if __name__ == "__main__":
    main()
