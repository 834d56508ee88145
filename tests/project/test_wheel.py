# SPDX-License-Identifier: Apache-2.0
"""The wheel in other people's hands: what is installed, typed, imported, missing and pinned."""

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from checkouts import ROOT, checkout, on_path, type_in
from helpers import PATIENCE, ended, hiding, require
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from report_runs import large_run

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GROUPS: dict[str, list[Any]] = PYPROJECT["dependency-groups"]
HEAVY = ("torch", "tensorflow", "jax", "lightning", "transformers", "peft", "grpc", "dp", "all")
# Each has an environment and a file of pins to itself.
ENGINES = ("flower", "nvflare", "fedbiomed")
PINS = ROOT / ("constraints-3.13.txt" if sys.version_info >= (3, 13) else "constraints.txt")
PINS_OF = re.findall(r"^([\w.-]+)==(\S+)$", PINS.read_text(encoding="utf-8"), re.M)
PINNED = {canonicalize_name(name): Version(version) for name, version in PINS_OF}
# Build tools, which come with Python or with none, and what CUDA builds of torch bring.
UNPINNED = ("setuptools", "wheel", "pip", "triton", "nvidia-", "cuda")


def test_the_core_is_small_and_what_an_extra_names_is_pinned_and_documented() -> None:
    """What these need in turn is looked at where pip finds it, below."""
    tables = {**EXTRAS, **GROUPS, "core": PROJECT["dependencies"]}
    named = [text for name in {*tables} - {*ENGINES, "release"} for text in tables[name]]
    for requirement in (Requirement(text) for text in named if isinstance(text, str)):
        here = not requirement.marker or requirement.marker.evaluate()
        if here and requirement.name != "fedclip":
            version = PINNED[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement
    # declearn needs cryptography, too; fedclip draws noise with it.
    core = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert core == {"declearn", "numpy", "cryptography"}
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert set(EXTRAS) == {*HEAVY, *ENGINES, "cli", "plot", "html"}
    for extra in EXTRAS:
        assert f"`{extra}`" in page or f"[{extra}" in page or f",{extra}]" in page, extra


COMMAND = "import sys\nfrom fedclip.cli.main import main\nsys.argv[0] = 'fedclip'\nmain()"
LOOP = "import fedclip.loops.{}"
CALIBRATE = "privacy calibrate --epsilon 3 --rounds 9 --records 400 --batch-size 32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "code", "words", "install"),
    [
        ("torch", LOOP.format("torch"), "", "torch"),
        ("transformers", LOOP.format("transformers"), "", "'transformers[torch]'"),
        ("tensorflow,torch,jax", LOOP.format("keras"), "", "keras, and tensorflow, torch or jax"),
        ("optax", LOOP.format("jax"), "", "jax optax"),
        ("declearn", COMMAND, "check", "'declearn>=2.9.1,<2.10'"),
        ("typer", "from fedclip.__main__ import main; main()", "list", "'fedclip[cli]'"),
        ("tomlkit", COMMAND, "translate optax clip max_delta=1", "'fedclip[cli]'"),
        ("dp_accounting", COMMAND, CALIBRATE, "dp-accounting"),
        ("jinja2", COMMAND, "report run --html p.html", "jinja2 vl-convert-python"),
    ],
)
def test_a_missing_package(
    missing: str, code: str, words: str, install: str, tmp_path: Path
) -> None:
    if code.startswith("import fedclip.loops."):
        require({"jax": "jax"}.get(code.rpartition(".")[2], "torch"))
    large_run(tmp_path / "run", 2, 2)
    there: Any = {"env": hiding(*missing.split(",")), "cwd": tmp_path}
    done = ended("-W", "ignore", "-c", code, *words.split(), well=False, **there)
    assert done.returncode == 1
    assert done.stderr.endswith(f": pip install {install}\n")
    assert done.stdout == ""
    assert not words or done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that was built from the source archive of a checkout."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("built")
    checkout(folder / "checkout")
    hatchling = f"'{sys.executable}' -m hatchling build -d {folder} -t"
    type_in([f"{hatchling} sdist"], folder / "checkout")
    unpack = ["mkdir archive", "tar xzf fedclip-*.tar.gz -C archive --strip-components 1"]
    type_in([*unpack, "cd archive", f"{hatchling} wheel"], folder)
    return next(folder.glob("fedclip-*.whl"))


