"""What weights and the clip do on unlike sites: ``python -m benchmarks.unlike_runs``.

Real federations over websockets on this machine: the server and the eight clients of
`unlike_sites` are processes of their own. The hostile client multiplies its update, and then clips
it as the others do. For each split of the records all rows and attacks are run, and compared split
by split; intervals are of 95 %, by Student's t.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import unlike_sites as task
from fedclip.cli.reporting import interval

SHOWN = ("weighted mean", "weighted clip", "weighted clip, at most 25 %", "equal clip")
PAIRS = (
    ("weighted clip", "weighted mean"),
    ("weighted clip, at most 25 %", "weighted clip"),
    ("weighted clip", "equal clip"),
)
PATIENCE = 900.0
"""Seconds after which a federation counts as hanging."""

NETWORK = """
[network]
protocol = "fedclip-websockets"
host = "127.0.0.1"
port = {port}
heartbeat = 0.02

[run.register]
min_clients = {clients}
max_clients = {clients}
timeout = 600
"""

_context: Any = multiprocessing.get_context("forkserver")


def accuracy(row: str, attack: str, seed: int, rounds: int = task.ROUNDS) -> float:
    """Return the share of the test data that the model of a federation tells right."""
    with tempfile.TemporaryDirectory() as made:
        place = task.write(Path(made), seed)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        text = task.config(place, task.ROWS[row]) + NETWORK.format(
            port=port, clients=len(task.SITES)
        )
        text = text.replace(f"rounds = {task.ROUNDS}", f"rounds = {rounds}")
        # The model of the last round is measured here, on all of the test data.
        text = text.replace("[run.evaluate]", "[run.evaluate]\nfrequency = 1000")
        (place / "config.toml").write_text(text, encoding="utf-8")
        names = ("server", *task.SITES)
        nodes = {
            name: _context.Process(target=node, args=(name, place, task.ATTACKS[attack]))
            for name in names
        }
        try:
            _wait(nodes, place)
        finally:
            for process in nodes.values():
                if process.pid is not None:
                    process.kill()
                    process.join()
        weights = json.loads((place / "weights.json").read_text())
    _, (data, labels) = task.split(seed)
    matrix, bias = (np.array(values) for values in sorted(weights.values(), key=np.ndim)[::-1])
    scores = data @ matrix.T + bias
    return float((scores.argmax(axis=1) == labels).mean())


def _wait(nodes: Mapping[str, BaseProcess], place: Path) -> None:
    end = time.monotonic() + PATIENCE
    for process in nodes.values():
        process.start()
    for name, process in nodes.items():
        process.join(max(0.1, end - time.monotonic()))
        if process.exitcode != 0:
            raise RuntimeError(f"{name}: {(place / f'{name}.txt').read_text()[-3000:]}")


def node(name: str, place: Path, attack: tuple[str, float] | None) -> None:
    """Be the server or a client; its output goes to a file."""
    with (place / f"{name}.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from fedclip.engines.declearn.quickrun import Experiment

    experiment = Experiment(place / "config.toml")
    if name == "server":
        serve(experiment)
    else:
        take_part(experiment, name, attack[1] if attack and attack[0] == name else 1.0)


def serve(experiment: Any) -> None:
    """Run the server, and write the weights of its model."""
    from declearn.communication import NetworkServerConfig
    from declearn.main import FederatedServer
    from declearn.main.config import FLOptimConfig, FLRunConfig

    from fedclip.engines.declearn.samplers import guarded

    network = NetworkServerConfig.from_toml(experiment.toml, False, "network")
    optim = FLOptimConfig.from_toml(experiment.toml, False, "optim")
    server = FederatedServer(experiment.model(), optim=optim, **guarded(network, optim))
    server.run(FLRunConfig.from_toml(experiment.toml, False, "run"))
    found = {key: value.tolist() for key, value in server.model.get_weights().coefs.items()}
    (experiment.folder / "weights.json").write_text(json.dumps(found))


def take_part(experiment: Any, name: str, factor: float) -> None:
    """Run a client; a hostile one has another factor than 1."""
    import tomllib

    from declearn.dataset import InMemoryDataset
    from declearn.main import FederatedClient

    from fedclip.engines.declearn.aggregator import ClippedAveraging

    honest: Any = ClippedAveraging.prepare_for_sharing

    def hostile(self: Any, updates: Any, n_steps: int) -> Any:
        return honest(self, updates * factor, n_steps)

    if factor != 1.0:
        ClippedAveraging.prepare_for_sharing = hostile  # type: ignore[method-assign]
    files = experiment.files[name]
    port = tomllib.loads(Path(experiment.toml).read_text(encoding="utf-8"))["network"]["port"]
    client = FederatedClient(
        {"protocol": "fedclip-websockets", "server_uri": f"ws://127.0.0.1:{port}", "name": name},
        InMemoryDataset(files["train_data"], target=files["train_target"], expose_classes=True),
        InMemoryDataset(files["valid_data"], target=files["valid_target"], expose_classes=True),
        verbose=False,
    )
    client.run()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unlike_runs", description=__doc__)
    parser.add_argument("--splits", type=int, default=task.SPLITS, choices=range(2, 9))
    parser.add_argument("--log", type=Path, help="keep what was measured here, and go on from it")
    options = parser.parse_args()
    # What every node imports.
    _context.set_forkserver_preload(["fedclip", "declearn.main", "declearn.model.torch"])
    logging.getLogger("declearn").setLevel(logging.ERROR)
    found: dict[str, float] = {}
    if options.log and options.log.exists():
        found = json.loads(options.log.read_text())
    for seed in range(options.splits):
        for row in SHOWN:
            for attack in task.ATTACKS:
                key = f"{row} | {attack} | {seed}"
                if key not in found:
                    found[key] = accuracy(row, attack, seed)
                    if options.log:
                        options.log.write_text(json.dumps(found, indent=1))
    print("|", "|", " | ".join(task.ATTACKS), "|")
    print("|---" * (1 + len(task.ATTACKS)), end="|\n")

    def of(row: str, attack: str) -> Any:
        return np.array([found[f"{row} | {attack} | {seed}"] for seed in range(options.splits)])

    for row in SHOWN:
        cells = (interval(of(row, attack)) for attack in task.ATTACKS)
        print("|", row, "|", " | ".join(f"{mean:.3f} ± {half:.3f}" for mean, half in cells), "|")
    for row, other in PAIRS:
        cells = (interval(of(row, attack) - of(other, attack)) for attack in task.ATTACKS)
        shown = " | ".join(f"{100 * mean:+.1f} ± {100 * half:.1f}" for mean, half in cells)
        print("|", f"{row} minus {other}, points |", shown, "|")


if __name__ == "__main__":
    main()
