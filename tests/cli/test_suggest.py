# SPDX-License-Identifier: Apache-2.0
"""`fedclip suggest`: which limit is advised, why, and the lines of TOML that have it."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_check import GOOD
from declearn.optimizer import Optimizer
from report_runs import Node, call, sentence

from fedclip.cli.check.configuration import check_config
from fedclip.cli.suggest import _least, advised
from fedclip.report import norms, read_report
from fedclip.report.findings import Advice
from fedclip.report.norms import FEW

VALUE = ["value-clip", {"max_value": 1.0}]
CLIENT = '[\n  "no-op",       # only looks\n  ["momentum", { beta = 0.9 }],\n]'
CONFIG = "# a comment on top\n" + GOOD.replace('["norm-clip"]', CLIENT)
CONFIG = CONFIG.replace('"averaging"', '"averaging"   # one weight for each')
CONFIG = CONFIG.replace("[optim.server_opt]\nlrate = 1.0\n", "")


@pytest.fixture
def looked(tmp_path: Path) -> Path:
    """Norms of three clients, of which the last one's are ten times as large, and the server's."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "run"
    modules = ["no-op", "momentum", "update-norms"]
    nodes = {name: Node(folder / name, modules) for name in ("a", "b", "c", "server")}
    for left in reversed(range(25)):
        for name, node in nodes.items():
            scale = 10.0 if name == "c" else 1.0
            norms = scale * rng.lognormal(0, 0.2, 1 if name == "server" else 8)
            # A state has the records of many rounds.
            node.round(norms, update=norms[0], save=left == 0)
    return folder


def test_each_proposal_says_what_it_would_have_clipped_of_each_client(looked: Path) -> None:
    found = {proposal.name: proposal for proposal in advised(read_report(looked), "").proposals}
    names = "step.fixed step.learnt step.shared update.fixed update.adaptive"
    assert set(found) == {*names.split()}
    fixed = found["step.fixed"]
    assert fixed.plugins["client_opt"][1]["max_norm"] == fixed.limit < 2.0
    rows = read_report(looked).select("a", "no-op")
    over = [norm > fixed.limit for row in rows for norm in row.record.norms()]
    assert fixed.shares == {"a": np.mean(over), "b": pytest.approx(0.05, abs=0.03), "c": 1.0}
    # Of three, the one in the middle is within the median.
    assert found["update.adaptive"].shares == {"a": 0.0, "b": 0.0, "c": 1.0}
    assert all(p.what and p.why and p.reveals for p in found.values())


@pytest.mark.parametrize(
    ("module", "norms", "words"),
    [
        ("no-op", [1.0] * 19, "19 norms are too few"),
        ("no-op", [0.0] * 40, "no limit can be chosen"),
        (VALUE, [1.0] * 40, "the norms of steps were not measured"),
    ],
)
def test_too_little_is_said(tmp_path: Path, module: Any, norms: list[float], words: str) -> None:
    Node(tmp_path, [module]).round(norms)
    result = call("suggest", tmp_path)
    assert result.exit_code == 0
    assert words in " ".join(result.stdout.split())


def test_with_noise_nobody_is_asked_to_measure(tmp_path: Path) -> None:
    Node(tmp_path / "a", [VALUE]).round([1.0] * 40)
    noise = {"noise_multiplier": 2.0, "expected_clients": 3, "delta": 1e-3}
    server = Node(tmp_path / "server", [["update-clip-server", noise]])
    server.checkpointer.save_optimizer(server.optimizer, timestamp="01")
    shown = call("suggest", tmp_path).stdout
    assert "plan the limit with" in " ".join(shown.split())
    assert "no-op" not in shown


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "config.toml"


@pytest.mark.parametrize("name", ["step.fixed", "step.shared", "update.adaptive"])
def test_a_proposal_is_written_and_the_rest_stays(looked: Path, file: Path, name: str) -> None:
    result = call("suggest", looked, "--use", name, "--write", file)
    assert result.exit_code == 0, result.stderr
    assert check_config(file).ok
    kept = ["# a comment on top", 'momentum", { beta = 0.9 }', "[run.training]\n", "# only looks"]
    kept += ["# one weight for each"] * (name != "update.adaptive")
    assert all(part in file.read_text() for part in kept)
    assert [p.name for p in file.parent.iterdir() if "fedclip" in p.name] == []


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("x = [", "step.fixed", "cannot be changed"),
        ('client_opt = "other.toml"\n', "step.fixed", "in another file"),
        ("client_opt = 0.1\n", "step.fixd", "'step.fixd'; did you mean 'step.fixed'?"),
        ('client_opt = {lrate = 0.1, modules = "no-op"}\n', "step.fixed", "must be a list"),
    ],
)
def test_no_proposal_is_written(looked: Path, file: Path, text: str, name: str, words: str) -> None:
    file.write_text(text)
    assert words in sentence("suggest", looked, "--use", name, "--write", file)
    assert file.read_text() == text