PIP = ".venv/bin/python -m pip"


def typed(folder: Path, *lines: str) -> str:
    """Type lines where `python` is that of the tests; return what they showed."""
    there = {"PATH": on_path(folder / "bin"), "PIP_CONSTRAINT": str(PINS), "PYTHONPATH": ""}
    return type_in([*lines], folder, **there)


@pytest.mark.slow
def test_the_core_alone_then_the_light_extras(wheel: Path, tmp_path: Path) -> None:
    large_run(tmp_path / "run", 2, 2)
    shown = typed(
        tmp_path,
        "python -m venv .venv",
        f"{PIP} install -q '{wheel}'",
        ".venv/bin/python -c 'import fedclip; print(fedclip.NormClip(1.0))'",
        "! .venv/bin/fedclip list",
    )
    assert shown.endswith("websockets: pip install 'fedclip[cli]'\n")
    typed(tmp_path, f"{PIP} install -q '{wheel}[cli]'")
    listed = typed(tmp_path, "set +x", f"{PIP} list --format json 2> /dev/null").partition("\n")[2]
    there = {package["name"].lower() for package in json.loads(listed)}
    assert {"declearn", "fedclip", "numpy"} <= there
    assert not {"torch", "tensorflow", "jax", "opacus", "matplotlib", "jinja2"} & there
    commands = ("--help", "list", "doctor", "report run")
    shown = typed(tmp_path, *(f".venv/bin/fedclip {words}" for words in commands))
    assert "zscore-clip" in shown
    assert "client-000" in shown
    report = ".venv/bin/fedclip report run --html p.html"
    assert "pip install" in typed(tmp_path, f"! {report}")
    typed(tmp_path, f"{PIP} install -q '{wheel}[html]'", report)
    assert (tmp_path / "p.html").stat().st_size > 10_000


@pytest.mark.soak
def test_pip_finds_all_that_the_extras_need_at_the_pinned_versions(
    wheel: Path, tmp_path: Path
) -> None:
    dry = f"{PIP} install -q --dry-run --report found.json '{wheel}[{','.join(HEAVY)}]'"
    typed(tmp_path, "python -m venv .venv", dry)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["install"]
    versions = {p["metadata"]["name"]: Version(p["metadata"]["version"]) for p in found}
    assert {"torch", "tensorflow", "jax", "opacus"} <= versions.keys()
    for name, version in versions.items():
        if not canonicalize_name(name).startswith(("fedclip", *UNPINNED)):
            assert PINNED.get(canonicalize_name(name)) == Version(version.public), name


@pytest.mark.slow
def test_without_declearn(wheel: Path, tmp_path: Path) -> None:
    round_ = """
        from pathlib import Path
        import numpy as np
        from fedclip.updates.protocol import Reply
        from fedclip.updates.store import PersistentServer
        settings = {"start_norm": 1.0, "noise_multiplier": 1.0, "expected_clients": 2}
        served = PersistentServer(settings, Path("run/server").resolve())
        model = {"w": np.zeros(2)}
        served.open()
        served.close([Reply(model, votes=1, within=1)] * 2, model)
    """
    (tmp_path / "round.py").write_text(textwrap.dedent(round_), encoding="utf-8")
    shown = typed(
        tmp_path,
        "python -m venv .venv",
        f"{PIP} install -q --no-deps '{wheel}'",
        f"{PIP} install -q -r '{ROOT / 'requirements-core.txt'}'",
        ".venv/bin/python round.py",
        ".venv/bin/fedclip report run",
        ".venv/bin/fedclip privacy spent run",
        "! .venv/bin/fedclip check run",
    )
    assert "closed form  epsilon" in shown
    assert "fedclip: this command needs declearn" in shown


USES = {name: f"fedclip.loops.{name}" for name in HEAVY[:5]} | {
    "peft": "peft",
    "grpc": "declearn.communication.grpc",
    "dp": "fedclip.privacy.accounting",
}


