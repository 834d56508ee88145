# SPDX-License-Identifier: Apache-2.0
"""`fedclip suggest`: from the norms of a run to lines of TOML."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from cli.test_advice import a_run, advice_of, odd
from cli.test_check import GOOD
from report_runs import Node, call

from fedclip.cli.check.configuration import check_config
from fedclip.report import read_report

CONFIG = "# a comment on top\n" + GOOD.replace(
    '["norm-clip"]', '[\n  "no-op",       # only looks\n  ["momentum", { beta = 0.9 }],\n]'
).replace('"averaging"', '"averaging"   # one weight for each')


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
    found = {proposal.name: proposal for proposal in advice_of(looked).proposals}
    assert set(found) == {
        *("step.fixed", "step.learnt", "step.shared", "update.fixed", "update.adaptive")
    }
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
        ("value-clip", [1.0] * 40, "the norms of steps were not measured"),
    ],
)
def test_too_little_is_said(tmp_path: Path, module: str, norms: list[float], words: str) -> None:
    spec = ["value-clip", {"max_value": 1.0}] if module == "value-clip" else module
    Node(tmp_path, [spec]).round(norms)
    result = call("suggest", tmp_path)
    assert result.exit_code == 0
    assert words in " ".join(result.stdout.split())


def test_with_noise_nobody_is_asked_to_measure(tmp_path: Path) -> None:
    Node(tmp_path / "a", [["value-clip", {"max_value": 1.0}]]).round([1.0] * 40)
    noise = {"noise_multiplier": 2.0, "expected_clients": 3, "delta": 1e-3}
    server = Node(tmp_path / "server", [["update-clip-server", noise]])
    server.checkpointer.save_optimizer(server.optimizer, timestamp="01")
    shown = call("suggest", tmp_path).stdout
    assert "plan the limit with" in " ".join(shown.split())
    assert "no-op" not in shown


@pytest.mark.parametrize("name", ["step.fixed", "step.shared", "update.adaptive"])
def test_a_proposal_is_written_and_the_rest_stays(looked: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    result = call("suggest", looked, "--use", name, "--write", file)
    assert result.exit_code == 0, result.stderr
    text = file.read_text()
    assert check_config(file).ok
    for kept in ("# a comment on top", 'momentum", { beta = 0.9 }', "[run.training]\n"):
        assert kept in text
    if name != "update.adaptive":
        assert "# one weight for each" in text
    assert "# only looks" in text
    assert [p.name for p in tmp_path.iterdir() if "fedclip" in p.name] == []


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("x = [", "step.fixed", "cannot be changed"),
        ('client_opt = "other.toml"\n', "step.fixed", "in another file"),
        ("client_opt = 0.1\n", "step.fixd", "'step.fixd'; did you mean 'step.fixed'?"),
        ('client_opt = {lrate = 0.1, modules = "no-op"}\n', "step.fixed", "must be a list"),
    ],
)
def test_what_can_not_be_written_is_a_sentence(
    looked: Path, tmp_path: Path, text: str, name: str, words: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    result = call("suggest", looked, "--use", name, "--write", file)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr
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


def test_the_first_one_is_written_and_a_name_is_checked(looked: Path, tmp_path: Path) -> None:
    folder = looked.rename(tmp_path / "my run")
    said = call("suggest", folder).stdout.splitlines()[-1]
    _, _, command = said.partition("fedclip ")
    (tmp_path / "config.toml").write_text(CONFIG)
    words = [tmp_path / w if w == "config.toml" else w for w in shlex.split(command)]
    assert call(*words).exit_code == 0
    text = (tmp_path / "config.toml").read_text()
    assert "norm-clip" in text
    assert "server_opt" not in text
    wrong = call("suggest", folder, "--use", "step.fixd")
    assert wrong.exit_code == 1
    assert "did you mean 'step.fixed'?" in wrong.stderr


def test_what_will_not_help_is_written_by_name_only(tmp_path: Path) -> None:
    a_run(tmp_path, odd(1.0), odd(1.0))
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    refused = call("suggest", tmp_path, "--write", file)
    assert (refused.exit_code, file.read_text()) == (1, CONFIG)
    assert "name it: --use NAME" in refused.stderr
    shown = call("suggest", tmp_path).stdout
    assert "To write it" not in shown
    assert "To see it in full:  --use update.fixed" in shown.splitlines()[-1]
    assert call("suggest", tmp_path, "--write", file, "--use", "step.learnt").exit_code == 0
