"""`fedclip privacy audit`: each fault that is built in is refuted, or the claim is not audited."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from dpsgd_wire import seeded
from hypothesis import given
from hypothesis import strategies as st
from quickruns import write_config, write_sites
from report_runs import call

from fedclip.dpsgd.step import IndependentNoise, PoissonSampler, SampleClipping
from fedclip.engines.local import audit as attack
from fedclip.engines.local.audit import Audit, audit
from fedclip.errors import ToolError
from fedclip.privacy.accounting import epsilon_of
from fedclip.privacy.audit import Claim, Guesses, guess, lower_bound
from fedclip.privacy.noise import insecure_normals
from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import Limits
from fedclip.updates.noise import Budget
from fedclip.updates.protocol import Reply, Schedule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning"),
]

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
    budget = "fedclip.updates.noise.secure_normals"
    monkeypatch.setattr(budget, insecure_normals(1))
    return partial(write_config, tmp_path / "config.toml")


def of_clients(
    write: Any, more: str = "", rate: str = FIXED, z: float = 1.5, rounds: int = 4, **changes: str
) -> Path:
    server = CENTRAL.format(more=more, rate=rate, z=z)
    file: Path = write(server=server, more=CROWD, rounds=rounds, **changes)
    return file


def of_records(
    write: Any, epsilon: float = 4.0, size: int = 25, steps: int = 20, clip: str = '"sample-clip"'
) -> Path:
    changes = {"aggregator": '"averaging"', "server": "[]", "client": f"[{clip}]"}
    training, more = f"n_steps = {steps}", PRIVATE.format(epsilon=epsilon)
    file: Path = write(rounds=2, batch_size=size, training=training, more=more, **changes)
    return file


# -- built-in faults ----------------------------------------------------------------------------
def less_noise(by: float) -> Any:
    central, records = Budget.noised, IndependentNoise.add

    def noised(self: Budget, *args: Any) -> Any:
        std = self.update_noise
        with mock.patch.object(self, "update_noise", std / by):
            return central(self, *args)

    stack = mock.patch.object(IndependentNoise, "add", lambda s, sums, z: records(s, sums, z / by))
    return mock.patch.multiple(Budget, noised=noised), stack


def clips(server: bool) -> Any:
    raw = mock.patch.object(UpdateClient, "clip", lambda self, update, sent, steps: Reply(update))
    return (raw, mock.patch.object(Limits, "excess", return_value="")) if server else (raw,)


def turns(early: Callable[[Schedule, int], Any]) -> Any:
    return (mock.patch.object(Schedule, "due", early),)


def too_early(schedule: Schedule, round_: int) -> Any:
    """The first group takes part in two rounds, one after the other, and then as it should."""
    group = (0, 0, 1, 0)[round_] if round_ < 4 else round_
    return schedule.clients[group % 2 :: 2]


ALL: dict[str, Callable[[], Any]] = {
    "no noise": lambda: less_noise(1e12),
    "half the noise": lambda: less_noise(2.0),
    "a hundredth of the noise": lambda: less_noise(100.0),
}
OF_CLIENTS = ALL | {
    "no clip": lambda: clips(server=True),
    "no clip at the clients": lambda: clips(server=False),
    "a turn too early": lambda: turns(too_early),
    "everybody in each round": lambda: turns(lambda self, round_: self.clients),
}
OF_RECORDS = ALL | {
    "no clip": lambda: (
        mock.patch.object(SampleClipping, "factors", lambda self, norms, bound: norms * 0 + 1.0),
    ),
    "everybody sampled": lambda: (
        mock.patch.object(PoissonSampler, "draw", lambda self: np.arange(self.records)),
    ),
}


def audited(file: Path, fault: Any = None) -> Audit | None:
    """Return the result; None if the run ends."""
    patches: Iterator[Any] = iter(fault() if fault else ())
    with next(patches, contextlib.nullcontext()), next(patches, contextlib.nullcontext()):
        with contextlib.suppress(ToolError):
            return audit(file, seed=1)
        return None


@pytest.mark.parametrize("fault", OF_CLIENTS)
@pytest.mark.parametrize("more", ["", BANDED])
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
    assert found is not None
    assert found.protects == ("person" if persons else "record")
    assert found.fault


@pytest.mark.parametrize("make", [of_clients, of_records])
@pytest.mark.parametrize("claim", [0.3, 30.0])
@pytest.mark.parametrize("fault", ["half the noise", "a turn too early", "everybody sampled"])
def test_each_fault_is_refuted_or_its_claim_is_not_audited(
    write: Any, make: Any, claim: float, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are few canaries for the claim: a noise multiplier, or an epsilon."""
    monkeypatch.setattr(attack, "_MOST", 1000)
    faults = OF_CLIENTS if make is of_clients else OF_RECORDS
    if fault in faults:
        found = audited(
            make(write, **{"z" if make is of_clients else "epsilon": claim}), faults[fault]
        )
        assert found is None or found.fault or not found.audited


@pytest.mark.parametrize(
    ("more", "rate"), [("", FIXED), (BANDED, ""), (', relation = "replace-one"', FIXED)]
)
def test_no_fault_is_found_where_there_is_none(write: Any, more: str, rate: str) -> None:
    found = audit(of_clients(write, more, rate), seed=1)
    assert not found.fault
    assert found.audited
    assert found.claimed < found.most
    assert found.claimed / 4 < found.least


