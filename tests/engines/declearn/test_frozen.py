# SPDX-License-Identifier: Apache-2.0
"""Frozen backbones: statistics that move, weights that nobody sends, and what is counted."""

import logging
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.messaging import Error, TrainReply
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize
from helpers import require
from personal_runs import BODY, MODELS, client, linear, manager, request, torch_model, weights
from report_runs import call

from fedclip import PersonalModel
from fedclip.cli.check.configuration import check_config
from fedclip.engines.declearn.personal import LABEL, label


def frozen_bn() -> Any:
    model = torch_model()
    bn = model.get_wrapped_model().module.bn
    bn.requires_grad_(False)
    bn.running_mean += 0.5
    return model


@pytest.mark.filterwarnings("ignore:PyTorch JSON serialization")
@pytest.mark.parametrize("personal", [None, "head"])
def test_frozen_batchnorm_keeps_its_statistics_and_uses_them(personal: Any) -> None:
    require("torch")
    import torch

    sent = msgpack_serialize(PersonalModel(frozen_bn(), personal, frozen_batchnorm="eval"))
    model = msgpack_deserialize(sent)
    before = weights(model)
    trained = manager(client(), model)
    assert isinstance(trained.training_round(request(model)), TrainReply)
    after = weights(trained.model)
    assert all(after[name] == before[name] for name in before if ".bn." in name)
    assert after[BODY[0]] != before[BODY[0]]
    network = trained.model.get_wrapped_model()
    x = torch.full((2, 4), 0.25)
    assert torch.equal(network.train()(x), network.eval()(x))
    # Without it, they move though the layer is frozen.
    drifting = manager(client(), frozen_bn())
    drifting.training_round(request())
    name = "module.bn.running_mean"
    assert weights(drifting.model)[name] != weights(frozen_bn())[name]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch_model, True),
        (lambda: PersonalModel(torch_model(), "head"), True),
        (lambda: PersonalModel(torch_model(), "batchnorm"), False),
        (lambda: PersonalModel(frozen_bn(), frozen_batchnorm="eval"), False),
    ],
)
def test_a_client_says_that_statistics_are_not_sent(make: Any, said: bool, caplog: Any) -> None:
    require("torch")
    manager(client(), make())
    assert ("running statistics are never sent ('module.bn')" in caplog.text) == said


@pytest.mark.parametrize("personal", [None, "head"])
def test_a_layer_that_is_frozen_on_one_client_or_not_used_is_named(personal: Any) -> None:
    torch = require("torch")
    model = torch_model() if personal is None else PersonalModel(torch_model(), personal)
    sent = request(model)
    trained = manager(client(), model)
    trained.model.get_wrapped_model().module.body.bias.requires_grad_(False)
    reply = trained.training_round(sent)
    assert isinstance(reply, Error)
    assert "differ in 'module.body.bias': freeze and name layers alike" in reply.message
    wider = torch_model()
    wider.get_wrapped_model().module.body.extra = torch.nn.Parameter(torch.zeros(2))
    given = wider if personal is None else PersonalModel(wider, personal)
    reply = manager(client(), given).training_round(request())
    assert isinstance(reply, Error)
    assert "'module.body.extra' of the model are trained, and not used by it" in reply.message


def frozen(framework: str) -> tuple[Any, list[str]]:
    """Return a model with a body that is frozen, and the names of what declearn never sends."""
    model = MODELS[framework](1)
    if framework == "jax":
        model.set_trainable_weights(["head:b", "head:w"])
        return model, ["body:b", "body:w"]
    for layer in model.get_wrapped_model().layers[:2]:
        layer.trainable = False
    rng = np.random.default_rng(0)
    model.get_wrapped_model().layers[1].set_weights([rng.random(5) for _ in range(4)])
    return model, [n for n in model.get_weights().coefs if not n.startswith("head")]


@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_frozen_weights_come_with_the_wrapper(framework: str, tmp_path: Path, caplog: Any) -> None:
    require({"jax": "haiku"}.get(framework, framework))
    plain, names = frozen(framework)
    with pytest.raises(ValueError, match="are frozen, and Keras' and Haiku's"):
        manager(client(), plain)
    server = PersonalModel(plain)
    trained = manager(client(), server)
    assert isinstance(trained.training_round(request(server)), TrainReply)
    before, after = weights(server), weights(trained.model)
    assert {n for n in after if after[n] == before[n]} == {*names}
    assert "running statistics" not in caplog.text
    assert label(tmp_path, server) == ""


MODEL = """
import torch
from declearn.model.torch import TorchModel
from parts import body

head = torch.nn.Linear(8, 2)
net = torch.nn.Sequential(body.requires_grad_(False), torch.nn.BatchNorm1d(8), head)
model = TorchModel(net, torch.nn.CrossEntropyLoss())
"""


def test_plan_and_check_count_what_is_trained(tmp_path: Path) -> None:
    require("torch")
    (tmp_path / "parts.py").write_text("import torch\nbody = torch.nn.Linear(100, 8)\n")
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    budget = [*("--epsilon", "8", "--rounds", "100"), *("--clients", "100")]
    said = call("privacy", "plan", *budget, "--model", file)
    count = "34 of the model's 859 values are trained and shared"
    assert said.output.startswith(f"{count}.\n"), said.output
    right = call("privacy", "plan", *budget, "--values", "34")
    assert said.output.endswith(right.output)
    both = call("privacy", "plan", *budget, "--values", "3", "--model", file)
    assert both.exit_code == 2
    example = Path(__file__).parents[3] / "examples" / "quickrun" / "config.toml"
    shutil.copy(example, tmp_path)
    notes = [f.message for f in check_config(tmp_path / "config.toml").findings]
    assert count in notes
    assert any(note.startswith("running statistics are never sent") for note in notes)
    labelled = label(tmp_path, PersonalModel(torch_model(), "head"))
    assert "('module.bn')" in labelled
    assert "'module.head.bias', 'module.head.weight' have the values with which all" in labelled
    assert labelled in (tmp_path / LABEL).read_text()
    assert label(tmp_path, linear()) == ""
    assert not (tmp_path / LABEL).exists()
    file.write_text("from declearn.model.sklearn import SklearnSGDModel as S\nmodel = S(None)")
    shown = call("privacy", "plan", *budget, "--model", file)
    assert shown.exit_code == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_with_adapters_counts_what_is_shared(monkeypatch: Any, capsys: Any) -> None:
    require("torch")
    pytest.importorskip("peft")
    pytest.importorskip("opacus")
    example = Path(__file__).parents[3] / "examples" / "adapters" / "run.py"
    made = runpy.run_path(str(example))
    monkeypatch.setitem(made["main"].__globals__, "SITES", 4)
    monkeypatch.setitem(made["main"].__globals__, "ROUNDS", 1)
    monkeypatch.setattr("sys.argv", ["run.py"])
    made["main"]()
    logging.disable(logging.NOTSET)
    lines = capsys.readouterr().out.splitlines()
    found = dict(line.split()[:2] for line in lines[1:-1] if not line.startswith(" "))
    assert found == {"head": "132", "adapters": "1,156", "all": "20,068"}
    assert "averages of A and B miss the mean of BA by " in lines[3]
