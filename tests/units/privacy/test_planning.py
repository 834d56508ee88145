"""From a privacy budget to noise, to what it does, and to lines that run."""

import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_runs import call, sentence

from fedclip import UpdateClipClient, UpdateClipServer
from fedclip.cli.check.configuration import check_config
from fedclip.privacy.accounting import Release, epsilon
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
    # With turns, the round that only votes is paid for, too.
    turns = plan(epsilon, 1e-5, rounds, clients, per_round=-(-clients // 3), relation=relation)
    assert turns.separation == 3
    assert UpdateClipServer(**turns.config).rounds_left() >= rounds
    # Steps of length C in one direction, and noise in all.
    values = replace(found, values=5000)
    assert values.drift == pytest.approx(values.noise * math.sqrt(5000 / rounds))
    assert ("--values" in str(found), "--values" in str(values)) == (True, False)
    assert f"with 5,000 values, the noise of a round has norm {values.length:.3g} C" in str(values)


@pytest.mark.parametrize(("clients", "honest", "sites"), [(99, 0.75, 74), (3, 0.5, 1), (7, 1.0, 7)])
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


@pytest.mark.parametrize(
    ("values", "said"),
    [("10000", "31 (the largest for float32)"), ("1000000000", "40 (and a model in float64)")],
)
def test_what_a_plan_says_of_secure_sums_is_enough_for_them(values: str, said: str) -> None:
    words = (*BUDGET, "--values", values, "--honest", "0.5")
    text, found = call(*words).stdout, json.loads(call(*words, "--json").stdout)
    assert found["prices"][1]["trusted"] == "50 of 100 clients, secure sums"
    optim = tomllib.loads("\n".join(found["toml"]))["optim"]
    (client,), (server,) = (optim[side]["modules"] for side in ("client_opt", "server_opt"))
    assert UpdateClipServer(**server[1]).rounds_left() == 100
    assert UpdateClipClient(**client[1]).noise == UpdateClipServer(**server[1]).site.get_config()
    numbers = re.search(r"clipval = (\S+) times max_norm, and bitsize (.*)", text)
    assert numbers[2] == said
    dtype = np.dtype(said.split()[-1].rstrip(")"))
    secagg = {"clipval": float(numbers[1]), "bitsize": int(said[:2])}
    assert not SiteNoise(**client[1]["noise"]).unsafe(secagg, {"w": np.zeros(1, dtype)})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--honest", "0"), "honest must be a number in (0, 1]"),
        (("--honest", "1.1"), "honest must be a number in (0, 1]"),
        (("--honest", "1", "--per-round", "10"), "turns and evaluations leave the noise"),
        (("--honest", "1", "--evaluation-share", "0.2"), "no --honest"),
        (("--per-round", "9", "--evaluation-share", "0.2"), "either evaluation_share or per_round"),
    ],
)
def test_prices_that_there_are_not(words: tuple[str, ...], said: str) -> None:
    assert said in sentence(*BUDGET, *words, code=2)


def test_turns_have_no_prices_and_evaluations_have_one() -> None:
    assert "trusted" not in call(*BUDGET, "--per-round", "10").stdout
    asked = (*BUDGET, "--evaluation-share", "0.2")
    assert "mean loss of an evaluation: 0.15 loss_bound" in call(*asked).stdout
    lines = " ".join(json.loads(call(*asked, "--json").stdout)["toml"])
    assert "evaluation_share = 0.2, loss_bound = 3.0" in lines


def test_a_delta_that_lets_one_client_out_is_told() -> None:
    told = "delta must be below 1 / clients = 0.01: use a hundredth of it"
    assert told in str(plan(8.0, 0.01, 100, 100))
    assert told not in str(plan(8.0, 0.0099, 100, 100))


def test_the_lines_of_a_plan_are_a_configuration(tmp_path: Path) -> None:
    done = call(*BUDGET, "--values", "10000")
    lines = done.stdout[done.stdout.index("[optim]") :].replace("modules", "lrate = 1.0\nmodules")
    path = tmp_path / "config.toml"
    path.write_text(
        f"""
        network = {{ protocol = "websockets", host = "127.0.0.1", port = 8765 }}
        data = {{}}
        [run]
        rounds = 100
        register = {{ min_clients = 100, max_clients = 100 }}
        training = {{ batch_size = 8 }}
        {lines}"""
    )
    checked = check_config(path)
    assert checked.ok
    said = [finding.message for finding in checked.findings]
    # The plan is for 100 releases; without start_norm, the first round only counts votes.
    assert any("100 rounds cost epsilon = 7.963 at delta = 1e-05" in m for m in said)
    assert not any("in name only" in m for m in said)
