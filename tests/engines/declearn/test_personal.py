# SPDX-License-Identifier: Apache-2.0
"""Personal layers: what stays on a client, what leaves it, and what is refused."""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator, AveragingAggregator
from declearn.messaging import Error, EvaluationRequest, SerializedMessage, StopTraining, TrainReply
from declearn.model.api import Model
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from declearn.optimizer import Optimizer
from declearn.training import TrainingManager
from declearn.utils.serialize import json_dump, json_load, msgpack_deserialize, msgpack_serialize
from helpers import require
from personal_runs import BODY, MODELS, client, linear, made, manager, request, torch_model, weights

import fedclip
from fedclip import PersonalModel
from fedclip.engines.declearn.personal import chosen

HEAD = ["module.head.weight", "module.head.bias"]
CLIPPED = {"name": "clipped-averaging", "max_norm": 0.05}
FEDPROX = [("fedprox", {"alpha": 0.1})]
PROXIMAL: Any = {"w_decay": 0.01, "regularizers": FEDPROX, "modules": ["momentum"]}
SCOPED = {"modules": [["norm-clip", {"max_norm": 0.1, "scope": ["head", "body"]}], "adam"]}
each_framework = pytest.mark.parametrize("framework", MODELS)


# -- which tensors ------------------------------------------------------------------------------
def test_batchnorm_stands_for_layers_with_running_statistics() -> None:
    names = ["a.bn.weight", "a.bn.bias", "a.bn.running_mean", "a.bn.num_batches_tracked"]
    others = ["a.bn.proj.weight", "a.weight", "bn2.weight"]
    assert chosen(["batchnorm"], names + others) == {*names}
    keras = ["net/bn/gamma:0", "net/bn/beta:0", "net/bn/moving_mean:0", "net/bn/moving_variance:0"]
    assert chosen(["batchnorm"], [*keras, "net/dense/kernel:0"]) == {*keras}
    bare = ["running_mean", "weight"]
    assert chosen(["batchnorm"], [*bare, "x.weight"]) == {*bare}
    # A wildcard keeps what only wrappers hide from it.
    names = ["a.lora_A.weight", "b.lora_A.default.weight", "b.lora_B.default.weight"]
    assert chosen(["*.lora_A.weight"], names) == {*names[:2]}


OTHERS: dict[str, Any] = {
    "no layer of the model keeps running statistics": {"personal": "batchnorm"},
    "personal must be a name pattern": {"personal": 3},
    "must be a model of declearn, got str": {"model": "x", "personal": "x"},
    "needs frozen BatchNorm of torch": {"frozen_batchnorm": "eval"},
    "must be one of 'eval', got 'train'": {"frozen_batchnorm": "train"},
}


@pytest.mark.parametrize("message", OTHERS)
def test_settings_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        PersonalModel(**{"model": linear(), **OTHERS[message]})


@pytest.mark.parametrize(
    ("personal", "message"),
    [
        ("haed.*", "personal pattern 'haed.*' matches no tensor"),
        (["head", "nothing"], "personal pattern 'nothing' matches no tensor"),
        ("*", "matches all of what is trained, .*nothing would be shared"),
        ("*.running_*", "matches none of what is trained, .* never shared"),
        ([], "personal names no tensor"),
        (["head", ""], "not empty"),
        ("tail", "'module.body.weight' and 'module.tail.weight' are one tensor, and personal="),
    ],
)
def test_patterns_that_match_nothing_everything_or_half_are_refused(
    personal: Any, message: str
) -> None:
    torch = require("torch")
    model = torch_model()
    if personal == "tail":
        network = model.get_wrapped_model().module
        network.add_module("tail", torch.nn.Linear(4, 5))
        network.tail.weight = network.body.weight
    with pytest.raises(ValueError, match=message):
        PersonalModel(model, personal)


def test_patterns_of_a_model_without_shapes_are_checked_when_it_has_them() -> None:
    model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss")
    late = PersonalModel(model, "intercepts")
    with pytest.raises(ValueError, match="'intercepts' matches no tensor"):
        late.initialize({"features_shape": (4,), "classes": {0, 1}})
    keras = require("keras")
    from declearn.model.tensorflow import TensorflowModel

    net = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(2, name="head")])
    with pytest.raises(ValueError, match=r"begin it with keras\.Input\(shape\)"):
        PersonalModel(TensorflowModel(net, keras.losses.MeanSquaredError()), "head")