@pytest.mark.parametrize("inner", ["new", "old"])
def test_of_a_run_in_the_folder_of_another_the_newest_is_taken(looked: Path, inner: str) -> None:
    Node(looked / "simulated" / "z", ["no-op"]).round([1.0])
    os.utime(looked / "simulated" / "z", (0, 4e9 if inner == "new" else 1))
    newest = looked / "simulated" if inner == "new" else looked
    for command in ("suggest", "report"):
        result = call(command, looked, "--json")
        assert result.exit_code == 0
        assert f"this is the newest of 2 runs, in {newest}; the others" in result.stderr
        assert ('"c"' in result.stdout) == (inner == "old")


def test_the_command_that_is_shown_writes_the_first_one(looked: Path, file: Path) -> None:
    folder = looked.rename(file.parent / "my run")
    _, _, command = call("suggest", folder).stdout.splitlines()[-1].partition("fedclip ")
    assert call(*(file if w == file.name else w for w in shlex.split(command))).exit_code == 0
    text = file.read_text()
    assert "norm-clip" in text
    assert "server_opt" not in text


def test_what_will_not_help_is_written_by_name_only(tmp_path: Path, file: Path) -> None:
    a_run(tmp_path, odd(1.0), odd(1.0))
    assert "name it: --use NAME" in sentence("suggest", tmp_path, "--write", file)
    assert file.read_text() == CONFIG
    shown = call("suggest", tmp_path).stdout
    assert "To write it" not in shown
    assert "To see it in full:  --use update.fixed" in shown.splitlines()[-1]
    assert call("suggest", tmp_path, "--write", file, "--use", "step.learnt").exit_code == 0


CLIENTS = [f"site-{letter}" for letter in "abcde"]
Scale = Callable[[int, int], Any]


def a_run(folder: Path, steps: Scale, updates: Scale | None = None, seed: int = 0) -> Advice:
    """Return the advice after ten rounds of eight steps, of scales by round and client."""
    rng, looks = np.random.default_rng(seed), ["no-op", *(["update-norms"] if updates else [])]
    nodes = [Node(folder / name, looks) for name in CLIENTS]
    for round_ in range(1, 11):
        for place, node in enumerate(nodes):
            norms = steps(round_, place) * rng.lognormal(0, 0.3, 8)
            update = updates(round_, place) * rng.lognormal(0, 0.2) if updates else 0.0
            node.round(norms, update=update, save=round_ == 10)
    return advised(read_report(folder), "")


def odd(times: float) -> Scale:
    return lambda round_, place: times if place == 4 else 1.0


def in_round(chosen: int, times: float) -> Scale:
    return lambda round_, place: times if (round_, place) == (chosen, 2) else 1.0


@pytest.mark.parametrize(
    ("steps", "updates", "start", "why"),
    [
        (odd(1.0), odd(1.0), "", "is unlikely to help"),
        (odd(2.5), odd(1.4), "", "is unlikely to help"),
        (odd(100.0), odd(20.0), "step.fixed", "site-e: the norms of its steps are"),
        (odd(1.0), odd(3.0), "update.adaptive", "The norms of the updates of site-e are"),
        (odd(100.0), odd(1.0), "step.fixed", "check its units"),
        (lambda _, place: {4: 100.0, 3: 50.0}.get(place, 1.0), None, "step.fixed", "d are up to"),
        (odd(100.0), None, "step.fixed", "the norms of updates were not measured"),
        (odd(0.01), odd(1.0), "", "times smaller than those of"),
        (in_round(7, 1000.0), odd(1.0), "step.fixed", "site-c: a norm of up to"),
    ],
)
def test_what_comes_first(tmp_path: Path, steps: Scale, updates: Any, start: str, why: str) -> None:
    advice = a_run(tmp_path, steps, updates)
    assert advice.start == start
    assert why in " ".join([advice.answer, *advice.findings])
    first = advice.proposals[0]
    assert first.name == (start or "step.fixed")
    if first.limit is not None:
        # By the median client, whatever the odd one does.
        assert 1.0 < first.limit < 3.0
    else:
        assert 0.5 < first.plugins["server_opt"][1]["start_norm"] < 2.0


