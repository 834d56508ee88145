# SPDX-License-Identifier: Apache-2.0
"""What runs the checks elsewhere can be read, and calls the make targets that there are."""

import json
import re
import tomllib
from typing import Any

import yaml
from checkouts import ROOT

import fedclip


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def called(name: str) -> set[str]:
    """Return the targets that a file calls; comments call none."""
    return set(re.findall(r"\bmake ([a-z-]+)", re.sub(r"#.*", "", read(name))))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))


def test_every_target_is_described_and_every_runner_lints_and_tests() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), flags=re.MULTILINE)
    described = re.findall(r"^([a-z-]+):.*## .+$", read("Makefile"), flags=re.MULTILINE)
    assert set(phony.split()) == targets() == set(described)
    for name in (".ci/run", ".github/workflows/ci.yml", ".pre-commit-config.yaml"):
        assert {"lint", "test"} <= called(name) <= targets(), name


def test_the_workflow_runs_every_python_that_the_package_names() -> None:
    workflow: Any = yaml.safe_load(read(".github/workflows/ci.yml"))
    job, extras = workflow["jobs"]["check"], workflow["jobs"]["extras"]
    classifiers = tomllib.loads(read("pyproject.toml"))["project"]["classifiers"]
    named = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert job["strategy"]["matrix"]["python"] == named
    assert "make extras" in extras["steps"][-1]["run"]


def test_long_runs_are_at_night_and_a_release_is_published_only_on_request() -> None:
    night, release = ".github/workflows/nightly.yml", ".github/workflows/release.yml"
    # YAML reads the key `on` as True.
    assert yaml.safe_load(read(night))[True]["schedule"][0]["cron"]
    assert called(night) == {"soak"} <= targets() >= called(release)
    publish = yaml.safe_load(read(release))["jobs"]["publish"]
    assert publish["if"].startswith("vars.PUBLISH == 'true' && ")


def test_the_release_is_dated_and_of_one_version() -> None:
    changelog = read("CHANGELOG.md")
    (version, date), *_ = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert len(changelog.splitlines()) <= 60
    assert version == fedclip.__version__ == json.loads(read(".zenodo.json"))["version"]
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert f"date-released: {date}" in read("CITATION.cff")
    assert f'set version = "{version}"' in read("recipe/meta.yaml")
