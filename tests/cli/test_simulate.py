# SPDX-License-Identifier: Apache-2.0
"""A federation in one process: what it shares with a run, who takes part, and what is refused."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.utils.serialize import msgpack_load
from helpers import free_port
from memory import without_sockets
from quickruns import write_config, write_sites
from report_runs import call

from fedclip.engines.declearn.quickrun import Federation
from fedclip.engines.local.simulate import Simulation, run
from fedclip.errors import ToolError
from fedclip.report import read_report
from fedclip.report.results import result_of

pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write three sites' data and the model; return what writes a configuration beside them."""
    write_sites(tmp_path)
    return partial(write_config, tmp_path / "config.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "personal"),
    [
        ("", True),
        (", weights = {a = 1.0, b = 5.0, c = 2.0}, max_share = 0.5", False),
        (", combine = 'arc', n_hostile = 1", False),
    ],
)
def test_a_run_over_the_network_is_the_same(write: Any, settings: str, personal: bool) -> None:
    """With five steps, three and seven in a round."""
    changes = {"aggregator": f"{{name = 'clipped-averaging'{settings}}}", "port": free_port()}
    client = '["zscore-clip", "update-clip-client"]'
    file = write(rounds=4, training="n_epoch = 1", client=client, **changes)
    if personal:
        model = file.parent / "model.py"
        more = "from fedclip import PersonalModel\nmodel = PersonalModel(model, 'intercept')\n"
        model.write_text(model.read_text() + more)
    federation = Federation(file)
    with without_sockets():
        asyncio.run(federation.run(seed=5))
    there = read_report(federation.results)
    here = read_report(run(file, 5).results)
    for site in "abc":
        limits = [row.record.limit for row in there.select(site, "update-clip-client")]
        ours = [row.record.limit for row in here.select(node="clients")]
        np.testing.assert_allclose(limits, ours, rtol=1e-6)
        assert len(limits) == 4
        updates = there.select(site, "update-clip-client"), here.select(site, "update-norms")
        sizes = [[row.record.norm_max for row in rows] for rows in updates]
        np.testing.assert_allclose(*sizes, rtol=1e-5)
        rows, same = ([*r.select(site, "zscore-clip")] for r in (there, here))
        assert [row.record.steps for row in rows] == [{"a": 5, "b": 3, "c": 7}[site]] * 4
        for row, other in zip(rows, same, strict=True):
            found, wanted = (r.record.as_dict() for r in (row, other))
            assert found == pytest.approx(wanted, rel=1e-5)
    losses = [[c.points for c in sorted(r.curves) if c.metric == "loss"] for r in (there, here)]
    # The server's, and those that the sites have measured, of their own models.
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses)
    best, simulated = (
        msgpack_load(f"{federation.results}/{node}/model_state_best.mpk").coefs
        for node in ("server", "simulated/server")
    )
    for name, values in best.items():
        np.testing.assert_allclose(simulated[name], values, atol=1e-5)
    assert len([*file.parent.glob("out/**/server/about_these_models.txt")]) == 2 * personal


def in_another_unit(site: Path) -> None:
    for part in ("train", "valid"):
        data = site / f"{part}_data.npy"
        np.save(data, np.load(data) * 100)


def weights(file: Path) -> dict[str, Any]:
    simulation = Simulation(file)
    for _ in range(3):
        assert not simulation.step()
    return dict(simulation.model.get_weights().coefs)


def test_a_seed_repeats_who_is_asked_who_replies_and_what_is_drawn(write: Any) -> None:
    drawn = "[simulate]\nclients = 12\nsampled = 9\ndrop_out = 0.3\nattackers = 3\n"
    first, same, other = (weights(write(more=f"{drawn}seed = {n}\n")) for n in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], same[name])
    assert any(not np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("obeys", "refused"), [("true", 0), ("false", 1)])
def test_an_attacker_that_does_not_clip_is_zeros(write: Any, obeys: str, refused: int) -> None:
    more = f"[simulate]\nattackers = 1\nfactor = 1e6\nseed = 0\nattackers_clip = {obeys}\n"
    simulation = Simulation(write(more=more, server='[["update-clip-server", {start_norm = 1.0}]]'))
    server: Any = simulation.server
    close, closed = server.close, []
    server.close = lambda *args, **more: closed.append(close(*args, **more)) or closed[-1]
    simulation.step()
    assert (closed[0].record["refused"], closed[0].record["clipped"]) == (refused, 1 - refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "weights = {a = 1.0, b = 5.0, c = 2.0}",
        "weights = 'steps'",
        "weights = 'steps', max_steps = 4",
        "combine = 'arc', n_hostile = 1",
    ],
)
def test_each_setting_of_the_aggregator_moves_the_model(write: Any, settings: str) -> None:
    def model(settings: str) -> Any:
        aggregator = f"{{name = 'clipped-averaging', max_norm = 1.0{settings}}}"
        changes = {"client": "[]", "server": "[]", "training": "n_epoch = 1"}
        return weights(write(aggregator=aggregator, more="[simulate]\nseed = 0\n", **changes))

    equal, found = model(""), model(f", {settings}")
    assert any(not np.allclose(equal[name], found[name]) for name in equal)
    assert all(values.any() for values in found.values())


