# SPDX-License-Identifier: Apache-2.0
"""Checks the evaluations of clients before declearn adds them up, where one would end the run.

An evaluation that cannot be counted is left out of the round's loss and metrics. If no evaluation
counts, the loss is infinite: never the best one, and for early stopping a round without progress.

With central noise on evaluations, only one mean with noise goes on from here (`Evaluations`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from declearn.messaging import EvaluationReply
from declearn.metrics import MetricSet, MetricState
from declearn.metrics._mean import MeanState

from fedclip.arrays import Float64
from fedclip.engines.declearn.members import one_line
from fedclip.errors import Problem, Unchecked

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
    valid, faults = dict(replies), dict[str, str]()
    for client, reply in replies.items():
        if fault := _error(_check, reply, metrics):
            faults[client] = fault
            del valid[client]
    while together and (fault := _error(_check_sum, valid.values(), metrics)):
        # One by one they can be counted; find the one without which the others can be added up.
        subsets = ({c: r for c, r in valid.items() if c != client} for client in valid)
        fits = (s for s in subsets if not _error(_check_sum, s.values(), metrics))
        subset = next(fits, {})
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

    @property
    def _names(self) -> list[str]:
        """The metrics, without the loss."""
        return [name for name in self.metrics.get_states() if name != "loss"]

    def problems(self, expected: int) -> list[Problem]:
        """Return why the evaluations of `expected` clients cannot have noise."""
        return noise_problems(self._names, self.secure, self.clients, expected)

    def mean(self, replies: Mapping[str, EvaluationReply]) -> EvaluationReply:
        """Return the mean of evaluations that can be counted, with noise, as one reply."""
        assert self.noise is not None
        names = self._names
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
    problems = []
    if other := [name for name in metrics if name != "accuracy"]:
        problems.append(
            "evaluation_share puts noise on the loss and on 'accuracy', and the server asks for "
            f"{', '.join(other)} too: leave that out of its metrics"
        )
    if secure:
        problems.append(
            "secure aggregation hides the evaluations of single clients, which have to be clipped: "
            "leave evaluation_share out"
        )
    if clients > expected:
        problems.append(
            f"evaluations ask all {clients} clients, and their sum is divided by expected_clients "
            f"= {expected}: raise it, or leave evaluation_share out"
        )
    return [Problem(text) for text in problems]


def beyond_range(reply: EvaluationReply, clipval: float) -> list[str]:
    """Return which numbers of an evaluation a secure sum would clip to the range ±`clipval`.

    declearn clips without a warning, and ends at NaN. A clipped loss is still the worst one; a
    clipped count of records would make each mean wrong.

    Raises
    ------
    ValueError
        If the evaluation must not be sent: a count is beyond the range, a number is NaN, or
        declearn cannot sum a metric securely. The message reveals none of the numbers.
    """
    numbers: list[tuple[str, Unchecked]] = [("loss", reply.loss)]
    for name, state in reply.metrics.items():
        try:
            fields = state.prepare_for_secagg()[0]
        except NotImplementedError as exc:
            raise ValueError(str(exc)) from exc
        numbers += [(field if field in _COUNTS else name, x) for field, x in fields.items()]
    if any(np.isnan(number).any() for _, number in numbers):
        raise ValueError("an evaluation gives NaN, which a secure sum cannot hold")
    beyond = list(dict.fromkeys(name for name, x in numbers if np.any(np.abs(x) > clipval)))
    if _COUNTS.intersection(beyond):
        raise ValueError(
            f"an evaluation is on more records than the range ±{clipval:g} of secure aggregation "
            "holds: raise clipval, or evaluate on fewer, with n_steps in [run.evaluate]"
        )
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
        empty = EvaluationReply(math.inf, 1, 0.0, {metric.name: blank})
        if not _error(_check_sum, [empty], metrics):
            reply.metrics[metric.name] = blank
    return reply


def _error(check: Callable[..., None], *args: object) -> str:
    """Return the text of what a check raises; "" if it raises nothing."""
    try:
        check(*args)
    except _Fault as exc:
        return str(exc)
    except Exception as exc:  # a reply may hold anything, and must not end the run
        return f"it cannot be read ({type(exc).__name__})"
    return ""


class _Fault(ValueError):
    """Why an evaluation cannot be counted, about the client's reply."""


def _check(reply: Unchecked, metrics: MetricSet) -> None:
    """Refuse an evaluation that cannot be counted."""
    _check_number("its loss", reply.loss)
    steps, states = reply.n_steps, reply.metrics
    if type(steps) is not int or not 0 < steps <= 2**53:
        raise _Fault(f"its number of steps is {_brief(steps)}")
    if not isinstance(states, Mapping):
        raise _Fault(f"its metrics are of type {type(states).__name__}")
    expected = {**metrics.get_states(), "loss": MeanState()}
    if states and states.keys() != expected.keys():
        raise _Fault(f"its metrics are {_brief(list(states))}, not {_brief(list(expected))}")
    for name, state in states.items():
        _check_state(f"its metric {name!r}", state, expected[name])
    if states and not states["loss"].divisor > 0:
        raise _Fault(f"its loss is divided by {states['loss'].divisor!r}")
    _check_sum([reply], metrics)


def _check_state(what: str, state: object, like: MetricState) -> None:
    if type(state) is not type(like):
        raise _Fault(f"{what} is of type {type(state).__name__}")
    # Of some metrics, arrays are as long as the client's data asks for.
    fixed = type(like).aggregate is MetricState.aggregate
    shapes = set()
    for field in dataclasses.fields(like):
        value, other = getattr(state, field.name), getattr(like, field.name)
        where = f"{what} has a {field.name}"
        if not isinstance(other, np.ndarray):
            _check_number(f"{where} that", value)
        elif not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
            raise _Fault(f"{where} that is no array of numbers")
        else:
            shapes.add(value.shape)
            wrong = value.shape != other.shape if fixed else value.size > _LONGEST
            if wrong or value.ndim != other.ndim or not len(value):
                raise _Fault(f"{where} of shape {value.shape}")
            if not np.all(np.abs(value) <= _LARGEST):
                raise _Fault(f"{where} with NaN, or numbers beyond ±{_LARGEST:g}")
        if field.name in _COUNTS and np.any(value < 0):
            raise _Fault(f"{where} below 0")
    if not fixed and len(shapes) > 1:
        raise _Fault(f"{what} has arrays of different lengths")


def _check_number(what: str, value: object) -> None:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        raise _Fault(f"{what} is no number, but {_brief(value)}")
    if not abs(float(value)) <= _LARGEST:
        raise _Fault(f"{what} is {float(value)!r}")


def _brief(value: object) -> str:
    text = one_line(repr(value), 61)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_sum(replies: Iterable[EvaluationReply], metrics: MetricSet) -> None:
    """Refuse evaluations that declearn cannot add up, or whose result it cannot save."""
    totals = metrics.get_states()
    try:
        with np.errstate(all="ignore"):
            for reply in replies:
                for name in totals.keys() & reply.metrics.keys():
                    totals[name] += reply.metrics[name]
            trial = MetricSet.from_config(metrics.get_config())
            trial.set_states(totals)
            for value in trial.get_result().values():
                np.asarray(value, dtype=np.float64)
    except Exception as exc:  # each metric raises errors of its kind
        why = f"{type(exc).__name__}: {one_line(exc, 100)}"
        raise _Fault(f"its metrics cannot be added up ({why})") from exc