def test_no_fault_is_found_in_dp_sgd_where_there_is_none(write: Any) -> None:
    found = audit(of_records(write), seed=1)
    assert not found.fault
    assert found.audited
    adaptive = audit(of_records(write, clip='["sample-clip", {mode = "adaptive"}]'), seed=1)
    assert not adaptive.fault


@pytest.mark.parametrize("fault", ["", "no clip"])
@pytest.mark.parametrize("central", [True, False])
def test_canaries_reach_their_bound_in_each_group_of_tensors(
    write: Any, central: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model has a tensor of one value, so that there is one canary in a run.
    monkeypatch.setattr(attack, "_MOST", 40)
    if central:
        scope = '{name = "clipped-averaging", scope = "tensor"}'
        found = audited(of_clients(write, aggregator=scope), OF_CLIENTS.get(fault))
    else:
        file = of_records(write, steps=2, clip='["sample-clip", {mode = "tensor"}]')
        found = audited(file, OF_RECORDS.get(fault))
    assert found is not None
    assert found.guesses.canaries == 40
    assert found.fault == (fault != "") or not found.audited


# -- the bound ----------------------------------------------------------------------------------
@given(
    canaries=st.integers(1, 2000),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    factor=st.floats(0.1, 4.0),
)
def test_more_right_guesses_and_smaller_claims_are_refuted_sooner(
    canaries: int, shares: tuple[float, float], factor: float
) -> None:
    guesses = max(1, round(shares[0] * canaries))
    found = Guesses(canaries, guesses, round(shares[1] * guesses))
    claim = Claim(lambda delta: epsilon_of(1.0, delta))
    if claim.refuted(found, factor):
        assert claim.refuted(found._replace(right=guesses), factor)
        assert claim.refuted(found, factor / 2)
        assert claim.factor(found) >= factor * 0.999
    assert claim.factor(found._replace(right=0)) == 0.0


def test_the_bound_is_above_the_truth_in_less_than_one_audit_of_twenty() -> None:
    rng, mu = np.random.default_rng(0), 1.0
    there = rng.random((60, 1000)) < 0.5
    scores = rng.standard_normal(there.shape) + mu * there
    bounds = [lower_bound(guess(*pair, 0.1, 0.1), 1e-5) for pair in zip(there, scores, strict=True)]
    truth = epsilon_of(mu, 1e-5)
    # 5 % of 60, and 3.5 standard deviations.
    assert sum(bound > truth for bound in bounds) <= 3 + 6
    assert np.median(bounds) > truth / 3


@pytest.mark.soak
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_another_package_proves_the_same(mu: float, delta: float) -> None:
    auditing = pytest.importorskip("jax_privacy.auditing")
    rng = np.random.default_rng(0)
    for canaries, share in ((500, 0.3), (2000, 0.1), (5000, 0.02)):
        there = rng.random(canaries) < 0.5
        scores = rng.standard_normal(canaries) + mu * there
        limit = float(np.sort(scores)[-round(share * canaries)])
        theirs = auditing.CanaryScoreAuditor(scores[there], scores[~there]).epsilon_one_run_fdp(
            0.05, delta, threshold_strategy=auditing.Explicit(limit)
        )
        ours = lower_bound(guess(there, scores, share, 0.0), delta)
        # At fewer deltas, the bound is a little lower.
        assert 0.98 * theirs - 0.04 <= ours <= theirs + 1e-3


@pytest.mark.soak
def test_audits_are_right_as_often_as_they_say(write: Any) -> None:
    files = [partial(of_clients, write), partial(of_clients, write, BANDED)]
    for make in [*files, partial(of_records, write), partial(of_records, write, size=100)]:
        file = make()
        sound = [audit(file, seed=seed) for seed in range(40)]
        assert all(one.audited for one in sound)
        # 5 % of 40, and 3.5 standard deviations.
        assert sum(one.fault for one in sound) <= 2 + 4
        first, second = less_noise(2.0)
        with first, second:
            assert sum(audit(file, seed=seed).fault for seed in range(40)) >= 39


# -- the command --------------------------------------------------------------------------------
def test_a_configuration_that_claims_nothing_is_refused(write: Any) -> None:
    with pytest.raises(ToolError, match="nothing here claims privacy"):
        audit(write(server='["update-clip-server"]'))


def test_the_command_prints_what_was_found(write: Any) -> None:
    file = str(of_clients(write))
    level = logging.getLogger("declearn").level
    done = call("privacy", "audit", file, "--seed", "1")
    assert done.exit_code == 0, done.output
    assert "no fault was found" in done.stdout
    assert "can refute at most" in done.stdout
    assert logging.getLogger("declearn").level == level
    assert "what this does not show" in done.stdout
    nowhere = call("privacy", "audit", "nowhere.toml")
    assert nowhere.exit_code == 2
    assert "nowhere.toml" in nowhere.output


def test_the_command_fails_where_the_claim_can_not_be_audited(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attack, "_MOST", 60)
    done = call("privacy", "audit", str(of_clients(write)), "--json")
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert result["fault"] is result["audited"] is False
    assert result["most"] < result["claimed"]
