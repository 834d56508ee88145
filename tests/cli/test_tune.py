# SPDX-License-Identifier: Apache-2.0
"""`fedclip tune`, `compare` and `demo`: settings over seeds, ranked by the metric of each site."""

import csv
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from checkouts import ROOT
from cli.test_simulate import in_another_unit, write  # noqa: F401
from helpers import free_port
from report_runs import call, large_run, sentence

from fedclip.cli import projects as demo
from fedclip.cli import running
from fedclip.cli.check.configuration import check_config
from fedclip.cli.projects import SITES, write_data
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
    text = CLIPPED.replace('"update-clip-server"', server)
    parts = {"aggregator": ("clipped-averaging", {}), "server_opt": ("update-clip-server", {})}
    adaptive = Proposal("update.adaptive", parts)
    with pytest.raises(ValueError, match=r"its server adds noise, and update\.adaptive adds none"):
        rewritten(text, adaptive)
    kept = rewritten(text, Proposal("step.fixed", {"client_opt": ("norm-clip", {"max_norm": 1.0})}))
    assert server in kept
    assert "noise" not in rewritten(CLIPPED, adaptive)


USUAL = {"training": "n_epoch = 1", "aggregator": '"averaging"', "server": "[]"}


@pytest.fixture
def config(write: Any) -> Any:  # noqa: F811
    """Three sites whose steps are clipped."""
    return write(port=free_port(), client='[["norm-clip", { max_norm = 5.0 }]]', **USUAL)


def test_each_named_value_is_run_with_each_seed(config: Path) -> None:
    settings = ("optim.client_opt.lrate=0.1,0.5", "norm-clip.max_norm=1.5,3")
    runs = Tuning(config, config.with_name("out"), 2, None, "simulate", settings).runs
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
def test_a_wrong_setting_is_a_sentence(config: Path, setting: str, words: str) -> None:
    """Before anything runs."""
    assert words in sentence("tune", config, setting).replace("\\", "")


