# SPDX-License-Identifier: Apache-2.0
"""Personal layers in federations in one process: what is on the wire."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from declearn.messaging import TrainReply
from federation_runs import N, complete
from hostile_server import Wire
from personal_runs import client, data, linear, made, manager, weights

import fedclip
from fedclip import PersonalModel

pytestmark = pytest.mark.slow

PROXIMAL = {"lrate": 0.5, "w_decay": 0.001, "regularizers": [["fedprox", {"alpha": 0.1}]]}
NOISE = {"max_epsilon": 8.0, "delta": 1e-2, "expected_clients": N, "noise_multiplier": 1.0}
NOISED: dict[str, Any] = {
    "aggregator": "clipped-averaging",
    "client_opt": {**PROXIMAL, "modules": ["update-clip-client", "momentum"]},
    "server_opt": {"lrate": 1.0, "modules": [["update-clip-server", NOISE]]},
}


def settings(model: Any, optim: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the settings of a federation of personal clients, of two rounds."""
    return {
        "model": model,
        "optim": optim,
        "protocol": "fedclip-websockets",
        "kind": "PersonalFederatedClient",
        "data": lambda i, _: {
            "train_data": data(i),
            "valid_data": data(i + 10),
            "checkpoint": f"saved_client_{i}",
        },
        **more,
        "run": {
            "rounds": 2,
            "training": {"batch_size": 8},
            "evaluate": {"batch_size": 24},
            **more.get("run", {}),
        },
    }


@pytest.mark.parametrize(
    ("framework", "secagg"), [("torch", "masking"), ("torch", "joye-libert"), ("tensorflow", None)]
)
def test_a_federation_sends_no_name_and_no_value_of_own_layers(
    tmp_path: Path, framework: str, secagg: str | None
) -> None:
    model = made(framework, "head" if framework == "jax" else ["head", "batchnorm"])
    start = weights(model)
    more = {"secagg": secagg, "client": {"personal": "head"}}
    run = complete(tmp_path, **settings(model, NOISED, **more))
    after = weights(run.nodes["server"].model)
    own = [name for name in after if name in model.own]
    assert all((after[name] == start[name]) == (name in own) for name in after)
    heads = []
    for name in run.names[1:]:
        trained = weights(run.nodes[name].trainmanager.model)
        heads.append(tuple(trained[one] for one in own))
        assert all(trained[one] != start[one] for one in own if "head" in one)
        # What another run would begin with.
        assert (tmp_path / f"saved_{name}" / "personal_layers.mpk").exists()
    assert len({*heads}) == N
    replies = [text for message, text in run.sent if "TrainReply" in type(message).__name__]
    assert len(replies) == 2 * N
    for text in replies:
        assert b"body" in text
        assert not any(name.encode() in text for name in own)
        for head in heads:
            assert not any(value in text for value in head if len(value) >= 8)


def test_private_clients_keep_own_layers_which_have_noise_too(tmp_path: Path) -> None:
    model = PersonalModel(linear(), "intercept")
    start = weights(model)
    optim = {"aggregator": "averaging", "client_opt": {**PROXIMAL, "modules": ["sample-clip"]}}
    privacy = {"budget": [3.0, 1e-2], "sclip_norm": 0.5}
    more = {"kind": "PrivateFederatedClient", "run": {"privacy": privacy}}
    run = complete(tmp_path, **settings(model, optim, **more))
    after = weights(run.nodes["server"].model)
    assert all((after[name] == start[name]) == (name == "intercept") for name in after)
    for name in run.names[1:]:
        node = run.nodes[name]
        assert isinstance(node, fedclip.PrivateFederatedClient)
        assert 0 < node.spent[0] <= 3.0
        assert weights(node.trainmanager.model)["intercept"] != start["intercept"]
    replies = [text for message, text in run.sent if isinstance(message, TrainReply)]
    assert len(replies) == 2 * N
    assert not any(b"intercept" in text for text in replies)


def test_fairness_is_refused() -> None:
    node = client()
    manager(node, PersonalModel(linear(), "intercept"))
    node.netwk = wire = Wire()
    with pytest.raises(RuntimeError, match="fairness would share"):
        asyncio.run(node._initialize_fairness())
    assert "refused by fedclip" in wire.messages[0].message
