# SPDX-License-Identifier: Apache-2.0
"""Vets the evaluations of clients before declearn adds them up, where one would end the run.

An evaluation that can not be counted is missing: the loss and the metrics of the round are those
of the others. If there is none, the loss counts as infinite: never the best one, and for early
stopping a round without progress.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np
from declearn.messaging import EvaluationReply
from declearn.metrics import MetricSet, MetricState
from declearn.metrics._mean import MeanState

from fedclip.errors import Unchecked
from fedclip.federation.quorum import plain

__all__ = ["counted", "nothing"]

# Sums, and squares of sums, of values beyond this would overflow.
_LARGEST = 1e100
# What declearn's metrics count, in fields of these names.
_COUNTS = {"divisor", "tpos", "tneg", "fpos", "fneg", "confmat", "sum_of_weights"}
# Metrics whose arrays may be of any length take time with the square of it.
_LONGEST = 1 << 16


def counted(
    replies: Mapping[str, EvaluationReply], metrics: MetricSet
) -> tuple[dict[str, EvaluationReply], dict[str, str]]:
    """Return the evaluations that can be counted, and why the others can not, by client.

    Parameters
    ----------
    replies
        What clients have sent: anything may be in any field.
    metrics
        The metrics that the clients were told to compute.
    """
    faults = {client: _fault(reply, metrics) for client, reply in replies.items()}
    sound = {client: reply for client, reply in replies.items() if not faults[client]}
    while why := _trouble(sound.values(), metrics):
        # One by one they can be counted; find the one without which the rest can be added up.
        others = ({c: r for c, r in sound.items() if c != client} for client in sound)
        kept = next((rest for rest in others if not _trouble(rest.values(), metrics)), {})
        faults |= dict.fromkeys(sound.keys() - kept.keys(), why)
        sound = kept
    return sound, {client: fault for client, fault in faults.items() if fault}


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
