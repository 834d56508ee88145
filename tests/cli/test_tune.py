# SPDX-License-Identifier: Apache-2.0
"""`fedclip tune`, `compare` and `demo`: settings over seeds, ranked by the metric of each site."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkouts import ROOT
from cli.test_simulate import in_another_unit, write  # noqa: F401
from helpers import free_port
from report_runs import call, large_run

from fedclip.cli import projects as demo
from fedclip.cli import running
from fedclip.cli.check.configuration import check_config
from fedclip.cli.projects import SITES, pulls, write_data
from fedclip.cli.projects import demo as run_demo
from fedclip.cli.reporting import AS_IS, NONE, Ranking, interval
from fedclip.cli.reporting import shown as in_words
from fedclip.cli.running import MARK, Planned
from fedclip.cli.suggest import rewritten
from fedclip.cli.tune import Tuning, unclipped
from fedclip.errors import ToolError
from fedclip.report import read_report
from fedclip.report.findings import Proposal
from fedclip.report.results import result_of

pytestmark = pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning")


CLIPPED = """# kept
[optim]
aggregator = {name = "clipped-averaging", weights = "steps", max_norm = 1.0}
[optim.client_opt]
lrate = 0.1
modules = [["norm-clip", {max_norm = 1.0}], "momentum", ["mad-clip", {shared = true}], "value-clip"]
[optim.server_opt]
lrate = 1.0
modules = ["update-clip-server", "adam", ["l2-global-clipping", {max_norm = 1.0}]]
"""


def test_no_clipping_is_the_file_with_its_clippers_by_norm_measuring_only() -> None:
    bare, had = unclipped(CLIPPED)
    optim = tomllib.loads(bare)["optim"]
    assert had
    assert optim["client_opt"]["modules"] == ["no-op", "momentum", "value-clip"]
    assert optim["server_opt"]["modules"] == ["no-op", "adam"]
    assert optim["aggregator"] == {"name": "averaging", "steps_weighted": True}
    assert bare.startswith("# kept")
    assert unclipped(bare) == (bare, False)
    with pytest.raises(ValueError, match="privacy calibrate"):
        unclipped(CLIPPED.replace('"momentum"', '["sample-clip", {max_norm = 1.0}]'))


def test_a_bound_without_noise_takes_no_noise_out() -> None:
    server = '["update-clip-server", {noise_multiplier = 2.0, expected_clients = 3}]'
    text = f"""[optim]
