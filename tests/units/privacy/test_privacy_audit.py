"""`fedclip privacy audit`: each fault that is built in is refuted, or the claim is not audited."""

import contextlib
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from dpsgd_wire import seeded
from quickruns import write_config, write_sites
from report_runs import call, sentence

from fedclip.dpsgd.step import IndependentNoise, PoissonSampler, SampleClipping
from fedclip.engines.local.audit import audit
from fedclip.errors import ToolError
from fedclip.privacy.accounting import epsilon_of
from fedclip.privacy.audit import Audit, guess, lower_bound
from fedclip.privacy.noise import insecure_normals
from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import Limits
from fedclip.updates.noise import Budget
from fedclip.updates.protocol import Reply, Schedule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Argument 'logger'")]

FIXED = "learning_rate = 0.0, "
CENTRAL = (
    '[["update-clip-server", {{start_norm = 0.5, {rate}noise_multiplier = {z}, '
    "expected_clients = 30, separation = 2, delta = 0.001{more}}}]]"
)
BANDED = ', noise = "banded", rounds = 4'
CROWD = "[simulate]\nclients = 60\nrecords = 16\n"
PRIVATE = """
[run.privacy]
budget = [{epsilon}, 1e-5]
sclip_norm = 1.0
use_csprng = true
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    write_sites(tmp_path, dict.fromkeys("abc", 100), valid=50, features=100)
    seeded(monkeypatch.setattr)
    monkeypatch.setattr("fedclip.updates.noise.secure_normals", insecure_normals(1))
    return partial(write_config, tmp_path / "config.toml")


def of_clients(
    write: Any, more: str = "", rate: str = FIXED, z: float = 1.5, rounds: int = 4, **changes: str
) -> Any:
    server = CENTRAL.format(more=more, rate=rate, z=z)
    return write(server=server, more=CROWD, rounds=rounds, **changes)


def of_records(
    write: Any, epsilon: float = 4.0, size: int = 25, steps: int = 20, clip: str = '"sample-clip"'
) -> Any:
    changes = {"aggregator": '"averaging"', "server": "[]", "client": f"[{clip}]"}
    training, more = f"n_steps = {steps}", PRIVATE.format(epsilon=epsilon)
    return write(rounds=2, batch_size=size, training=training, more=more, **changes)


def less_noise(by: float) -> list[Any]:
    central, records = Budget.noised, IndependentNoise.add

    def noised(self: Budget, *args: Any) -> Any:
        with mock.patch.object(self, "update_noise", self.update_noise / by):
            return central(self, *args)

    return [
        mock.patch.object(Budget, "noised", noised),
        mock.patch.object(IndependentNoise, "add", lambda s, sums, z: records(s, sums, z / by)),
    ]


def too_early(schedule: Schedule, round_: int) -> Any:
    """The first group takes part in two rounds, one after the other, and then as it should."""
    group = (0, 0, 1, 0)[round_] if round_ < 4 else round_
    return schedule.clients[group % 2 :: 2]


def replaced(cls: type, **members: Any) -> Any:
    return mock.patch.multiple(cls, **members)


def unclipped(self: UpdateClient, update: Any, sent: Any, steps: Any) -> Reply:
    return Reply(update)


ALL: dict[str, list[Any]] = {
    "no noise": less_noise(1e12),
    "half the noise": less_noise(2.0),
    "a hundredth of the noise": less_noise(100.0),
}
OF_CLIENTS = ALL | {
    "no clip": [replaced(UpdateClient, clip=unclipped), replaced(Limits, excess=lambda *_: "")],
    "no clip at the clients": [replaced(UpdateClient, clip=unclipped)],
    "a turn too early": [replaced(Schedule, due=too_early)],
    "everybody in each round": [replaced(Schedule, due=lambda self, round_: self.clients)],
}
OF_RECORDS = ALL | {
    "no clip": [replaced(SampleClipping, factors=lambda self, norms, bound: norms * 0 + 1.0)],
    "everybody sampled": [replaced(PoissonSampler, draw=lambda self: np.arange(self.records))],
}


def audited(file: Path, faults: Any = ()) -> Audit | None:
    """Return the result; None if the run ends."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        with contextlib.suppress(ToolError):
            return audit(file, seed=1)
        return None


