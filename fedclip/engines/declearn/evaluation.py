# SPDX-License-Identifier: Apache-2.0
r"""Checks the evaluations of clients before declearn adds them up, where one would end the run.

An evaluation that cannot be counted is left out of the round's loss and metrics. If no evaluation
counts, the loss is infinite: never the best one, and for early stopping a round without progress.

With central noise on evaluations, only one mean with noise goes on from here (`Evaluations`).

A private client adds noise itself, to the clipped numbers of its records (`Evaluation`)::

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

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from declearn.messaging import EvaluationReply
from declearn.metrics import MeanMetric, MetricSet, MetricState
from declearn.metrics._mean import MeanState
from numpy.typing import NDArray

from fedclip.core.parameters import Configured, number, parameter
from fedclip.dpsgd.calibrate import evaluation_noise
from fedclip.dpsgd.persample.base import Data, Failed, Float64, retry_halving
from fedclip.dpsgd.persons import Persons
from fedclip.engines.declearn.context import AnyModel
from fedclip.engines.declearn.members import one_line
from fedclip.engines.declearn.persample import Records, part
from fedclip.errors import Problem, Unchecked
from fedclip.privacy.noise import Normals, noised

# Sums, and squares of sums, of values beyond this would overflow.
_LARGEST = 1e100
# What declearn's metrics count, in fields of these names.
_COUNTS = {"divisor", "tpos", "tneg", "fpos", "fneg", "confmat", "sum_of_weights"}
# Metrics whose arrays may be of any length take time with the square of it.
_LONGEST = 1 << 16


def counted(
    replies: Mapping[str, EvaluationReply], metrics: MetricSet, *, together: bool = True
) -> tuple[dict[str, EvaluationReply], dict[str, str]]:
    """Return the evaluations that can be counted, and by client why the others cannot.

    Parameters
    ----------
    replies
        What clients have sent; any field may hold anything.
    metrics
        The metrics that the clients were asked to compute.
    together
        Whether they are added up, which leaves out those that do not fit the others. False before
        noise, where no client may decide about another.
    """
    texts = {client: _error(_check, reply, metrics) for client, reply in replies.items()}
    faults = {client: fault for client, fault in texts.items() if fault}
    valid = {client: reply for client, reply in replies.items() if client not in faults}
    while together and (fault := _error(_check_sum, valid.values(), metrics)):
        # One by one they can be counted; find the one without which the others can be added up.
        subsets = ({c: r for c, r in valid.items() if c != client} for client in valid)
        subset = next((s for s in subsets if not _error(_check_sum, s.values(), metrics)), {})
        faults |= dict.fromkeys(valid.keys() - subset.keys(), fault)
        valid = subset
    return valid, faults


@dataclasses.dataclass
class Evaluations:
    """How the evaluations of a run are published: one by one, or as a mean with noise.

    Attributes
    ----------
    metrics
        What clients are asked for.
    clients
        How many have registered.
    secure
        Whether the server sees a secure sum only.
    noise
        From rows of numbers, one for each client and the loss first, to means with noise, or None
        if the budget does not cover them. The module that accounts for the noise sets it.

    Notes
    -----
    Each of a client's k numbers is clipped to a range of 1 and centred. An empty reply moves the k
    sums by at most ``sqrt(k) / 2``, another client by ``sqrt(k)``. The noise is one more Gaussian
    mechanism of the round, of multiplier z / s: the squared inverses of update, votes and
    evaluation add up to ``z^-2``.
    """

    metrics: MetricSet
    clients: int
    secure: bool
    noise: Callable[[Float64], Float64 | None] | None = None

    def problems(self, expected: int) -> list[Problem]:
        """Return why the evaluations of `expected` clients cannot have noise."""
        return noise_problems(self.metrics.get_states(), self.secure, self.clients, expected)

    def mean(self, replies: Mapping[str, EvaluationReply]) -> EvaluationReply:
        """Return the mean of evaluations that can be counted, with noise, as one reply."""
        assert self.noise is not None
        names = [name for name in self.metrics.get_states() if name != "loss"]
        rows = [[r.loss, *(_mean(r.metrics.get(name)) for name in names)] for r in replies.values()]
        means = self.noise(np.array(rows, dtype=np.float64).reshape(-1, 1 + len(names)))
        if means is None:
            return nothing(self.metrics)
        states = {n: MeanState(float(x), 1.0) for n, x in zip(["loss", *names], means, strict=True)}
        return EvaluationReply(states["loss"].num_sum, 1, 0.0, {**states})


def noise_problems(
    metrics: Iterable[str], secure: bool = False, clients: int = 0, expected: int = 0
) -> list[Problem]:
    """Return why evaluations cannot have noise.

    Parameters
    ----------
    metrics
        Names of what is measured besides the loss.
    secure, clients, expected
        Where the server adds it: whether it sees secure sums, how many clients it asks, and by
        which number their sum is divided.
    """
    other = ", ".join(name for name in metrics if name not in ("accuracy", "loss"))
    covered = "evaluation_share puts noise on the loss and on 'accuracy'"
    few = f"evaluations ask all {clients} clients, and expected_clients is {expected}"
    reasons = (
        (other, f"{covered}, and the server asks for {other} too: leave that out"),
        (secure, "secure aggregation hides the evaluations: leave evaluation_share out"),
        (clients > expected, f"{few}: raise it, or leave evaluation_share out"),
    )
    return [Problem(text) for applies, text in reasons if applies]


def beyond_range(reply: EvaluationReply, clipval: float) -> list[str]:
    """Return which numbers of an evaluation a secure sum would clip to the range ±`clipval`.

    declearn clips without a warning, and ends at NaN. A clipped loss is still the worst one; a
    clipped count of records would make each mean wrong.

    Raises
    ------
    NotImplementedError, ValueError
        If the evaluation must not be sent: declearn cannot sum a metric securely, a count is
        beyond the range, or a number is NaN. The message reveals none of the numbers.
    """
    numbers: list[tuple[str, Unchecked]] = [("loss", reply.loss)]
    for name, state in reply.metrics.items():
        fields = state.prepare_for_secagg()[0]
        numbers += [(field if field in _COUNTS else name, x) for field, x in fields.items()]
    if any(np.isnan(number).any() for _, number in numbers):
        raise ValueError("an evaluation gives NaN, which a secure sum cannot hold")
    beyond = list(dict.fromkeys(name for name, x in numbers if np.any(np.abs(x) > clipval)))
    if _COUNTS.intersection(beyond):
        text = f"an evaluation is on more records than the range ±{clipval:g} of secure aggregation"
        raise ValueError(f"{text}: raise clipval, or set n_steps in [run.evaluate]")
    return beyond


def _mean(state: MetricState | None) -> float:
    """Return a client's mean; NaN if it has sent none."""
    if not isinstance(state, MeanState) or state.divisor == 0:
        return math.nan
    return float(state.num_sum) / float(state.divisor)