aggregator = "clipped-averaging"
client_opt = {{lrate = 0.1, modules = ["update-clip-client"]}}
server_opt = {{lrate = 1.0, modules = [{server}]}}
"""
    adaptive = {"aggregator": ("clipped-averaging", {}), "server_opt": ("update-clip-server", {})}
    with pytest.raises(ValueError, match=r"its server adds noise, and update\.adaptive adds none"):
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
    commands: set[str] = set()
    interrupts = [True]

    def played(planned: Planned, tell: Any, command: str) -> None:
        started.append((planned.label, planned.seed))
        commands.add(command)
        if len(started) > 3 and interrupts:
            raise KeyboardInterrupt
        large_run(planned.folder, 3, 3, seed=planned.seed)
        (planned.folder / "config.toml").write_text(planned.text)
        tell(planned.rounds)
        (planned.folder / MARK).write_bytes(planned.text.encode())

    monkeypatch.setattr(running, "run_one", played)
    words = ["tune", config, "norm-clip.max_norm=1.5,3.0", "--seeds", 2, "--jobs", 1]
    interrupted = call(*words)
    assert interrupted.exit_code == 130
    assert "continues from here" in interrupted.stderr
    interrupts.clear()
    started.clear()
    result = call(*words, "--write")
    assert result.exit_code == 0, result.stderr
    assert started == [("max_norm=3.0", 1), ("max_norm=1.5", 2), ("max_norm=3.0", 2)]
    assert "was not changed" in result.stderr
    # Seeds that come to the same are no seeds: then there is one run of each.
    (config.with_name("config-tune") / "no-clipping").rename(config.with_name("other"))
    monkeypatch.setattr(
        running, "run_one", lambda plan, *more: played(plan._replace(seed=1), *more)
    )
    started.clear()
    alike = call(*words[:3], "--seeds", 4, "--jobs", 1, "--rounds", 6)
    assert alike.exit_code == 0, alike.stderr
    assert [label for label, _ in started] == [NONE, NONE, "max_norm=1.5", "max_norm=3.0"]
    assert "No winner: the first seeds of no clipping gave equal results" in alike.stdout
    monkeypatch.setattr(running, "run_one", played)
    started.clear()
    assert call(*words).exit_code == 0
    # Another configuration is another run, and other seeds are not mixed in.
    call(*words, "--rounds", 7)
    assert len(started) == 10
    out = config.with_name("config-tune")
    assert call("compare", out).stdout.count("max_norm=") >= 2
    assert commands == {"simulate"}
    call(*words, "--nodes")
    assert commands == {"simulate", "quickrun"}
    # A winner is written as it was named.
    monkeypatch.setattr(Ranking, "winner", "max_norm=3.0")
    done = call(*words, "--write")
    assert "wrote max_norm=3.0" in done.stdout
    assert "{max_norm = 3.0}" in config.read_text().replace("{ ", "{").replace(" }", "}")


@pytest.mark.slow
def test_unfit_for_noise_what_would_not_run_is_left_out(odd: Path) -> None:
    noisy = '[["update-clip-server", {noise_multiplier = 4.0, expected_clients = 3, delta = 1e-3}]]'
    text = odd.read_text().replace('"averaging"', '"clipped-averaging"')
    text = re.sub(r"(client_opt\]\n(?:.*\n)*?modules = )\[\]", r'\1["update-clip-client"]', text)
    odd.write_text(re.sub(r"(server_opt\]\n(?:.*\n)*?modules = )\[\]", rf"\1{noisy}", text))
    done = call("tune", odd, "--seeds", 2, "--rounds", 3, "--jobs", 2)
    assert done.exit_code == 0, done.stderr
    assert "step.shared is not tried: step.shared would not run: [optim.server_opt]" in done.stderr
    assert "update.adaptive is not tried: its server adds noise" in done.stderr
    assert "as configured" in done.stdout
    wrong = call("tune", odd, "--seeds", 2, "--rounds", 3, "--jobs", 2, "--sites", "north")
    assert "there is no site 'north' (there are: a, b, c)" in wrong.stderr


@pytest.fixture
def odd(write: Any) -> Path:  # noqa: F811
    """Three sites, of which c has another unit in all of its data."""
    changes = {"aggregator": '"averaging"', "client": "[]", "server": "[]", "rounds": 4}
    file: Path = write(training="n_epoch = 1", port=free_port(), **changes)
    in_another_unit(file.parent / "data" / "c")
    return file


@pytest.mark.slow
def test_tune_ranks_writes_and_runs_nothing_twice(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = running.run_one, []
    words = ["tune", odd, "--seeds", 2, "--jobs", 2]
    monkeypatch.setattr(running, "run_one", lambda *args: (started.append(args[0]), real(*args))[1])
    done = call(*words)
    assert done.exit_code == 0, done.stderr
    assert "Not counted, as outliers: c." in done.stdout
    assert re.search(r"\d settings with 2 seeds each: no clipping, ", done.stderr)
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


# -- the demo -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_it_trains_in_three_ways_and_shows_what_came_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder, rounds = tmp_path / "demo", 4
    ranking = run_demo(folder, rounds, seeds=2, bound=0.7)
    shown, told = capsys.readouterr()

    # The table is of this run: its numbers are those of the servers' files.
    last = {
        (name, node): [
            metrics(folder / name / f"seed-{seed}" / node, rounds)[-1] for seed in range(2)
        ]
        for name in ranking.results
        for node in ("server", *SITES)
    }
    fixed = accuracies(last, "fixed-bound")
    for name in ranking.results:
        for seed in range(2):
            assert check_config(folder / name / f"seed-{seed}").ok
            report = read_report(folder / name / f"seed-{seed}")
            assert {row.record.round for row in report.select(node="site-a")} == {1, 2, 3, 4}
        # Another seed is another split, from an untrained model; another way has the same splits.
        assert len({row["loss"] for row in last[name, "server"]}) == 2
        means = accuracies(last, name)
        assert ranking.mean(name) == pytest.approx(interval(means.tolist()))
        assert in_words(*ranking.mean(name)) in shown
        differences = interval((means - fixed).tolist())
        assert ranking.gain(name, "fixed-bound") == pytest.approx(differences, abs=1e-9)
    # A site is named, and what came out there; the one bar never starts again.
    (site, share) = re.findall(
        r"With the adaptive bound, the lowest site is (\S+): accuracy (\S+)%", shown
    )[0]
    found = {
        one: np.mean([float(row["accuracy"]) for row in last["adaptive-bound", one]])
        for one in SITES
    }
    assert found[site] == min(found.values()) == pytest.approx(float(share) / 100, abs=1e-3)
    assert "6 federations train for 4 rounds" in shown
    done = [int(number) for number in re.findall(r"^demo: (\d+) of 24 rounds done", told, re.M)]
    assert done == sorted(set(done))
    assert done[-1] == 24
    assert len(told.splitlines()) == len(done)

    # Clipping matters in it.
    for name in ("fixed-bound", "adaptive-bound"):
        assert ranking.mean(name)[0] > ranking.mean("no-clipping")[0]
    limits = {
        row.record.limit for row in read_report(folder / "fixed-bound").select(node="seed-0/site-a")
    }
    assert limits == {0.7}

    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The demo may be run again in its folder.
    demo.prepare(folder)


def accuracies(last: dict[tuple[str, str], Any], way: str) -> Any:
    found = [[float(row["accuracy"]) for row in last[way, site]] for site in SITES]
    return np.mean(found, axis=0)


def metrics(folder: Path, rounds: int) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == rounds
    return rows


@pytest.mark.soak
def test_the_bound_comes_down_to_the_majority_as_the_page_says(tmp_path: Path) -> None:
    demo.prepare(tmp_path)
    write_data(tmp_path / "data" / "seed-0")
    planned = demo.planned(tmp_path, "adaptive-bound", 0, 30, 1.0)
    assert not demo.run_all([planned], "quickrun", 1, lambda done, text: None)
    (found,) = pulls(read_report(planned.folder.parent))
    assert found[:2] == pytest.approx([1, 1])
    assert all(1.2 < pull < 2.8 for pull in found[2:10])
    assert all(pull < 1.5 for pull in found[16:])
    assert np.median(found[20:]) == pytest.approx(1.0, abs=0.1)


@pytest.mark.soak
def test_the_page_has_the_numbers_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    ranking = run_demo(tmp_path / "demo")
    for way, row in {
        "no-clipping": "no clipping",
        "fixed-bound": "fixed bound 1",
        "adaptive-bound": "adaptive bound",
    }.items():
        found = re.search(rf"^\| {row} \| ([\d.]+) % ± ([\d.]+) % \|", page, re.M)
        assert found is not None
        said = [float(number) / 100 for number in found.groups()]
        assert ranking.mean(way) == pytest.approx(said, abs=0.01)
    gain = [100 * (number or 0.0) for number in ranking.gain("adaptive-bound", "fixed-bound")]
    assert "is 3.0 ± 1.6 points above" in page
    assert gain == pytest.approx([3.0, 1.6], abs=0.3)
    shown = capsys.readouterr().out
    for said in ("site-b", "4.6 times as hard", "and 1.1 times"):
        assert said in shown
        assert said.removeprefix("and ") in page


def test_it_does_not_write_into_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ToolError, match="is not empty"):
            run_demo(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_client_that_fails_ends_all_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(folder: Path, seed: int) -> None:
        write_data(folder, seed)
        (folder / "site-b" / "train_data.npy").write_bytes(b"no array")

    monkeypatch.setattr(demo, "write_data", torn)
    with pytest.raises(ToolError, match=r"^no-clipping, seed 0, failed: \w+Error: "):
        run_demo(tmp_path / "demo", seeds=1)
