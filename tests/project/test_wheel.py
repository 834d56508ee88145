# SPDX-License-Identifier: Apache-2.0
"""The wheel in other people's hands: with the core alone, with each extra, without a package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from checkouts import ROOT, on_path, type_in
from helpers import ended, hiding, require
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
        # Build tools, which come with Python or with none, and what CUDA builds of torch bring.
        if name in ("setuptools", "wheel", "pip", "triton") or name.startswith(("nvidia-", "cuda")):
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
CLIENT = "import fedclip\nfedclip.PrivateFederatedClient({}, {}, 'c')"
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
        ("lightning,pytorch_lightning", LOOP.format("lightning"), [], "lightning"),
        ("transformers", LOOP.format("transformers"), [], "'transformers[torch]'"),
        ("tensorflow", LOOP.format("tensorflow"), [], "tensorflow"),
        ("tensorflow,torch,jax", LOOP.format("keras"), [], "keras, and tensorflow, torch or jax"),
        ("optax", LOOP.format("jax"), [], "jax optax"),
        ("opacus", CLIENT, [], "opacus dp-accounting"),
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
def pip(*words: str) -> str:
    return " ".join([".venv/bin/python -m pip", *words])


@pytest.mark.slow
def test_the_core_alone_then_each_extra(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("fedclip-*.whl")
    large_run(tmp_path / "run", 2, 2)
    python = on_path(tmp_path / "bin")

    def typed(*lines: str) -> str:
        constraints = str(PINS)
        return type_in([*lines], tmp_path, PATH=python, PIP_CONSTRAINT=constraints, PYTHONPATH="")

    typed("python -m venv .venv", pip("install -q", f"'{wheel}'"))
    shown = typed(
        ".venv/bin/python -c 'import fedclip; print(fedclip.NormClip(1.0))'",
        "! .venv/bin/fedclip list",
    )
    assert shown.endswith("websockets: pip install 'fedclip[cli]'\n")
    typed(pip("install -q", f"'{wheel}[cli]'"))
    there = json.loads(typed("set +x", pip("list --format json 2> /dev/null")).partition("\n")[2])
    assert {"declearn", "fedclip", "numpy"} <= {package["name"] for package in there}
    frameworks = {"torch", "tensorflow", "jax", "opacus", "matplotlib", "jinja2"}
    assert not frameworks & {package["name"].lower() for package in there}

    shown = typed(
        ".venv/bin/fedclip --help",
        ".venv/bin/fedclip list",
        ".venv/bin/fedclip doctor",
        ".venv/bin/fedclip report run",
    )
    assert "zscore-clip" in shown
    assert "client-000" in shown

    # The light one for real; of all together, that pip finds everything at the pinned versions.
    report = ".venv/bin/fedclip report run --html p.html"
    assert "pip install" in typed(f"! {report}")
    typed(pip("install -q", f"'{wheel}[html]'"), report)
    assert (tmp_path / "p.html").stat().st_size > 10_000
    typed(pip("install -q --dry-run --report found.json", f"'{wheel}[all]'"))
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["install"]
    assert {"torch", "tensorflow", "jax", "opacus"} <= {p["metadata"]["name"] for p in found}
    for package in (entry["metadata"] for entry in found):
        name, version = canonicalize_name(package["name"]), Version(package["version"])
        if name not in ("fedclip", "setuptools", "wheel"):
            assert PINNED.get(name) == Version(version.public), package["name"]


@pytest.mark.slow
def test_without_declearn(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("fedclip-*.whl")
    round_ = (
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from fedclip.updates.protocol import Reply\n"
        "from fedclip.updates.store import PersistentServer\n"
        "settings = {'start_norm': 1.0, 'noise_multiplier': 1.0, 'expected_clients': 2}\n"
        "served = PersistentServer(settings, Path('run/server').resolve())\n"
        "model = {'w': np.zeros(2)}\n"
        "served.open()\n"
        "served.close([Reply(model, votes=1, within=1)] * 2, model)\n"
    )
    (tmp_path / "round.py").write_text(round_, encoding="utf-8")
    shown = type_in(
        [
            "python -m venv .venv",
            pip("install -q --no-deps", f"'{wheel}'"),
            pip("install -q -r", f"'{ROOT / 'requirements-core.txt'}'"),
            ".venv/bin/python round.py",
            ".venv/bin/fedclip report run",
            ".venv/bin/fedclip privacy spent run",
            "! .venv/bin/fedclip check run",
        ],
        tmp_path,
        PATH=on_path(tmp_path / "bin"),
        PIP_CONSTRAINT=str(PINS),
        PYTHONPATH="",
    )
    assert "closed form  epsilon" in shown
    assert "fedclip: this command needs declearn" in shown


@pytest.mark.soak
@pytest.mark.parametrize("extra", HEAVY)
def test_an_extra_in_a_fresh_environment(extra: str, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("fedclip-*.whl")
    uses = {
        "torch": "fedclip.loops.torch",
        "tensorflow": "fedclip.loops.tensorflow",
        "jax": "fedclip.loops.jax",
        "lightning": "fedclip.loops.lightning",
        "transformers": "fedclip.loops.transformers",
        "peft": "peft",
        "grpc": "declearn.communication.grpc",
        "dp": "fedclip.privacy.accounting",
    }
    code = "; ".join(f"import {uses[e]}" for e in (uses if extra == "all" else [extra]))
    type_in(
        [
            "python -m venv .venv",
            pip("install -q", f"'{wheel}[{extra}]'"),
            f".venv/bin/python -W ignore -c '{code}'",
        ],
        tmp_path,
        PATH=on_path(tmp_path / "bin"),
        PIP_CONSTRAINT=str(PINS),
        PYTHONPATH="",
    )