def test_a_model_comes_back_from_a_message_and_from_a_file(tmp_path: Path) -> None:
    model = PersonalModel(linear(), "intercept")
    sent = msgpack_deserialize(msgpack_serialize(model))
    json_dump(model.get_config(), str(tmp_path / "model.json"))
    read: Any = Model.from_config(json_load(str(tmp_path / "model.json")))
    for found in (sent, read):
        assert isinstance(found, PersonalModel)
        assert found.personal == ["intercept"]
        assert weights(found) == weights(model)


# -- on the server ------------------------------------------------------------------------------
def test_the_server_shares_the_rest_and_its_own_head_never_changes() -> None:
    model = made("torch")
    inner = model.model
    head = inner.get_wrapped_model().module.head.weight
    head.data[0, 0] = -0.0
    before = weights(model)
    shared = model.get_weights(trainable=True)
    assert list(shared.coefs) == BODY
    optim = Optimizer(lrate=1.0, w_decay=0.1, regularizers=FEDPROX)
    optim.apply_gradients(model, shared)
    model.set_weights(0.5 * model.get_weights(trainable=True), trainable=True)
    after = weights(model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {*BODY}
    assert "module.body.weight" in changed
    with pytest.raises(ValueError, match=r"weights for 'module\.head\.bias', .* were sent"):
        model.set_weights(inner.get_weights(trainable=True), trainable=True)
    fewer = type(shared)({n: a for n, a in shared.coefs.items() if n != "module.bn.bias"})
    with pytest.raises(ValueError, match=r"differ in 'module\.bn\.bias'"):
        model.set_weights(fewer, trainable=True)
    with pytest.raises(TypeError, match="weights must be a TorchVector, got NumpyVector"):
        model.set_weights(NumpyVector({}), trainable=True)


def test_a_client_of_declearn_is_told_which_one_it_takes() -> None:
    parts = PersonalModel(linear(), "intercept"), Optimizer(lrate=0.1), AveragingAggregator()
    plain = TrainingManager(*parts, client().train_data, verbose=False)
    reply = plain.training_round(request())
    assert isinstance(reply, Error)
    assert "trained by fedclip.PersonalFederatedClient" in reply.message


# -- on a client --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("framework", "optim"), [*zip(MODELS, [PROXIMAL, SCOPED, PROXIMAL], strict=True)]
)
def test_the_average_is_that_of_models_without_the_head(framework: str, optim: Any) -> None:
    """Each client trains as declearn would alone; the others' clipped bodies are averaged."""
    server = made(framework)
    start = weights(server)
    shared, alone = [], []
    for i in range(3):
        trained = manager(client(i), server, Aggregator.from_config(CLIPPED), **optim)
        # Keras and Haiku begin with the server's values of what it never sends.
        assert all(weights(trained.model)[n] == start[n] for n in server.own)
        reply = trained.training_round(request(server))
        assert isinstance(reply, TrainReply), reply
        shared.append(reply.updates)
        whole = MODELS[framework]()
        whole.set_weights(server.get_weights())
        begun = whole.get_weights(trainable=True)
        manager(client(i), whole, **optim).training_round(request())
        ended = whole.get_weights(trainable=True)
        for name, array in trained.model.get_weights().coefs.items():
            np.testing.assert_allclose(array, whole.get_weights().coefs[name], atol=1e-5)
        body = begun - ended
        kept = {n: np.asarray(a, float) for n, a in body.coefs.items() if n not in server.own}
        clip = Aggregator.from_config(CLIPPED)
        alone.append(clip.prepare_for_sharing(updates=NumpyVector(kept), n_steps=3))
    clip = Aggregator.from_config(CLIPPED)
    found, right = (clip.finalize_updates(sum(x)) for x in (shared, alone))
    assert found.coefs.keys() == right.coefs.keys()
    for name, array in right.coefs.items():
        np.testing.assert_allclose(np.asarray(found.coefs[name]), array, atol=1e-6)


