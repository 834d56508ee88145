# SPDX-License-Identifier: Apache-2.0
"""`fedclip tune` and `fedclip compare`: settings over seeds, ranked by the metric of each site."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_simulate import write  # noqa: F401
from helpers import free_port
from hypothesis import given
from hypothesis import strategies as st
from report_runs import Node, call, large_run
from rich.console import Console

from fedclip.cli import runner
from fedclip.cli.check.configuration import check_config
from fedclip.cli.editing import rewritten, unclipped
from fedclip.cli.output import ToolError
from fedclip.cli.quickrun import draw_from
from fedclip.cli.ranking import AS_IS, NONE, Ranking, drawn, interval
from fedclip.cli.runner import MARK, Planned
from fedclip.cli.tune import Tuning
from fedclip.report import read_report
from fedclip.report.advice import Advice, Proposal
from fedclip.report.results import Result, result_of

pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning")

NAN = float("nan")


# -- the ranking --------------------------------------------------------------------------------
def standings(metric: str = "accuracy", **values: list[list[float]]) -> Ranking:
    """Return the ranking with these values at a, b and c, seed by seed; c is an outlier."""
    found = {
        name.replace("_", " "): {
            str(seed): Result(
                {
                    site: {"loss": seed * abs(value), metric: value}
                    for site, value in zip("abc", row, strict=True)
                },
                ["c"],
            )
            for seed, row in enumerate(rows, 1)
        }
        for name, rows in values.items()
    }
    return Ranking(found, NONE)


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
        (standings(no_clipping=BARE, x=ODD_ONLY), "", "Nothing is better"),
        (standings(no_clipping=BARE, x=[[0.99, 0.6, 1]] * 3), "x", "than its interval"),
        # Two records more with each seed are no spread, and so no interval.
        (standings(no_clipping=BARE, x=[[a + 0.1, b, 1] for a, b, _ in BARE]), "", "more seeds"),
        (
            standings(no_clipping=BARE, y=RAISED, x=[[a + 0.3, b, 1] for a, b, _ in BARE]),
            "y",
            "y is better than no clipping by more than its interval",
        ),
        (standings("loss", no_clipping=RAISED, x=BARE), "x", "The highest site with it is a, 0.81"),
        # Accuracies may be the same where losses are not.
        (standings(no_clipping=[BARE[0]] * 3, x=RAISED), "x", "than its interval"),
        (
            standings(no_clipping=[*BARE[:2], [NAN] * 3], x=RAISED),
            "x",
            "With no clipping, the model diverged",
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
            "But b does worse by more than the interval.",
        ),
    ],
)
def test_the_answer_is_that_of_the_numbers(found: Ranking, winner: str, words: str) -> None:
    assert (found.winner, words in found.answer()) == (winner, True), found.answer()
    text = json.dumps(found.as_dict(), allow_nan=False)
    assert json.loads(text)["winner"] == winner


def test_seeds_that_draw_nothing_tell_nothing() -> None:
    found = standings(no_clipping=BARE, x=RAISED)
    assert found.winner == "x"
    runs = found.results[NONE]
    found.results[NONE] = dict.fromkeys(runs, runs["1"])
    assert found.winner == ""
    assert "shuffle = true" in found.answer()


def test_differences_are_those_of_the_same_seeds() -> None:
    found = standings(no_clipping=BARE, x=RAISED)
    assert found.gain("x", NONE) == pytest.approx(interval([0.1, 0.105, 0.11]))
    assert found.gain("x", NONE, "c") == pytest.approx(interval([-0.5, -0.4, -0.6]))
    # One that was given up early is compared over the seeds that it has.
    found.results["x"].pop("3")
    assert found.gain("x", NONE) == pytest.approx(interval([0.1, 0.105]))


def test_errors_of_rounding_are_no_interval() -> None:
    found = standings(no_clipping=[[23 / 24] * 3, [19 / 24] * 3], x=[[0.625] * 3, [11 / 24] * 3])
    assert found.against("x") == "-0.333 ± 0"
    assert found.against("x", "c") == "-0.333 ± 0"


def test_ten_sites_and_seven_settings_fit_a_narrow_terminal() -> None:
    sites = [f"university-hospital-{n}" for n in range(10)]
    names = [NONE, AS_IS, *(f"update.adaptive{n}" for n in range(5))]
    values = {
        name: {
            str(seed): Result(
                {site: {"accuracy": 0.8 + 0.01 * i + 0.013 * i * seed} for site in sites},
                sites[:1],
                clipped=0.5,
            )
            for seed in (1, 2)
        }
        for i, name in enumerate(names)
    }
    found = Ranking(values, NONE)
    file = io.StringIO()
    console = Console(file=file, width=80)
    ranking, by_site = found.tables()
    for table in (ranking, by_site):
        console.print(drawn(table))
    text = file.getvalue()
    assert "…" not in text
    for word in (*names, "+0.029 ± 0.083", "50%", f"{sites[0]} (not"):
        assert word in text
    assert [len(table["rows"]) for table in (ranking, by_site)] == [7, 10]
    only = Ranking({NONE: values[NONE]}, NONE).tables()[1]
    assert (only["heads"], only["rows"][0][1:]) == (["Site", NONE, "Difference"], ["0.8", "-"])


def test_what_diverged_or_failed_comes_last() -> None:
    low = [[a - 0.3, b - 0.3 - a / 100, 1.0] for a, b, _ in BARE]
    found = standings(no_clipping=low, x=RAISED, one=BARE, lost=[[NAN, 0.5, 0.5]] * 2)
    found.results["failed"] = {"1": Result()}
    assert found.order() == ["x", "one", NONE, "lost", "failed"]
    assert (found.lost("lost"), found.lost("failed")) == (["1", "2"], ["1"])


def test_the_majority_share_and_balanced_accuracy_stand_next_to_accuracy() -> None:
    rare = [[98.0, 0.0], [2.0, 0.0]]
    run = Result({s: {"accuracy": 0.98} for s in "ab"}, confusions={"a": rare, "b": rare})
    assert run.classes() == (pytest.approx(0.98), 0.5)
    assert "accuracy 0.98 (majority class 0.98, balanced 0.5)" in run.in_words()
    found = Ranking({NONE: {"1": run}, "x": {"1": run}}, NONE)
    assert (
        "The majority class alone gives 0.98; balanced accuracy: no clipping 0.5, x 0.5."
        in (found.tables()[0]["caption"])
    )
    settings: Any = found.as_dict()["settings"]
    assert settings[0]["balanced_accuracy"] == 0.5
    # Of a site without a matrix, or with no records, neither is known.
    assert run._replace(confusions={"a": rare}).classes() is None
    assert run._replace(confusions={"a": rare, "b": [[0.0, 0.0]] * 2}).classes() is None


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=3, max_size=3),
        min_size=1,
    )
)
def test_a_constant_prediction_has_the_accuracy_of_the_majority(
    matrices: dict[str, list[list[int]]],
) -> None:
    counts = {site: np.sum(matrix, axis=1) for site, matrix in matrices.items()}
    run = Result({site: {"accuracy": 0.5} for site in matrices}, confusions=matrices)
    both = run.classes()
    assert (both is None) == any(not count.sum() for count in counts.values())
    if both:
        constant = [np.mean([n[c] / n.sum() for n in counts.values()]) for c in range(3)]
        assert both[0] == pytest.approx(max(constant))
        assert 0.0 <= both[1] <= 1.0


# -- compare ------------------------------------------------------------------------------------
def test_compare_ranks_by_the_sites_that_are_not_outliers(tmp_path: Path) -> None:
    for name, level in (("one", 2.0), ("two", 2.5)):
        for seed in (1, 2):
            large_run(tmp_path / name / f"seed-{seed}", 4, 4, seed=seed, level=level)
    folders = [tmp_path / "one", tmp_path / "two"]
    report = read_report(folders[0])
    runs = [result_of(report, run) for run in report.experiments]
    assert [run.outliers for run in runs] == [["client-003"]] * 2
    facts = json.loads(call("compare", *folders, "--json").stdout)
    assert facts["counted"] == ["client-000", "client-001", "client-002"]
    assert facts["sites"] == [*facts["counted"], "client-003"]
    means = [np.mean([run.sites[s]["accuracy"] for s in facts["counted"]]) for run in runs]
    first = next(setting for setting in facts["settings"] if setting["name"] == "one")
    assert first["mean"] == pytest.approx(np.mean(means))
    assert first["seeds"] == ["seed-1", "seed-2"]
    text = " ".join(call("compare", *folders).stdout.split())
    assert "Not counted, as outliers: client-003." in text
    assert "client-003 (not counted)" in text


def test_without_metrics_of_sites_the_servers_count(tmp_path: Path) -> None:
    Node(tmp_path / "a", ["norm-clip"]).round([0.5])
    Node(tmp_path / "server", []).round([], metrics={"loss": 0.25})
    facts = json.loads(call("compare", tmp_path, "--json").stdout)
    assert (facts["counted"], facts["metric"], facts["higher"]) == (["server"], "loss", False)
    assert facts["settings"][0]["mean"] == 0.25


@pytest.mark.slow
def test_a_seed_that_diverged_is_not_left_out_of_a_mean(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        large_run(tmp_path / "runs" / f"seed-{seed}", 4, 2, seed=seed)
    for file in (tmp_path / "runs" / "seed-2" / "server").glob("metrics*.csv"):
        rows = file.read_text().splitlines()
        rows[-1] = f"{rows[-1].partition(',')[0]},nan,nan"
        file.write_text("\n".join(rows) + "\n")
    shown = call("compare", tmp_path / "runs", "--html", tmp_path / "page.html").stdout
    assert "NaN in 1" in shown
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    (experiment,) = json.loads(data[1], parse_constant=pytest.fail)["experiments"]
    # Neither a mean nor a band of those that are left.
    assert experiment["metrics"]["loss"]["server"][-1] == [4, None]
    assert experiment["metrics"]["loss"]["band"][-1] == [4, None, None]
    (setting,) = json.loads(call("compare", tmp_path / "runs", "--json").stdout)["settings"]
    assert (setting["diverged"], setting["mean"]) == (["seed-2"], None)


def test_the_share_that_was_clipped_is_that_of_clippers(tmp_path: Path) -> None:
    node = Node(tmp_path / "c0", [["norm-clip", {"max_norm": 1.0}], "update-norms"])
    node.round([0.5, 2.0], update=9.0)
    found = result_of(read_report(tmp_path), "")
    assert found.clipped == 0.5


def test_a_run_in_the_folder_of_another_is_compared_with_it(tmp_path: Path) -> None:
    Node(tmp_path / "outer" / "a", ["norm-clip"]).round([0.5])
    Node(tmp_path / "outer" / "inner" / "a", ["norm-clip"]).round([2.0])
    facts = json.loads(
        call("compare", tmp_path / "outer", tmp_path / "outer/inner", "--json").stdout
    )
    clipped = {setting["name"]: setting["clipped"] for setting in facts["settings"]}
    assert clipped == {"outer": 0.0, "inner": 1.0}


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


def tuning(file: Path, *settings: str, seeds: int = 2) -> Tuning:
    return Tuning(file, file.with_name("out"), seeds, None, "simulate", settings)


@pytest.fixture
def config(write: Any) -> Path:  # noqa: F811
    """Three sites whose steps are clipped."""
    client = '[["norm-clip", { max_norm = 5.0 }]]'
    file: Path = write(
        training="n_epoch = 1",
        port=free_port(),
        aggregator='"averaging"',
        client=client,
        server="[]",
    )
    return file


def test_each_named_value_is_run_with_each_seed(config: Path) -> None:
    runs = tuning(config, "optim.client_opt.lrate=0.1,0.5", "norm-clip.max_norm=1.5,3").runs
    assert [*runs] == [NONE, *(f"lrate={a},max_norm={b}" for a in (0.1, 0.5) for b in (1.5, 3))]
    first, _ = runs["lrate=0.1,max_norm=1.5"]
    found = tomllib.loads(first.text)
    assert found["optim"]["client_opt"]["lrate"] == 0.1
    assert found["optim"]["client_opt"]["modules"] == [["norm-clip", {"max_norm": 1.5}]]
    assert first.folder == config.parent / "out" / "lrate=0.1,max_norm=1.5" / "seed-1"
    # The copy finds the same files, and writes to its own folder.
    assert found["model"]["model_file"] == str(config.parent / "model.py")
    assert found["experiment"]["checkpoint"] == str(first.folder)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("client_opt.lrate=0.1", "write optim.client_opt.lrate"),
        ("lrate", "must be KEY=VALUE"),
        ("norm-clp.max_norm=1,2", "did you mean 'norm-clip'"),
        ("nowhere.key=1", "no section and no module 'nowhere'"),
        ("norm-clip.max_norm=1,1", "give each value once"),
        ("norm-clip.max_norm=2.0,-1.0", "max_norm=-1.0 would not run"),
    ],
)
def test_a_wrong_setting_is_a_sentence_before_anything_runs(
    config: Path, setting: str, words: str
) -> None:
    with pytest.raises(ToolError, match=words):
        tuning(config, setting)
    result = call("tune", config, setting)
    assert result.exit_code == 1
    assert words in result.stderr.replace("\\", "")


def test_named_values_are_ranked_and_go_on_where_they_stopped(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int]] = []
    interrupts = [True]

    def played(planned: Planned, tell: Any, command: str) -> None:
        started.append((planned.label, planned.seed))
        if len(started) > 3 and interrupts:
            raise KeyboardInterrupt
        large_run(planned.folder, 3, 3, seed=planned.seed)
        (planned.folder / "config.toml").write_text(planned.text)
        tell(planned.rounds)
        (planned.folder / MARK).write_bytes(planned.text.encode())

    monkeypatch.setattr(runner, "run", played)
    words = ["tune", config, "norm-clip.max_norm=1.5,3.0", "--seeds", 2, "--jobs", 1]
    interrupted = call(*words)
    assert interrupted.exit_code == 130
    assert "continues from here" in interrupted.stderr
    interrupts.clear()
    started.clear()
    result = call(*words, "--write")
    assert result.exit_code == 0, result.stderr
    assert started == [("max_norm=3.0", 1), ("max_norm=1.5", 2), ("max_norm=3.0", 2)]
    assert "was left unchanged" in result.stderr
    # Seeds that come to the same are no seeds: then there is one run of each.
    (config.with_name("config-tune") / "no-clipping").rename(config.with_name("other"))
    monkeypatch.setattr(runner, "run", lambda plan, *more: played(plan._replace(seed=1), *more))
    started.clear()
    alike = call(*words[:3], "--seeds", 4, "--jobs", 1, "--rounds", 6)
    assert alike.exit_code == 0, alike.stderr
    assert [label for label, _ in started] == [NONE, NONE, "max_norm=1.5", "max_norm=3.0"]
    assert "No winner: the first seeds of no clipping came to the same" in alike.stdout
    monkeypatch.setattr(runner, "run", played)
    started.clear()
    assert call(*words).exit_code == 0
    # Another configuration is another run, and other seeds are not mixed in.
    call(*words, "--rounds", 7)
    assert len(started) == 10
    out = config.with_name("config-tune")
    assert call("compare", out).stdout.count("max_norm=") >= 2
    # A winner is written as it was named.
    monkeypatch.setattr(Ranking, "winner", "max_norm=3.0")
    done = call(*words, "--write")
    assert "wrote max_norm=3.0" in done.stdout
    assert "{max_norm = 3.0}" in config.read_text().replace("{ ", "{").replace(" }", "}")


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
    real, started = runner.run, []

    def run(planned: Any, told: Any, command: str) -> None:
        started.append(planned)
        if len(started) == 5:
            raise KeyboardInterrupt
        real(planned, told, command)

    monkeypatch.setattr(runner, "run", run)
    words = ["tune", odd, "--seeds", 2, "--jobs", 2]
    interrupted = call(*words)
    assert interrupted.exit_code == 130, interrupted.stderr
    assert "continues from here" in interrupted.stderr
    monkeypatch.setattr(runner, "run", lambda *args: (started.append(args[0]), real(*args))[1])
    done = call(*words, "--html", odd.with_name("page.html"))
    assert done.exit_code == 0, done.stderr
    assert "Not counted, as outliers: c." in done.stdout
    assert re.search(r"\d settings with 2 seeds each: no clipping, ", done.stderr)
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
    wanted = [
        result_of(read_report(folder), "simulated").sites["a"]["accuracy"] for folder in folders
    ]
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
    monkeypatch.setattr("fedclip.cli.tune.advised", lambda report, experiment: one)
    done = call("tune", odd, "--seeds", 2, "--rounds", 2, "--jobs", 2, "--nodes", "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    folder = odd.parent / "config-tune-nodes" / "no-clipping" / "seed-1"
    assert (folder / "a" / "metrics.csv").is_file()
    assert set(facts["sites"]) == {"a", "b", "c"}
    assert {setting["name"] for setting in facts["settings"]} == {NONE, "step.fixed"}
    # What is to be typed judges these very runs.
    monkeypatch.setattr(Ranking, "winner", "step.fixed")
    words = "--seeds 2 --rounds 2 --nodes --sites a,b"
    assert f"{words} --write\n" in call("tune", odd, *words.split()).stdout


def test_a_seed_decides_what_torch_draws() -> None:
    torch = pytest.importorskip("torch")
    draw_from(3)
    first = torch.rand(2)
    draw_from(3)
    assert torch.equal(torch.rand(2), first)
