# SPDX-License-Identifier: Apache-2.0
"""Restarts a server after a crash, from the newest round that was saved completely."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from declearn.main.utils import Checkpointer
from declearn.model.api import Model
from declearn.optimizer import Optimizer

from fedclip.errors import StateError

_LOGGER = logging.getLogger("declearn.server.fedclip")


class SavedRound(NamedTuple):
    """Model and optimizer of one round."""

    model: Model[Any]
    optimizer: Optimizer
    timestamp: str


def load_round(folder: str | Path) -> SavedRound:
    """Return model and optimizer of the newest round of which both can be loaded.

    A server that is killed, or whose disk is full, may leave a model without its optimizer, or
    half a file. The newest model and the newest optimizer may then be from different rounds: with
    noise, the budget would be a round short.

    Parameters
    ----------
    folder : str or Path
        The server's `checkpoint` folder.

    Raises
    ------
    StateError
        If there is no such round; the message says what was found.

    Notes
    -----
    The best model, which declearn saves at the end of a run, belongs to no round. declearn names
    files by the second, and writes the model first: if the model of a pair is the younger file, the
    pair mixes two rounds of the same second, and is left out. In a copy of the folder, the order of
    writing is that of copying, and says nothing.
    """
    path = Path(folder)
    if not path.is_dir():
        raise StateError(f"{str(folder)!r} is no folder: give the server's checkpoint folder")
    saved = Checkpointer(str(folder))
    models, optimizers = (
        {
            file.stem.removeprefix(f"{kind}_state_"): file
            for file in path.glob(f"{kind}_state_*.mpk")
        }
        for kind in ("model", "optimizer")
    )
    faults = []
    for timestamp in sorted(models.keys() & optimizers.keys(), reverse=True):
        try:
            if _mixed(models[timestamp], optimizers[timestamp], timestamp):
                faults.append(f"{timestamp}: the model is younger than the optimizer")
                continue
            model = saved.load_model(timestamp=timestamp)
            optimizer = saved.load_optimizer(timestamp=timestamp)
        except Exception as exc:  # whatever a damaged file makes declearn raise
            faults.append(f"{timestamp}: {type(exc).__name__}: {exc!s:.200}")
            continue
        for fault in faults:
            _LOGGER.warning("a round was not saved as a whole, and is left out: %s", fault)
        return SavedRound(model, optimizer, timestamp)
    why = "; ".join(faults[:5]) or f"it has {len(models)} models and {len(optimizers)} optimizers"
    raise StateError(f"{str(folder)!r} holds no round whose model and optimizer both load: {why}")


def _mixed(model: Path, optimizer: Path, timestamp: str) -> bool:
    """Whether the model was written after the optimizer, within the second that names both."""
    try:
        second = datetime.strptime(timestamp, "%y-%m-%d_%H-%M-%S").timestamp()
    except ValueError:
        return False
    written = optimizer.stat()
    return written.st_mtime < second + 2.0 and model.stat().st_mtime_ns > written.st_mtime_ns