@each_framework
def test_own_layers_survive_rounds_evaluation_and_stop(framework: str, caplog: Any) -> None:
    server = made(framework)
    node = client(checkpoint=None)
    trained = manager(node, server)
    trained.training_round(request(server))
    after = weights(trained.model)
    own = {n: after[n] for n in server.own}
    assert all(own[n] != weights(server)[n] for n in own if not n.endswith("running_mean"))
    ask: dict[str, Any] = {"round_i": 1, "batches": {"batch_size": 24}}
    shared = server.get_weights(trainable=True)
    evaluation = EvaluationRequest(weights=shared, n_steps=None, timeout=None, **ask)
    trained.evaluation_round(evaluation)
    for best in (shared, shared * 2):
        assert "not evaluated together" not in caplog.text
        asyncio.run(node.stop_training(StopTraining(weights=best, loss=0.1, rounds=1)))
        assert {n: weights(trained.model)[n] for n in own} == own
        assert all(weights(trained.model)[n] == weights(server)[n] for n in shared.coefs)
    assert "not evaluated together" in caplog.text


@each_framework
def test_an_update_of_nan_leaves_own_layers_as_they_were(framework: str, tmp_path: Path) -> None:
    server = made(framework)
    trained = manager(client(checkpoint=str(tmp_path)), server)
    trained.training_round(request(server))
    before, file = weights(trained.model), tmp_path / "personal_layers.mpk"
    bits, broken = file.read_bytes(), request(server)
    broken.weights = broken.weights * float("nan")
    assert isinstance(trained.training_round(broken), TrainReply)
    assert {n: weights(trained.model)[n] for n in server.own} == {n: before[n] for n in server.own}
    assert file.read_bytes() == bits


@pytest.mark.parametrize("personal", ["head", ["head", "batchnorm"]])
def test_own_layers_survive_restarts_bit_for_bit(
    tmp_path: Path, personal: Any, caplog: Any
) -> None:
    server = made("torch", personal)

    def started(folder: Path | None) -> Any:
        node = client(checkpoint=None if folder is None else str(folder))
        return manager(node, made("torch", personal))

    trained = started(tmp_path)
    trained.training_round(request(server))
    kept = [name for name in weights(server) if name in server.own]
    assert len(kept) == (2 if personal == "head" else 7)
    again = started(tmp_path)
    for name in kept:
        assert weights(again.model)[name] == weights(trained.model)[name]
    lost, file = started(None), tmp_path / "personal_layers.mpk"
    assert weights(lost.model) == weights(server)
    assert "personal layers are lost when the process ends" in caplog.text
    with pytest.raises(fedclip.StateError, match="belongs to another model"):
        manager(client(layers=file), PersonalModel(server.model, "body"))
    file.write_bytes(b"cut")
    with pytest.raises(fedclip.StateError, match="cannot be read as layers"):
        started(tmp_path)


def test_a_server_that_shares_what_a_client_keeps_is_refused_before_any_step() -> None:
    require("torch")
    plain = torch_model()
    with pytest.raises(ValueError, match=r"shares 'module\.head\.bias', .*PersonalModel\(model"):
        manager(client(personal="head"), plain)
    with pytest.raises(ValueError, match=r"shares 'module\.bn\.bias', 'module\.bn\.weight', which"):
        manager(client(personal="batchnorm"), PersonalModel(plain, "head"))
    with pytest.raises(ValueError, match="personal pattern 'foot' matches no tensor"):
        manager(client(personal="foot"), PersonalModel(plain, "head"))
    # A server that has another head, which it does not train, under the name of the right one.
    decoy = torch_model()
    decoy.get_wrapped_model().module.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"the server's model trains none of 'module.head.bias'"):
        manager(client(personal="head"), decoy)
    trained = manager(client(), PersonalModel(plain, "head"))
    before = weights(trained.model)
    reply = trained.training_round(request(torch_model(1)))
    assert isinstance(reply, Error)
    assert "refused by fedclip: weights for 'module.head.bias'" in reply.message
    assert weights(trained.model) == before