@pytest.mark.parametrize("fault", OF_CLIENTS)
@pytest.mark.parametrize("more", ["", pytest.param(BANDED, marks=pytest.mark.soak)])
def test_faults_of_noise_on_averages_are_refuted_or_not_audited(
    write: Any, more: str, fault: str
) -> None:
    found = audited(of_clients(write, more), OF_CLIENTS[fault])
    # The server refuses what its clients did not clip.
    assert (found is None) == (fault == "no clip at the clients")
    assert found is None or found.fault


@pytest.mark.parametrize(
    ("fault", "persons"),
    [*((n, False) for n in OF_RECORDS), ("no clip", True), ("half the noise", True)],
)
def test_faults_of_dp_sgd_are_refuted(write: Any, fault: str, persons: bool) -> None:
    file = of_records(write)
    if persons:
        for site in "abc":
            of = "".join(f"{i % 80}\n" for i in range(100))
            (file.parent / "data" / site / "train_persons.csv").write_text("person\n" + of)
    found = audited(file, OF_RECORDS[fault])
    assert found.protects == ("person" if persons else "record")
    assert found.fault


@pytest.mark.soak
@pytest.mark.parametrize("claim", [0.3, 30.0])
@pytest.mark.parametrize("fault", ["half the noise", "a turn too early", "everybody sampled"])
def test_each_fault_is_refuted_or_its_claim_is_not_audited(
    write: Any, claim: float, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are few canaries for the claim: a noise multiplier, or an epsilon."""
    monkeypatch.setattr("fedclip.privacy.audit._MOST", 1000)
    if fault in OF_CLIENTS:
        found = audited(of_clients(write, z=claim), OF_CLIENTS[fault])
        assert found is None or found.fault or not found.audited
    if fault in OF_RECORDS:
        found = audited(of_records(write, epsilon=claim), OF_RECORDS[fault])
        assert found is None or found.fault or not found.audited


@pytest.mark.parametrize(
    ("of", "more"),
    [
        pytest.param(of_clients, {}, marks=pytest.mark.soak),
        (of_clients, {"more": BANDED, "rate": ""}),
        pytest.param(of_clients, {"more": ', relation = "replace-one"'}, marks=pytest.mark.soak),
        pytest.param(of_records, {}, marks=pytest.mark.soak),
        (of_records, {"clip": '["sample-clip", {mode = "adaptive"}]'}),
    ],
)
def test_no_fault_is_found_where_there_is_none(write: Any, of: Any, more: dict[str, str]) -> None:
    found = audit(of(write, **more), seed=1)
    assert not found.fault
    assert found.audited or "clip" in more
    if of is of_clients:
        assert found.claimed < found.most
        assert found.claimed / 4 < found.least


def test_the_bound_is_above_the_truth_in_less_than_one_audit_of_twenty() -> None:
    rng, mu = np.random.default_rng(0), 1.0
    there = rng.random((60, 1000)) < 0.5
    scores = rng.standard_normal(there.shape) + mu * there
    bounds = [lower_bound(guess(*pair, 0.1, 0.1), 1e-5) for pair in zip(there, scores, strict=True)]
    truth = epsilon_of(mu, 1e-5)
    # 5 % of 60, and 3.5 standard deviations.
    assert sum(bound > truth for bound in bounds) <= 3 + 6
    assert np.median(bounds) > truth / 3


def test_the_command_prints_what_was_found(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = of_clients(write)
    level = logging.getLogger("declearn").level
    done = call("privacy", "audit", file, "--seed", "1")
    assert done.exit_code == 0, done.output
    for words in ("no fault was found", "can refute at most", "what this does not show"):
        assert words in done.stdout
    assert logging.getLogger("declearn").level == level
    # With few canaries, the claim cannot be audited.
    monkeypatch.setattr("fedclip.privacy.audit._MOST", 60)
    done = call("privacy", "audit", file, "--json")
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert result["fault"] is result["audited"] is False
    assert result["most"] < result["claimed"]
    with pytest.raises(ToolError, match="nothing here claims privacy"):
        audit(write(server='["update-clip-server"]'))
    assert "nowhere.toml" in sentence("privacy", "audit", "nowhere.toml", code=2)
