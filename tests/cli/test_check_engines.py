# SPDX-License-Identifier: Apache-2.0
"""`fedclip check` on Flower and NVFlare, and `fedclip site check` on the policy of a site."""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import call, sentence

from fedclip.cli.check.claims import Claim, voids_of
from fedclip.cli.check.configuration import check_config
from fedclip.core.toml import toml_value
from fedclip.privacy.ledger import Ledger
from fedclip.site.gate import Gate
from fedclip.site.policy import Policy
from fedclip.updates.bound import AdaptiveBound

NOISE = "noise-multiplier = 1.0\nexpected-clients = 10\n"


@pytest.mark.parametrize(
    ("section", "text", "level", "said"),
    [
        ("update-clip", "start-nrom = 1.0", "problem", "did you mean 'start_norm'"),
        ("update-clip", "start-norm = -1.0", "problem", "start_norm must be"),
        ("update-clip", 'exclude = ["a", "b"]', "problem", "exclude is a list, which Flower"),
        ("update-clip", NOISE + 'weights = "steps"', "problem", "weights do not go with noise"),
        ("update-clipp", "start-norm = 1.0", "problem", "did you mean 'update-clipp'"),
        ("update-clip", NOISE + "max-epsilon = 10.0", "note", "after 4 of 25 planned rounds"),
        ("update-clip", "start-norm = 1.0\n[other]", "", ""),
    ],
)
def test_settings_of_flower(tmp_path: Path, section: str, text: str, level: str, said: str) -> None:
    app = "[tool.flwr.app.config]\nnum-server-rounds = 25\nfraction-evaluate = 0.0\n"
    (tmp_path / "pyproject.toml").write_text(f"{app}[tool.flwr.app.config.{section}]\n{text}\n")
    found = check_config(tmp_path).findings
    wanted = [(level, "[tool.flwr.app.config.update-clip]")] * bool(level)
    assert [(f.level, f.where) for f in found] == wanted
    assert all(said in f.message for f in found)
    assert not check_config(tmp_path, quickrun=True).ok


def judged(folder: Path, table: dict[str, Any], rounds: int, evaluates: bool) -> list[set[str]]:
    """Return the problems and leaks of the same settings on declearn, Flower and NVFlare."""
    settings = {**table, "start_norm": 1.0}
    optim = {
        "aggregator": "clipped-averaging",
        "client_opt": {"lrate": 0.5, "modules": ["update-clip-client"]},
        "server_opt": {"lrate": 1.0, "modules": [["update-clip-server", settings]]},
    }
    network = {"protocol": "fedclip-websockets", "host": "127.0.0.1", "port": 8765}
    run = {"rounds": rounds, "register": 10, "training": {"batch_size": 8}}
    config = {"network": network, "data": {}, "run": run, "optim": optim}
    lines = [f"{name} = {toml_value(value)}\n" for name, value in config.items()]
    (folder / "config.toml").write_text("".join(lines))
    flower = {"num-server-rounds": rounds, "update-clip": settings}
    flower |= {} if evaluates else {"fraction-evaluate": 0.0}
    (folder / "app").mkdir(exist_ok=True)
    (folder / "app/pyproject.toml").write_text(f"[tool.flwr.app]\nconfig = {toml_value(flower)}\n")
    job = folder / "job" / "app" / "config"
    job.mkdir(parents=True, exist_ok=True)
    path, args = "fedclip.engines.nvflare.clipping.CloseRound", {"settings": settings}
    workflow = {"aggregator": {"path": path, "args": args}, "num_rounds": rounds}
    selector = [{"path": "nvflare.app_common.widgets.intime_model_selector.IntimeModelSelector"}]
    content = {"workflows": [{"args": workflow}], "components": selector * evaluates}
    (job / "config_fed_server.json").write_text(json.dumps(content))
    found = [check_config(folder / name) for name in ("config.toml", "app/pyproject.toml", "job")]
    return [
        {f"{f.level}: {f.message}" for f in check.findings if f.level in ("problem", "leak")}
        for check in found
    ]


