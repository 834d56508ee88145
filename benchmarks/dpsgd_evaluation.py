"""What noise does to evaluations: ``python -m benchmarks.dpsgd_evaluation``.

Losses and hits are those of a logistic regression on digits that it has not seen, drawn anew with
replacement, so many as there are validation records. Printed is the root mean square of what noise
and the clip change in their means, at a budget of epsilon 3 and delta 1e-5 over 10 rounds of one
evaluation each, beside what it costs the 60 steps of 400 training records.
"""

from __future__ import annotations

import numpy as np
from declearn.metrics import MeanMetric, MetricSet
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from fedclip.dpsgd.calibrate import calibrate
from fedclip.engines.declearn.evaluation import Accuracy, Evaluation
from fedclip.privacy.noise import secure_normals

EPSILON, DELTA, ROUNDS, BOUND = 3.0, 1e-5, 10, 3.0
SHARES, SIZES, DRAWS = (0.05, 0.1, 0.2), (200, 1000, 10_000), 2000

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class _Loss(MeanMetric, register=False):
    """Stands for the loss of a model, which declearn makes a metric of."""

    name = "loss"

    def metric_func(self, y_true: Array, y_pred: Array) -> Array:
        raise NotImplementedError


def rows() -> Array:
    """Return losses and hits of records that a model has not seen."""
    x, y = load_digits(return_X_y=True)
    model = LogisticRegression(C=0.02, max_iter=500).fit(x[::2] / 16, y[::2])
    chances = model.predict_proba(x[1::2] / 16)
    return np.stack(
        [-np.log(chances[range(len(chances)), y[1::2]]), chances.argmax(1) == y[1::2]], 1
    )


def errors(share: float, size: int, draws: int = DRAWS) -> tuple[float, float]:
    """Return the root mean square errors of mean loss and accuracy."""
    ((z, _, _),) = calibrate(EPSILON, DELTA, 400, 64, 60).evaluating(share, ROUNDS).evaluations
    evaluation = Evaluation(MetricSet([_Loss(), Accuracy()]), BOUND)
    whole, rng, found = rows(), np.random.default_rng(0), []
    for _ in range(draws):
        drawn = whole[rng.integers(0, len(whole), size)]
        clipped = np.clip(drawn / evaluation.bounds, 0.0, 1.0)
        noisy = evaluation.noised(clipped, z, secure_normals)[:-1] * evaluation.bounds
        found.append(noisy - drawn.mean(axis=0))
    loss, accuracy = np.sqrt(np.mean(np.square(found), axis=0))
    return float(loss), float(accuracy)


def main() -> None:
    exact = rows().mean(axis=0)
    print(f"mean loss {exact[0]:.3f}, accuracy {exact[1]:.3f}; losses count up to {BOUND:g}")
    plain = calibrate(EPSILON, DELTA, 400, 64, 60)
    for share in SHARES:
        plan = plain.evaluating(share, ROUNDS)
        more = plan.noise_multiplier / plain.noise_multiplier - 1
        found = (
            f"{size:,}: {loss:.3f}, {hits:.3f}"
            for size in SIZES
            for loss, hits in [errors(share, size)]
        )
        print(
            f"share {share:g}: {more:.1%} more noise on steps; loss, accuracy of", "; ".join(found)
        )


if __name__ == "__main__":
    main()
