# SPDX-License-Identifier: Apache-2.0
"""Server and clients with different versions of fedclip: a sentence, never a client that dies."""

import random
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.messaging import SerializedMessage, TrainRequest
from declearn.optimizer import Optimizer
from federation_helpers import Clients
from federation_liars import anything

import fedclip
from fedclip.core.plugins import VERSION
from fedclip.engines.declearn.messages import UpdateClipBound
from fedclip.statistics.counts import FedclipSharedState

NEWER = "9.0.0"
SERVER = [("update-clip-server", {"start_norm": 1.0}), "zscore-clip-server"]
CLIENT_MODULES: list[Any] = [("zscore-clip", {"shared": True}), "update-clip-client"]
KEYS = {"update-clip": "UpdateClipBound", "zscore-clip-shared": "FedclipSharedState"}

pytestmark = pytest.mark.usefixtures("no_round_left_open")


def sent() -> dict[str, dict[str, Any]]:
    """Return what a server sends, as declearn packs it."""
    aux = Optimizer(lrate=1.0, modules=list(SERVER)).collect_aux_var()
    return {k: {"__type__": f"AuxVar>{KEYS[k]}", "dump": m.to_dict()} for k, m in aux.items()}


def arrived(aux: dict[str, Any]) -> dict[str, Any]:
    """Return it as clients get it."""
    request = TrainRequest(round_i=1, weights=None, aux_var={}, batches={"batch_size": 1})
    request.aux_var = aux
    got: Any = SerializedMessage.from_bin_message(request.serialize()).deserialize()
    return dict(got.aux_var)


@pytest.mark.parametrize("key", KEYS)
def test_what_a_newer_server_says_besides_is_kept(key: str) -> None:
    aux = sent()
    aux[key]["dump"] |= {"surprise": [1, 2], "fedclip": NEWER}
    message = arrived(aux)[key]
    assert message.unread == {"surprise": [1, 2]}
    assert message.to_dict() == aux[key]["dump"]
    clients = Clients(1, CLIENT_MODULES, {"name": "clipped-averaging"})
    reply = clients.round(0, arrived(aux), np.array([3.0, 4.0]))
    assert set(reply.aux_var) == set(KEYS)


@pytest.mark.parametrize("cls", [UpdateClipBound, FedclipSharedState])
def test_decoding_never_raises(cls: Any) -> None:
    rng = random.Random(3)
    for _ in range(500):
        message = cls.from_dict(anything(rng))
        assert isinstance(message, cls)
        message.missing()


def test_the_configuration_says_of_which_version_it_is() -> None:
    module = fedclip.UpdateClipClient()
    assert module.get_config() == {"noise": None, "fedclip": VERSION}
    assert isinstance(fedclip.UpdateClipClient.from_config({"fedclip": NEWER}), type(module))
    aggregator = fedclip.ClippedAveraging(max_norm=1.0)
    config = aggregator.get_config()
    assert config["fedclip"] == VERSION
    again = Aggregator.from_config({**config, "fedclip": NEWER})
    assert again.get_config() == config


@pytest.mark.parametrize("cls", [fedclip.UpdateClipClient, fedclip.ClippedAveraging])
def test_a_parameter_of_a_newer_version_is_told(cls: Any) -> None:
    with pytest.raises(TypeError, match=f"no parameter 'surprise'.*of fedclip {NEWER}"):
        cls(surprise=1, fedclip=NEWER)
    with pytest.raises(TypeError, match="no parameter 'surprise'") as found:
        cls(surprise=1)
    assert "it is of fedclip" not in str(found.value)


BOUND, STATE = KEYS
OTHERS: list[tuple[str, str, list[Any]]] = [
    (BOUND, "bound", ["1", [1.0], {"all": 1.0}, np.ones(2)]),
    (BOUND, "adaptive", [[1, 2], np.ones(2)]),
    (BOUND, "private", [[1, 2]]),
    (BOUND, "stop", [[1, 2], np.ones(2)]),
    (STATE, "settings", [[["z_max", 2.0]], 1, "x"]),
    (STATE, "version", ["x", [1], 1.5, np.ones(2)]),
    (STATE, "max_steps", ["x", {}, float("inf")]),
    (STATE, "labels", [1, {}, "all", np.ones(2)]),
    (STATE, "state", [[1.0]]),
]


@pytest.mark.parametrize(("key", "field", "values"), OTHERS)
def test_a_field_that_is_missing_or_of_another_kind_is_told(
    key: str, field: str, values: Any
) -> None:
    modules, aux = Optimizer(lrate=1.0, modules=list(CLIENT_MODULES)), sent()
    aux[key]["dump"]["fedclip"] = NEWER
    for value in values:
        aux[key]["dump"][field] = value
        with pytest.raises(ValueError, match=f"the server's message has no valid {field}"):
            modules.process_aux_var(arrived(aux))
    del aux[key]["dump"][field]
    with pytest.raises(ValueError, match=f"lacks {field}; it is of fedclip {NEWER}, and this is"):
        modules.process_aux_var(arrived(aux))


def test_a_version_or_a_state_of_another_kind_is_told() -> None:
    modules, aux = Optimizer(lrate=1.0, modules=list(CLIENT_MODULES)), sent()
    aux[STATE]["dump"] |= {"state": {"median": [1.0]}, "fedclip": NEWER}
    with pytest.raises(ValueError, match=f"cannot read the server's state.* of fedclip {NEWER}"):
        modules.process_aux_var(arrived(aux))
    aux[BOUND]["dump"]["fedclip"] = np.ones(2)
    with pytest.raises(ValueError, match="the server's message has no valid fedclip"):
        modules.process_aux_var(arrived(aux))
