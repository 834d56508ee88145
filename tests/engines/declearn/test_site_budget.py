# SPDX-License-Identifier: Apache-2.0
"""A site's budget in declearn, against servers that would spend more, and beside other parts."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from declearn.messaging import Error, InitReply, PrivacyReply, PrivacyRequest, TrainReply
from declearn.secagg.utils import IdentityKeys
from helpers import policy
from hostile_server import C, attack, data, init, leaks, train

import fedclip
from fedclip.engines.declearn.messages import UpdateClipBound
from fedclip.privacy import ledger as ledgers
from fedclip.privacy.ledger import Ledger
from fedclip.site.gate import REFUSED

CLIPPED = fedclip.ClippedAveraging()
BOUND = {"update-clip": UpdateClipBound(1e9)}


def budget(folder: Path) -> Path:
    """Return a policy with a budget for four updates."""
    ledger = str(folder / "spent.json")
    return policy(folder, noise_multiplier=2.0, max_epsilon=10.0, delta=1e-5, ledger=ledger)


ROUNDS = [init(), *(train(i) for i in range(1, 8))]


def test_a_budget_holds_over_jobs_and_restarts(tmp_path: Path, caplog: Any) -> None:
    file = budget(tmp_path)
    first = attack([init(), train(), train(2), train(3)], file)
    assert len(first.updates) == 3
    # The noise is the site's own: an update of (almost) zeros has its standard deviation.
    second = attack([init(lrate=1e-15), train(), train(2)], file)
    assert len(second.updates) == 1
    assert second.of(Error) == [Error(REFUSED)]
    (values,) = second.updates
    squares = np.square(np.concatenate([np.ravel(a) for a in values.coefs.values()]) / (2.0 * C))
    # Of 201 squares, the mean is 1, and off by .6 (six of its standard deviations) in none of 10^7.
    assert abs(squares.mean() - 1.0) < 0.6
    third = attack(ROUNDS, file)
    assert not third.updates
    assert third.of(Error) == [Error(REFUSED)] * 7
    assert "one more update would make epsilon 11.48, above max_epsilon = 10" in caplog.text


def test_beyond_max_replies_the_client_leaves(tmp_path: Path) -> None:
    wire = attack(ROUNDS, policy(tmp_path, max_replies_per_run=3))
    assert [type(message) for message in wire.messages] == [InitReply, TrainReply, TrainReply]


def test_a_ledger_that_is_put_back_gives_a_running_process_nothing(tmp_path: Path) -> None:
    file, ledger, kept = budget(tmp_path), tmp_path / "spent.json", tmp_path / "backup"
    attack([init()], file)
    shutil.copy(ledger, kept)

    script: list[Any] = [init(), train(), train(2), partial(shutil.copy, kept, ledger), train(3)]
    wire = attack([*script, ledger.unlink, train(4), train(5)], file)
    assert len(wire.updates) == 4
    assert wire.of(Error) == [Error(REFUSED)]
    # Between two processes it is not seen, as the docs say.
    shutil.copy(kept, ledger)
    ledgers._OF_THIS_PROCESS.clear()
    assert len(attack(ROUNDS, file).updates) == 4


def test_own_noise_goes_with_plain_averages_and_votes_stay(tmp_path: Path, caplog: Any) -> None:
    file = budget(tmp_path)
    asked = [init(["update-clip-client"], CLIPPED), train(aux=BOUND)]
    wire = attack(asked, file)
    assert not wire.updates
    assert wire.of(Error) == [Error(REFUSED)]
    assert "noise takes updates beyond the bound" in caplog.text
    asked[0] = init(["update-clip-client"])
    # declearn's own average, with the module that votes beside it, is refused by that module.
    assert not attack(asked, file).updates


def test_a_ledger_of_records_and_secure_aggregation_are_refused(tmp_path: Path) -> None:
    Ledger(9.0, 1e-5, tmp_path / "spent.json", data="9 records")
    with pytest.raises(ValueError, match="is a ledger of records"):
        attack([], budget(tmp_path))
    key = Ed25519PrivateKey.generate()
    keys = {"secagg_type": "masking", "id_keys": IdentityKeys(key, [key.public_key()])}
    with pytest.raises(ValueError, match="secagg hides what leaves"):
        attack([], policy(tmp_path), secagg=keys)


@pytest.mark.slow
def test_dp_sgd_goes_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    ask = PrivacyRequest((9.0, 1e-5), 1.0, "rdp", True, None, 1, {"batch_size": 8}, 1, None)
    script = [init(["sample-clip"], dpsgd=True), ask, train()]
    ledger = tmp_path / "records.json"
    settings = {"kind": fedclip.PrivateFederatedClient, "valid_data": data(), "ledger": ledger}
    wire = attack(script, policy(tmp_path), **settings)
    assert [type(m) for m in wire.messages] == [InitReply, PrivacyReply, TrainReply]
    assert not [*leaks(wire)]
    assert ledger.exists()
