"""A private federation in processes, whose clients' data differ in one record; what they send.

All clients draw the same samples and the same noise, so that only what depends on that record can
differ. Each writes what it sends to ``NAME.sent``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import PATIENCE, free_port

N, D, CLASSES = 40, 4, 3
SECRET = "HIV+"

_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fedclip", "declearn.main", "declearn.model.torch"])


class Secret(Exception):
    """An exception class of the user's own, whose name says it all."""


def arrays(n: int = N, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D)).astype("float32")
    return x, np.arange(n) % CLASSES


def _raised(make: Callable[[], BaseException]) -> Callable[[Any, Any], Any]:
    def get(x: Any, y: Any) -> Any:
        raise make()

    return get


def _missing(x: Any, y: Any) -> Any:
    return np.load(f"{SECRET}.npy")


# What becomes of record 0 of a torch dataset, whenever it is asked for.
RAISING: dict[str, Callable[[Any, Any], Any]] = {
    "missing": _missing,
    "key": _raised(lambda: KeyError(SECRET)),
    "own": _raised(lambda: Secret(SECRET)),
    "exit": _raised(lambda: SystemExit(SECRET)),
    "stop": _raised(lambda: StopIteration(SECRET)),
    "memory": _raised(lambda: MemoryError(SECRET)),
    "shape": lambda x, y: (np.ones((2, 2, D + 3), "float32"), y),
    "kind": lambda x, y: ({"a": SECRET}, y),
    "object": lambda x, y: (object(), y),
}
# On the wire, one of each way; all are tried without it.
KINDS = ("plain", "other", "nan", "text", "own")
# Of these the record counts as zero.
ZERO = ("nan", "label", "text", "lacking", *RAISING)


def dataset(kind: str, at: int = 0, **settings: Any) -> Any:
    """Return the records of a client; another one in the place of one, for most kinds."""
    from declearn.dataset import InMemoryDataset

    x, y = arrays()
    if kind in RAISING:
        return _torch_dataset(x, y, RAISING[kind])
    if kind in ("other", "huge", "nan"):
        x[at] = {"other": -5.0, "huge": 1e30, "nan": np.nan}[kind]
    elif kind == "label":
        y[at] = 7
    elif kind == "text":
        x = x.astype(object)
        x[0, 1] = SECRET
    elif kind == "lacking":
        y = np.where(np.arange(N) == 0, np.nan, y)
    return InMemoryDataset(x, target=y, **settings)


def _torch_dataset(x: Any, y: Any, get: Callable[[Any, Any], Any]) -> Any:
    import torch
    from declearn.dataset.torch import TorchDataset

    class Files(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return get(x[i], y[i]) if i == 0 else (x[i], y[i])

    return TorchDataset(Files())


def main(name: str, folder: Path) -> None:
    with (folder / f"{name}.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    from declearn.utils import set_device_policy

    set_device_policy(gpu=False)
    settings = json.loads(Path("settings.json").read_text())
    if name == "server":
        _server(settings)
    else:
        _client(name, settings)


def _server(settings: dict[str, Any]) -> None:
    import torch
    from declearn.main import FederatedServer
    from declearn.model.torch import TorchModel
    from declearn.utils import setup_server_loggers

    setup_server_loggers(level=logging.INFO)
    torch.manual_seed(0)
    model = TorchModel(torch.nn.Linear(D, CLASSES), torch.nn.CrossEntropyLoss())
    address = {"protocol": "websockets", "host": "127.0.0.1", "port": settings["port"]}
    address["heartbeat"] = 0.02
    # One that asks for more than it needs.
    type(model).required_data_info = {"n_samples", "features_shape", "data_type"}  # type: ignore
    asked = {"netwk": address, "optim": settings["optim"], "metrics": settings["metrics"]}
    FederatedServer(model=model, **asked).run(settings["run"])


def seeded(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let private clients draw samples and noise from seeds, which nobody may do in earnest."""
    from fedclip.dpsgd import step
    from fedclip.engines.declearn import private_client as manager
    from fedclip.privacy.noise import insecure_normals

    bits, normals = np.random.default_rng(2), insecure_normals(2)
    replace(manager, "IndependentNoise", lambda: step.IndependentNoise(normals))
    replace(manager, "secure_normals", insecure_normals(3))

    def sampler(*size: int) -> Any:
        return step.PoissonSampler(*size, lambda n: bits.integers(0, 2**64, n, dtype=np.uint64))

    replace(manager, "PoissonSampler", sampler)


def _client(name: str, settings: dict[str, Any]) -> None:
    from declearn.communication.websockets import WebsocketsClient
    from declearn.utils import setup_client_loggers

    import fedclip

    setup_client_loggers(name)
    seeded()
    network = {"protocol": "websockets", "server_uri": f"ws://127.0.0.1:{settings['port']}"}
    # The first three validation records, on which the model is tried, are the same at all.
    kinds = ("plain", name) if settings["evaluated"] else (name, "plain")
    node = fedclip.PrivateFederatedClient(
        {**network, "name": name},
        dataset(kinds[0]),
        dataset(kinds[1], N - 1, expose_data_type=True),
        checkpoint=f"saved_{name}",
        verbose=False,
    )
    send = WebsocketsClient._send_message

    async def noted(self: Any, bin_msg: bytes) -> bytes:
        with Path(f"{name}.sent").open("ab") as file:
            pickle.dump(bin_msg, file)
        return await send(self, bin_msg)

    WebsocketsClient._send_message = noted  # type: ignore[method-assign]
    asyncio.run(node.async_run())


def federation(
    folder: Path, kinds: tuple[str, ...], evaluated: Any = None, **run: Any
) -> dict[str, int]:
    """Run a federation with a client of each kind; return the exit codes.

    If parameters are given by which evaluations have noise, the kind is that of the validation
    records.
    """
    modules = [["value-clip", {"max_value": 0.05}], ["norm-clip", {"max_norm": 0.07}]]
    clip = ["sample-clip", evaluated] if evaluated else "sample-clip"
    settings: dict[str, Any] = {
        "port": free_port(),
        "evaluated": bool(evaluated),
        "metrics": ["accuracy"] if evaluated else None,
        "optim": {
            "aggregator": "averaging",
            "server_opt": {"lrate": 1.0},
            "client_opt": {"lrate": 0.5, "modules": [*modules, clip, "momentum"]},
        },
        "run": {
            "rounds": 2,
            "register": {k: len(kinds) for k in ("min_clients", "max_clients")},
            "training": {"batch_size": 20, "n_epoch": 2, "n_steps": 3},
            "evaluate": {"batch_size": 20},
            "privacy": {"budget": [3.0, 1e-3], "sclip_norm": 0.5},
            **run,
        },
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    names = ("server", *kinds)
    nodes = {n: _context.Process(target=main, args=(n, folder), daemon=True) for n in names}
    try:
        for node in nodes.values():
            node.start()
        for name, node in nodes.items():
            node.join(PATIENCE)
            said = (folder / f"{name}.txt").read_text(errors="replace")
            assert node.exitcode is not None, (name, said[-3000:])
        return {name: node.exitcode for name, node in nodes.items()}
    finally:
        for node in nodes.values():
            if node.pid is not None:
                node.kill()
                node.join()


def sent(folder: Path, name: str) -> list[bytes]:
    """Return all that a client sent, but for asking whether there is something for it."""
    found = []
    with (folder / f"{name}.sent").open("rb") as file:
        while file.peek(1):
            found.append(pickle.load(file))
    return [one for one in found if b"recv" not in one[:40].lower()]
