# SPDX-License-Identifier: Apache-2.0
"""Restarts a node after a crash, from the newest round that was saved completely.

declearn names its files by local time, which may be set back, as at the end of summer time. So the
newest round follows from the contents of the files.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgpack
from declearn.main.utils import Checkpointer
from declearn.optimizer import Optimizer

from fedclip.engines.declearn.context import LOGGER, AnyModel
from fedclip.errors import StateError, Unchecked


class SavedRound(NamedTuple):
    """Model and optimizer of one round."""

    model: AnyModel
    optimizer: Optimizer
    timestamp: str


def load_round(folder: str | Path) -> SavedRound:
    """Return model and optimizer of the newest round of which both can be loaded.

    ::

        pairs = models and optimizers of the same name, that are of the same round
        newest = the pair whose optimizer has reached the highest round, by its counters;
                 without counters, the last one in metrics.csv, to which rounds are appended

    A server that is killed, or whose disk is full, may leave a model without its optimizer, or
    half a file. The newest model and the newest optimizer may then be from different rounds: with
    noise, the budget would be a round short.

    Parameters
    ----------
    folder : str or Path
        The `checkpoint` folder of a server, or of a client.

    Raises
    ------
    StateError
        If there is no such round; the message lists the files and their faults.

    Notes
    -----
    The log has a warning for each round that is left out because a part of it is missing, damaged
    or of another round. Of several runs in one folder the highest round counts, which has spent
    the most.
    The best model, which declearn saves at the end of a run, belongs to no round. declearn names
    files by the second, and writes the model first: of rounds that share a second, a server that
    is killed may leave the model of the later one with the optimizer of the earlier one.
    """
    path = Path(folder)
    if not path.is_dir():
        raise StateError(f"{str(folder)!r} is no folder: give the server's checkpoint folder")
    saved = Checkpointer(str(folder))
    models, optimizers = (
        {file.stem.partition("_state_")[2]: file for file in path.glob(f"{kind}_state_*.mpk")}
        for kind in ("model", "optimizer")
    )
    metrics = path / "metrics.csv"
    lines = metrics.read_text(errors="replace").splitlines() if metrics.is_file() else []
    # The metrics are written last of a round.
    rows = {line.partition(",")[0]: row for row, line in enumerate(lines)}
    faults: dict[str, str] = {}
    reached = []
    for timestamp, file in optimizers.items():
        try:
            # Values that declearn wraps, such as vectors, stay wrapped.
            counted = _counted(msgpack.unpackb(file.read_bytes()))
            reached.append((*counted, rows.get(timestamp, 0), timestamp))
        except Exception as exc:  # a file cut short or damaged may hold anything in any place
            faults[timestamp] = f"{exc!r:.200}"
    for rounds, steps, _, timestamp in sorted(reached, reverse=True):
        try:
            if timestamp not in models:
                raise StateError("its model is missing")
            if _mixed(models[timestamp], optimizers[timestamp], timestamp):
                raise StateError("the model is younger than the optimizer")
            model = saved.load_model(timestamp=timestamp)
            optimizer = saved.load_optimizer(timestamp=timestamp)
        except Exception as exc:  # whatever a damaged file makes declearn raise
            faults[timestamp] = f"{exc!r:.200}"
            continue
        lacking = models.keys() - optimizers.keys() - {"best"}
        faults |= {name: "its optimizer is missing" for name in lacking if name > timestamp}
        for name, fault in sorted(faults.items()):
            LOGGER.warning("a round was not saved as a whole, left out: %s: %s", name, fault)
        LOGGER.info("going on from round %d, saved as %s", rounds or steps, timestamp)
        return SavedRound(model, optimizer, timestamp)
    listed = "; ".join(f"{name}: {fault}" for name, fault in sorted(faults.items())[:5])
    why = listed or f"it has {len(models)} models and {len(optimizers)} optimizers"
    raise StateError(f"{str(folder)!r} holds no round whose model and optimizer both load: {why}")


def _counted(state: Unchecked) -> tuple[int, int]:
    """Return the round that the state of an optimizer has reached, and its steps."""
    # declearn counts the steps of a changing learning rate, and the rounds of clients.
    rate = state.get("lrate", {})
    rounds, steps = [rate.get("rounds", 0)], [rate.get("steps", 0)]
    for _, module in state["modules"]:
        if isinstance(module, dict):
            # A counter of rounds, or of the updates of a shared state; and the records.
            counters = module.get("round"), module.get("version")
            rounds += [number for number in counters if type(number) is int]
            steps.append(sum(record["steps"] for record in module.get("rounds", ())))
    return max(rounds), max(steps)


def _mixed(model: Path, optimizer: Path, timestamp: str) -> bool:
    """Whether the model was written after the optimizer, within the second that names both."""
    try:
        named = datetime.strptime(timestamp, "%y-%m-%d_%H-%M-%S")
    except ValueError:
        return False
    written = optimizer.stat()
    # Whichever time zone the name is in: they differ by quarters of an hour.
    late = (written.st_mtime - named.replace(tzinfo=UTC).timestamp() + 1.0) % 900.0
    return late < 3.0 and model.stat().st_mtime_ns > written.st_mtime_ns
