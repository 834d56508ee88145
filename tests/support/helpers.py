# SPDX-License-Identifier: Apache-2.0
"""The clippers under test, one row each, and the frameworks that they are tested with.

To put a new clipper under test, add its row to `SPECIMENS`: every file of behaviours goes over
the table. ``pytest --backends numpy,torch`` tests with these frameworks only, and imports no
other: tests ask for a framework through `each_framework`, `needs` and `require`.
"""

import importlib
import itertools
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer

from fedclip.testing import FRAMEWORKS, SHAPES, apply, installed, to_numpy, to_vector

Arrays = Mapping[str, Any]

PATIENCE = 600.0
"""Seconds after which a process counts as hanging, on a machine that is busy with much else."""

ASKED = {name for name in os.environ["FEDCLIP_BACKENDS"].split(",") if name}
if unknown := ASKED - set(FRAMEWORKS):
    raise pytest.UsageError(f"--backends knows {', '.join(FRAMEWORKS)}; got {', '.join(unknown)}")

BACKENDS = [name for name in installed() if name in ASKED]
"""The frameworks to test with: those that are asked for, of those that are installed."""

FRAMEWORK_MODULES = ("torch", "tensorflow", "jax", "jaxlib", "haiku", "keras")

# What else stands for a framework.
FRAMEWORK_OF = {"keras": "tensorflow", "haiku": "jax", "optax": "jax"}


@dataclass(frozen=True)
class Specimen:
    """One clipper, as it is put under test; warm-ups are small, so that 20 steps see everything."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    # It tells rows of one clipper apart.
    label: str = ""
    # Or "regularizer".
    kind: str = "module"

    def __str__(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name

    @property
    def sampled(self) -> bool:
        """Whether a quick run tries it: one row of each clipper, all transforms of `norm-clip`."""
        return not self.label or self.name == "norm-clip"

    def make(self, **config: Any) -> Any:
        """Return a fresh clipper; `config` replaces parameters."""
        base: Any = OptiModule if self.kind == "module" else Regularizer
        return base.from_specs(self.name, {**self.config, **config})


SPECIMENS = [
    Specimen("norm-clip", {"max_norm": 1.0}),
    Specimen("norm-clip", {"max_norm": 0.5, "scope": "tensor"}, label="tensor"),
    Specimen("norm-clip", {"max_norm": 0.2, "dims": [0]}, label="slices"),
    Specimen("norm-clip", {"max_norm": 7.0, "ord": 1}, label="l1"),
    Specimen("norm-clip", {"max_norm": 0.1, "ord": "rms", "scope": "layer"}, label="rms"),
    Specimen("norm-clip", {"scope": {"enc.*": 0.3, "*scale": 0.05}}, label="table"),
    Specimen("value-clip", {"max_value": 0.2}),
    Specimen("zscore-clip", {"z_max": 1.5, "warmup": 3, "max_norm": 1.5}),
    Specimen(
        "zscore-clip",
        {"z_max": 1.5, "warmup": 3, "max_norm": None, "scope": "tensor", "std_eps": 0.0},
        label="tensor",
    ),
    Specimen("no-op"),
    Specimen("percentile-clip", {"percentile": 60}),
    Specimen(
        "percentile-clip", {"percentile": 60, "method": "linear", "scope": "layer"}, label="linear"
    ),
    Specimen("normalize", {"norm": 0.7}),
    Specimen("normalize", {"scope": "tensor", "ord": "std"}, label="std"),
    Specimen("standardize"),
    Specimen("centralize"),
    Specimen("centralize", {"scope": "global"}, label="global"),
    Specimen("ema-clip", {"warmup": 3, "warmup_norm": 1.0, "max_norm": 2.0}),
    Specimen("ema-clip", {"warmup": 3, "warmup_norm": None, "scope": "tensor"}, label="tensor"),
    Specimen("auto-clip", {"warmup": 6, "max_norm": 2.0}),
    Specimen("auto-clip", {"median": "window", "window": 9, "scope": "layer"}, label="window"),
    Specimen("percentile-norm-clip", {"percentile": 80, "window": 8, "warmup": 4, "max_norm": 2.0}),
    Specimen(
        "percentile-norm-clip",
        {"percentile": 80, "history": "stream", "warmup": 4, "scope": "tensor"},
        label="stream",
    ),
    Specimen("mad-clip", {"window": 16, "warmup": 3, "max_norm": 2.0}),
    Specimen("adaptive-clip", {"start_norm": 1.0, "max_norm": 2.0}),
    Specimen("adaptive-clip", {"scope": "layer", "every": 3}, label="layer"),
    Specimen("growth-clip", {"max_norm": 2.0}),
    Specimen("growth-clip", {"mul": 1.2, "add": 0.05, "scope": "tensor"}, label="tensor"),
    Specimen("ema-norm-clip", {"decay": 0.8, "init": 0.0}),
    Specimen(
        "ema-norm-clip",
        {"decay": 0.8, "init": "first", "scope": "tensor", "min_norm": 1e-12},
        label="tensor",
    ),
    Specimen("ema-normalize", {"decay": 0.8, "init": 0.0, "debias": True}),
    Specimen("ema-value-clip", {"decay": 0.8}),
    Specimen("growth-value-clip"),
    Specimen("agc", {"ratio": 0.1, "axis": 0}, kind="regularizer"),
    Specimen("agc", {"ratio": 0.1, "unit": "tensor"}, kind="regularizer", label="tensor"),
]
MODULES = [s for s in SPECIMENS if s.kind == "module"]


def specimens(rows: Iterable[Specimen] = SPECIMENS) -> Any:
    """Return the decorator that runs a test for each of these specimens."""
    return pytest.mark.parametrize("specimen", [*rows], ids=str)


def specimens_by_framework() -> Any:
    """Return the decorator that runs a test for each specimen in one framework, in turn."""
    in_turn = itertools.cycle(n for n in FRAMEWORKS[1:] + FRAMEWORKS[:1] if n in BACKENDS)
    rows = [*zip(SPECIMENS, in_turn, strict=False)]
    return pytest.mark.parametrize(("specimen", "framework"), rows, ids=str)


def each_framework(*, oracle: bool = True) -> Any:
    """Return the decorator that runs a test for each framework; NumPy is the oracle."""
    chosen = [name for name in FRAMEWORKS if name in BACKENDS and (oracle or name != "numpy")]
    return pytest.mark.parametrize("framework", chosen)


def pairwise(**axes: Sequence[Any]) -> Any:
    """Return the decorator that runs a test for few rows: each two values of two axes meet in one.

    Of an axis `framework`, only those that are to be tested with count.
    """
    tables = [[v for v in axes[n] if n != "framework" or v in BACKENDS] for n in axes]
    places = itertools.product(*(range(len(table)) for table in tables))
    pairs = {row: {*itertools.combinations(enumerate(row), 2)} for row in places}
    left, rows = set().union(*pairs.values()), []
    while left:
        best = max(pairs, key=lambda row: len(pairs[row] & left))
        left -= pairs[best]
        rows.append([table[i] for table, i in zip(tables, best, strict=True)])
    return pytest.mark.parametrize(
        list(axes), rows, ids=lambda value: str(value) if isinstance(value, Specimen) else None
    )


def needs(framework: str) -> None:
    """Skip the test, or the whole file, if the framework is not there or not to be tested with."""
    if framework not in BACKENDS:
        why = f"{framework} is not installed, or not among --backends"
        pytest.skip(why, allow_module_level=True)


def require(module: str) -> Any:
    """Return a module of a framework, or skip as `needs` does."""
    root = module.partition(".")[0]
    needs(FRAMEWORK_OF.get(root, root))
    return importlib.import_module(module)


def hiding(*modules: str) -> dict[str, str]:
    """Return the environment of Python processes that find none of these modules.

    Without the frameworks, declearn is imported in a third of the time.
    """
    folders = [str(Path(__file__).parent / "hiding"), *filter(None, sys.path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "FEDCLIP_HIDDEN": ",".join(modules or FRAMEWORK_MODULES),
    }


_HELD: list[socket.socket] = []


def free_port() -> int:
    """Return a port that nobody else is given while this process lasts; a server may take it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


