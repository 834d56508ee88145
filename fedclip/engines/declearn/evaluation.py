# SPDX-License-Identifier: Apache-2.0
"""Vets the evaluations of clients before declearn adds them up, where one would end the run.

An evaluation that can not be counted is missing: the loss and the metrics of the round are those
of the others. If there is none, the loss counts as infinite: never the best one, and for early
stopping a round without progress.

With central noise on evaluations, all that goes on from here is one mean, with noise
(`Evaluations`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar

import numpy as np
from declearn.messaging import EvaluationReply
from declearn.metrics import MetricSet, MetricState
from declearn.metrics._mean import MeanState

from fedclip.core.measures import Float64
from fedclip.engines.declearn.quorum import plain
from fedclip.errors import Unchecked

# Sums, and squares of sums, of values beyond this would overflow.
_LARGEST = 1e100
# What declearn's metrics count, in fields of these names.
_COUNTS = {"divisor", "tpos", "tneg", "fpos", "fneg", "confmat", "sum_of_weights"}
# Metrics whose arrays may be of any length take time with the square of it.
_LONGEST = 1 << 16


def counted(
    replies: Mapping[str, EvaluationReply], metrics: MetricSet, *, together: bool = True
) -> tuple[dict[str, EvaluationReply], dict[str, str]]:
    """Return the evaluations that can be counted, and why the others can not, by client.

    Parameters
    ----------
    replies
        What clients have sent: anything may be in any field.
    metrics
        The metrics that the clients were told to compute.
    together
        Whether they are added up, and those left out that do not go with others; not so before
        noise, where no client may decide about another.
    """
    faults = {client: _fault(reply, metrics) for client, reply in replies.items()}
    sound = {client: reply for client, reply in replies.items() if not faults[client]}
    while together and (why := _trouble(sound.values(), metrics)):
        # One by one they can be counted; find the one without which the rest can be added up.
        others = ({c: r for c, r in sound.items() if c != client} for client in sound)
        kept = next((rest for rest in others if not _trouble(rest.values(), metrics)), {})
        faults |= dict.fromkeys(sound.keys() - kept.keys(), why)
        sound = kept
    return sound, {client: fault for client, fault in faults.items() if fault}


@dataclasses.dataclass
class Evaluations:
    """How the evaluations of a run are told: one by one, or as a mean with noise.

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
        if they are not paid for. It is set by the module that pays.

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
    def _others(self) -> list[str]:
        """What is measured besides the loss."""
        return [name for name in self.metrics.get_states() if name != "loss"]

    def unfit(self, expected: int) -> str:
        """Return why evaluations of so many expected clients can have no noise; "" if they can."""
        return unfit(self._others, self.secure, self.clients, expected)

    def mean(self, replies: Mapping[str, EvaluationReply]) -> EvaluationReply:
        """Return the mean of evaluations that can be counted, with noise, as one reply."""
        assert self.noise is not None
        names = self._others
        rows = [[r.loss, *(_mean(r.metrics.get(name)) for name in names)] for r in replies.values()]
        found = self.noise(np.array(rows, dtype=np.float64).reshape(-1, 1 + len(names)))
        if found is None:
            return nothing(self.metrics)
        states = {n: MeanState(float(x), 1.0) for n, x in zip(["loss", *names], found, strict=True)}
        return EvaluationReply(states["loss"].num_sum, 1, 0.0, {**states})


def unfit(metrics: Iterable[str], secure: bool = False, clients: int = 0, expected: int = 0) -> str:
    """Return why there can be no noise on evaluations; "" if there can.

    Parameters
    ----------
    metrics
        Names of what is measured besides the loss.
    secure, clients, expected
        Where the server adds it: whether it sees secure sums, how many clients it asks, and by
        which number their sum is divided.
    """
    if other := [name for name in metrics if name != "accuracy"]:
        text = f"the server asks for {', '.join(other)} too: leave that out of its metrics"
        return f"evaluation_share puts noise on the loss and on 'accuracy', and {text}"
    if secure:
        text = (
            "secure aggregation hides the evaluations of single clients, which have to be clipped"
        )
        return f"{text}: leave evaluation_share out"
    if clients > expected:
        return (
            f"evaluations ask all {clients} clients, and their sum is divided by expected_clients "
            f"= {expected}: raise it, or leave evaluation_share out"
        )
    return ""