def nothing(metrics: MetricSet) -> EvaluationReply:
    """Return the result of a round without an evaluation: an infinite loss, metrics of NaN."""
    reply = EvaluationReply(math.inf, 1, 0.0, {"loss": MeanState(math.inf, 1.0)})
    for metric in metrics.metrics:
        # declearn's own result of no evaluation would be an accuracy, or an error, of 0.
        fields = dataclasses.asdict(metric.build_initial_states())
        blank = metric.state_cls(**{name: value * math.nan for name, value in fields.items()})
        reply.metrics[metric.name] = blank
        if _error(_check_sum, [reply], metrics):
            del reply.metrics[metric.name]
    return reply


def _error(check: Callable[..., None], *args: object) -> str:
    """Return the text of what a check raises; "" if it raises nothing."""
    try:
        check(*args)
    except Exception as exc:  # a reply may hold anything, and must not end the run
        return one_line(exc, 200) or type(exc).__name__
    return ""


def _check(reply: Unchecked, metrics: MetricSet) -> None:
    """Refuse an evaluation that cannot be counted."""
    steps, states = reply.n_steps, reply.metrics
    if not _fits(reply.loss, 0.0):
        raise ValueError(f"its loss is {reply.loss!r:.60}")
    if type(steps) is not int or not 0 < steps <= 2**53:
        raise ValueError(f"its number of steps is {steps!r:.60}")
    expected = {**metrics.get_states(), "loss": MeanState()}
    if not isinstance(states, Mapping) or (states and states.keys() != expected.keys()):
        raise ValueError(f"its metrics are {states!r:.60}, not {[*expected]!r:.60}")
    for name, state in states.items():
        _check_state(f"its metric {name!r}", state, expected[name])
    if states and not states["loss"].divisor > 0:
        raise ValueError(f"its loss is divided by {states['loss'].divisor!r}")
    _check_sum([reply], metrics)


