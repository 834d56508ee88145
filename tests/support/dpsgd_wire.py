# SPDX-License-Identifier: Apache-2.0
"""Records of which one differs, raises or lacks something; and clients that draw the same."""

from collections.abc import Callable
from typing import Any

import numpy as np

N, D, CLASSES = 40, 4, 3
SECRET = "HIV+"


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
# On the wire, one of each way; all are tried without it. Of the latter, validation records differ.
KINDS = ("plain", "other", "nan", "text", "own")
VALIDATION = ("huge", "label")
# Of these the record counts as zero.
ZERO = ("nan", *RAISING)


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
