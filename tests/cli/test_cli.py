# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, where, and its exit codes."""

import importlib.metadata
import io
import json
import socket
from pathlib import Path

import pytest
from checkouts import ROOT
from cli.test_check import GOOD
from declearn.optimizer import list_optim_modules
from helpers import free_port
from quickruns import write_sites
from report_runs import Node, call, sentence

from fedclip.cli.output import progress


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def write(file: Path, modules: str = "[]", port: int = 1) -> Path:
    text = GOOD.replace('["norm-clip"]', modules).replace("min_clients = 2", "min_clients = 1")
    file.write_text(text.replace("port = 8765", f"port = {port}"))
    return file


def test_list_has_every_clipper_and_none_of_declearns() -> None:
    # No line of the help is cut off.
    assert "..." not in call("--help").stdout.partition("Commands:")[2]
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
    ("declearn", "code", "words"),
    [
        ("2.4.0", 1, "fedclip on declearn needs declearn>=2.8,<3, and declearn 2.4.0 is"),
        ("2.8.0", 0, "Clippers work. A server, a client or a command that reads"),
        ("2.9.1", 0, ""),
        ("2.10.0", 0, "Clippers work."),
    ],
)
def test_doctor(declearn: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: declearn if name == "declearn" else real(name)
    )
    result = call("doctor")
    said = sentence("doctor") if code else result.stdout
    assert (result.exit_code, words in said) == (code, True)
    assert ("pip install" in said) == bool(words)


def test_translate_of_nothing_known() -> None:
    said = sentence("translate", "optax", "clip_by_globl_norm")
    assert "did you mean 'clip_by_global_norm'?" in said
    said = sentence("translate", "optax", "clip_by_global_norm", "0.5", code=2)
    assert "'0.5' must be PARAMETER=VALUE" in said


def test_check_counts_notes_and_is_strict_if_asked(file: Path) -> None:
    file.write_text("client_opt = 0.1\n")
    assert call("check", file).stdout.endswith("No problem.\n")
    assert call("check", file, "--strict").exit_code == 0
    assert call("check", write(file, '["norm-clip"]')).exit_code == 0
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
def test_check_of_each_form_of_a_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    result = call("check", file)
    assert (result.exit_code, "problem " in result.stdout) == (bool(message), bool(message))
    assert message in result.stdout


def test_quickrun_does_not_start_what_would_fail(file: Path) -> None:
    result = call("quickrun", write(file, '["zscor-clip"]'))
    assert result.exit_code == 1
    assert "did you mean 'zscore-clip'" in result.stderr
    assert "nothing was started" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = sentence("quickrun", write(file, port=port))
    assert f"port {port} on 127.0.0.1 is in use" in said
    write(file, port=free_port())
    assert "[data] No folder starting with 'data'" in sentence("quickrun", file)
    write_sites(file.parent, {"c0": 8})
    model = (file.parent / "model.py").rename(file.parent / "model.txt")
    assert "there is no model file" in sentence("quickrun", file)
    file.write_text(f"{file.read_text()}[model]\nmodel_file = '{model}'\n")
    assert "it is a Python file" in sentence("quickrun", file)


def test_interrupted_it_points_to_the_report(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(federation: object, seed: object) -> None:
        raise KeyboardInterrupt

    write(file, port=free_port())
    write_sites(file.parent, {"c0": 8})
    monkeypatch.setattr("fedclip.engines.declearn.quickrun.Federation.run", interrupted)
    monkeypatch.chdir(file.parent)
    assert sentence("quickrun", code=130).endswith("fedclip report result")


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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    Node(tmp_path / "client", ["norm-clip"]).round([6.0])
    return tmp_path


def test_report_writes_csv_and_json_with_the_documented_names(run: Path) -> None:
    to_stdout = call("report", run, "--csv", "-").stdout
    assert to_stdout.startswith("node,module,group,round,")
    assert call("report", run, "--csv", run / "r.csv").exit_code == 0
    assert (run / "r.csv").read_text() == to_stdout
    facts = json.loads(call("report", run, "--json").stdout)
    assert facts["schema"] == "fedclip-report/1"
    lists = [part for part in facts.values() if isinstance(part, list) and part]
    names = {*facts, *(name for first, *_ in lists if isinstance(first, dict) for name in first)}
    assert names >= {"rows", "curves", "findings", "limited_by", "norm_p95", "kind"}
    section = (ROOT / "docs" / "reports.md").read_text().partition("## JSON")[2]
    assert [name for name in names if f"`{name}`" not in section] == []


LONG = "x" * 5_000


@pytest.mark.parametrize("command", ["report", "check", "quickrun", "run", "demo"])
def test_a_path_that_no_system_takes_is_a_sentence(command: str) -> None:
    assert sentence(command, LONG, code=1 if command == "demo" else 2)


@pytest.mark.slow
def test_what_can_not_be_written_is_a_sentence(run: Path) -> None:
    for option in ("--csv", "--html"):
        for file in (run, run / LONG):
            assert "cannot write" in sentence("report", run, option, file)