def test_runs_go_on_where_they_stopped(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (interrupted.exit_code, "continues from here" in interrupted.stderr) == (130, True)
    interrupts.clear()
    started.clear()
    result = call(*words, "--write")
    assert result.exit_code == 0, result.stderr
    assert started == [("max_norm=3.0", 1), ("max_norm=1.5", 2), ("max_norm=3.0", 2)]
    assert "was not changed" in result.stderr
    # Seeds that come to the same are no seeds: then there is one run of each.
    (config.with_name("config-tune") / "no-clipping").rename(config.with_name("other"))
    started.clear()
    with monkeypatch.context() as patch:
        patch.setattr(running, "run_one", lambda plan, *x: played(plan._replace(seed=1), *x))
        alike = call(*words[:3], "--seeds", 4, "--jobs", 1, "--rounds", 6)
    assert alike.exit_code == 0, alike.stderr
    assert [label for label, _ in started] == [NONE, NONE, "max_norm=1.5", "max_norm=3.0"]
    assert "No winner: the first seeds of no clipping gave equal results" in alike.stdout
    started.clear()
    assert call(*words).exit_code == 0
    # Another configuration is another run, and other seeds are not mixed in.
    call(*words, "--rounds", 7)
    assert len(started) == 10
    assert call("compare", config.with_name("config-tune")).stdout.count("max_norm=") >= 2
    assert commands == {"simulate"}
    call(*words, "--nodes")
    assert commands == {"simulate", "quickrun"}
    monkeypatch.setattr(Ranking, "winner", "max_norm=3.0")
    assert "wrote max_norm=3.0" in call(*words, "--write").stdout
    assert "{max_norm = 3.0}" in config.read_text().replace("{ ", "{").replace(" }", "}")


@pytest.mark.slow
def test_unfit_for_noise_what_would_not_run_is_left_out(odd: Path, write: Any) -> None:  # noqa: F811
    noisy = '[["update-clip-server", {noise_multiplier = 4.0, expected_clients = 3, delta = 1e-3}]]'
    words = ["tune", write(server=noisy, training="n_epoch = 1", port=free_port())]
    done = call(*words, "--seeds", 2, "--rounds", 3, "--jobs", 2)
    assert done.exit_code == 0, done.stderr
    assert "step.shared is not tried: step.shared would not run: [optim.server_opt]" in done.stderr
    assert "update.adaptive is not tried: its server adds noise" in done.stderr
    assert "as configured" in done.stdout


@pytest.fixture
def odd(write: Any) -> Any:  # noqa: F811
    """Three sites, of which c has another unit in all of its data."""
    file = write(port=free_port(), client="[]", rounds=4, **USUAL)
    in_another_unit(file.parent / "data" / "c")
    return file


@pytest.mark.slow
def test_tune_ranks_writes_and_runs_nothing_twice(odd: Path) -> None:
    words = ["tune", odd, "--seeds", 2, "--jobs", 2]
    with mock.patch.object(running, "run_one", side_effect=running.run_one) as runs:
        done = call(*words)
        assert done.exit_code == 0, done.stderr
        assert "Not counted, as outliers: c." in done.stdout
        assert re.search(r"\d settings with 2 seeds each: no clipping, ", done.stderr)
        # Nothing is run a second time, and nothing but what is shown decides.
        before = runs.call_count
        again = call(*words, "--json", "--write", "--sites", "a,b")
        assert runs.call_count == before > 0
    facts = json.loads(again.stdout.partition("\nwrote")[0])
    assert facts["counted"] == ["a", "b"]
    settings = {setting["name"]: setting for setting in facts["settings"]}
    assert {len(setting["seeds"]) for setting in settings.values()} == {2}
    folder = odd.parent / "config-tune" / "no-clipping"
    reports = [read_report(folder / f"seed-{seed}") for seed in (1, 2)]
    wanted = [result_of(report, "simulated").sites["a"]["accuracy"] for report in reports]
    assert settings[NONE]["sites"]["a"]["mean"] == pytest.approx(np.mean(wanted))
    if facts["winner"]:
        assert check_config(odd).ok
        assert f"wrote {facts['winner']}" in again.stdout
    else:
        assert "clip" not in odd.read_text()
    assert AS_IS not in settings
    wrong = call(*words, "--sites", "north").stderr
    assert "there is no site 'north' (there are: a, b, c)" in wrong


@pytest.mark.slow
def test_the_demo_shows_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder, rounds = tmp_path / "demo", 4
    ranking = run_demo(folder, rounds, seeds=2, bound=0.7)
    shown, told = capsys.readouterr()

    # The table is of this run: its numbers are those of the servers' files.
    def last(way: str, node: str, metric: str = "accuracy") -> list[float]:
        texts = [(folder / way / f"seed-{i}" / node / "metrics.csv").read_text() for i in range(2)]
        tables = [[*csv.DictReader(text.splitlines())] for text in texts]
        assert [len(rows) for rows in tables] == [rounds] * 2
        return [float(rows[-1][metric]) for rows in tables]

    def accuracies(way: str) -> Any:
        return np.mean([last(way, site) for site in SITES], axis=0)

    for name in ranking.results:
        for seed in range(2):
            assert check_config(folder / name / f"seed-{seed}").ok
            report = read_report(folder / name / f"seed-{seed}")
            assert {row.record.round for row in report.select(node="site-a")} == {1, 2, 3, 4}
        # Another seed is another split, from an untrained model; another way has the same splits.
        assert len({*last(name, "server", "loss")}) == 2
        means = accuracies(name)
        assert ranking.mean(name) == pytest.approx(interval(means.tolist()))
        assert in_words(*ranking.mean(name)) in shown
        differences = interval((means - accuracies("fixed-bound")).tolist())
        assert ranking.gain(name, "fixed-bound") == pytest.approx(differences, abs=1e-9)
    # A site is named, and what came out there; the one bar never starts again.
    words = r"With the adaptive bound, the lowest site is (\S+): accuracy (\S+)%"
    ((site, share),) = re.findall(words, shown)
    found = [np.mean(last("adaptive-bound", one)) for one in SITES]
    assert SITES[np.argmin(found)] == site
    assert min(found) == pytest.approx(float(share) / 100, abs=1e-3)
    assert "6 federations train for 4 rounds" in shown
    done = [int(number) for number in re.findall(r"^demo: (\d+) of 24 rounds done", told, re.M)]
    assert done == sorted(set(done))
    assert done[-1] == 24
    assert len(told.splitlines()) == len(done)
    for name in ("fixed-bound", "adaptive-bound"):
        assert ranking.mean(name)[0] > ranking.mean("no-clipping")[0]
    rows_of_a = read_report(folder / "fixed-bound").select(node="seed-0/site-a")
    assert {row.record.limit for row in rows_of_a} == {0.7}
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The demo may be run again in its folder.
    demo.prepare(folder)


@pytest.mark.slow
def test_a_client_that_fails_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(folder: Path, seed: int) -> None:
        write_data(folder, seed)
        (folder / "site-b" / "train_data.npy").write_bytes(b"no array")

    monkeypatch.setattr(demo, "write_data", torn)
    with pytest.raises(ToolError, match=r"^no-clipping, seed 0, failed: \w+Error: "):
        run_demo(tmp_path / "demo", seeds=1)


@pytest.mark.soak
def test_the_page_has_the_numbers_of_the_demo(tmp_path: Path, capsys: Any) -> None:
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    ranking = run_demo(tmp_path / "demo")
    rows = ("no clipping", "fixed bound 1", "adaptive bound")
    for way, row in zip(("no-clipping", "fixed-bound", "adaptive-bound"), rows, strict=True):
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
