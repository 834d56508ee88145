# SPDX-License-Identifier: Apache-2.0
"""The core runs where declearn can not be imported: all but what is named here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE

PACKAGE = Path(__file__).parents[1] / "fedclip"

ROOMS = (
    *("errors", "scopes", "states", "records", "parameters", "measures", "rules", "transforms"),
    *("privacy", "federation", "compat", "report", "toml", "modules", "registration"),
)
# What declearn sees, or what looks into declearn. Any other file of these rooms is core.
SHELLS = {
    "fedclip.modules.servers",
    "fedclip.privacy.pipeline",
    "fedclip.privacy.places",
    *(
        f"fedclip.federation.{name}"
        for name in (
            *("evaluation", "network", "personal", "personal_client", "restart", "senders"),
            *("serving", "tolerant"),
            *(f"statistics.{name}" for name in ("check", "counterpart", "messages")),
            *(f"update.{n}" for n in ("aggregator", "check", "client", "messages", "server")),
        )
    ),
}

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("declearn", "torch", "tensorflow", "jax", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""

# One step of a transform with a rule, its state as plain values and back, and its record.
STEP = """
import json
import numpy as np
from fedclip import states
from fedclip.arrays.blocks import exact_norm
from fedclip.records import Recorder
from fedclip.rules.growth import Growth
from fedclip.scopes import resolve
from fedclip.transforms import Gradient, NormClipping

groups = resolve("layer", None, ["enc.w", "enc.b", "head"])
assert groups.labels == ("enc", "head")
clipping = NormClipping(Growth(2.0, None, None, None, None, None, 0.0))
state, recorder = clipping.init(groups), Recorder()
recorder.start_round()
for factor in (1.0, 2.0, 100.0):
    given = [factor * np.array(v) for v in ([3.0, 4.0], [0.0], [0.1])]
    named = dict(zip(groups.names, given))
    gradient = Gradient.of("clip", named, groups, clipping)
    outcome = gradient.clipped(clipping, state)
    recorder.add(groups.labels, outcome.norms, outcome.limits, outcome.clipped)
    plain = json.loads(json.dumps(states.dump(outcome.state, groups.labels)))
    statistics = states.check_groups(plain, clipping.init(resolve("global", None, ["x"])))
    state = states.load(clipping.init(groups), statistics, groups.labels)
assert outcome.clipped.all()
assert exact_norm(outcome.outputs[:2]) <= outcome.limits[0] < 500
assert [r.group for r in recorder.rounds()] == ["all", "enc", "head"]
"""

RULE = """
import numpy as np
from fedclip.arrays import NUMPY
from fedclip.rules.constant import Constant

rule = Constant((1.0, 2.0))
limits, state = rule(np.array([5.0, 0.5]), rule.init(2, NUMPY), NUMPY)
assert limits.tolist() == [1.0, 2.0]
"""

PRIVACY = """
import numpy as np
import math
from fedclip.privacy import Map, RELATIONS
from fedclip.privacy.accounting import Release, epsilon, noise_multiplier
from fedclip.privacy.lengths import l2_of
from fedclip.privacy.noise import add_noise, insecure_normals, secure_normals
from fedclip.privacy.sensitivity import compose

assert 5.0 <= l2_of("inf", 0.5, 100) < 5.0 + 1e-9
found = compose((Map("a clip", bound=0.5, formula="0.5", lipschitz=1.0, finite=True),))
assert found.l2_bound == 0.5
assert found.sensitivity("replace-one") == 1.0
spent = epsilon([Release(2.0, 10)], 1e-5)
assert 0 < spent < epsilon([Release(1.0, 10)], 1e-5)
assert noise_multiplier(spent, 1e-5, 10) <= 2.0 + 1e-6
given = {"w": np.zeros(10_000)}
for normals in (insecure_normals(1), secure_normals):
    noised = add_noise(given, 0.5, normals)["w"]
    assert abs(noised.std() - 0.5) < 0.05
assert not given["w"].any()
"""

# A round of update clipping, by any engine: two of three updates are clipped; the bound goes up.
ROUND = """
import json
import numpy as np
from fedclip.federation.update.adaptive import AdaptiveBound
from fedclip.federation.update.clipping import UpdateClient
from fedclip.federation.update.engine import UpdateServer

def server():
    return UpdateServer(AdaptiveBound(1.0, learning_rate=0.2))

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
from fedclip.modules import by_name

found = by_name()
assert len(found) >= 19 and "agc" in found
for name, cls in found.items():
    assert "Parameters" in inspect.getdoc(cls)
    clipper = cls.from_config(cls().get_config())
    for size in (1.0, 1.1, 0.9, 1.0, 1.05, 50.0):
        given = {"w": np.full((4, 3), size), "b": np.array([0.5, -size])}
        out = clipper.clip(given, given) if name == "agc" else clipper.clip(given)
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
    found = {name.removesuffix(".__init__") for name in names}
    assert found >= SHELLS, f"no longer there: {SHELLS - found}"
    return sorted(found - SHELLS)


def belongs(file: Path, room: str) -> bool:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py") == room


def alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", REFUSE + code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=PACKAGE.parent,
        check=False,
    )


def test_every_file_of_the_core_is_imported_without_declearn() -> None:
    code = f"import importlib\nfor name in {core()!r}:\n    importlib.import_module(name)"
    done = alone(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_named_as_a_shell_is_one() -> None:
    """So that the list gets shorter when a file no longer needs declearn."""
    code = (
        "import importlib\n"
        f"for name in {sorted(SHELLS)!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    sys.exit(name + ' needs no declearn')\n"
    )
    done = alone(code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "code",
    [STEP, RULE, CLIPPERS, PRIVACY, ROUND],
    ids=["a step", "a rule", "clippers", "privacy", "a round"],
)
def test_it_runs_without_declearn(code: str) -> None:
    done = alone(code)
    assert done.returncode == 0, done.stderr[-2000:]
