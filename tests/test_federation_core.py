# SPDX-License-Identifier: Apache-2.0
"""The logic of a round stands in files that run where there is no declearn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedclip

CORE = (
    "fedclip.federation.replies",
    "fedclip.federation.statistics.client",
    "fedclip.federation.statistics.counts",
    "fedclip.federation.statistics.server",
    "fedclip.federation.update.averaging",
    "fedclip.federation.update.bound",
    "fedclip.federation.update.budget",
    "fedclip.federation.update.coupling",
    "fedclip.federation.update.secagg",
    "fedclip.measures.sketch",
    "fedclip.records",
)

# The package itself registers everything; a part of it is imported here without that.
ALONE = """
import importlib, sys, types
sys.modules["declearn"] = None
package = types.ModuleType("fedclip")
package.__path__ = [{folder!r}]
sys.modules["fedclip"] = package
for name in {names!r}:
    importlib.import_module(name)
assert not any(name.startswith(("torch", "tensorflow", "jax")) for name in sys.modules)
"""

A_ROUND = """
import numpy as np
from fedclip.federation.update.averaging import UpdateClipping, averaged
from fedclip.federation.update.bound import BoundRule, share_within
from fedclip.federation.update.coupling import ClientRound

clipping = UpdateClipping(
    "global", None, zeroing_norm=None, zeroing_ord="inf", zeroing_factor=None, on_nonfinite="skip"
)
rounds = [ClientRound(1.0) for _ in range(3)]
updates = [{"w": np.array([size, 0.0])} for size in (0.5, 2.0, 8.0)]
shared = [clipping.prepare(u, r, whole=True).arrays for u, r in zip(updates, rounds)]
assert shared[0] is updates[0]
assert not any(clipping.excess(arrays, 1.0, True) for arrays in shared)
assert abs(averaged(shared, 3)["w"][0] - 2.5 / 3) < 1e-9
share = share_within(3, sum(not r.clipped for r in rounds), None, 0.0)
assert share == 1 / 3
assert BoundRule(0.5, 0.2, 1e-6, 1e4).after(1.0, share).bound > 1.0
"""


def alone(code: str) -> subprocess.CompletedProcess[str]:
    folder = str(Path(fedclip.__file__).parent)
    text = ALONE.format(folder=folder, names=CORE) + code
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(folder).parent)},
        check=False,
    )


@pytest.mark.parametrize("code", ["", A_ROUND], ids=["imports", "a round"])
def test_it_runs_without_declearn(code: str) -> None:
    done = alone(code)
    assert done.returncode == 0, done.stderr[-2000:]
