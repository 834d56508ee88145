# SPDX-License-Identifier: Apache-2.0
"""`fedclip suggest`: from the norms of a run to lines of TOML."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest
from report_runs import Node, call

from fedclip.report import read_report
from fedclip.report.advice import Advice
from fedclip.tools.check import check_config
from fedclip.tools.suggest import advised

CONFIG = """\
# a comment on top

[network]
protocol = "websockets"
host = "127.0.0.1"
port = 8765

[data]

[optim]
aggregator = "averaging"   # one weight for each

[optim.client_opt]
lrate = 0.5
modules = [
  "no-op",       # only looks
  ["momentum", { beta = 0.9 }],
]

[run]
rounds = 5
[run.register]
min_clients = 3
[run.training]
batch_size = 32
"""


def advice_of(folder: Path) -> Advice:
    return advised(read_report(folder), "")


@pytest.fixture
def looked(tmp_path: Path) -> Path:
    """Norms of three clients, of which the last one's are ten times as large, and the server's."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "run"
    nodes = {name: Node(folder / name, ["no-op", "momentum"]) for name in ("a", "b", "c", "server")}
    for _ in range(25):
        for name, node in nodes.items():
            scale = 10.0 if name == "c" else 1.0
            node.round(scale * rng.lognormal(0, 0.2, 1 if name == "server" else 8))
    return folder


def test_each_proposal_says_what_it_would_have_clipped_of_each_client(looked: Path) -> None:
    found = {proposal.name: proposal for proposal in advice_of(looked).proposals}
    assert set(found) == {
        *("step.fixed", "step.learnt", "step.shared"),
        *("update.adaptive", "aggregate.fixed", "aggregate.learnt"),
    }
    fixed = found["step.fixed"]
    assert fixed.plugins["client_opt"][1]["max_norm"] == fixed.limit < 2.0
    rows = [row for row in read_report(looked).rows if row.node == "a"]
    over = [norm > fixed.limit for row in rows for norm in row.record.norms()]
    assert fixed.shares == {"a": np.mean(over), "b": pytest.approx(0.05, abs=0.03), "c": 1.0}
    assert max(found["step.learnt"].shares.values()) < 0.05
    # A limit for all clients cuts the one that is unlike the others.
    assert found["step.shared"].shares["c"] > 0.9 > 0.1 > found["step.shared"].shares["a"]
    assert all(p.what and p.why and p.reveals for p in found.values())


@pytest.mark.parametrize(
    ("module", "norms", "words"),
    [
        ("no-op", [1.0] * 19, "19 norms are too few"),
        ("no-op", [0.0] * 40, "no scale"),
        ("value-clip", [1.0] * 40, "no clipper by norm ran on the clients"),
    ],
)
def test_too_little_is_said(tmp_path: Path, module: str, norms: list[float], words: str) -> None:
    spec = ["value-clip", {"max_value": 1.0}] if module == "value-clip" else module
    Node(tmp_path, [spec]).round(norms)
    result = call("suggest", tmp_path)
    assert result.exit_code == 0
    assert words in " ".join(result.stdout.split())


def test_every_printed_block_is_toml(looked: Path) -> None:
    result = call("suggest", looked)
    assert result.exit_code == 0, result.stderr
    blocks = [b.partition("\n    [")[2] for b in result.stdout.split("\n\n")]
    parsed = [tomllib.loads(textwrap.dedent(f"    [{block}")) for block in blocks if block]
    assert len(parsed) == 6
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


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
        ("x = [", "step.fixed", "can not be changed"),
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


def test_several_experiments_are_not_mixed(looked: Path, tmp_path: Path) -> None:
    Node(tmp_path / "other" / "a", ["no-op"]).round([1.0])
    result = call("suggest", tmp_path)
    assert result.exit_code == 1
    assert "holds 2 experiments" in result.stderr
    assert f"({tmp_path / 'other'}, {looked})" in result.stderr
    # One that lies in the folder itself is the one that is meant.
    Node(looked / "before" / "a", ["no-op"]).round([1.0])
    result = call("suggest", looked)
    assert result.exit_code == 0
    assert "what folders below hold is left out (1)" in result.stderr
