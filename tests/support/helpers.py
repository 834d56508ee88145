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

BACKENDS = [name for name in os.environ["FEDCLIP_BACKENDS"].split(",") if name]
"""The frameworks to test with, of those that are installed."""
if unknown := set(BACKENDS) - set(FRAMEWORKS):
    raise pytest.UsageError(f"--backends knows {', '.join(FRAMEWORKS)}; got {', '.join(unknown)}")

INSTALLED = installed()

FRAMEWORK_MODULES = ("torch", "tensorflow", "jax", "jaxlib", "haiku", "keras")

# What else stands for a framework.
FRAMEWORK_OF = {"keras": "tensorflow", "haiku": "jax", "optax": "jax"}


@dataclass(frozen=True)
class Specimen:
    """One clipper, as it is put under test.

    Attributes
    ----------
    name, config
        Registered name and parameters; small warm-ups, so that 20 steps see everything.
    moves
        It changes gradients that are not over any limit.
    stateful
        It has statistics.
    label
        Tells rows of one clipper apart.
    kind
        "module" or "regularizer".
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    moves: bool = False
    stateful: bool = False
    label: str = ""
    kind: str = "module"

    def __str__(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name

    @property
    def sampled(self) -> bool:
        """Whether a quick run tries this row.

        It tries one row of each clipper, and all of `norm-clip`, which differ by transform.
        """
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
    Specimen("zscore-clip", {"z_max": 1.5, "warmup": 3, "max_norm": 1.5}, stateful=True),
    Specimen(
        "zscore-clip",
        {"z_max": 1.5, "warmup": 3, "max_norm": None, "scope": "tensor", "std_eps": 0.0},
        stateful=True,
        label="tensor",
    ),
    Specimen("no-op"),
    Specimen("percentile-clip", {"percentile": 60}, moves=True),
    Specimen(
        "percentile-clip",
        {"percentile": 60, "method": "linear", "scope": "layer"},
        moves=True,
        label="linear",
    ),
    Specimen("normalize", {"norm": 0.7}, moves=True),
    Specimen("normalize", {"scope": "tensor", "ord": "std"}, moves=True, label="std"),
    Specimen("standardize", moves=True),
    Specimen("centralize", moves=True),
    Specimen("centralize", {"scope": "global"}, moves=True, label="global"),
    Specimen("ema-clip", {"warmup": 3, "warmup_norm": 1.0, "max_norm": 2.0}, stateful=True),
    Specimen(
        "ema-clip",
        {"warmup": 3, "warmup_norm": None, "scope": "tensor"},
        stateful=True,
        label="tensor",
    ),
    Specimen("auto-clip", {"warmup": 6, "max_norm": 2.0}, stateful=True),
    Specimen(
        "auto-clip",
        {"median": "window", "window": 9, "scope": "layer"},
        stateful=True,
        label="window",
    ),
    Specimen(
        "percentile-norm-clip",
        {"percentile": 80, "window": 8, "warmup": 4, "max_norm": 2.0},
        stateful=True,
    ),
    Specimen(
        "percentile-norm-clip",
        {"percentile": 80, "history": "stream", "warmup": 4, "scope": "tensor"},
        stateful=True,
        label="stream",
    ),
    Specimen("mad-clip", {"window": 16, "warmup": 3, "max_norm": 2.0}, stateful=True),
    Specimen("adaptive-clip", {"start_norm": 1.0, "max_norm": 2.0}, stateful=True),
    Specimen("adaptive-clip", {"scope": "layer", "every": 3}, stateful=True, label="layer"),
    Specimen("growth-clip", {"max_norm": 2.0}, stateful=True),
    Specimen(
        "growth-clip", {"mul": 1.2, "add": 0.05, "scope": "tensor"}, stateful=True, label="tensor"
    ),
    Specimen("ema-norm-clip", {"decay": 0.8, "init": 0.0}, moves=True, stateful=True),
    Specimen(
        "ema-norm-clip",
        {"decay": 0.8, "init": "first", "scope": "tensor", "min_norm": 1e-12},
        moves=True,
        stateful=True,
        label="tensor",
    ),
    Specimen(
        "ema-normalize", {"decay": 0.8, "init": 0.0, "debias": True}, moves=True, stateful=True
    ),
    Specimen("ema-value-clip", {"decay": 0.8}, moves=True, stateful=True),
    Specimen("growth-value-clip", moves=True, stateful=True),
    Specimen("agc", {"ratio": 0.1, "axis": 0}, kind="regularizer"),
    Specimen("agc", {"ratio": 0.1, "unit": "tensor"}, kind="regularizer", label="tensor"),
]
MODULES = [s for s in SPECIMENS if s.kind == "module"]


def specimens(rows: Sequence[Specimen] = SPECIMENS, **traits: Any) -> Any:
    """Return the decorator that runs a test for each specimen with these traits."""
    chosen = [s for s in rows if all(bool(getattr(s, t)) == v for t, v in traits.items())]
    return pytest.mark.parametrize("specimen", chosen, ids=str)


def specimens_by_framework(rows: Sequence[Specimen] = SPECIMENS, **traits: Any) -> Any:
    """Return the decorator that runs a test for each specimen in one framework, in turn."""
    chosen = [s for s in rows if all(bool(getattr(s, t)) == v for t, v in traits.items())]
    in_turn = itertools.cycle(name for name in FRAMEWORKS[1:] + FRAMEWORKS[:1] if name in BACKENDS)
    return pytest.mark.parametrize(
        ("specimen", "framework"), [*zip(chosen, in_turn, strict=False)], ids=str
    )


def each_framework(*, oracle: bool = True) -> Any:
    """Return the decorator that runs a test for each framework; NumPy is the oracle."""
    chosen = [name for name in FRAMEWORKS if name in BACKENDS and (oracle or name != "numpy")]
    return pytest.mark.parametrize("framework", chosen)


def pairwise(**axes: Sequence[Any]) -> Any:
    """Return the decorator that runs a test for few rows: each two values of two axes meet in one.

    Of an axis `framework`, only those that are to be tested with count.
    """
    tables = [
        [v for v in values if name != "framework" or v in BACKENDS] for name, values in axes.items()
    ]
    cells = [[(axis, i) for i in range(len(table))] for axis, table in enumerate(tables)]
    missing = [
        pair
        for one, other in itertools.combinations(cells, 2)
        for pair in itertools.product(one, other)
    ]
    left, rows = set(missing), []
    for pair in missing:
        if pair not in left:
            continue
        row = dict(pair)
        for axis, choices in enumerate(cells):
            if axis not in row:
                others = [*row.items()]
                news = [sum(tuple(sorted((c, o))) in left for o in others) for c in choices]
                row[axis] = news.index(max(news))
        left -= {*itertools.combinations(sorted(row.items()), 2)}
        rows.append([table[row[axis]] for axis, table in enumerate(tables)])
    return pytest.mark.parametrize(
        list(axes), rows, ids=lambda value: str(value) if isinstance(value, Specimen) else None
    )


def needs(framework: str) -> None:
    """Skip the test, or the whole file, if the framework is not there or not to be tested with."""
    if framework not in BACKENDS:
        pytest.skip(f"{framework} is not among --backends", allow_module_level=True)
    if framework not in INSTALLED:
        pytest.skip(f"{framework} is not installed", allow_module_level=True)


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


def assert_same(got: Sequence[Arrays], wanted: Sequence[Arrays]) -> None:
    """Check that two lists of outputs are the same, bit for bit."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert list(a) == list(b)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
