# SPDX-License-Identifier: Apache-2.0
"""The plan of a private client: what the server asks for, within what the client allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from declearn.messaging import PrivacyRequest
from declearn.training import TrainingManager

from fedclip.core import parameters
from fedclip.dpsgd.calibrate import Calibration, calibrate, steps_of_a_round
from fedclip.dpsgd.persample.base import Data
from fedclip.dpsgd.persons import Persons
from fedclip.engines.declearn import persample
from fedclip.engines.declearn.dataset_records import Records, first_records
from fedclip.engines.declearn.private_evaluation import Evaluation
from fedclip.engines.declearn.sample_clip import Place, SampleClip, place_of

__all__ = ["Plan", "plan_of"]


@dataclass(frozen=True)
class Plan:
    """All that a private training needs; to make one costs no budget and changes nothing.

    Attributes
    ----------
    stage
        What happens to single records, and what to their noisy sum.
    bound
        On the norm of a record's gradient; the first one, if it is adaptive.
    budget
        Epsilon and delta: the smaller of the server's and the client's.
    records
        The training records, or persons.
    tried
        Validation records, one in each batch, on which the model is tried.
    calibration
        Noise multiplier, sampling rate and steps.
    batch_size, rounds
        As the server asks for them.
    evaluation, valid
        How to evaluate with noise, and on which units; None without noise.
    """

    stage: Place
    bound: float
    budget: tuple[float, float]
    records: Records | Persons
    tried: list[Data]
    calibration: Calibration
    batch_size: int
    rounds: int
    evaluation: Evaluation | None
    valid: Records | Persons | None


def plan_of(
    manager: TrainingManager,
    message: PrivacyRequest,
    max_budget: tuple[float, float] | None = None,
    records: Records | Persons | None = None,
    valid: Persons | None = None,
) -> Plan:
    """Return the plan for a request.

    Parameters
    ----------
    manager
        With the model, the optimizer, the data and the metrics.
    message
        The request of the server.
    max_budget
        The client's own (epsilon, delta).
    records
        The training records, by person where persons are protected; None to read them here.
    valid
        The validation records by person; None if records are protected.

    Raises
    ------
    TypeError, ValueError
        If what is asked for would not be private, or is impossible.
    """
    if message.accountant == "gdp":
        raise ValueError(
            'accountant = "gdp" is no upper bound on epsilon: write "rdp" or "prv" in '
            "[run.privacy]; fedclip counts by dp-accounting's PLD in either case"
        )
    persample.check(manager.model)
    bound = parameters.positive(sclip_norm=message.sclip_norm)
    weights = manager.model.get_weights(trainable=True).coefs
    shapes = {name: tuple(map(int, array.shape)) for name, array in weights.items()}
    stage = place_of(manager.optim.modules, shapes, bound)
    validation: Any = manager.valid_data
    tried = first_records(validation)
    records = records or Records(manager.train_data, tried[0])
    epsilon, delta = message.budget
    if max_budget is not None:
        epsilon, delta = min(epsilon, max_budget[0]), min(delta, max_budget[1])
    steps = _steps(message, len(records))
    size: int = message.batches["batch_size"]
    calibration = calibrate(epsilon, delta, len(records), size, steps, records.unit)
    evaluation = _evaluation(stage.settings, manager, records.unit, valid)
    return Plan(
        stage,
        bound,
        (epsilon, delta),
        records,
        tried,
        calibration.evaluating(stage.settings.evaluation_share, message.rounds),
        size,
        message.rounds,
        evaluation,
        (valid or Records(validation)) if evaluation is not None else None,
    )


def _steps(message: PrivacyRequest, records: int) -> int:
    batches: Mapping[str, object] = message.batches
    steps = steps_of_a_round(records, batches, message.n_epoch, message.n_steps)
    if not steps:
        raise ValueError(
            "noise for a budget needs a number of steps: set n_epoch or n_steps in "
            "[run.training], and not a time alone"
        )
    return steps * message.rounds


def _evaluation(
    marker: SampleClip, manager: TrainingManager, unit: str, valid: Persons | None
) -> Evaluation | None:
    if not (marker.evaluation_share and marker.loss_bound):
        return None
    evaluation = Evaluation(manager.metrics, marker.loss_bound)
    if unit == "person" and valid is None:
        raise ValueError(
            "evaluation_share protects persons here: tell this client whose the validation "
            "records are, by valid_persons; for fedclip quickrun, in a file valid_persons.csv "
            "next to the validation data"
        )
    return evaluation
