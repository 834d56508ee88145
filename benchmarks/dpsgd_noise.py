"""Correlated noise for one pass, beside independent noise: ``python -m benchmarks.dpsgd_noise``.

In one pass over records in a fixed order each takes part in one step. All T sums are then one
release: noise C^-1 Z of independent rows Z costs as much as one Gaussian mechanism, if no column of
the lower triangular C is longer than 1 (matrix factorisation: Denisov et al., 2022,
arXiv:2202.08312). Noise of a step is partly taken back later, and prefix sums, on which the weights
depend, have less of it. Independent noise is less for each step, as Poisson samples are amplified.

errors       root mean square error of the T prefix sums of one pass, in bounds of a record
digits       accuracy as in benchmarks.dpsgd_accuracy: ten rounds of one epoch with independent
             noise, and ten rounds that are one pass together with correlated noise
mnist        the same for 5,000 digits of MNIST

Adjacency: a record is there, or its gradient is zero. The factorisation is the best there is for
the mean square of all prefix sums, in any number of bands: trees and bands have more noise.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from declearn.utils import set_device_policy

from benchmarks import dpsgd_accuracy
from benchmarks.dpsgd_accuracy import DELTA, MNIST, ROUNDS, Data, Setting, digits, mnist
from fedclip.engines.declearn.private_client import PrivateTrainingManager
from fedclip.privacy.accounting import noise_multiplier
from fedclip.privacy.noise import secure_normals

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
STEPS = (15, 50, 200)

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def best_factor(steps: int) -> Matrix:
    """Return the C with columns of length 1 and least mean square error of prefix sums.

    The fixed point of Denisov et al. (2022, section 3.1): with A the prefix sums and D diagonal,
    C^T C = D^-1/2 (D^1/2 A^T A D^1/2)^1/2 D^-1/2 where its diagonal is 1.
    """
    prefix = np.tril(np.ones((steps, steps)))
    gram, scale = prefix.T @ prefix, np.ones(steps)
    for _ in range(300):
        root = np.sqrt(scale)
        values, vectors = np.linalg.eigh(root[:, None] * gram * root)
        square_root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        scale = np.diag(square_root).copy()
    product = square_root / np.outer(root, root)
    length = np.sqrt(np.diag(product))
    product /= np.outer(length, length)
    # The lower triangular C of C^T C: Cholesky's, with rows and columns in reverse.
    return np.linalg.cholesky(product[::-1, ::-1]).T[::-1, ::-1]


def tree_error(steps: int) -> float:
    """Return the error of a binary tree of sums, all of whose noise is used (Honaker, 2015)."""
    levels = (steps - 1).bit_length() + 1
    nodes = [
        (first, first + (1 << level))
        for level in range(levels)
        for first in range(0, steps, 1 << level)
        if first + (1 << level) <= steps
    ]
    rows = np.array([[first <= t < last for t in range(steps)] for first, last in nodes], float)
    ends, total = np.array([last for _, last in nodes]), 0.0
    for t in range(1, steps + 1):
        there = rows[ends <= t][:, :t]
        weights = np.linalg.lstsq(there.T, np.ones(t), rcond=None)[0]
        total += weights @ weights
    return float(np.sqrt(rows.sum(0).max() * total / steps))


def factor_error(factor: Matrix) -> float:
    decoded = np.cumsum(np.linalg.inv(factor), axis=0)
    longest = np.sqrt((factor**2).sum(0).max())
    return float(longest * np.sqrt((decoded**2).sum() / len(factor)))


def of_errors() -> None:
    """Print the errors of prefix sums."""
    print("steps  epsilon  independent    tree    best   best / independent")
    for steps in STEPS:
        alone, tree, best = factor_error(np.eye(steps)), tree_error(steps), 0.0
        best = factor_error(best_factor(steps))
        for epsilon in EPSILONS:
            sampled = noise_multiplier(epsilon, DELTA, steps, 1 / steps) * alone
            once = noise_multiplier(epsilon, DELTA, 1)
            cells = (sampled, once * tree, once * best, once * best / sampled)
            print(f"{steps:5} {epsilon:8g}" + "".join(f"{cell:10.2f}" for cell in cells))


class OnePass:
    """Batches in a fixed order, each record once, and noise that is correlated over them."""

    def __init__(self, records: int, steps: int) -> None:
        order = np.random.default_rng().permutation(records)
        self._batches = iter(np.array_split(order, steps))
        self._inverse, self._drawn = np.linalg.inv(best_factor(steps)), []  # type: ignore[var-annotated]
        self.expected, self.rate = records / steps, 1.0

    def draw(self) -> Any:
        return next(self._batches)

    def add(self, sums: Mapping[str, Any], std: float) -> dict[str, Any]:
        self._drawn.append(
            {n: std * secure_normals(a.size).reshape(a.shape) for n, a in sums.items()}
        )
        row = self._inverse[len(self._drawn) - 1]
        return {
            name: array + sum(w * z[name] for w, z in zip(row, self._drawn, strict=False))
            for name, array in sums.items()
        }


class OnePassManager(PrivateTrainingManager):
    """Trains on one pass; what it costs is not in its ledger."""

    steps = 0

    def make_private(self, message: Any, *args: Any, **settings: Any) -> None:
        super().make_private(message, *args, **settings)
        self.noise = self._sampler = OnePass(len(self.records), self.steps)  # type: ignore[assignment]
        once = noise_multiplier(*message.budget, 1)
        self.calibration = dataclasses.replace(self.calibration, noise_multiplier=once)
        self.ledger.charge = lambda *charged: None  # type: ignore[method-assign]

    def train_under_constraints(self, *args: Any, **settings: Any) -> dict[str, float]:
        for _ in range(self.steps // ROUNDS):
            self.run_train_step(self.records.take(self._sampler.draw()))
        return {"n_epoch": 0, "n_steps": self.steps // ROUNDS, "t_spent": 0.0}


def compare(data: Data, settings: Mapping[str, Setting], seeds: Any, choose: Any) -> None:
    """Print the accuracy of both, with the best number of steps and learning rate for one pass."""
    for kind, setting in settings.items():
        for epsilon in (1.0, 3.0, 8.0):
            many = [dpsgd_accuracy.accuracy(kind, data, setting, seed, epsilon) for seed in seeds]
            grid = [(k, lrate) for k in (20, 50, 100) for lrate in (0.25, 0.5, 1.0, 2.0, 4.0)]

            def once(steps: int, lrate: float, seed: int, e: float = epsilon) -> float:
                OnePassManager.steps = steps
                changed = setting._replace(lrate=lrate)  # noqa: B023
                return dpsgd_accuracy.accuracy(kind, data, changed, seed, e)  # noqa: B023

            dpsgd_accuracy.PrivateTrainingManager = OnePassManager  # type: ignore[misc]
            try:
                best = max(grid, key=lambda point: np.mean([once(*point, s) for s in choose]))
                one = [once(*best, seed) for seed in seeds]
            finally:
                dpsgd_accuracy.PrivateTrainingManager = PrivateTrainingManager  # type: ignore[misc]
            print(
                f"{kind:7} epsilon {epsilon:g}: independent {np.mean(many):.3f} ± "
                f"{np.std(many):.3f}, one pass {np.mean(one):.3f} ± {np.std(one):.3f} "
                f"({best[0]} steps, learning rate {best[1]:g})",
                flush=True,
            )


def of_digits() -> None:
    settings = {kind: found[0] for kind, found in dpsgd_accuracy.DIGITS.items()}
    compare(digits(), settings, dpsgd_accuracy.SEEDS, range(2))


def of_mnist() -> None:
    compare(mnist(), MNIST, dpsgd_accuracy.SEEDS, range(1))


PARTS = {"errors": of_errors, "digits": of_digits, "mnist": of_mnist}


def main(arguments: Sequence[str]) -> None:
    set_device_policy(gpu=False)
    warnings.simplefilter("ignore")
    for name in arguments or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
