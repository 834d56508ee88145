# SPDX-License-Identifier: Apache-2.0
r"""Evaluations with noise: each record's numbers clipped, added up, and noised on the client.

::

    Evaluate(units):                            k numbers of each: the loss, and accuracy if asked
        for each unit, a record or a person:
            v = mean over its records of clip(number / bound, 0, 1)
                where a record that raises, or gives NaN, counts as the worst there is
            sums += (v_1 - 1/2, …, v_k - 1/2, 1/2)
        sums += z sqrt(k + 1) / 2 normal
        n     = max(1, 2 sums[k + 1])
        mean  = bound * clip(1/2 + sums / n, 0, 1)

A unit more or less moves the sums by at most sqrt(k + 1) / 2: no number in them is further than
1/2 from zero. What leaves the client follows from the noised sums alone, how many units there are
too. Each record goes through the model in a separate batch, so that no record depends on another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from declearn.metrics import MeanMetric, MetricSet
from declearn.metrics._mean import MeanState
from numpy.typing import NDArray

from fedclip.core import parameters
from fedclip.dpsgd.calibrate import evaluation_noise
from fedclip.dpsgd.persample.base import Data, Failed, Float64, retry_halving
from fedclip.dpsgd.persons import Persons
from fedclip.engines.declearn.context import AnyModel
from fedclip.engines.declearn.dataset_records import Records
from fedclip.engines.declearn.evaluation import noise_problems
from fedclip.engines.declearn.persample import part
from fedclip.privacy.noise import Normals, noised

__all__ = ["Accuracy", "Evaluation"]


class Accuracy(MeanMetric):
    """The share of records that a model classifies rightly: the metric ``accuracy``.

    Parameters
    ----------
    threshold : float, default=0.5
        Above it, a single output stands for class 1; of several outputs, the largest counts.

    Examples
    --------
    >>> metric = Accuracy()
    >>> metric.update(np.array([1, 0]), np.array([[0.2, 0.8], [0.1, 0.9]]))
    >>> metric.get_result()
    {'accuracy': 0.5}
    """

    name = "accuracy"

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = parameters.number("a number", threshold=threshold)
        super().__init__()

    def get_config(self) -> dict[str, object]:
        """Return the parameters."""
        return {"threshold": self.threshold}

    def metric_func(self, y_true: NDArray[np.generic], y_pred: Float64) -> NDArray[np.bool_]:
        """Return which records are right; refuse labels that are not one class for each."""
        several = y_pred.ndim > 1 and y_pred.shape[1] > 1
        classes = y_pred.argmax(axis=1) if several else y_pred.reshape(-1) > self.threshold
        if classes.shape != (y_true.size,):
            raise ValueError(
                f"accuracy is of one class for each record, and labels have shape {y_true.shape} "
                f"for outputs of shape {y_pred.shape}: leave it out of the metrics"
            )
        return np.asarray(classes == y_true.reshape(-1))


class Evaluation:
    """The noised evaluations of a private client.

    Parameters
    ----------
    metrics
        The metrics that the server asks for, with the loss.
    loss_bound
        So much of a record's loss counts at most.

    Raises
    ------
    ValueError
        If something is asked for that no bound is known of.
    """

    def __init__(self, metrics: MetricSet, loss_bound: float) -> None:
        bounds, self._metrics = {"loss": loss_bound, "accuracy": 1.0}, metrics
        named: dict[str, Any] = {metric.name: metric for metric in metrics.metrics}
        # First the loss, which is in each of declearn's sets.
        named = {"loss": named.pop("loss"), **named}
        for problem in noise_problems([*named][1:]):
            raise ValueError(problem.text)
        self._of = [*named.values()]
        self.bounds = np.array([bounds[name] for name in named])
        self._worst = np.array([float(name == "loss") for name in named])

    def of_record(self, model: AnyModel, record: Data) -> Float64:
        """Return the numbers of a batch of one record, over their bounds."""
        true, predicted, _ = model.compute_batch_predictions(record)
        numbers = [float(np.sum(metric.metric_func(true, predicted))) for metric in self._of]
        row = np.asarray(numbers) / self.bounds
        return np.where(np.isnan(row), self._worst, np.clip(row, 0.0, 1.0))

    def values(self, model: AnyModel, units: Records | Persons, failed: Failed) -> Float64:
        """Return the numbers of each unit; records that raise go to `failed`."""
        rows = np.tile(self._worst, (len(units), 1))
        for row, unit in zip(rows, range(len(units)), strict=True):
            for batch in units.take([unit], failed):
                shares = [1.0] if batch.shares is None else batch.shares
                for i, (place, share) in enumerate(zip(batch.positions, shares, strict=True)):
                    work = partial(self._add, row, share, model, part(batch, slice(i, i + 1)))
                    retry_halving(work, int(place), int(place) + 1, failed)
        return rows

    def _add(self, row: Float64, share: float, model: AnyModel, record: Data, *_: int) -> None:
        row += share * (self.of_record(model, record) - self._worst)

    def noised(self, rows: Float64, noise_multiplier: float, normals: Normals) -> Float64:
        """Return the means with noise, over their bounds, and last the number of units."""
        sums = np.append((rows - 0.5).sum(axis=0), len(rows) / 2.0)
        noisy = noised(sums, evaluation_noise(noise_multiplier, rows.shape[1]), normals)
        count = max(1.0, 2.0 * noisy[-1])
        return np.append(np.clip(0.5 + noisy[:-1] / count, 0.0, 1.0), count)

    @property
    def nothing(self) -> Float64:
        """The reply if the budget is spent: the worst numbers, of one unit."""
        return np.append(self._worst, 1.0)

    def states(self, found: Float64) -> dict[str, MeanState]:
        """Return what `noised` has found as declearn's states, and let the metrics have them."""
        sums, count = found[:-1] * self.bounds * found[-1], float(found[-1])
        names = (metric.name for metric in self._of)
        states = {name: MeanState(float(s), count) for name, s in zip(names, sums, strict=True)}
        self._metrics.set_states(dict(states))
        return states
