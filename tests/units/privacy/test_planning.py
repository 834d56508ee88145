"""From a privacy budget to noise, to what it does, and to lines that run."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from declearn.main.config import FLOptimConfig
from report_runs import call

from fedclip import UpdateClipClient, UpdateClipServer
from fedclip.cli.check.configuration import check_config
from fedclip.privacy.accounting import Release, epsilon, mu_of
from fedclip.privacy.planning import TrustModels, plan
from fedclip.updates.client_noise import SiteNoise

BUDGET = ("privacy", "plan", "--epsilon", "8", "--rounds", "100", "--clients", "100")


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("epsilon", "rounds", "clients"), [(8.0, 100, 100), (0.5, 7, 3)])
def test_a_plan_is_worth_its_rounds_and_no_more(
    relation: str, epsilon: float, rounds: int, clients: int
) -> None:
    found = plan(epsilon, 1e-5, rounds, clients, relation=relation)
    server = UpdateClipServer(**found.config)
    assert server.rounds_left() == rounds
    assert server.budget.update_noise == found.update_noise
    assert 0.99 * epsilon <= found.spent <= epsilon


def test_the_drift_is_what_noise_adds_up_to() -> None:
    """Rounds of the very noise: its sum, relative to steps of length C in one direction."""
    rng = np.random.default_rng(0)
    for rounds in (4, 100):
        found = plan(8.0, 1e-5, rounds, 100, values=5000)
        total = sum(found.noise * rng.standard_normal(5000) for _ in range(rounds))
        assert np.linalg.norm(total) / rounds == pytest.approx(found.drift, rel=0.05)
        least = math.sqrt(5000) / (mu_of(8.0, 1e-5) * 100)
        assert least <= found.drift <= 1.001 * math.sqrt(4 / 3) * least


def test_the_lines_of_a_plan_are_a_configuration(tmp_path: Path) -> None:
    done = call(*BUDGET, "--values", "10000")
    assert done.exit_code == 0
    text = done.stdout[done.stdout.index("[optim]") :]
    optim = tomllib.loads(text)["optim"]
    for side in ("client_opt", "server_opt"):
        optim[side]["lrate"] = 1.0
    FLOptimConfig.from_params(**optim)
    path = tmp_path / "config.toml"
    path.write_text(
        "[network]\nprotocol = 'websockets'\nhost = '127.0.0.1'\nport = 8765\n[data]\n"
        "[run]\nrounds = 100\n[run.register]\nmin_clients = 100\nmax_clients = 100\n"
        "[run.training]\nbatch_size = 8\n" + text.replace("modules", "lrate = 1.0\nmodules")
    )
    checked = check_config(path)
    assert checked.ok
    said = [f.message for f in checked.findings]
    # The plan is for 100 releases; without start_norm, the first round only counts votes.
    assert any("100 rounds cost epsilon = 7.963 at delta = 1e-05" in m for m in said)
    assert not any("in name only" in m for m in said)


# -- a server that is not trusted with the noise --------------------------------------------------
@pytest.mark.parametrize(
    ("clients", "honest", "sites"), [(100, 0.75, 75), (3, 0.5, 1), (7, 1.0, 7)]
)
def test_prices_of_noise_from_the_sites(clients: int, honest: float, sites: int) -> None:
    found = plan(2.0, 1e-5, 50, clients, relation="replace-one")
    prices = TrustModels(found, honest)
    server, sure, nobody = prices.rows
    assert (server.noise, server.each, prices.sites) == (found.noise, 0.0, sites)
    for row, enough in ((sure, sites), (nobody, 1)):
        # So many have the server's noise; all of them together more than that.
        assert row.each * math.sqrt(enough) == pytest.approx(found.update_noise)
        assert row.noise * math.sqrt(clients) == pytest.approx(row.each)
        assert row.noise == pytest.approx(row.times * server.noise)
    by_silent = [prices.epsilon(silent) for silent in range(clients)]
    assert by_silent == sorted(by_silent)
    assert by_silent[clients - sites] == found.spent <= 2.0
    alone = Release(found.noise_multiplier / math.sqrt(sites), 50)
    assert by_silent[-1] == pytest.approx(epsilon([alone], 1e-5, "replace-one"))


def test_lines_of_a_plan_with_noise_from_the_sites() -> None:
    done = call(*BUDGET, "--values", "10000", "--honest", "0.5", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["prices"][1]["trusted"] == "50 of 100 clients, secure sums"
    optim = tomllib.loads("\n".join(found["toml"]))["optim"]
    (client,), (server,) = (optim[side]["modules"] for side in ("client_opt", "server_opt"))
    assert UpdateClipServer(**server[1]).rounds_left() == 100
    assert UpdateClipClient(**client[1]).noise == UpdateClipServer(**server[1]).site.get_config()


@pytest.mark.parametrize(
    ("values", "said"),
    [("10000", "31 (the largest for float32)"), ("1000000000", "40 (and a model in float64)")],
)
def test_what_a_plan_says_of_secure_sums_is_enough_for_them(values: str, said: str) -> None:
    done = call(*BUDGET, "--values", values, "--honest", "0.5")
    found = re.search(r"clipval = (\S+) times max_norm, and bitsize (.*)", done.stdout)
    assert found is not None
    assert found[2] == said
    client = tomllib.loads(done.stdout[done.stdout.index("[optim]") :])["optim"]["client_opt"]
    site = SiteNoise(**client["modules"][0][1]["noise"])
    dtype = np.dtype(said.split()[-1].rstrip(")"))
    secagg = {"clipval": float(found[1]), "bitsize": int(said[:2])}
    assert not site.unsafe(secagg, {"w": np.zeros(1, dtype)})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--honest", "0"), "honest must be a number in (0, 1]"),
        (("--honest", "1.1"), "honest must be a number in (0, 1]"),
        (
            ("--honest", "1", "--per-round", "10"),
            "turns and evaluations leave the noise",
        ),
    ],
)
def test_prices_that_there_are_not(words: tuple[str, ...], said: str) -> None:
    done = call(*BUDGET, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "trusted" not in call(*BUDGET, "--per-round", "10").stdout
