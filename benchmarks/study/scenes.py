# SPDX-License-Identifier: Apache-2.0
"""Federations on scikit-learn's records, what may be wrong with them, and one run of one.

A run is `fedclip simulate`'s, in this process, with a linear model: one logistic loss for each
label, as scikit-learn's `SGDClassifier` has it. Its score is the accuracy, after the last round,
on records that no site has and that nothing is wrong with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from scipy.special import expit
from sklearn import datasets
from sklearn.linear_model import SGDClassifier

from fedclip.core.toml import toml_value
from fedclip.engines.declearn.quickrun import draw_from
from fedclip.engines.local.crowd import Crowd
from fedclip.engines.local.simulate import Simulation

Array = np.ndarray[Any, Any]
Site = tuple[Array, Array]
"""Records and labels."""

ROUNDS = 15


@dataclass(frozen=True)
class Source:
    """Records, over how many sites, and how these train.

    Attributes
    ----------
    step_norm, update_norm
        The median norms of steps and of updates in the first round, where nothing is wrong: by
        these, a fixed limit or bound has its scale (``python -m benchmarks.study norms``).
    """

    load: Callable[[], Any]
    sites: int
    lrate: float
    batch: int
    step_norm: float
    update_norm: float


SOURCES: Mapping[str, Source] = {
    "digits": Source(datasets.load_digits, 8, 0.5, 32, 0.87, 2.43),
    "cancer": Source(datasets.load_breast_cancer, 5, 0.1, 16, 0.88, 0.44),
    "wine": Source(datasets.load_wine, 5, 0.1, 8, 1.66, 0.54),
}

TROUBLES: Mapping[str, str] = {
    "none": "sites alike",
    "sizes": "the largest site has 60 times the records of the smallest",
    "labels": "each site draws its label mix from Dirichlet(0.3)",
    "sizes and labels": "both",
    "units": "the last site has all columns × 100",
    "bursts": "one gradient in a hundred is × 1000",
    "records": "one record in fifty is × 1000, at every site",
    "hostile": "a site multiplies its update by -10, then clips it as it should",
}
CLAIMS, CLAIMED = "claims", 10**6
"""Beside these troubles: the hostile site says besides that it took so many steps."""
BURSTS, BURST, ODD, WRONG, CORRUPT = 0.01, 1000.0, 100.0, 0.02, 1000.0


class Linear(SklearnSGDModel, register=False):  # type: ignore[call-arg]
    """scikit-learn's linear classifier, with the gradient of a batch at once, and with bursts."""

    def __init__(self, bursts: float = 0.0, seed: int = 0) -> None:
        super().__init__(SGDClassifier(loss="log_loss", penalty=None))
        self._bursts, self._rng = bursts, np.random.default_rng(seed)

    def compute_batch_gradients(self, batch: Any, max_norm: float | None = None) -> NumpyVector:
        x, labels, _ = batch
        rows = len(self._model.coef_)
        # As many rows as labels, or one row for the second of two.
        right = labels[:, None] == self._model.classes_[None, -rows:]
        off = expit(x @ self._model.coef_.T + self._model.intercept_) - right
        # All mechanisms take the same steps, and so have the same bursts.
        times = BURST if self._rng.random() < self._bursts else 1.0
        off *= times / len(labels)
        return NumpyVector({"intercept": off.sum(axis=0), "coef": off.T @ x})


@cache
def records(data: str) -> tuple[Array, Array]:
    """Return the records of a source, and their labels from 0 on."""
    x, labels = SOURCES[data].load(return_X_y=True)
    return x, labels.astype(np.int64)


