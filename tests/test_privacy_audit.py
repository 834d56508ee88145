"""`fedclip privacy audit`: what attacks find, with faults built in and without."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from quickruns import write_config, write_sites
from report_runs import call

from fedclip.privacy.banded import Stream
from fedclip.tools import audit as attack
from fedclip.tools.audit import audit
from fedclip.tools.output import ToolError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Argument 'logger':DeprecationWarning"),
]

CENTRAL = (
    '[["update-clip-server", {{start_norm = 0.5, learning_rate = {rate}, noise_multiplier = 3.0, '
    "expected_clients = 30, separation = 2, delta = 0.001{more}}}]]"
)
BANDED = ', noise = "banded", rounds = 6'


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    write_sites(tmp_path, dict.fromkeys("abc", 100), valid=50, features=200)
    return partial(write_config, tmp_path / "config.toml", rounds=6)


def little_noise() -> AbstractContextManager[Any]:
    draw = Stream.draw
    return mock.patch.object(Stream, "draw", lambda self, *args: draw(self, *args) / 8)


@pytest.mark.parametrize(
    ("more", "rate", "fault", "found"),
    [
        ("", 0.0, nullcontext, False),
        (BANDED, 0.2, nullcontext, False),
        (BANDED, 0.0, little_noise, True),
    ],
)
def test_clients_are_found_out_where_there_is_too_little_noise(
    write: Any, more: str, rate: float, fault: Any, found: bool
) -> None:
    crowd = "[simulate]\nclients = 60\nrecords = 16\n"
    file = write(server=CENTRAL.format(more=more, rate=rate), more=crowd)
    with fault():
        result = audit(file, seed=1)
    assert result.fault == found
    assert result.least > 0.2
    assert 2.0 < result.claimed < 3.5
    assert found or result.membership.low < 0.6


PRIVATE = """
[run.privacy]
budget = [1.0, 1e-5]
sclip_norm = 1.0
use_csprng = true
"""


class Quiet(attack.IndependentNoise):
    """Noise that is an eighth of what it should be."""

    def add(self, sums: Any, std: float) -> dict[str, Any]:
        return super().add(sums, std / 8)


@pytest.mark.parametrize("found", [False, True])
def test_records_are_found_out_where_there_is_too_little_noise(
    write: Any, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    pytest.importorskip("opacus")
    if found:
        monkeypatch.setattr("fedclip.dpsgd.manager.IndependentNoise", Quiet)
    changes = {"aggregator": '"averaging"', "server": "[]", "client": '["sample-clip"]'}
    file = write(**changes, training="n_epoch = 1", more=PRIVATE)
    result = audit(file, seed=1)
    assert result.protects == "record"
    assert result.fault == found
    assert 0.9 < result.claimed < 1.6


def test_a_configuration_that_claims_nothing_is_refused(write: Any) -> None:
    with pytest.raises(ToolError, match="nothing here claims privacy"):
        audit(write(server='["update-clip-server"]'))


def test_the_command_prints_what_was_found(write: Any) -> None:
    file = str(write(server=CENTRAL.format(more="", rate=0.0), more="[simulate]\nclients = 60\n"))
    level = logging.getLogger("declearn").level
    done = call("privacy", "audit", file, "--seed", "1")
    assert done.exit_code == 0, done.output
    assert "no fault was found" in done.stdout
    assert logging.getLogger("declearn").level == level
    assert "what this does not show" in done.stdout
    told = json.loads(call("privacy", "audit", file, "--json").stdout)
    assert told["fault"] is False
    nowhere = call("privacy", "audit", "nowhere.toml")
    assert nowhere.exit_code == 2
    assert "nowhere.toml" in nowhere.output
    assert told["membership"]["low"] < told["membership"]["auc"] < told["membership"]["high"]