def test_running_means_stay_with_their_client(write: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = write(server='["update-clip-server"]')
    (tmp_path / "model.py").write_text(
        "import torch\nfrom declearn.model.torch import TorchModel\n"
        "net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1), "
        "torch.nn.Flatten(0))\nmodel = TorchModel(net.double(), torch.nn.BCEWithLogitsLoss())\n"
    )
    for path in (tmp_path / "data").rglob("*_target.npy"):
        np.save(path, np.load(path).astype(float))
    simulation = Simulation(file, 0)
    simulation.step()
    kept = [state.coefs["module.0.running_mean"] for state in simulation.crowd._unshared.values()]
    assert len(kept) == 3
    assert not torch.equal(kept[0], kept[1])
    assert not simulation.model.get_weights().coefs["module.0.running_mean"].any()


def test_turns_that_do_not_fit_are_refused(write: Any) -> None:
    noise = 'start_norm = 0.5, noise_multiplier = 1.0, expected_clients = 2, noise = "banded"'
    turns = f'[["update-clip-server", {{{noise}, rounds = 5, delta = 0.01, separation = 3}}]]'
    insecure = turns.replace("3}", '3, generator = "insecure", seed = 3}')
    assert "that takes more than 4 clients" in call("simulate", write(server=turns)).stderr
    assert "that takes more than 4 clients" in Simulation(write(server=insecure)).step()
    two = insecure.replace("separation = 3", "separation = 2")
    with pytest.raises(ToolError, match="remove sampled"):
        Simulation(write(server=two, more="[simulate]\nsampled = 2\n"))


def test_a_spent_budget_ends_it_with_a_sentence(write: Any) -> None:
    noise = "noise_multiplier = 1.0, expected_clients = 3, max_epsilon = 8.0"
    file = write(server=f'[["update-clip-server", {{{noise}}}]]', rounds=50)
    # `check`, before the command starts it, says how many rounds there are.
    done = run(file, 1)
    # The first one only counts votes.
    assert done.rounds == 3
    assert "max_epsilon" in done.ended
    assert (file.parent / "out" / "simulated" / "server" / "model_state_best.mpk").exists()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("more", "[simulate]\nclients = 2\n", "the data folder has 3: raise clients"),
        ("more", "[simulate]\nsampled = 4\n", "sampled = 4 is more than clients = 3"),
        ("more", "[run.privacy]\nbudget = [1.0, 1e-5]\nsclip_norm = 1.0\n", "DP-SGD"),
        ("aggregator", ", weights = {a = 1.0, b = 2.0}", "clipped-averaging does not name 'c'"),
        ("aggregator", ", combine = 'arc', n_hostile = 2", "more than 4 replies in a round, and"),
        ("aggregator", ", max_norm = 1.0, scope = 'tensor'", "with scope = 'global' only"),
        ("server", '["adam", "update-clip-server"]', "update-clip-server must be the first module"),
    ],
)
def test_what_can_not_be_simulated_is_refused(write: Any, key: str, value: str, text: str) -> None:
    none = {"client": "[]", "server": "[]"} if "max_norm" in value else {}
    value = f"{{name = 'clipped-averaging'{value}}}" if key == "aggregator" else value
    with pytest.raises(ToolError, match=text):
        Simulation(write(**none, **{key: value}))


def test_mistakes_in_its_section_are_found_before(write: Any) -> None:
    for line, text in {
        "drop_out = 1.0": "drop_out must be a number in [0, 1)",
        "client = 3": "did you mean 'clients'",
        "clients = 5\nattackers = 6": "attackers = 6 is more than clients = 5",
        "seed = -1": "seed must be an int >= 0",
    }.items():
        result = call("simulate", write(more=f"[simulate]\n{line}\n"))
        assert (result.exit_code, text in result.stderr) == (1, True), result.output


def test_numbers_and_best_weights_are_those_of_the_healthy_sites(write: Any) -> None:
    """c has another unit: its loss rises while that of the others falls."""
    changes = {"aggregator": '"averaging"', "client": '["no-op"]', "server": "[]", "rounds": 6}
    file = write(training="n_epoch = 1", **changes)
    in_another_unit(file.parent / "data" / "c")
    told: list[str] = []
    done = run(file, 0, progress=lambda done, total, text: told.append(text))
    report = read_report(done.results)
    losses = {c.node: dict(c.points) for c in report.curves if c.metric == "loss"}
    rounds = range(1, 7)
    healthy = [np.mean([losses[site][r] for site in "ab"]) for r in rounds]
    pooled = [losses["server"][r] for r in rounds]
    assert done.best == 1 + int(np.argmin(healthy)) != 1 + int(np.argmin(pooled))
    assert f"loss {healthy[-1]:.3g}" in told[-1]
    assert "(mean of a, b); outlier c: accuracy" in told[-1]
    assert result_of(report, "").outliers == ["c"]
    shown = call("report", done.results).stdout.splitlines()
    assert "limit the influence of each" in shown[0]
    assert f"loss {healthy[-1]:.3g}" in shown[1]
