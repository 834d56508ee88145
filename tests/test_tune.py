# SPDX-License-Identifier: Apache-2.0
"""`fedclip tune`: proposals and no clipping over seeds, ranked by the metric of each site."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import free_port
from report_runs import call, large_run
from rich.console import Console
from test_simulate import write  # noqa: F401

from fedclip.report import read_report
from fedclip.report.advice import Advice, Proposal
from fedclip.tools import sweep
from fedclip.tools.check import check_config
from fedclip.tools.compare import by_site, drawn, interval, judged_by
from fedclip.tools.editing import rewritten, unclipped
from fedclip.tools.quickrun import draw_from
from fedclip.tools.standings import AS_IS, NONE, Standings

pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning")

NAN = float("nan")


# -- how settings stand -------------------------------------------------------------------------
def standings(higher: bool = True, **values: list[list[float]]) -> Standings:
    """Return how settings stand with these values at a, b and c, seed by seed; c is not counted."""
    found = {
        name.replace("_", " "): {
            seed: dict(zip("abc", row, strict=True)) for seed, row in enumerate(rows, 1)
        }
        for name, rows in values.items()
    }
    metric = "accuracy" if higher else "loss"
    return Standings(metric, higher, ["a", "b", "c"], ["a", "b"], found)


BARE = [[0.80, 0.70, 0.5], [0.84, 0.60, 0.4], [0.79, 0.66, 0.6]]
RAISED = [[a + 0.1 + d, b + 0.1, 0.0] for (a, b, _), d in zip(BARE, (0.0, 0.01, 0.02), strict=True)]
ODD_ONLY = [[a, b, 1.0] for a, b, _ in BARE]


@pytest.mark.parametrize(
    ("found", "winner", "words"),
    [
        (
            standings(no_clipping=BARE, x=RAISED),
            "x",
            "with it is b, 0.75 ± 0.13; with no clipping b, 0.65",
        ),
        (standings(no_clipping=RAISED, x=BARE), "", "The nearest is x: -0.105 ± 0.012"),
        # What an odd site gains or loses is shown, and decides nothing.
        (standings(no_clipping=BARE, x=ODD_ONLY), "", "No proposal is better"),
        (standings(no_clipping=BARE, x=[[0.99, 0.6, 1]] * 3), "x", "than its interval"),
        # Two records more with each seed are no spread, and so no interval.
        (standings(no_clipping=BARE, x=[[a + 0.1, b, 1] for a, b, _ in BARE]), "", "more seeds"),
        (
            standings(no_clipping=BARE, y=RAISED, x=[[a + 0.3, b, 1] for a, b, _ in BARE]),
            "y",
            "y is better than no clipping by more than its interval",
        ),
        (standings(False, no_clipping=RAISED, x=BARE), "x", "The highest site with it is a, 0.81"),
        # Accuracies may be the same where losses are not.
        (standings(no_clipping=[BARE[0]] * 3, x=RAISED), "x", "than its interval"),
        (
            standings(no_clipping=[*BARE[:2], [NAN] * 3], x=RAISED),
            "x",
            "Without clipping the model",
        ),
        (standings(no_clipping=BARE, x=[*RAISED[:2], [NAN] * 3]), "", "over 3 seeds)."),
        (
            standings(no_clipping=RAISED, as_configured=BARE),
            "",
            "The nearest is as configured: -0.105",
        ),
        (
            standings(no_clipping=BARE, x=[[0.99, b - 0.02 - a / 100, 0] for a, b, _ in BARE]),
            "x",
            "But it is worse at b by more than the interval.",
        ),
    ],
)
def test_the_answer_is_that_of_the_numbers(found: Standings, winner: str, words: str) -> None:
    assert (found.winner, words in found.answer()) == (winner, True), found.answer()
    text = json.dumps(found.as_dict(), allow_nan=False)
    assert json.loads(text)["winner"] == winner


def test_seeds_that_draw_nothing_tell_nothing() -> None:
    found = standings(no_clipping=BARE, x=RAISED)
    found.losses.extend([{"a": 0.5}, {"a": 0.5}, {"a": 0.4}])
    assert found.winner == "x"
    del found.losses[2]
    assert found.winner == ""
    assert "shuffle = true" in found.answer()


def test_differences_are_those_of_the_same_seeds() -> None:
    found = standings(no_clipping=BARE, x=RAISED)
    assert found.gain("x", NONE) == pytest.approx(interval([0.1, 0.105, 0.11]))
    assert found.gain("x", NONE, "c") == pytest.approx(interval([-0.5, -0.4, -0.6]))
    # One that was given up early is compared over the seeds that it has.
    found.values["x"].pop(3)
    assert found.gain("x", NONE) == pytest.approx(interval([0.1, 0.105]))


def test_errors_of_rounding_are_no_interval() -> None:
    found = standings(no_clipping=[[23 / 24] * 3, [19 / 24] * 3], x=[[0.625] * 3, [11 / 24] * 3])
    assert found.against("x") == "-0.333 ± 0"
    assert found.against("x", "c") == "-0.333 ± 0"


def test_ten_sites_and_seven_settings_fit_a_narrow_terminal() -> None:
    sites = [f"university-hospital-{n}" for n in range(10)]
    names = [NONE, AS_IS, *(f"update.adaptive{n}" for n in range(5))]
    values = {
        name: {seed: dict.fromkeys(sites, 0.8 + 0.01 * i + 0.013 * i * seed) for seed in (1, 2)}
        for i, name in enumerate(names)
    }
    found = Standings("accuracy", True, sites, sites[1:], values)
    found.ended[names[-1]] = "it diverged"
    file = io.StringIO()
    console = Console(file=file, width=80)
    ranking, by_site, every = found.tables()
    for table in (ranking, by_site):
        console.print(drawn(table))
    text = file.getvalue()
    assert "…" not in text
    for word in (*names, "2, given up", "+0.029 ± 0.083", f"{sites[0]} (not"):
        assert word in text
    assert [len(table["rows"]) for table in (ranking, by_site, every)] == [7, 10, 7]
    only = Standings("accuracy", True, sites, sites, {NONE: values[NONE]}).tables()[1]
    assert (only["heads"], only["rows"][0][1:]) == (["Site", NONE, "Difference"], ["0.8", "-"])


def test_what_is_hopeless_is_given_up_and_why() -> None:
    low = [[a - 0.3, b - 0.3 - a / 100, 1.0] for a, b, _ in BARE]
    same = [[a - 0.3, b - 0.3, 1.0] for a, b, _ in BARE]
    one = [[a - 0.3, b + 0.1, 1.0] for a, b, _ in BARE]
    lost = [[NAN, 0.5, 0.5]] * 2
    found = standings(no_clipping=low, x=RAISED, low=low, one=one, same=same, lost=lost)
    why = found.give_up()
    assert set(why) == {"low", "lost"}
    assert "it diverged with seed 1, 2" in why["lost"]
    assert "after 3 seeds, x is better at each site" in why["low"]
    assert found.ranking() == ["x", "one", "same", NONE, "low", "lost"]
    assert found.give_up() == {}


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        ({"loss": 1.0, "precision": 0.5}, ("loss", False)),
        ({"loss": 1.0, "f-score": 0.5, "accuracy": 0.5}, ("accuracy", True)),
        ({"loss": 1.0, "mse": 0.5}, ("loss", False)),
        ({"loss": 1.0, "r2": 0.5}, ("r2", True)),
    ],
)
def test_what_sites_are_judged_by(metrics: dict[str, float], wanted: Any) -> None:
    assert judged_by(metrics) == wanted


def test_compare_names_the_worst_site(tmp_path: Path) -> None:
    for seed in (1, 2):
        large_run(tmp_path / "runs" / f"seed-{seed}", 4, 3, seed=seed)
    report = read_report(tmp_path / "runs")
    worst = [by_site(report, run)["client-002"]["accuracy"] for run in report.experiments]
    (setting,) = json.loads(call("compare", tmp_path / "runs", "--json").stdout)["settings"]
    assert setting["worst"].startswith(f"client-002: accuracy {np.mean(worst):.3g} ± ")
    assert setting["worst"] in call("compare", tmp_path / "runs").stdout


# -- what is run --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("aggregator", "client", "server", "left", "clipped"),
    [
        ('"averaging"', "[]", "[]", (["no-op"], ["no-op"], "averaging"), False),
        (
            '"clipped-averaging"',
            '[["norm-clip", {max_norm = 1.0}], "momentum", "zscore-clip", "update-clip-client"]',
            '["update-clip-server", "adam"]',
            (
                ["no-op", "momentum"],
                ["no-op", "adam"],
                {"name": "averaging", "steps_weighted": False},
            ),
            True,
        ),
        (
            '{name = "clipped-averaging", weights = "steps", max_norm = 1.0}',
            '["value-clip", ["mad-clip", {shared = true}]]',
            '["mad-clip-server", ["l2-global-clipping", {max_norm = 1.0}]]',
            (["value-clip", "no-op"], ["no-op"], {"name": "averaging", "steps_weighted": True}),
            True,
        ),
    ],
)
def test_no_clipping_is_the_file_with_its_clippers_by_norm_measuring_only(
    aggregator: str, client: str, server: str, left: Any, clipped: bool
) -> None:
    text = f"""# kept
