# SPDX-License-Identifier: Apache-2.0
"""The wheel in other people's hands: what is installed, typed, imported, missing and pinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from checkouts import ROOT, build, checkout, on_path, type_in
from helpers import PATIENCE, ended, hiding, require
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from report_runs import large_run

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GROUPS: dict[str, list[str]] = {
    name: [entry for entry in entries if isinstance(entry, str)]
    for name, entries in PYPROJECT["dependency-groups"].items()
}
HEAVY = ("torch", "tensorflow", "jax", "lightning", "transformers", "peft", "grpc", "dp", "all")
# Each has an environment and a file of pins to itself.
ENGINES = ("flower", "nvflare", "fedbiomed")
PINS = ROOT / ("constraints-3.13.txt" if sys.version_info >= (3, 13) else "constraints.txt")
PINNED = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", PINS.read_text(encoding="utf-8"), re.M)
}


# Build tools, which come with Python or with none, and what CUDA builds of torch bring.
UNPINNED = ("setuptools", "wheel", "pip", "triton", "nvidia-", "cuda")


# -- pinned -------------------------------------------------------------------------------------
def needed(texts: list[str], extras: set[str]) -> Iterator[Requirement]:
    """Yield those of the requirements that count on this machine, with some extras."""
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in extras or {""}):
            yield requirement


def closure(texts: list[str]) -> Iterator[Requirement]:
    """Yield requirements, and those of what they name, as far as it is installed here."""
    seen, todo = set(), list(needed(texts, set()))
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if requirement.name == "fedclip":
            todo += [r for extra in requirement.extras for r in needed(EXTRAS[extra], set())]
            continue
        yield requirement
        try:
            todo += needed(requires(requirement.name) or [], requirement.extras | {""})
        except PackageNotFoundError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts",
    [
        PROJECT["dependencies"],
        *(texts for extra, texts in EXTRAS.items() if extra not in ENGINES),
        *(texts for group, texts in GROUPS.items() if group != "release"),
    ],
    ids=lambda texts: texts[-1],
)
def test_all_that_an_extra_or_a_group_needs_is_pinned(texts: list[str]) -> None:
    found = list(closure(texts))
    assert found
    for requirement in found:
        name = canonicalize_name(requirement.name)
        if name.startswith(UNPINNED):
            continue
        assert name in PINNED, f"{PINS.name} lacks {requirement}"
        assert requirement.specifier.contains(PINNED[name], prereleases=True), requirement


def test_the_core_is_small_and_every_extra_is_documented() -> None:
    # declearn needs cryptography, too; fedclip draws noise with it.
    core = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert core == {"declearn", "numpy", "cryptography"}
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert set(EXTRAS) == {*HEAVY, *ENGINES, "cli", "plot", "html"}
    for extra in EXTRAS:
        assert f"`{extra}`" in page or f"[{extra}" in page or f",{extra}]" in page, extra


# -- a package is missing -----------------------------------------------------------------------
COMMAND = "import sys\nfrom fedclip.cli.main import main\nsys.argv[0] = 'fedclip'\nmain()"
LOOP = "import fedclip.loops.{}"
CALIBRATE = [
    *("privacy", "calibrate", "--epsilon", "3", "--rounds", "9"),
    *("--records", "400", "--batch-size", "32"),
]


def without(missing: str, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = hiding(*missing.split(","))
    return ended("-W", "ignore", "-c", code, *words, env=env, well=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "code", "words", "install"),
    [
        ("torch", LOOP.format("torch"), [], "torch"),
        ("transformers", LOOP.format("transformers"), [], "'transformers[torch]'"),
        ("tensorflow,torch,jax", LOOP.format("keras"), [], "keras, and tensorflow, torch or jax"),
        ("optax", LOOP.format("jax"), [], "jax optax"),
        ("declearn", COMMAND, ["check"], "'declearn>=2.9.1,<2.10'"),
        ("typer", "from fedclip.__main__ import main; main()", ["list"], "'fedclip[cli]'"),
        ("tomlkit", COMMAND, ["translate", "optax", "clip", "max_delta=1"], "'fedclip[cli]'"),
        ("dp_accounting", COMMAND, CALIBRATE, "dp-accounting"),
        ("jinja2", COMMAND, ["report", "run", "--html", "p.html"], "jinja2 vl-convert-python"),
    ],
)
def test_what_is_missing_is_named_in_one_sentence(
    missing: str,
    code: str,
    words: list[str],
    install: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code.startswith("import fedclip.loops."):
        require({"tensorflow": "tensorflow", "jax": "jax"}.get(code.rpartition(".")[2], "torch"))
    monkeypatch.chdir(tmp_path)
    large_run(tmp_path / "run", 2, 2)
    done = without(missing, code, *words)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.endswith(f": pip install {install}")
    assert done.stdout == ""
    if words:
        assert done.stderr.count("\n") == 1


# -- installed ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source archive, and the wheel that was built from it."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("built")
    build(folder)
    return folder


def pip(*words: str) -> str:
    return " ".join([".venv/bin/python -m pip", *words])


def typed(folder: Path, *lines: str) -> str:
    """Type lines where `python` is that of the tests; return what they showed."""
    bin = folder / "bin"
    path = on_path(bin) if not bin.exists() else f"{bin}{os.pathsep}{os.environ['PATH']}"
    return type_in([*lines], folder, PATH=path, PIP_CONSTRAINT=str(PINS), PYTHONPATH="")


@pytest.mark.slow
def test_the_core_alone_then_each_extra(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("fedclip-*.whl")
    large_run(tmp_path / "run", 2, 2)
    shown = typed(
        tmp_path,
        "python -m venv .venv",
        pip("install -q", f"'{wheel}'"),
        ".venv/bin/python -c 'import fedclip; print(fedclip.NormClip(1.0))'",
        "! .venv/bin/fedclip list",
    )
    assert shown.endswith("websockets: pip install 'fedclip[cli]'\n")
    typed(tmp_path, pip("install -q", f"'{wheel}[cli]'"))
    listed = typed(tmp_path, "set +x", pip("list --format json 2> /dev/null")).partition("\n")[2]
    there = {package["name"].lower() for package in json.loads(listed)}
    assert {"declearn", "fedclip", "numpy"} <= there
    assert not {"torch", "tensorflow", "jax", "opacus", "matplotlib", "jinja2"} & there
    commands = ("--help", "list", "doctor", "report run")
    shown = typed(tmp_path, *(f".venv/bin/fedclip {words}" for words in commands))
    assert "zscore-clip" in shown
    assert "client-000" in shown

    # The light one for real; of all together, that pip finds everything at the pinned versions.
    report = ".venv/bin/fedclip report run --html p.html"
    assert "pip install" in typed(tmp_path, f"! {report}")
    typed(tmp_path, pip("install -q", f"'{wheel}[html]'"), report)
    assert (tmp_path / "p.html").stat().st_size > 10_000
    typed(tmp_path, pip("install -q --dry-run --report found.json", f"'{wheel}[all]'"))
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["install"]
    assert {"torch", "tensorflow", "jax", "opacus"} <= {p["metadata"]["name"] for p in found}
    for package in (entry["metadata"] for entry in found):
        name, version = canonicalize_name(package["name"]), Version(package["version"])
        if not name.startswith(("fedclip", *UNPINNED)):
            assert PINNED.get(name) == Version(version.public), package["name"]


@pytest.mark.slow
def test_without_declearn(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("fedclip-*.whl")
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
        pip("install -q --no-deps", f"'{wheel}'"),
        pip("install -q -r", f"'{ROOT / 'requirements-core.txt'}'"),
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
def test_an_extra_in_a_fresh_environment(extra: str, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("fedclip-*.whl")
    code = "; ".join(f"import {USES[e]}" for e in (USES if extra == "all" else [extra]))
    install = pip("install -q", f"'{wheel}[{extra}]'")
    typed(tmp_path, "python -m venv .venv", install, f".venv/bin/python -W ignore -c '{code}'")


# -- typed: the tutorials, and commands ---------------------------------------------------------
INSTALLING = ("python -m venv", ". .venv", "pip install")


def commands(page: str) -> list[str]:
    """Return the lines that a page asks its reader to type."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    pattern = r"(<!-- not in the tutorial -->\n)?^```console\n(.*?)^```$"
    found = re.findall(pattern, text, re.M | re.S)
    lines = [line for left_out, body in found if not left_out for line in body.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.mark.slow
def test_the_first_ten_minutes_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    checkout(tmp_path / "checkout")
    (wheel,) = built.glob("fedclip-*.whl")
    # Nobody waits for the whole demo here; tests/cli/test_tune.py runs it.
    lines = [
        line.replace("pip install '.[", f"pip install -q '{wheel}[").replace(
            "fedclip demo", "fedclip demo --seeds 1"
        )
        for line in commands("first-ten-minutes.md")
    ]
    shown = typed(tmp_path, "cd checkout", *lines)
    results = tmp_path / "checkout" / "examples" / "hospital" / "study"
    assert "data-norms" in (results / "report.html").read_text("utf-8")
    assert (tmp_path / "checkout" / "fedclip-demo" / "demo.png").exists()
    assert "valley: the norms of its steps are" in shown
    assert '"no-op"' not in (results / "config.toml").read_text("utf-8").partition("server_opt")[0]
    assert "unclipped" in shown


@pytest.mark.slow
def test_the_tutorial_on_privacy(tmp_path: Path) -> None:
    require("torch")
    pytest.importorskip("dp_accounting")
    checkout(tmp_path / "x")
    lines = [x for x in commands("tutorial-privacy.md") if not x.startswith(INSTALLING)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    type_in(lines, tmp_path / "x", PATH=on_path(tmp_path / "bin"), PYTHONPATH=paths)
    found = (tmp_path / "x" / "examples" / "dp_sgd" / "result").rglob("privacy_spent.json")
    assert sorted(path.parent.name for path in found) == ["client_0", "client_1", "client_2"]


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


IMPORTED = """
import sys
from fedclip.cli.main import main
try:
    main()
except SystemExit:
    print(*sorted({"declearn", "torch", "numpy", "rich"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "needs"),
    [
        *(("list", ""), ("doctor", ""), ("list zscore-clip", "numpy")),
        *(("--help", "numpy rich"), ("report nowhere", "numpy rich")),
    ],
)
def test_a_command_imports_what_it_needs(words: str, needs: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = ended("-c", IMPORTED, *words.split(), env=env, well=False)
    assert set(done.stderr.splitlines()[-1].split()) <= set(needs.split()), done.stderr


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