def ended(*words: object, well: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return what a Python process with these arguments has come to: well, if it is to."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        **{"timeout": PATIENCE, **options},
    )
    assert not well or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def python(code: str, *hidden: str, options: Sequence[str] = (), **environment: str) -> str:
    """Return what code prints, in a process that finds none of these modules, or of frameworks."""
    env = {**hiding(*hidden), **environment}
    return ended(*options, "-c", textwrap.dedent(code), env=env).stdout.strip()


def policy(folder: Path, **settings: Any) -> Path:
    """Write a site's policy with these settings, or a bound alone; return its file."""
    path, settings = folder / "site.toml", {"max_norm": 0.5, **settings}
    path.write_text("[update]\n" + "".join(f"{k} = {v!r}\n" for k, v in settings.items()))
    path.chmod(0o600)
    return path


def gradient(seed: int = 0, scale: float = 0.15) -> dict[str, np.ndarray]:
    """Return one random gradient, float64; of norm about 1.6 for the usual scale."""
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.normal(0, scale, shape)) for n, shape in SHAPES.items()}


def run(clipper: Any, steps: Sequence[Arrays], framework: str = "numpy") -> list[Any]:
    """Return the outputs of some steps, as NumPy arrays."""
    return [to_numpy(apply(clipper, to_vector(step, framework))) for step in steps]


def norm(arrays: Arrays | Sequence[Any] | Any) -> float:
    """Return the L2 norm of all arrays together, in (scaled) float64 arithmetic."""
    values = arrays.values() if isinstance(arrays, Mapping) else arrays
    values = values if isinstance(values, Iterable) and not hasattr(values, "shape") else [values]
    flat = np.concatenate([np.asarray(v).astype(np.float64).ravel() for v in values])
    peak = np.abs(flat).max(initial=0.0)
    return float(peak * np.linalg.norm(flat / peak)) if peak else 0.0
