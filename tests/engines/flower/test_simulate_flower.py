# SPDX-License-Identifier: Apache-2.0
"""`fedclip simulate --engine flower` comes to what one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quickruns import MODEL, write_config, write_sites

from fedclip.report import read_report

CHANGES = {
    "client": '["zscore-clip", ["momentum", {beta = 0.5}], "update-clip-client"]',
    "rounds": 4,
    "training": "n_steps = 3",
    "more": "[simulate]\nclients = 5\ndrop_out = 0.2\nattackers = 1\nseed = 3\n",
}


@pytest.fixture
def task(tmp_path: Path) -> Any:
    write_sites(tmp_path, {"a": 40, "b": 24})
    return lambda out: write_config(tmp_path / f"{out}.toml", out, **CHANGES)


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
    assert {name for _, name, _ in rows} == {"zscore-clip", "update-clip-client", "update-norms"}


def test_a_client_that_fails_ends_the_run_in_words(task: Any) -> None:
    file = task("flower")
    model = file.with_name("model.py")
    fails = "import os\nif 'RAY_JOB_ID' in os.environ: raise OSError('no model here')"
    model.write_text(MODEL + fails)
    done = simulate(file, "flower")
    assert done.returncode == 1
    assert "could not train" in done.stderr