def saturated(round_: int, place: int) -> Any:
    """Return scales of steps where two models saturate: one step of eight has a gradient at all."""
    return np.where(np.arange(8) == round_ % 8, 25.0, 1e-3) if place > 2 else 1.0


def spoilt(round_: int, place: int) -> float:
    """Return the scale of steps where a spike at the third client spoils the model for all."""
    return 3e3 if (round_, place) == (5, 2) else 500.0 if round_ > 5 else 1.0


def test_an_outlier_whose_gradients_saturate_is_found_by_its_largest_norms(tmp_path: Path) -> None:
    advice = a_run(tmp_path, saturated, seed=1)
    assert sorted(advice.odd) == ["site-d", "site-e"]
    assert not any("smaller" in text for text in advice.findings)
    first = advice.proposals[0]
    assert (advice.start, first.limit and first.limit > 1.0) == ("step.fixed", True)
    others = [first.shares[name] for name in CLIENTS[:3]]
    assert max(others) <= min(first.shares["site-d"], first.shares["site-e"])


def test_a_limit_against_a_spike_is_that_of_the_rounds_before_it(tmp_path: Path) -> None:
    advice = a_run(tmp_path, spoilt, seed=1)
    first = advice.proposals[0]
    assert (advice.start, 1.0 < (first.limit or 0.0) < 5.0) == ("step.fixed", True)
    assert "site-c" in advice.answer
    assert max(share for name, share in first.shares.items() if name != "site-c") < 0.1


@pytest.mark.parametrize(
    ("loss", "accuracy", "matrix", "said"),
    [
        (0.4, 0.9, [[5, 5], [5, 5]], "Clipping is unlikely to help here"),
        (8.47, 0.9, [[5, 5], [5, 5]], "To see whether a limit helps"),
        (0.4, 0.0, [[0, 5], [5, 0]], "site-c far worse than other clients"),
        (0.4, 0.9, [[9, 1], [0, 0]], "The validation data of site-c has only one class"),
    ],
)
def test_the_metric_of_each_site_is_looked_at(
    tmp_path: Path, loss: float, accuracy: float, matrix: list[list[int]], said: str
) -> None:
    a_run(tmp_path, odd(1.0), odd(1.0))
    server = Node(tmp_path / "server", []).checkpointer
    for name in CLIENTS:
        own = (loss, accuracy, matrix) if name == "site-c" else (0.4, 0.9, [[9, 1], [1, 9]])
        found = {"loss": own[0], "accuracy": own[1], "confusion": np.array(own[2])}
        server.save_metrics(found, f"metrics_{name}", timestamp="1")
    server.save_metrics({"loss": 0.5}, timestamp="1")
    server.save_optimizer(Optimizer(lrate=1.0), timestamp="1")
    advice = advised(read_report(tmp_path), "")
    assert said in " ".join([advice.answer, *advice.findings])
    assert advice.start == ""


def test_a_model_that_has_diverged(tmp_path: Path) -> None:
    a_run(tmp_path, lambda round_, place: 2.0**round_, None)
    Node(tmp_path / "server", []).round([], metrics={"loss": float("nan")})
    advice = advised(read_report(tmp_path), "")
    assert advice.start == "step.fixed"
    assert "has diverged" in advice.answer
    # By the first round: what came later is of no use.
    assert 1.5 < (advice.proposals[0].limit or 0.0) < 3.0


def test_the_page_has_the_thresholds() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "suggest.md").read_text(encoding="utf-8")
    for text in (
        f"by steps is {norms._ODD['step']:g} or more",
        f"by updates is {norms._ODD['update']:g} or more",
        f"(without the number of steps: {norms._ODD_ALONE:g};",
        f"when another is an outlier by steps: {norms._ODD['step']:g})",
        f"at least {norms._SMALL:g} times smaller",
        f"largest norm is {norms._SPIKE:g} times",
        f"fewer than {FEW['step']} norms, or by fewer than {FEW['update']} updates",
    ):
        assert text in page


def test_a_limit_that_clips_others_more_than_the_outliers_does_not_fit() -> None:
    assert _least({"a": 0.1, "odd": 0.2}, ["odd"]) == 0.2
    assert _least({"a": 0.3, "odd": 0.2, "b": 0.0}, ["odd"]) is None
