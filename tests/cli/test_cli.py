# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import io
import json
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.test_check import GOOD
from declearn.optimizer import list_optim_modules
from helpers import free_port
from report_runs import call
from typer.testing import Result

from fedclip.cli.output import progress

Write = Callable[..., Path]


def one_sentence(result: Result) -> str:
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("fedclip: ")
    return line


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "config.toml") -> Path:
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        return file

    return write


def config(modules: str = "[]", port: int = 1) -> str:
    text = GOOD.replace('["norm-clip"]', modules).replace("min_clients = 2", "min_clients = 1")
    return text.replace("port = 8765", f"port = {port}")


def test_no_line_of_the_help_is_cut_off() -> None:
    assert "..." not in call("--help").stdout.partition("Commands:")[2]


# ---------------------------------------------------------------------------- list, doctor


def test_list_has_every_clipper_and_none_of_declearns() -> None:
    entries = json.loads(call("list", "--json").stdout)
    names = [entry["name"] for entry in entries if entry["kind"] == "module"]
    ours = [k for k, v in list_optim_modules().items() if v.__module__.startswith("fedclip")]
    assert sorted(names) == sorted(ours)
    assert {"norm-clip", "value-clip", "zscore-clip", "no-op"} <= set(names)
    assert all(entry["summary"].endswith(".") for entry in entries)
    assert max(len(entry["summary"]) for entry in entries) <= 70
    shown = call("list").stdout.splitlines()
    assert len(shown) == 1 + len(entries)
    assert any(line.startswith("norm-clip  ") for line in shown)


@pytest.mark.parametrize(
    ("declearn", "code", "sentence"),
    [
        ("2.4.0", 1, "fedclip on declearn needs declearn>=2.8,<3, and declearn 2.4.0 is"),
        ("2.8.0", 0, "Clippers work. A server, a client or a command that reads"),
        ("2.9.1", 0, ""),
        ("2.10.0", 0, "Clippers work."),
    ],
)
def test_doctor_says_what_works_with_a_declearn(
    declearn: str, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: declearn if name == "declearn" else real(name)
    )
    result = call("doctor")
    assert result.exit_code == code
    assert sentence in (one_sentence(result) if code else result.stdout)
    assert ("pip install" in result.output) == bool(sentence)


# ------------------------------------------------------------------------------- translate


def test_translate_of_nothing_known() -> None:
    result = call("translate", "optax", "clip_by_globl_norm")
    assert result.exit_code == 1
    assert "did you mean 'clip_by_global_norm'?" in one_sentence(result)
    result = call("translate", "optax", "clip_by_global_norm", "0.5")
    assert result.exit_code == 2
    assert "'0.5' must be PARAMETER=VALUE" in one_sentence(result)


# ----------------------------------------------------------------------------------- check


def test_check_counts_notes_and_is_strict_if_asked(write: Write) -> None:
    file = write("client_opt = 0.1\n")
    assert call("check", file).stdout.endswith("No problem.\n")
    assert call("check", file, "--strict").exit_code == 0
    file = write(config('["norm-clip"]'))
    assert call("check", file).exit_code == 0
    strict = call("check", file, "--strict")
    assert strict.exit_code == 1
    assert strict.stdout.endswith("No problem, 1 note.\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "config.toml is not valid TOML"),
        ("client_opt = true", "must be a learning rate or a section, got True"),
        ("client_opt = 'nowhere.toml'", "must be a learning rate or a section, got 'nowhere"),
        ("rounds = 1", "has neither [optim] nor client_opt"),
        ("data = 1\noptim = 1", "[optim] must be a section, got 1"),
        ("server_opt = 0.5\n[client_opt]\nlrate = 0.1\nmodules = ['no-op']", ""),
        ("[client_opt]\nlrate = ['linear-decay', {base = 0.1, rate = 0.01}]", ""),
        ("[client_opt]\nlrate = 0.1\nregularizers = [['lasso', {alpha = 0.1}]]", ""),
    ],
)
def test_check_of_each_form_of_a_file(write: Write, text: str, message: str) -> None:
    result = call("check", write(text))
    assert (result.exit_code, "problem " in result.stdout) == (bool(message), bool(message))
    assert message in result.stdout


# -------------------------------------------------------------------------------- quickrun


def test_quickrun_does_not_start_what_would_fail(write: Write) -> None:
    result = call("quickrun", write(config('["zscor-clip"]')))
    assert result.exit_code == 1
    assert "did you mean 'zscore-clip'" in result.stderr
    assert "nothing was started" in result.stderr


