# SPDX-License-Identifier: Apache-2.0
"""The core runs where neither declearn nor a framework can be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import python

PACKAGE = Path(__file__).parents[3] / "fedclip"

# All rooms but those that know frameworks or engines; `report`, too, reads files only.
ROOMS = (
    *("clippers", "core", "errors", "privacy", "report", "rules", "site", "statistics"),
    *("transforms", "translate", "updates"),
)

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("declearn", "torch", "tensorflow", "jax", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""

# A round of update clipping, by any engine: two of three updates are clipped; the bound goes up.
ROUND = """
import json
import numpy as np
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.server import UpdateServer

def server():
    return UpdateServer(AdaptiveBound(1.0))

first, clients, model = server(), [UpdateClient() for _ in range(3)], {"w": np.zeros(2)}
sent = first.open()
updates = [{"w": np.array([size, 0.0])} for size in (0.5, 2.0, 8.0)]
replies = [c.clip(u, sent, steps=5) for c, u in zip(clients, updates)]
assert replies[0].arrays is updates[0]
closed = first.close(replies, model)
assert abs(closed.average["w"][0] - 2.5 / 3) < 1e-9
assert closed.faults == ["", "", ""] and not closed.withheld
assert closed.record["share"] == 1 / 3 and closed.record["clipped"] == 2
second = server()
second.set_state(json.loads(json.dumps(first.get_state())))
assert second.open().bound == closed.record["next_bound"] > 1.0
"""


# Every clipper in a plain loop: clips, has a state, and can be copied, pickled and configured.
CLIPPERS = """
import copy, inspect, json, pickle
import numpy as np
import fedclip
from fedclip.clippers import by_name

found = by_name()
assert len(found) >= 19 and "agc" in found
for name, cls in found.items():
    assert "Parameters" in inspect.getdoc(cls)
    clipper = cls.from_config(cls().get_config())
    for size in (1.0, 1.1, 0.9, 1.0, 1.05, 50.0):
        given = {"w": np.full((4, 3), size), "b": np.array([0.5, -size])}
        weights = {n: 0.0 * x for n, x in given.items()}
        out = clipper.clip(given, weights) if name == "agc" else clipper.clip(given)
    assert name == "no-op" or out is not given
    if name == "agc":
        continue
    state = json.loads(json.dumps(clipper.get_state()["groups"]))
    others = copy.deepcopy(clipper), pickle.loads(pickle.dumps(clipper)), cls()
    others[2].set_state(clipper.get_state())
    for other in others:
        assert json.loads(json.dumps(other.get_state()["groups"])) == state
    clipper.on_round_start()
    assert len(clipper.rounds) and clipper.collect_aux_var() is None
assert fedclip.ZScoreClip.preset("zclip").warmup == 25
assert fedclip.NormClip(0.5).guarantee(fedclip.privacy.Context()).bound >= 0.5
"""


def core() -> list[str]:
    """Return the names of all files of the core."""
    files = [f for room in ROOMS for f in PACKAGE.rglob("*.py") if belongs(f, room)]
    names = (".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts) for f in files)
    return sorted({name.removesuffix(".__init__") for name in names})


def belongs(file: Path, room: str) -> bool:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py") == room


def alone(code: str) -> None:
    python(f"{REFUSE}\n{code}", "nothing", options=["-W", "error"])


@pytest.mark.slow
def test_every_file_of_the_core_is_imported_without_declearn() -> None:
    code = f"import importlib\nfor name in {core()!r}:\n    importlib.import_module(name)"
    alone(code)


@pytest.mark.slow
@pytest.mark.parametrize("code", [CLIPPERS, ROUND], ids=["clippers", "a round"])
def test_it_runs_without_declearn(code: str) -> None:
    alone(code)
