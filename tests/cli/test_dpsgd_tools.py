"""The command line of DP-SGD: noise for a budget, and what was spent."""

import csv
import io
import json
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import report_runs
from declearn.main.config import FLRunConfig
from declearn.optimizer import Optimizer

import fedclip
from fedclip.privacy.accounting import Release, epsilon
from fedclip.privacy.ledger import Ledger

pytest.importorskip("dp_accounting")

call = partial(report_runs.call, "privacy")
BUDGET = ("calibrate", "--epsilon", 3, "--rounds", 10, "--records", 400, "--batch-size", 64)
ENDS = ["1e-320", "0.5", "inf", "nan", "1e-12", "1e308", "-1", "1", "0", "1e10"]
COMMANDS = [
    "plan --epsilon {} --rounds 10 --clients 10 --values 100",
    "plan --epsilon {} --rounds 9223372036854775807 --clients 10 --relation replace-one",
    "plan --epsilon 1 --rounds 10 --clients 10 --delta {}",
    "calibrate --epsilon {} --rounds 3 --records 40 --batch-size 50 --values 100",
    "calibrate --epsilon 1 --rounds 3 --records 40 --batch-size 50 --delta {}",
]


def test_its_lines_are_a_configuration() -> None:
    text = call(*BUDGET).stdout
    config = tomllib.loads(text[text.index("[optim.client_opt]") :])
    optimizer = Optimizer(lrate=0.1, **config["optim"]["client_opt"])
    assert isinstance(optimizer.modules[0], fedclip.SampleClip)
    run = FLRunConfig.from_params(register=3, evaluate={"batch_size": 64}, **config["run"])
    assert run.privacy is not None
    assert tuple(run.privacy.budget) == (3.0, 1e-5)
    assert run.training.n_epoch == 1


@pytest.mark.slow
def test_it_says_when_there_are_too_few_records() -> None:
    assert "too few" not in call(*BUDGET, "--values", 650).stdout
    few = call(*BUDGET, "--values", 10**6).stdout
    assert "400 records are too few for this epsilon" in few
    assert "larger than the updates: 16,16" in few
    # Too few for whatever model; and a delta for which one record is nothing.
    least = ("--epsilon", 0.02, "--rounds", 1, "--records", 9, "--batch-size", 3)
    text = call("calibrate", *least).stdout
    assert "with 1 value, the noise" in text
    assert "9 records are too few for this epsilon" in text
    assert "not below 1 / 9 records" in call("calibrate", *least, "--delta", 0.2).stdout


def exported(*arguments: object) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(call("spent", *arguments, "--csv", "-").stdout))]


@pytest.mark.slow
@pytest.mark.parametrize("change", [(), ("--delta", 1e-3), ("--relation", "replace-one")], ids=str)
@pytest.mark.parametrize("plans", [[(2.0, 0.16)] * 3, [(2.0, 0.16), (3.0, 0.2)]])
def test_the_last_line_of_an_export_is_what_is_said(
    plans: list[tuple[float, float]], change: tuple[Any, ...], tmp_path: Path
) -> None:
    path = tmp_path / "privacy_spent.json"
    for z, rate in plans:
        Ledger(9.0, 1e-5, path, data="9 records").reserve(z, rate, 4)
    rows = exported(path, *change)
    (found,) = json.loads(call("spent", path, *change, "--json").stdout)
    ((name, said),) = found["epsilons"].items()
    assert name.startswith(rows[-1]["accountant"])
    assert ("at order" in name) == (len({*plans}) > 1 and "replace-one" not in change)
    assert float(rows[-1]["epsilon"]) == said
    assert [float(row["epsilon"]) for row in rows] == sorted(float(r["epsilon"]) for r in rows)
    assert {row["mechanism"] for row in rows} == {"Poisson-sampled Gaussian"}
    assert call("spent", path, *change, "--csv", tmp_path / "s.csv").exit_code == 0
    assert [*csv.DictReader((tmp_path / "s.csv").read_text().splitlines())] == rows


def test_no_text_of_an_export_is_a_formula_to_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "=1.json"
    Ledger(9.0, 1e-5, path, data='=HYPERLINK("x"),\n').reserve(2.0, 1.0, 4)
    for row in exported(path):
        assert row["where"] == "'=1.json"
        assert row["data"] in ("", '\'=HYPERLINK("x"),\n')


def test_what_can_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "privacy_spent.json").write_text("{}")
    for name, said in {
        "nothing": "there is no ",
        "privacy_spend.json": "did you mean 'privacy_spent.json'?",
        "privacy_spent.json": "is not a ledger of privacy spent",
        ".": "is not a ledger of privacy spent",
    }.items():
        assert said in report_runs.sentence("privacy", "spent", tmp_path / name, code=2)
    (tmp_path / "privacy_spent.json").unlink()
    assert "shows no spent privacy budget" in call("spent", tmp_path).stderr


def test_the_name_of_a_checkpoint_need_not_be_the_newest(tmp_path: Path) -> None:
    """Local time goes back by an hour in autumn."""
    noise: dict[str, Any] = {"noise_multiplier": 2.0, "expected_clients": 20, "delta": 1e-3}
    noise["relation"] = "replace-one"
    server = report_runs.Node(tmp_path / "server", [("update-clip-server", noise)])
    module: Any = server.optimizer.modules[0]
    for stamp in ("26-10-25_02-59-00", "26-10-25_02-01-00"):
        module.budget.ledger.reserve(2.0, 1.0, 3)
        server.checkpointer.save_optimizer(server.optimizer, timestamp=stamp)
    (found,) = json.loads(call("spent", tmp_path, "--json").stdout)
    assert (found["protects"], found["delta"]) == ("client", 1e-3)
    assert found["epsilons"]["closed form"] == epsilon([Release(2.0, 6)], 1e-3, "replace-one")
    rows = exported(tmp_path)
    assert [row["relation"] for row in rows] == ["replace-one"] * 6
    assert float(rows[-1]["epsilon"]) == found["epsilons"]["closed form"]
    (tmp_path / "server" / "optimizer_state_26-10-26_00-00-00.mpk").write_bytes(b"\xc1")
    assert "cannot read the checkpoint" in call("spent", tmp_path).stderr
    (tmp_path / "server" / "optimizer_config.json").write_text("[" * 90_000)
    assert report_runs.sentence("privacy", "spent", tmp_path, code=2)


@pytest.mark.parametrize(
    ("command", "value"),
    [(command, ENDS[(i + 3 * j) % 10]) for i, command in enumerate(COMMANDS) for j in range(2)],
)
def test_the_ends_of_numbers_are_a_number_or_a_sentence(command: str, value: str) -> None:
    done = call(*command.format(value).split())
    assert isinstance(done.exception, SystemExit | None)
    if done.exit_code:
        assert (done.exit_code, done.stderr[:9], done.stderr.count("\n")) == (2, "fedclip: ", 1)
    # Nothing that is printed is below 0.
    assert not re.search(r"(?<!\w)-\d|nan|inf(?!inite)", done.stdout)