def _check_state(what: str, state: object, like: MetricState) -> None:
    if type(state) is not type(like):
        raise ValueError(f"{what} is of type {type(state).__name__}")
    # Of some metrics, arrays are as long as the client's data asks for.
    fixed, shapes = type(like).aggregate is MetricState.aggregate, set()
    for field in dataclasses.fields(like):
        value, other = getattr(state, field.name), getattr(like, field.name)
        least = 0.0 if field.name in _COUNTS else -_LARGEST
        shapes |= set() if fixed or not np.ndim(other) else {np.shape(value)}
        if len(shapes) > 1 or not _fits(value, other, fixed, least):
            raise ValueError(f"{what} has a {field.name} of {value!r:.60}")


def _fits(value: object, like: Unchecked, fixed: bool = True, least: float = -_LARGEST) -> bool:
    """Whether a value is a number, or an array of them, as this one is."""
    array, shape = np.asarray(value), np.shape(like)
    same = array.shape == shape
    if shape and not fixed:
        same = array.ndim == len(shape) and 0 < array.size <= _LONGEST
    if not same or array.dtype.kind not in "fiu" or isinstance(value, np.ndarray) != bool(shape):
        return False
    return bool(np.all((array >= least) & (array <= _LARGEST)))


def _check_sum(replies: Iterable[EvaluationReply], metrics: MetricSet) -> None:
    """Refuse evaluations that declearn cannot add up, or whose result it cannot save."""
    totals = metrics.get_states()
    with np.errstate(all="ignore"):
        for reply in replies:
            for name in totals.keys() & reply.metrics.keys():
                totals[name] += reply.metrics[name]
        trial = MetricSet.from_config(metrics.get_config())
        trial.set_states(totals)
        for value in trial.get_result().values():
            np.asarray(value, dtype=np.float64)


class Accuracy(Configured, MeanMetric):
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

    threshold: float = parameter(number, "a number", default=0.5, kw_only=False)

    def __post_init__(self) -> None:
        """Begin with no records."""
        MeanMetric.__init__(self)

    def metric_func(self, y_true: NDArray[np.generic], y_pred: Float64) -> NDArray[np.bool_]:
        """Return which records are right; refuse labels that are not one class for each."""
        several = y_pred.ndim > 1 and y_pred.shape[1] > 1
        classes = y_pred.argmax(axis=1) if several else y_pred.reshape(-1) > self.threshold
        if classes.shape != (y_true.size,):
            shapes = f"labels have shape {y_true.shape}, outputs {y_pred.shape}: leave it out"
            raise ValueError(f"accuracy is of one class for each record, and {shapes}")
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
        self._metrics = metrics
        # First the loss, which is in each of declearn's sets.
        self._of: list[Any] = sorted(metrics.metrics, key=lambda metric: metric.name != "loss")
        names = [metric.name for metric in self._of]
        for problem in noise_problems(names[1:]):
            raise ValueError(problem.text)
        self.bounds = np.array([loss_bound, 1.0])[: len(names)]
        self._worst = np.array([1.0, 0.0])[: len(names)]

    def of_record(self, model: AnyModel, record: Data) -> Float64:
        """Return the numbers of a batch of one record, over their bounds."""
        true, predicted, _ = model.compute_batch_predictions(record)
        numbers = [float(np.sum(metric.metric_func(true, predicted))) for metric in self._of]
        row = np.asarray(numbers) / self.bounds
        return np.where(np.isnan(row), self._worst, np.clip(row, 0.0, 1.0))

    def values(self, model: AnyModel, units: Records | Persons, failed: Failed) -> Float64:
        """Return the numbers of each unit; records that raise go to `failed`."""
        rows = np.tile(self._worst, (len(units), 1))
        for unit, row in enumerate(rows):
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