@pytest.mark.soak
@pytest.mark.parametrize("extra", HEAVY)
def test_an_extra_in_a_fresh_environment(extra: str, wheel: Path, tmp_path: Path) -> None:
    code = "; ".join(f"import {USES[e]}" for e in (USES if extra == "all" else [extra]))
    install = f"{PIP} install -q '{wheel}[{extra}]'"
    typed(tmp_path, "python -m venv .venv", install, f".venv/bin/python -W ignore -c '{code}'")


INSTALLING = ("python -m venv", ". .venv", "pip install")


def commands(page: str) -> list[str]:
    """Return the lines that a page asks its reader to type."""
    pattern = r"(<!-- not in the tutorial -->\n)?^```console\n(.*?)^```$"
    found = re.findall(pattern, (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M | re.S)
    return re.findall(r"^\$ (.*)", "".join(body for out, body in found if not out), re.M)


@pytest.mark.soak
def test_the_first_ten_minutes_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    checkout(tmp_path / "checkout")
    # Nobody waits for the whole demo here; tests/cli/test_tune.py runs it.
    lines = "\n".join(commands("first-ten-minutes.md"))
    lines = lines.replace("pip install '.[", f"pip install -q '{wheel}[")
    lines = lines.replace("fedclip demo", "fedclip demo --seeds 1")
    shown = typed(tmp_path, "cd checkout", lines)
    results = tmp_path / "checkout" / "examples" / "hospital" / "study"
    assert "data-norms" in (results / "report.html").read_text("utf-8")
    assert (tmp_path / "checkout" / "fedclip-demo" / "demo.png").exists()
    assert "valley: the norms of its steps are" in shown
    assert '"no-op"' not in (results / "config.toml").read_text("utf-8").partition("server_opt")[0]
    assert "unclipped" in shown


@pytest.mark.soak
def test_the_tutorial_on_privacy(tmp_path: Path) -> None:
    require("torch")
    pytest.importorskip("dp_accounting")
    checkout(tmp_path / "x")
    lines = [x for x in commands("tutorial-privacy.md") if not x.startswith(INSTALLING)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    type_in(lines, tmp_path / "x", PATH=on_path(tmp_path / "bin"), PYTHONPATH=paths)
    found = (tmp_path / "x" / "examples" / "dp_sgd" / "result").rglob("privacy_spent.json")
    assert sorted(path.parent.name for path in found) == ["client_0", "client_1", "client_2"]


IMPORTED = """
import sys
from fedclip.cli.main import main
try:
    main()
except SystemExit:
    print(*sorted({"declearn", "torch", "numpy", "rich"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_command_imports_what_it_needs() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    needs = {"list": "", "doctor": "", "list zscore-clip": "numpy", "report nowhere": "numpy rich"}
    for words, modules in {**needs, "--help": "numpy rich"}.items():
        done = ended("-c", IMPORTED, *words.split(), env=env, well=False)
        assert set(done.stderr.splitlines()[-1].split()) <= set(modules.split()), done.stderr


@pytest.mark.slow
def test_run_gives_a_script_its_arguments_its_folder_and_the_clippers(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 42")
    script = """
        import sys, beside
        from declearn.optimizer import Optimizer
        print(sys.argv[1:], beside.VALUE, Optimizer(0.1, modules=["zscore-clip"]).modules)
        sys.exit(7)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    words = ["-m", "fedclip", "run", tmp_path / "script.py", "--port", "80", "--help"]
    done = ended(*words, env=hiding(), well=False)
    assert done.returncode == 7
    assert "['--port', '80', '--help'] 42 [ZScoreClip()]" in done.stdout


def test_no_environment_is_tracked() -> None:
    # A tracked link of that name replaces the folder that make fills, wherever it is checked out.
    done = subprocess.run(["git", "ls-files", ".venv"], cwd=ROOT, capture_output=True, check=False)
    assert done.stdout == b"", "take it out before this is merged: git rm --cached .venv"


@pytest.mark.slow
def test_the_tutorial_on_loops_as_a_notebook() -> None:
    require("torch")
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    notebook = jupytext.read(ROOT / "docs" / "tutorial-loops.md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=PATIENCE).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [o["text"] for cell in cells for o in cell.outputs if o.get("name") == "stdout"]
    assert len(cells) == 4
    assert "steps clipped" in "".join(shown)