def test_the_client_and_the_server_both_say_what_stays() -> None:
    model = made("torch", ["head", "bn"])
    node = client(personal="head")
    reply = manager(node, model).training_round(request(model))
    assert list(reply.updates.updates.coefs) == BODY[:2]


def test_modules_that_share_gradients_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = made("torch")
    reply = manager(client(), model, modules=["scaffold-client"]).training_round(request(model))
    assert isinstance(reply, Error)
    assert "modules that share gradients, such as scaffold" in reply.message
    assert "Not sent, as it names 'module.head.bias'" in caplog.text
    # An error that would quote a name is sent without it.
    wrong = [["norm-clip", {"max_norm": 1, "scope": ["foot"]}]]
    reply = manager(client(), model, modules=wrong).training_round(request(model))
    assert reply.message.startswith("an error that names layers which stay on this client")


@pytest.mark.parametrize("scope", ["tensor", "layer", ["head"]])
def test_norms_of_own_layers_alone_are_not_counted_for_the_server(scope: Any) -> None:
    model = made("torch")
    shared = {"shared": True, "scope": scope}
    with pytest.raises(ValueError, match=r"zscore-clip is shared, and its group '.*head"):
        manager(client(), model, modules=[["zscore-clip", shared]])
    for fine in ({"scope": "tensor", "exclude": "head"}, {"scope": ["*bias"]}, {}):
        manager(client(), model, modules=[["zscore-clip", {"shared": True, **fine}]])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("finite", [True, False])
def test_rounds_without_a_step_or_with_nan_send_nothing_of_them(steps: int, finite: bool) -> None:
    model = made("torch")
    trained = manager(client(), model, Aggregator.from_config(CLIPPED))
    inner = trained.model
    start = inner.get_weights(trainable=True)
    if not finite:
        inner.get_wrapped_model().module.head.weight.data[0, 0] = float("nan")
    if not steps:
        trained.train_under_constraints = lambda *_: {"n_epoch": 0, "n_steps": 0, "t_spent": 0.0}
    with warnings.catch_warnings():
        # That an update of NaN counts as zeros is said on the client.
        warnings.simplefilter("ignore", fedclip.FedclipWarning)
        reply = trained.training_round(request(model))
    sent = reply.serialize()
    end = inner.get_weights(trainable=True)
    for vector in (start, end, start - end):
        kept = [np.asarray(vector.coefs[name]) for name in HEAD]
        assert not any(value.any() and value.tobytes() in sent for value in kept)
    assert not any(name.encode() in sent for name in HEAD)
    arrived: Any = SerializedMessage.from_bin_message(sent).deserialize()
    assert set(arrived.updates.updates.coefs) == {*BODY}
    # NaN in a head makes the gradients of the body NaN, and its update zeros.
    assert arrived.updates.n_zeroed == int(not finite and steps > 0)
    first = np.asarray(reply.updates.updates.coefs[BODY[0]])
    assert first.any() == (finite and steps > 0)
    assert first.tobytes() in sent


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_the_norm_of_what_is_shared_is_noted_and_changes_nothing(max_norm: float | None) -> None:
    def trained(measures: bool) -> tuple[Any, Any]:
        node, model = client(), PersonalModel(linear(), "intercept")
        node.measures = measures
        limited = max_norm and Aggregator.from_config({**CLIPPED, "max_norm": max_norm})
        trains = manager(node, model, limited)
        return trains, trains.training_round(request(model)).updates.updates

    (trains, found), (other, same) = trained(True), trained(False)
    assert found == same
    assert other.optim.modules == []
    (record,) = trains.optim.modules[-1].rounds
    (values,) = found.coefs.values()
    assert (record.limit, record.clipped) == (max_norm, int(max_norm is not None))
    assert max_norm is not None or record.norm_max == pytest.approx(np.linalg.norm(values))
    # Under DP-SGD nothing is noted, of whichever client.
    trains.make_private = None
    trains.training_round(request(PersonalModel(linear(), "intercept")))
    assert len(trains.optim.modules[-1].rounds) == 1
    assert not fedclip.PrivateFederatedClient.measures
