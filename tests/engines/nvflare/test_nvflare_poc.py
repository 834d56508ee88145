# SPDX-License-Identifier: Apache-2.0
"""NVFlare: jobs that attack a site's policy, on a server and a site in processes of their own."""

import json
import os
import shutil
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ended
from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils import fobs
from nvflare.job_config.api import FedJob
from nvflare_hostile import NUMBER, SECRET, WAYS, Hostile, Keep

from fedclip.engines.nvflare import add_update_clipping

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "nvflare"
POLICY = "[update]\nmax_norm = 0.5\nallow_metrics = ['accuracy']\n"
# The hostile jobs are code, which a site lets in on purpose only.
WITH_CODE = f"{POLICY}allow_job_code = true\n"

flare_decomposers.register()
common_decomposers.register()


def hostile(folder: Path, **meta: str) -> Path:
    job = FedJob("hostile", min_clients=1, meta_props=meta)
    job.to_server(NPModelPersistor(model=[0.0] * 4), id="persistor")
    # It goes on after errors, so that one job tries all ways.
    rounds = {"num_clients": 1, "num_rounds": len(WAYS), "ignore_result_error": True}
    job.to_server(FedAvg(aggregator=Keep(), **rounds))
    job.to_clients(Hostile(), tasks=["train"])
    job.export_job(str(folder))
    return folder / "hostile"


def run(folder: Path, *jobs: Path, policy: str = WITH_CODE) -> tuple[str, list[bytes], list[Any]]:
    """Run jobs; return how they ended, the frames, and the results that arrived, by rounds."""
    (folder / "site.toml").write_text(policy)
    (folder / "site.toml").chmod(0o600)
    script = ROOT / "tests" / "support" / "nvflare_poc.py"
    ended(script, folder, *jobs, env=os.environ | {"HOME": str(folder)})  # where NVFlare writes
    arrived = list((folder / "arrived").iterdir())
    frames = [path.read_bytes() for path in arrived if path.suffix == ".frame"]
    results = [fobs.loads(path.read_bytes()) for path in arrived if path.suffix == ".result"]
    results.sort(key=lambda result: result.get_cookie("contribution_round"))
    assert len(frames) > 20
    return (folder / "status.txt").read_text(), frames, results


def holds(frames: list[bytes]) -> tuple[bool, bool]:
    numbers = struct.pack("<f", NUMBER), struct.pack("<d", NUMBER)
    named = any(SECRET.encode() in frame for frame in frames)
    return named, any(number in frame for frame in frames for number in numbers)


def test_a_hostile_job_takes_out_no_more_than_the_policy_lets(tmp_path: Path) -> None:
    status, frames, results = run(tmp_path, hostile(tmp_path))
    assert status == "FINISHED:COMPLETED"
    assert any(b"accuracy" in frame for frame in frames)
    assert holds(frames) == (False, False)
    left = dict(zip(WAYS, results, strict=True))
    for way, kind in (("difference", DataKind.WEIGHT_DIFF), ("weights", DataKind.WEIGHTS)):
        dxo = from_shareable(left.pop(way))
        assert (dxo.data_kind, dxo.meta) == (kind, {"accuracy": 0.5})
        assert 0.49 < np.linalg.norm(dxo.data["numpy_key"]) <= 0.5
    assert from_shareable(left.pop("metrics")).data == {"accuracy": 0.5}
    codes = {way: reply.get_return_code() for way, reply in left.items()}
    assert codes == dict.fromkeys(left, ReturnCode.TASK_RESULT_FILTER_ERROR)
    assert all(set(reply) <= {"__headers__"} for reply in left.values())
    # Cookies are the server's, whatever an executor has done to them.
    for reply in results:
        assert "note" not in reply.get_cookie_jar()


@pytest.mark.soak
@pytest.mark.parametrize("case", ["own code", "no policy", "another scope"])
def test_a_job_that_would_get_around_the_policy_gets_nothing(case: str, tmp_path: Path) -> None:
    job = hostile(tmp_path, **({"scope": "another"} if case == "another scope" else {}))
    policy = {"no policy": "[update]", "own code": POLICY}.get(case, WITH_CODE)
    status, frames, results = run(tmp_path, job, policy=policy)
    assert status != "FINISHED:COMPLETED"
    assert holds(frames) == (False, False)
    assert not any("DXO" in result for result in results)


def test_the_example_without_code_runs_with_short_lists(tmp_path: Path, monkeypatch: Any) -> None:
    """What docs/nvflare-site.md shows: a script that the site has, and lists of what both allow."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    example, script = import_module("job"), tmp_path / "installed" / "client.py"
    job = example.recipe(1, 3, str(script))
    add_update_clipping(job, folder=str(tmp_path / "spent"), start_norm=0.48)
    example.export(job, tmp_path)
    assert not [*(tmp_path / "digits").rglob("*.py")]
    script.parent.mkdir()
    shutil.copy(EXAMPLE / "client.py", script)
    (tmp_path / "short-lists").touch()
    status, _, results = run(tmp_path, tmp_path / "digits", policy=POLICY)
    assert status == "FINISHED:COMPLETED"
    rounds = json.loads((tmp_path / "spent" / "update_clip.json").read_text())["rounds"]
    bounds = [one["bound"] for one in rounds]
    assert bounds[1] > 0.5 > bounds[0]
    for result, bound in zip(results, bounds, strict=True):
        dxo = from_shareable(result)
        norm = np.linalg.norm(dxo.data["numpy_key"].astype("f8"))
        assert norm == pytest.approx(min(bound, 0.5), rel=1e-5)
        assert dxo.meta.get("initial_metrics") == {"accuracy": pytest.approx(0.5, abs=0.5)}
