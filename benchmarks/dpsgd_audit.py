"""Attack DP-SGD with canaries: ``python -m benchmarks.dpsgd_audit [RUNS]``.

Each of 5,000 canaries is the worst record there can be: its gradient has ten times the bound, in a
direction that no other record has. A fair coin decides whether it is among the training records.
After one training by fedclip's own client, whoever sees the weights guesses: those canaries whose
directions got most were there, those that got least were not. An (epsilon, delta)-private training
allows so many guesses to be right, so that those that are give a lower bound on epsilon, which is
too high in at most one run of twenty (Mahloujifar, Melis & Chaudhuri, 2024, "Auditing
f-differential privacy in one run").

Cases that have a fault built in must come out above the claim, or the audit would not see faults.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.messaging import PrivacyRequest
from declearn.model.sklearn import SklearnSGDModel
from declearn.optimizer import Optimizer

from fedclip import SampleClip
from fedclip.dpsgd.step import IndependentNoise, SampleClipping
from fedclip.engines.declearn.private_client import PrivateTrainingManager
from fedclip.privacy.audit import guess, lower_bound
from fedclip.privacy.noise import secure_normals

EPSILON, DELTA = 3.0, 1e-5
CANARIES, GUESSES = 5000, 400
STEPS, BOUND = 10, 1.0
# So small that the weights, on which the canaries' gradients depend, stay where they are.
LRATE = 1e-9

_LOGGER = logging.getLogger("benchmarks.dpsgd")
_LOGGER.setLevel("ERROR")


# -- one training -----------------------------------------------------------------------------
def prepared(there: np.ndarray[Any, Any]) -> PrivateTrainingManager:
    """Return a client that has those canaries that are there, and empty records for the others."""
    count = len(there)
    # The gradient is half the record, for a model of zeros.
    records = np.zeros((count, count), dtype="float32")
    np.fill_diagonal(records, np.where(there, 20.0 * BOUND, 0.0))
    dataset = InMemoryDataset(records, target=np.zeros(count, dtype=int))
    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty=None)
    model.initialize({"features_shape": (count,), "classes": [0, 1]})
    made = PrivateTrainingManager(
        model=model,
        optim=Optimizer(lrate=LRATE, modules=[SampleClip(micro_batch=256)]),
        aggrg=AveragingAggregator(),
        train_data=dataset,
        valid_data=dataset,
        logger=_LOGGER,
        verbose=False,
    )
    # Half of the records in each batch: sampling takes part, and a canary is in nearly all runs.
    batches = {"batch_size": count // 2}
    settings: dict[str, Any] = {
        "accountant": "rdp",
        "use_csprng": True,
        "seed": None,
        "n_epoch": None,
    }
    request = PrivacyRequest(
        (EPSILON, DELTA), BOUND, rounds=1, batches=batches, n_steps=STEPS, **settings
    )
    made.make_private(request)
    return made


def observe(client: PrivateTrainingManager) -> np.ndarray[Any, Any]:
    """Train, and return what is seen of each canary."""
    batches = {"batch_size": int(client.calibration.expected)}
    client.train_under_constraints(batches, n_epoch=None, n_steps=STEPS)
    return np.asarray(-client.model.get_weights().coefs["coef"].ravel())


# -- faults -----------------------------------------------------------------------------------
Fault = Callable[[PrivateTrainingManager], AbstractContextManager[Any]]


def nothing_is_clipped(client: PrivateTrainingManager) -> AbstractContextManager[Any]:
    return mock.patch.object(SampleClipping, "factors", lambda self, norms, bound: norms * 0 + 1.0)


def noise_is_divided_once_more(client: PrivateTrainingManager) -> AbstractContextManager[Any]:
    size = client.calibration.expected
    fewer = IndependentNoise(lambda count: secure_normals(count) / size)
    return mock.patch.object(client, "noise", fewer)


class Case(NamedTuple):
    """A fault to build in, and whether the audit must then find more than is claimed."""

    fault: Fault = nullcontext
    found: bool = False


CASES = {
    "as it is": Case(),
    "nothing is clipped": Case(nothing_is_clipped, True),
    "noise is divided by the size of a batch once more": Case(noise_is_divided_once_more, True),
}


# -- the attack -------------------------------------------------------------------------------
def audit(case: Case, canaries: int = CANARIES, guesses: int = GUESSES) -> float:
    """Return the lower bound on epsilon that one training gives."""
    there = np.random.default_rng().random(canaries) < 0.5
    client = prepared(there)
    with case.fault(client):
        seen = observe(client)
    half = guesses / canaries / 2
    return lower_bound(guess(there, seen, half, half), DELTA)


def main(arguments: Sequence[str]) -> int:
    runs, failed = int(arguments[0]) if arguments else 20, 0
    print(f"The claim is epsilon = {EPSILON:g} at delta = {DELTA:g}; medians of {runs} runs.")
    for name, case in CASES.items():
        found = [audit(case) for _ in range(runs)]
        median = float(np.median(found))
        right = (median > EPSILON) == case.found
        failed += not right
        print(
            f"{name:50} epsilon >= {median:.2f} ({min(found):.2f} to {max(found):.2f}), "
            f"{'above' if median > EPSILON else 'not above'} the claim{'' if right else '  WRONG'}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
