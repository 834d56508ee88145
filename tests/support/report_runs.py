# SPDX-License-Identifier: Apache-2.0
"""Experiments for the tests of reports: checkpoints as declearn writes them, without a network."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import numpy as np
from declearn.main.utils import Checkpointer
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from typer.main import get_command
from typer.testing import CliRunner, Result

import fedclip.cli.main
from fedclip import UpdateNorms
from fedclip.core.records import Recorder, RoundRecord
from fedclip.rules import LEARNT

# To build the commands anew takes longer than most of them do.
built = cache(get_command)


def call(*words: object) -> Result:
    """Return what a command of fedclip has come to."""
    with mock.patch("typer.testing._get_command", built):
        return CliRunner().invoke(fedclip.cli.main.app, [str(word) for word in words])


def sentence(*words: object, code: int = 1) -> str:
    """Return the one sentence that a command ends with."""
    result = call(*words)
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("fedclip: ")
    return line


class Node:
    """One node's optimizer and checkpointer, without a federation round them."""

    def __init__(self, folder: Path, modules: list[Any]) -> None:
        self.optimizer = Optimizer(lrate=1.0, modules=modules)
        self.checkpointer = Checkpointer(str(folder))
        self.saved = 0

    def round(
        self, norms: Sequence[float], save: bool = True, metrics: Any = None, update: float = 0.0
    ) -> None:
        self.optimizer.start_round()
        for norm in norms:
            gradient = NumpyVector({"a": np.array([0.6, 0.0]), "b": np.array([0.8])}) * norm
            for module in self.optimizer.modules:
                gradient = module.run(gradient)
        for module in self.optimizer.modules:
            if isinstance(module, UpdateNorms):
                module.measure(NumpyVector({"w": np.array([update])}))
        if save:
            # declearn's own labels have a resolution of a second.
            self.saved += 1
            stamp = f"{self.saved:02}"
            self.checkpointer.save_optimizer(self.optimizer, timestamp=stamp)
            if metrics:
                self.checkpointer.save_metrics(metrics, timestamp=stamp)


def write_states(folder: Path, name: str, records: Sequence[RoundRecord], each: int = 100) -> None:
    """Write records as the states of one clipper, so many rounds to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(records), each):
        rounds = [asdict(record) for record in records[start : start + each]]
        state = {"rounds": rounds, "groups": {"all": {"count": 1.0}}}
        packed = msgpack.packb({"modules": [[name, state]]})
        (folder / f"optimizer_state_{start + each:05}.mpk").write_bytes(packed)


def record_of(round_: int, norms: Sequence[float], limit: float) -> RoundRecord:
    recorder = Recorder()
    for norm in norms:
        recorder.add(("all",), norm, limit, norm > limit, basis=LEARNT)
    (record,) = recorder.rounds()
    record.round = round_
    return record


def large_run(
    folder: Path, rounds: int, clients: int, *, seed: int = 0, level: float = 2.0
) -> Path:
    """Write a run in which norms and loss fall, accuracy rises, and the last client is larger."""
    rng = np.random.default_rng(seed)
    server = Checkpointer(str(folder / "server"))
    server.save_optimizer(Optimizer(lrate=1.0), timestamp="00000")
    for client in range(clients):
        scale = 8.0 if client == clients - 1 else 1.0
        records = [
            record_of(r, scale * level * rng.lognormal(0, 0.4, 6) * r**-0.2, 2.5 * level * r**-0.2)
            for r in range(1, rounds + 1)
        ]
        write_states(folder / f"client-{client:03}", "zscore-clip", records)
    for r in range(1, rounds + 1):
        loss = 0.3 + 2.0 * float(np.exp(-6 * r / rounds)) + 0.02 * float(rng.normal())
        server.save_metrics({"loss": loss, "accuracy": 1 - loss / 3}, timestamp=f"{r:05}")
        for client in range(min(clients, 5)):
            own = loss * (0.8 + 0.1 * client)
            values = {"loss": own, "accuracy": 1 - own / 3}
            prefix = f"metrics_client-{client:03}"
            server.save_metrics(values, prefix=prefix, timestamp=f"{r:05}")
    return folder