[optim]
aggregator = {aggregator}
[optim.client_opt]
lrate = 0.1
modules = {client}
[optim.server_opt]
lrate = 1.0
modules = {server}
"""
    bare, had = unclipped(text)
    optim = tomllib.loads(bare)["optim"]
    found = *(optim[side]["modules"] for side in ("client_opt", "server_opt")), optim["aggregator"]
    assert (found, had) == (left, clipped)
    assert bare.startswith("# kept")
    assert unclipped(bare) == (bare, False)


def test_dp_sgd_is_refused() -> None:
    text = "[optim.client_opt]\nlrate = 0.1\nmodules = [%s]\n"
    with pytest.raises(ValueError, match="privacy calibrate"):
        unclipped(text % '["sample-clip", {max_norm = 1.0}]')


def test_a_bound_without_noise_takes_no_noise_out() -> None:
    server = '["update-clip-server", {noise_multiplier = 2.0, expected_clients = 3}]'
    text = f"""[optim]
aggregator = "clipped-averaging"
client_opt = {{lrate = 0.1, modules = ["update-clip-client"]}}
server_opt = {{lrate = 1.0, modules = [{server}]}}
"""
    adaptive = {"aggregator": ("clipped-averaging", {}), "server_opt": ("update-clip-server", {})}
    with pytest.raises(ValueError, match=r"it has noise, and update\.adaptive has none"):
        rewritten(text, Proposal("update.adaptive", adaptive))
    kept = rewritten(text, Proposal("step.fixed", {"client_opt": ("norm-clip", {"max_norm": 1.0})}))
    assert server in kept
    assert "noise" not in rewritten(
        text.replace(server, '"update-clip-server"'), Proposal("update.adaptive", adaptive)
    )


@pytest.mark.slow
def test_beside_noise_what_would_not_run_is_left_out(odd: Path) -> None:
    noisy = '[["update-clip-server", {noise_multiplier = 4.0, expected_clients = 3, delta = 1e-3}]]'
    text = odd.read_text().replace('"averaging"', '"clipped-averaging"')
    text = re.sub(r"(client_opt\]\n(?:.*\n)*?modules = )\[\]", r'\1["update-clip-client"]', text)
    odd.write_text(re.sub(r"(server_opt\]\n(?:.*\n)*?modules = )\[\]", rf"\1{noisy}", text))
    done = call("tune", odd, "--seeds", 2, "--rounds", 3, "--jobs", 2)
    assert done.exit_code == 0, done.stderr
    assert "step.shared is not tried: step.shared would not run: [optim.server_opt]" in done.stderr
    assert "update.adaptive is not tried: it has noise, and" in done.stderr
    assert "as configured" in done.stdout
    wrong = call("tune", odd, "--seeds", 2, "--rounds", 3, "--jobs", 2, "--sites", "north")
    assert "there is no site 'north' (there are: a, b, c)" in wrong.stderr


@pytest.fixture
def odd(write: Any) -> Path:  # noqa: F811
    """Three sites, of which c has another unit in all of its data."""
    changes = {"aggregator": '"averaging"', "client": "[]", "server": "[]", "rounds": 4}
    file: Path = write(training="n_epoch = 1", port=free_port(), **changes)
    for part in ("train", "valid"):
        data = file.parent / "data" / "c" / f"{part}_data.npy"
        np.save(data, np.load(data) * 100)
    return file


@pytest.mark.slow
def test_tune_ranks_writes_and_goes_on_where_it_stopped(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = sweep.run, []

    def run(planned: Any, told: Any, command: str) -> None:
        started.append(planned)
        if len(started) == 5:
            raise KeyboardInterrupt
        real(planned, told, command)

    monkeypatch.setattr(sweep, "run", run)
    words = ["tune", odd, "--seeds", 2, "--jobs", 2]
    interrupted = call(*words)
    assert interrupted.exit_code == 130, interrupted.stderr
    assert "goes on from here" in interrupted.stderr
    monkeypatch.setattr(sweep, "run", lambda *args: (started.append(args[0]), real(*args))[1])
    done = call(*words, "--html", odd.with_name("page.html"))
    assert done.exit_code == 0, done.stderr
    assert "with norms unlike those of the others" in done.stdout
    assert re.search(r"Not counted: c\b", done.stdout)
    assert re.search(r"\d settings \(no clipping, .*\) with 2 seeds each, 2 runs", done.stderr)
    assert re.search(r"at most about 0:\d\d:\d\d from here", done.stderr)
    assert " seeds). " in odd.with_name("page.html").read_text("utf-8")
    # Nothing is run a second time, and nothing but what is shown decides.
    before = len(started)
    again = call(*words, "--json", "--write", "--sites", "a,b")
    facts = json.loads(again.stdout.partition("\nwrote")[0])
    assert len(started) == before
    assert facts["counted"] == ["a", "b"]
    assert {len(setting["seeds"]) for setting in facts["settings"]} == {2}
    none = next(setting for setting in facts["settings"] if setting["name"] == NONE)
    folders = [odd.parent / "config-tune" / "no-clipping" / f"seed-{seed}" for seed in (1, 2)]
    wanted = [by_site(read_report(folder), "simulated")["a"]["accuracy"] for folder in folders]
    assert none["sites"]["a"]["mean"] == pytest.approx(np.mean(wanted))
    text = odd.read_text()
    if facts["winner"]:
        assert check_config(odd).ok
        assert f"wrote {facts['winner']}" in again.stdout
    else:
        assert "clip" not in text
    assert AS_IS not in {setting["name"] for setting in facts["settings"]}
    assert "there is no site 'aa'" in call(*words, "--sites", "aa").stderr


@pytest.mark.slow
def test_nodes_are_run_over_websockets_and_their_own_metrics_are_read(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"client_opt": ("norm-clip", {"max_norm": 1.0})}
    one = Advice("x", proposals=[Proposal("step.fixed", lines)])
    monkeypatch.setattr("fedclip.tools.tune.advised", lambda report, experiment: one)
    done = call("tune", odd, "--seeds", 2, "--rounds", 2, "--jobs", 2, "--nodes", "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    folder = odd.parent / "config-tune-nodes" / "no-clipping" / "seed-1"
    assert (folder / "a" / "metrics.csv").is_file()
    assert set(facts["sites"]) == {"a", "b", "c"}
    assert {setting["name"] for setting in facts["settings"]} == {NONE, "step.fixed"}
    # What is to be typed judges these very runs.
    monkeypatch.setattr(Standings, "winner", "step.fixed")
    words = "--seeds 2 --rounds 2 --nodes --sites a,b"
    assert f"{words} --write\n" in call("tune", odd, *words.split()).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", 1], "Invalid value"),
        (["nowhere.toml"], "does not exist"),
    ],
)
def test_what_can_not_be_tuned_is_a_sentence(words: list[Any], said: str) -> None:
    result = call("tune", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_seed_decides_what_torch_draws() -> None:
    torch = pytest.importorskip("torch")
    draw_from(3)
    first = torch.rand(2)
    draw_from(3)
    assert torch.equal(torch.rand(2), first)