@given(
    st.fixed_dictionaries(
        {"noise_multiplier": st.sampled_from([0.3, 5.0, 40.0]), "expected_clients": st.just(10)},
        optional={"delta": st.sampled_from([1e-6, 0.02, 0.5])},
    ),
    st.sampled_from([{}, {"generator": "insecure"}, {"generator": "insecure", "seed": 3}]),
    st.integers(1, 40),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
@pytest.mark.slow
def test_each_engine_is_judged_by_one_list(
    table: dict[str, Any], generator: dict[str, Any], rounds: int, evaluates: bool
) -> None:
    table = table | generator
    with tempfile.TemporaryDirectory() as folder:
        of_declearn, *others = judged(Path(folder), table, rounds, evaluates)
    bound = AdaptiveBound(**table, start_norm=1.0)
    parts = {part: part for part in ("noise", "sampler", "evaluate", "early_stop")}
    wanted = {
        f"{void.level}: {void.message}"
        for void in voids_of(Claim("declearn", bound, rounds, 10), parts)
        if void.where == "noise"
    }
    unsure = {text for text in set.union(*others) if "number of all clients" in text}
    for found in (of_declearn, *(other - unsure for other in others)):
        assert {text for text in found if "without noise" not in text} == wanted
        assert any("without noise" in text for text in found) or not evaluates
    assert all(evaluates or not any("without noise" in t for t in other) for other in others)
    # Only where all clients may be more than those of a round.
    assert bool(unsure) == (table.get("delta") == 0.02)


@pytest.mark.parametrize("text", ["[]", "{", '{"workflows": 3}', '{"workflows": [3, {"args": 1}]}'])
def test_a_job_of_nvflare_that_clips_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "config_fed_server.json").write_text(text)
    assert not check_config(tmp_path / "config_fed_server.json").ok


def test_a_leak_ends_the_command_with_1_and_stops_no_run(tmp_path: Path) -> None:
    for evaluates in (True, False):
        judged(tmp_path, {"noise_multiplier": 40.0, "expected_clients": 10}, 3, evaluates)
        assert check_config(tmp_path / "job").ok
        done = call("check", tmp_path / "job")
        assert done.exit_code == int(evaluates)
        assert ("  leak " in done.stdout) == evaluates


def written(folder: Path, more: str) -> Path:
    path = folder / "site.toml"
    path.write_text(f"[update]\nmax_norm = 0.5\n{more}")
    path.chmod(0o600)
    return path


check = partial(call, "site", "check")


def budget(folder: Path) -> tuple[Path, Path]:
    """Return a policy, and the ledger of its budget, in a new folder."""
    ledger = folder / "kept" / "spent.json"
    ledger.parent.mkdir(mode=0o700)
    more = f"noise_multiplier = 2\nmax_epsilon = 10\ndelta = 1e-5\nledger = '{ledger.as_posix()}'\n"
    return written(folder, more), ledger


def test_a_policy_is_explained(tmp_path: Path) -> None:
    plain = check(written(tmp_path, "allow_metrics = ['loss']"))
    assert plain.exit_code == 0, plain.output
    assert "L2 norm of at most 0.5;" in plain.output
    assert "without noise: an update can reveal data" in plain.output
    assert "without limit or accounting: loss" in plain.output
    path, ledger = budget(tmp_path)
    assert "spent: epsilon 0 by 0 updates" in check(path).output
    # Nothing is made by looking.
    assert not ledger.exists()
    gate, model = Gate(Policy.read(path)), {"w": np.zeros((2, 2), "float32")}
    for _ in range(3):
        gate.update(model)
    found = check(path)
    assert found.exit_code == 0, found.output
    assert "standard deviation 1 is added" in found.output
    assert "spent: epsilon 8.385 by 3 updates" in found.output
    assert "remaining: 1 updates" in found.output
    gate.update(model)
    assert "this site is spent: it sends no more updates" in sentence("site", "check", path)


def test_problems_of_a_policy_are_said(tmp_path: Path) -> None:
    path, ledger = budget(tmp_path)
    ledger.parent.rmdir()
    assert "does not exist: create it" in check(path).stderr
    ledger.parent.mkdir(mode=0o700)
    Ledger(9.0, 1e-5, ledger, data="9 records")
    assert "is a ledger of records" in check(path).stderr
    ledger.write_text("")
    assert "is not a ledger" in check(path).stderr
    ledger.unlink()
    ledger.parent.chmod(0o777)
    if sys.platform != "win32":
        assert "others than its owner may change" in sentence("site", "check", path)
    assert "nowhere.toml: No such file" in check(tmp_path / "nowhere.toml").stderr
