# SPDX-License-Identifier: Apache-2.0
"""Flower as it runs: the example on Ray and over a SuperLink, and the docs page."""

import doctest
import json
import os
import re
import shutil
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_loop import arrays_of, record
from flwr.app import Context, Message, RecordDict
from helpers import ended

from fedclip.cli.check.configuration import check_config
from fedclip.cli.privacy import read_spent
from fedclip.report import read_report

APP = Path(__file__).parents[3] / "examples" / "flower"


@pytest.mark.slow
def test_ten_clients_on_ray_with_noise(tmp_path: Path) -> None:
    noise = ("noise-multiplier=0.3", "expected-clients=10", "start-norm=1.0")
    options = [word for pair in noise for word in ("--set", f"update-clip.{pair}")]
    done = ended(APP / "run.py", "--folder", tmp_path, "--rounds", "3", *options, timeout=1500.0)
    kept = json.loads((tmp_path / "update_clip.json").read_text())
    assert [row["replies"] for row in kept["rounds"]] == [10, 10, 10]
    accuracies = re.findall(r"MetricRecord: \{'accuracy': ([\d.]+)", done.stdout)
    assert max(map(float, accuracies)) > 0.6
    (spent,) = read_spent(tmp_path)
    assert spent.accountant.rounds == 3
    assert len(read_report(tmp_path).rows) == 3


def test_flwr_builds_the_example(tmp_path: Path) -> None:
    assert check_config(APP).ok
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("result*", "__pycache__"))
    flwr = Path(sys.executable).with_name("flwr")
    env = {**os.environ, "HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
    ended(flwr, "build", "--app", "app", cwd=tmp_path, env=env)
    (bundle,) = tmp_path.glob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    assert {"pyproject.toml", "LICENSE", "digits/client_app.py"} <= set(names)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(APP))
    yield import_module("digits.client_app")
    for name in [name for name in sys.modules if name.partition(".")[0] == "digits"]:
        del sys.modules[name]


def test_a_step_clipper_goes_on_in_the_next_round(client: Any) -> None:
    settings = {"local-epochs": 1, "learning-rate": 0.5, "step-clip": True}
    node = {"partition-id": 0, "num-partitions": 10}
    context = Context(1, 1, node, RecordDict(), settings)
    model = {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}
    for round_ in (1, 2):
        message = Message(RecordDict({"arrays": record(model)}), 1, "train")
        # A process that has started anew has nothing but the context.
        reply = client.train(message, context)
        model = arrays_of(reply.content["arrays"])
        state = json.loads(context.state["step-clip"]["state"])
        # 144 images in batches of 32.
        assert [(r["round"], r["steps"]) for r in state["rounds"]] == [(1, 5), (2, 5)][:round_]


# -- the page; `project/test_docs.py` runs the others -------------------------------------------
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_the_page_runs() -> None:
    page, names, said = "flower.md", dict[str, Any](), list[str]()
    text = (APP.parents[1] / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(python|pycon)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    for language, block in found:
        if language == "python":
            exec(compile(block, page, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, {}, page, page, 0)
        test.globs = names
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
