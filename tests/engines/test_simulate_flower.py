# SPDX-License-Identifier: Apache-2.0
"""`fedclip simulate --engine flower` comes to what one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedclip.report import read_report

CONFIG = """
[network]
[data]
data_folder = {data}
[model]
model_file = {model}
[optim]
aggregator = "clipped-averaging"
[optim.client_opt]
lrate = 0.1
modules = ["zscore-clip", ["momentum", {{beta = 0.5}}], "update-clip-client"]
[optim.server_opt]
lrate = 1.0
modules = [["update-clip-server", {{learning_rate = 0.5}}]]
[run]
rounds = 4
[run.training]
batch_size = 8
n_steps = 3
[experiment]
checkpoint = {out}
[simulate]
clients = 5
drop_out = 0.2
attackers = 1
seed = 3
"""
MODEL = """
from declearn.model.sklearn import SklearnSGDModel
model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
"""


@pytest.fixture
def task(tmp_path: Path) -> Any:
    rng = np.random.default_rng(0)
    for site, records in (("a", 40), ("b", 24)):
        folder = tmp_path / "data" / site
        folder.mkdir(parents=True)
        for part, count in (("train", records), ("valid", 20)):
            data = rng.normal(size=(count, 4))
            np.save(folder / f"{part}_data.npy", data)
            np.save(folder / f"{part}_target.npy", (data[:, 0] > 0).astype(int))
    (tmp_path / "model.py").write_text(MODEL)

    def written(out: str) -> Path:
        paths = {"data": tmp_path / "data", "model": tmp_path / "model.py", "out": tmp_path / out}
        values = {key: json.dumps(str(path)) for key, path in paths.items()}
        file = tmp_path / f"{out}.toml"
        file.write_text(CONFIG.format(**values))
        return file

    return written


def simulate(file: Path, engine: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "fedclip", "simulate", str(file), "--engine", engine]
    return subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)


def read(results: Path) -> tuple[Any, Any]:
    # Imported here, as declearn registers its optional frameworks.
    from declearn.utils.serialize import msgpack_load

    (best,) = results.glob("**/server/model_state_best.mpk")
    report = read_report(results)
    rows = [(row.node, row.name, row.record.as_dict()) for row in report.rows]
    return msgpack_load(str(best)).coefs, rows


def test_the_engine_changes_nothing(task: Any) -> None:
    found = []
    for engine in ("process", "flower"):
        file = task(engine)
        done = simulate(file, engine)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        found.append(read(file.parent / engine))
    (model, rows), (other, others) = found
    for name, values in model.items():
        np.testing.assert_allclose(values, other[name], rtol=1e-12)
    assert rows == others
    assert {name for _, name, _ in rows} == {"zscore-clip", "update-clip-client"}


def test_a_client_that_fails_ends_the_run_in_words(task: Any) -> None:
    file = task("flower")
    model = file.with_name("model.py")
    fails = "import os\nif 'RAY_JOB_ID' in os.environ: raise OSError('no model here')"
    model.write_text(MODEL + fails)
    done = simulate(file, "flower")
    assert done.returncode == 1
    assert "could not train" in done.stderr