def test_quickrun_says_that_its_port_is_taken(write: Write) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = call("quickrun", write(config(port=port)))
    assert result.exit_code == 1
    assert f"port {port} on 127.0.0.1 is in use" in one_sentence(result)


def write_data(folder: Path) -> None:
    client = folder / "data" / "c0"
    client.mkdir(parents=True)
    for part in ("train_data", "train_target", "valid_data", "valid_target"):
        (client / f"{part}.npy").touch()


def test_quickrun_says_what_is_not_there(write: Write, tmp_path: Path) -> None:
    file = write(config(port=free_port()))
    assert "[data] No folder starting with 'data'" in one_sentence(call("quickrun", file))
    write_data(tmp_path)
    assert "there is no model file" in one_sentence(call("quickrun", file))
    (tmp_path / "model.txt").touch()
    file.write_text(file.read_text() + f"[model]\nmodel_file = '{tmp_path / 'model.txt'}'\n")
    assert "it is a Python file" in one_sentence(call("quickrun", file))


def test_quickrun_that_is_interrupted_points_to_the_report(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedclip.engines.declearn.quickrun

    async def interrupted(federation: object, seed: object) -> None:
        raise KeyboardInterrupt

    write(config(port=free_port()))
    write_data(tmp_path)
    (tmp_path / "model.py").touch()
    monkeypatch.setattr(fedclip.engines.declearn.quickrun.Federation, "run", interrupted)
    monkeypatch.chdir(tmp_path)
    result = call("quickrun")
    assert result.exit_code == 130
    assert one_sentence(result).endswith("fedclip report result")


def test_on_a_terminal_a_line_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", file)
    show = progress("[/red]")
    for done in (1, 2, 100):
        show(done, 100, "loss \x1b[31m")
    *lines, last = file.getvalue().split("\r\x1b[K")[1:]
    assert (len(lines), "\n" in "".join(lines)) == (2, False)
    assert all("left, loss" in line for line in lines)
    assert last == "[/red]: 100 of 100 rounds done, loss \\x1b[31m\n"


# ---------------------------------------------------------------------------------- report


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    import numpy as np
    from declearn.main.utils import Checkpointer
    from declearn.model.sklearn import NumpyVector
    from declearn.optimizer import Optimizer

    optimizer = Optimizer(0.1, modules=["norm-clip"])
    optimizer.start_round()
    optimizer.modules[0].run(NumpyVector({"w": np.full(4, 3.0)}))
    Checkpointer(str(tmp_path / "client")).checkpoint(optimizer=optimizer, first_call=True)
    return tmp_path


def test_report_writes_csv(checkpoints: Path, tmp_path: Path) -> None:
    to_stdout = call("report", checkpoints, "--csv", "-").stdout
    assert to_stdout.startswith("node,module,group,round,")
    file = tmp_path / "r.csv"
    assert call("report", checkpoints, "--csv", file).exit_code == 0
    assert file.read_text() == to_stdout


def test_report_as_json_has_the_documented_names(checkpoints: Path) -> None:
    facts = json.loads(call("report", checkpoints, "--json").stdout)
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
    section = page.partition("## JSON")[2]
    assert facts["schema"] == "fedclip-report/1"
    names = {
        *facts,
        *(
            name
            for part in facts.values()
            if part and part != facts["schema"]
            for name in (part[0] if isinstance(part[0], dict) else ())
        ),
    }
    assert names >= {"rows", "curves", "findings", "limited_by", "norm_p95", "kind"}
    assert [name for name in names if f"`{name}`" not in section] == []


ROUND = {
    **dict.fromkeys(("round", "clipped"), 1),
    **dict.fromkeys(("norm_min", "norm_max", "limit", "limit_min", "limit_max"), 1.0),
    "steps": 2,
    **dict.fromkeys(("nonfinite", "fixed", "learnt", "warmup"), 0),
    "buckets": [],
    "counts": [],
}

LONG = "x" * 5_000


@pytest.mark.parametrize("command", ["report", "check", "quickrun", "run", "demo"])
def test_a_path_that_no_system_takes_is_a_sentence(command: str) -> None:
    result = call(command, LONG)
    assert result.exit_code == (1 if command == "demo" else 2), result.output
    one_sentence(result)


@pytest.mark.slow
def test_what_can_not_be_written_is_a_sentence(checkpoints: Path, tmp_path: Path) -> None:
    for option in ("--csv", "--html"):
        for file in (tmp_path, tmp_path / LONG):
            result = call("report", checkpoints, option, file)
            assert result.exit_code == 1
            assert "cannot write" in one_sentence(result)