def split(data: str, trouble: str, seed: int) -> tuple[list[Site], Site]:
    """Return what each site trains on, and what the model is tested on."""
    source, rng = SOURCES[data], np.random.default_rng(seed)
    x, labels = records(data)
    order = rng.permutation(len(labels))
    # Digits keep their zeros; the others are scaled by a table that all sites have.
    center, scale = (0.0, 16.0) if data == "digits" else (x.mean(axis=0), x.std(axis=0))
    tested, used = np.split(order, [len(order) * 3 // 10])
    parts = [*_parts(labels[used], source.sites, trouble, rng)]
    sites = []
    for place, part in enumerate(parts):
        own = x[used[part]]
        if trouble == "units" and place == source.sites - 1:
            own = own * ODD
        if trouble == "records":
            own = np.where(rng.random((len(own), 1)) < WRONG, own * CORRUPT, own)
        sites.append(((own - center) / scale, labels[used[part]]))
    return sites, ((x[tested] - center) / scale, labels[tested])


def _parts(labels: Array, sites: int, trouble: str, rng: np.random.Generator) -> Iterator[Array]:
    """Yield the places of each site's records."""
    shares = np.geomspace(1, 60 if "sizes" in trouble else 1, sites)
    counts = np.diff(np.round(np.cumsum([0, *shares]) / shares.sum() * len(labels))).astype(int)
    if "labels" not in trouble:
        yield from np.split(np.arange(len(labels)), np.cumsum(counts)[:-1])
        return
    left = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    for count in counts:
        mix, rows = rng.dirichlet([0.3] * len(left)) + 1e-12, []
        for _ in range(count):
            # A label of which none are left is drawn no more.
            chances = np.where([bool(rest) for rest in left], mix, 0.0)
            rows.append(left[rng.choice(len(left), p=chances / chances.sum())].pop())
        yield np.array(rows)


class Scene:
    """A federation with a trouble, split by a seed, in a folder."""

    def __init__(self, folder: Path, data: str, trouble: str, seed: int) -> None:
        self.folder, self.trouble, self.seed = folder, trouble, seed
        self.source = SOURCES[data]
        sites, self.tested = split(data, trouble, seed)
        self.counts = {f"site-{i:02}": len(labels) for i, (_, labels) in enumerate(sites)}
        for name, (x, labels) in zip(self.counts, sites, strict=True):
            own = folder / "data" / name
            own.mkdir(parents=True)
            for part, rows in (("train", slice(None)), ("valid", slice(1))):
                np.save(own / f"{part}_data.npy", x[rows])
                np.save(own / f"{part}_target.npy", labels[rows])
        bursts = BURSTS if trouble == "bursts" else 0.0
        (folder / "model.py").write_text(
            f"from benchmarks.study.scenes import Linear\n\nmodel = Linear({bursts}, {seed})\n"
        )

    def text(self, optim: Mapping[str, Any]) -> str:
        """Return a quickrun file, with these sections of [optim]."""
        client = {"lrate": self.source.lrate, **optim.get("client_opt", {})}
        whole: dict[str, Any] = {
            "data": {"data_folder": str(self.folder / "data")},
            "model": {"model_file": str(self.folder / "model.py")},
            "optim": {
                "aggregator": optim.get("aggregator", {"name": "averaging"}),
                "client_opt": client,
                "server_opt": {"lrate": 1.0, "modules": optim.get("server_opt", [])},
            },
            "run": {
                "rounds": ROUNDS,
                "training": {"batch_size": self.source.batch, "n_epoch": 1},
            },
            "experiment": {"checkpoint": str(self.folder / "results")},
            "simulate": {"attackers": 1, "factor": -10.0}
            if self.trouble in ("hostile", CLAIMS)
            else {},
        }
        whole["run"]["training"]["drop_remainder"] = False
        return "".join(
            f"[{section}]\n" + "".join(f"{key} = {toml_value(table[key])}\n" for key in table)
            for section, table in whole.items()
        )

    def write(self, optim: Mapping[str, Any]) -> Path:
        """Write that file, and return where it is."""
        file = self.folder / "config.toml"
        file.write_text(self.text(optim), encoding="utf-8")
        return file

    def losses(self, optim: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
        """Yield loss and accuracy on the test records after each round; NaN once it is lost."""
        draw_from(self.seed)
        simulation = Simulation(self.write(optim), self.seed)
        if self.trouble == CLAIMS:
            _claim(simulation.crowd)
        for _ in range(ROUNDS):
            if why := simulation.step():
                raise RuntimeError(why)
            yield self._judged(simulation.model.get_weights().coefs)

    def score(self, optim: Mapping[str, Any]) -> float:
        """Return the accuracy after the last round; NaN if the weights are no numbers."""
        *_, (_, accuracy) = self.losses(optim)
        return accuracy

    def _judged(self, weights: Mapping[str, Array]) -> tuple[float, float]:
        x, labels = self.tested
        scores = x @ weights["coef"].T + weights["intercept"]
        if not np.isfinite(scores).all():
            return float("nan"), float("nan")
        right = labels[:, None] == np.arange(labels.max() + 1)[None, -scores.shape[1] :]
        found = scores.argmax(axis=1) if scores.shape[1] > 1 else scores[:, 0] > 0
        loss = np.logaddexp(0.0, np.where(right, -scores, scores)).mean()
        return float(loss), float((found == labels).mean())


def _claim(crowd: Crowd) -> None:
    """Have the hostile sites of a crowd claim steps."""
    train = crowd.train

    def claiming(client: int, *given: Any) -> tuple[NumpyVector, int, Any]:
        update, steps, aux = train(client, *given)
        return update, CLAIMED if client in crowd.hostile else steps, aux

    crowd.train = claiming  # type: ignore[method-assign]


def norms(data: str) -> tuple[float, float]:
    """Return the median norms of steps and of updates in the first round, of five clean scenes."""
    steps, updates = [], []
    for seed in range(100, 105):
        with tempfile.TemporaryDirectory() as folder:
            scene = Scene(Path(folder), data, "none", seed)
            crowd = Simulation(scene.write({}), seed).crowd
            start, made = crowd.model.get_weights(), crowd.model.compute_batch_gradients

            def noted(batch: Any, max_norm: Any = None, made: Any = made) -> NumpyVector:
                gradient = made(batch, max_norm)
                steps.append(_norm(gradient))
                return gradient

            crowd.model.compute_batch_gradients = noted
            for client in range(len(crowd.names)):
                updates.append(_norm(crowd.train(client, start, {})[0]))
    return float(np.median(steps)), float(np.median(updates))


def _norm(vector: Any) -> float:
    return float(np.sqrt(sum((x**2).sum() for x in vector.coefs.values())))