def clipped(reply: EvaluationReply, clipval: float) -> tuple[list[str], str]:
    """Return what of an evaluation a secure sum would clip, and why it must not be sent.

    declearn clips each number to ± `clipval` in silence, and ends at NaN. Losses that are clipped
    are still the worst ones; counts that are, of records, would make any mean a wrong one. What is
    said tells nothing of the numbers.
    """
    numbers: list[tuple[str, Unchecked]] = [("loss", reply.loss)]
    for name, state in reply.metrics.items():
        try:
            fields = state.prepare_for_secagg()[0]
        except NotImplementedError as exc:
            return [], str(exc)
        numbers += [(field if field in _COUNTS else name, x) for field, x in fields.items()]
    if any(np.isnan(number).any() for _, number in numbers):
        return [], "an evaluation gives NaN, of which there is no secure sum"
    beyond = list(dict.fromkeys(name for name, x in numbers if np.any(np.abs(x) > clipval)))
    if not _COUNTS.intersection(beyond):
        return beyond, ""
    return [], (
        f"an evaluation is on more records than the range ±{clipval:g} of secure aggregation "
        "holds: raise clipval, or evaluate on fewer, with n_steps in [run.evaluate]"
    )


def _mean(state: MetricState | None) -> float:
    """Return a client's mean; NaN if it has sent none."""
    if not isinstance(state, MeanState) or state.divisor == 0:
        return math.nan
    return float(state.num_sum) / float(state.divisor)


EVALUATIONS: ContextVar[Evaluations | None] = ContextVar("fedclip_evaluations", default=None)
"""Those of the run that a server is in, for the module that pays for noise on them."""


def nothing(metrics: MetricSet) -> EvaluationReply:
    """Return the result of a round without an evaluation: an infinite loss, metrics of NaN."""
    reply = EvaluationReply(math.inf, 1, 0.0, {"loss": MeanState(math.inf, 1.0)})
    for metric in metrics.metrics:
        # declearn's own result of no evaluation would be an accuracy, or an error, of 0.
        fields = dataclasses.asdict(metric.build_initial_states())
        blank = metric.state_cls(**{name: value * math.nan for name, value in fields.items()})
        if not _trouble([EvaluationReply(math.inf, 1, 0.0, {metric.name: blank})], metrics):
            reply.metrics[metric.name] = blank
    return reply


def _fault(reply: Unchecked, metrics: MetricSet) -> str:
    """Return why an evaluation can not be counted; "" if it can."""
    try:
        if fault := _number(reply.loss):
            return f"its loss {fault}"
        steps, states = reply.n_steps, reply.metrics
        if type(steps) is not int or not 0 < steps <= 2**53:
            return f"its number of steps is {_brief(steps)}"
        if not isinstance(states, Mapping):
            return f"its metrics are of type {type(states).__name__}"
        wanted = {**metrics.get_states(), "loss": MeanState()}
        if states and states.keys() != wanted.keys():
            return f"its metrics are {_brief(list(states))}, not {_brief(list(wanted))}"
        for name, state in states.items():
            if fault := _state_fault(state, wanted[name]):
                return f"its metric {name!r} {fault}"
        if states and not states["loss"].divisor > 0:
            return f"its loss is divided by {states['loss'].divisor!r}"
    except Exception as exc:  # it may be anything, and must not end the run
        return f"it can not be read ({type(exc).__name__})"
    return _trouble([reply], metrics)


def _state_fault(state: object, like: MetricState) -> str:
    if type(state) is not type(like):
        return f"is of type {type(state).__name__}"
    # Of some metrics, arrays are as long as the client's data asks for.
    fixed = type(like).aggregate is MetricState.aggregate
    shapes = set()
    for field in dataclasses.fields(like):
        value, other = getattr(state, field.name), getattr(like, field.name)
        if isinstance(other, np.ndarray):
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
                return f"has a {field.name} that is no array of numbers"
            shapes.add(value.shape)
            wrong = value.shape != other.shape if fixed else value.size > _LONGEST
            if wrong or value.ndim != other.ndim or not len(value):
                return f"has a {field.name} of shape {value.shape}"
            if not np.all(np.abs(value) <= _LARGEST):
                return f"has a {field.name} with NaN, or numbers beyond reason"
        elif fault := _number(value):
            return f"has a {field.name} that {fault}"
        if field.name in _COUNTS and np.any(value < 0):
            return f"has a {field.name} below 0"
    return "" if fixed or len(shapes) < 2 else "has arrays of different lengths"


def _number(value: object) -> str:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        return f"is no number, but {_brief(value)}"
    return "" if abs(float(value)) <= _LARGEST else f"is {float(value)!r}"


def _brief(value: object) -> str:
    text = plain(repr(value), 61)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _trouble(replies: Iterable[EvaluationReply], metrics: MetricSet) -> str:
    """Return why declearn can not add up evaluations, or save the result; "" if it can."""
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
    except Exception as exc:  # each metric raises errors of its own
        return f"its metrics can not be added up ({type(exc).__name__}: {plain(exc, 100)})"
    return ""
