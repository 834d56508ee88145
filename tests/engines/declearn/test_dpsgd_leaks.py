# SPDX-License-Identifier: Apache-2.0
"""Nothing of a record leaves a private client but the noised sum: data sets one record apart."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import dpsgd_wire as wire
import numpy as np
import pytest
from declearn.communication.api.backend.actions import Join
from declearn.utils import access_types_mapping
from declearn.utils.serialize import json_load, msgpack_load, msgpack_serialize
from dpsgd_managers import conversation, noised_sums, private
from dpsgd_models import keras_model
from helpers import require

from fedclip.dpsgd.persample.base import UnsupportedModelError
from fedclip.engines.declearn import persample
from fedclip.privacy.ledger import read_entries

pytestmark = pytest.mark.slow

torch: Any = require("torch")
pytest.importorskip("opacus")
nn = torch.nn
PAGE = Path(__file__).with_name("dpsgd_messages.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def sent(folder: Path) -> dict[str, list[Any]]:
    return {kind: conversation(kind, folder) for kind in (*wire.KINDS, *wire.VALIDATION)}


def fields_of(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}


def differing(mine: list[Any], others: list[Any]) -> set[tuple[str, str]]:
    """Return the fields in which two clients' messages differ, bit by bit."""
    assert [*map(type, mine)] == [*map(type, others)]
    return {
        (type(one).__name__, field)
        for one, other in zip(mine, others, strict=True)
        for field, value in fields_of(one).items()
        if msgpack_serialize(value) != msgpack_serialize(getattr(other, field))
    }


def test_what_a_client_sends_differs_in_the_noised_sum_alone(sent: dict[str, list[Any]]) -> None:
    names = [type(message).__name__ for message in sent["plain"]]
    rounds = ["TrainReply", "EvaluationReply"] * 2
    assert names == ["MetadataReply", "InitReply", "PrivacyReply", *rounds]
    lengths = [len(message.serialize()) for message in sent["plain"]]
    for kind in wire.KINDS[1:]:
        assert differing(sent["plain"], sent[kind]) == {("TrainReply", "updates")}, kind
        packed = [message.serialize() for message in sent[kind]]
        assert [len(one) for one in packed] == lengths, kind
        assert wire.SECRET.encode() not in b"".join(packed), kind


def test_what_an_evaluation_sends_differs_in_the_noised_numbers_alone(
    sent: dict[str, list[Any]],
) -> None:
    noised = {("EvaluationReply", "loss"), ("EvaluationReply", "metrics")}
    for kind in wire.VALIDATION:
        assert differing(sent["plain"], sent[kind]) == noised, kind
        for reply, plain in zip(sent[kind][4::2], sent["plain"][4::2], strict=True):
            loss = reply.metrics["loss"]
            assert (reply.n_steps, reply.t_spent) == (1, 0.0)
            # All else is made of the noised sums, of which the last counts records.
            assert reply.loss == pytest.approx(loss.num_sum / loss.divisor)
            assert reply.metrics["accuracy"].divisor == loss.divisor != wire.N
            moved = noised_sums(reply.metrics) - noised_sums(plain.metrics)
            assert moved[-1] == pytest.approx(0.0, abs=1e-9)
            # To replace a record is to take one out and put one in.
            assert 1e-6 < np.linalg.norm(moved) <= 2 * np.sqrt(3) / 2


def test_a_checkpoint_holds_nothing_of_a_record(folder: Path, sent: dict[str, list[Any]]) -> None:
    found = {}
    for kind in wire.KINDS:
        saved = folder / kind
        modules = msgpack_load(str(max(saved.glob("optimizer_state*"))))["modules"]
        states = [dict(modules)[name] for name in ("value-clip", "norm-clip")]
        assert not any(state["groups"] or state["rounds"] for state in states)
        losses = json_load(str(saved / "training_losses.json"))
        assert not any(one["training_losses"] for one in losses.values())
        entries = read_entries(saved / "privacy_spent.json").values()
        # All but momentum, which stands after the noise; all but times and shapes.
        paid = [e._replace(time="", data=e.data.partition(", features")[0]) for e in entries]
        found[kind] = modules[:3], losses, paid
    assert all(found[kind] == found["plain"] for kind in wire.KINDS), sent.keys()


# What a server alone sends.
SERVER = {
    *("CancelTraining", "EvaluationRequest", "GenericMessage", "InitRequest", "MetadataQuery"),
    *("PrivacyRequest", "StopTraining", "TrainRequest", "FairnessQuery", "FairnessSetupQuery"),
    *("JoyeLibertSecaggSetupQuery", "MaskingSecaggSetupQuery"),
    *("FairbatchSamplingProbas", "FairfedFairness", "FairfedDeltavg", "FairgradWeights"),
}


def table() -> dict[tuple[str, str], str]:
    """Return the last column of the table of what is sent, by message and field."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    fields = ((n, re.findall(r"`(\w+)`", cell) or [""], told.strip()) for n, cell, told in rows)
    return {(name, field): told for name, cells, told in fields for field in cells}


def test_the_table_has_each_field_of_each_message_that_a_client_can_send() -> None:
    known = {
        cls.__name__: [f.name for f in dataclasses.fields(cls)] or [""]
        for cls in access_types_mapping("Message").values()
        if cls.__module__.startswith("declearn.") and cls.__name__ not in SERVER
    }
    known["Join"] = [f.name for f in dataclasses.fields(Join)]
    assert {*table()} == {(name, field) for name, fields in known.items() for field in fields}


def test_the_table_says_of_each_field_what_is_on_the_wire(sent: dict[str, list[Any]]) -> None:
    told = table()
    found = set().union(*(differing(sent["plain"], sent[kind]) for kind in wire.KINDS[1:]))
    for message in sent["plain"]:
        for field in fields_of(message) or [""]:
            name = type(message).__name__
            noised = (name, field) in found
            words = ("the noised sum",) if noised else ("no", "how many there are")
            assert told[name, field] in words, (name, field)


class Remembers(nn.Module):  # type: ignore[misc]
    count = 0

    def __init__(self, use: Any, kept: Any = None, buffer: bool = False) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(wire.D, wire.CLASSES), use
        if buffer:
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: Any) -> Any:
        return self.layer(self.use(self, x))


def average(net: Any, x: Any) -> Any:
    net.kept = 0.99 * net.kept + 0.01 * x.detach().mean(0)
    return x - net.kept


def in_place(net: Any, x: Any) -> Any:
    net.kept.mul_(0.9).add_(x.detach().mean(0))
    return x - net.kept


def boxed(box: Any, net: Any, x: Any) -> Any:
    """Return another value from the hundredth time on."""
    box["count"] = box.get("count", 0) + 1
    return x if box["count"] < 100 else 2 * x


def by_class(net: Any, x: Any) -> Any:
    type(net).count += 1
    return x if net.count < 100 else 2 * x


BOX: dict[str, int] = {}


def on_itself(net: Any, x: Any) -> Any:
    return boxed(vars(on_itself), net, x)


def in_defaults(net: Any, x: Any, *, kept: Any = {}) -> Any:  # noqa: B006
    return boxed(kept, net, x)


def enclosed() -> Any:
    kept: Any = {}
    return lambda net, x: boxed(kept, net, x)


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0

    def __call__(self, net: Any, x: Any) -> Any:
        self.count += 1
        return x if self.count < 100 else 2 * x


def hooked() -> Any:
    net, box = nn.Linear(wire.D, wire.CLASSES), {"out": 0.0}
    net.register_forward_hook(lambda layer, args, out: box.update(out=out.detach()))
    return net


REMEMBERING: dict[str, Any] = {
    "an average": lambda: Remembers(average, torch.zeros(wire.D)),
    "a counter": lambda: Remembers(lambda net, x: boxed(vars(net), net, x)),
    "a buffer that is set": lambda: Remembers(average, torch.zeros(wire.D), buffer=True),
    "a buffer in place": lambda: Remembers(in_place, torch.zeros(wire.D), buffer=True),
    "a class": lambda: Remembers(by_class),
    "globals": lambda: Remembers(lambda net, x: boxed(BOX, net, x)),
    "a closure": lambda: Remembers(enclosed()),
    "a default": lambda: Remembers(in_defaults),
    "a part of a call": lambda: Remembers(partial(boxed, {})),
    "a function": lambda: Remembers(on_itself),
    "a slot": lambda: Remembers(Slotted()),
    "a hook": hooked,
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_model_that_remembers_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"carries something|changes the buffer"):
        private(wire.dataset("plain"), REMEMBERING[name]())


def cached(net: Any, x: Any) -> Any:
    """Keep what depends on the shape alone, and draw random numbers."""
    net.kept.setdefault(x.shape[-1], torch.arange(float(x.shape[-1])))
    return x * np.random.uniform(0.5, 1.5) + torch.rand(x.shape) + net.kept[x.shape[-1]]


def test_random_numbers_and_what_follows_shapes_are_no_memory() -> None:
    private(wire.dataset("plain"), nn.Sequential(nn.Dropout(0.5), Remembers(cached, {})))


def test_a_variable_that_keras_does_not_know_is_seen_and_restored() -> None:
    keras, tf = require("keras"), require("tensorflow")

    @keras.saving.register_keras_serializable()
    class Remembering(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.inner = keras.layers.Dense(wire.CLASSES)
            self.kept = tf.Variable(tf.zeros(wire.D))

        def call(self, x: Any) -> Any:
            found = self.inner(x - self.kept)
            self.kept.assign(x[0])
            return found

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras_model(keras.Sequential([Remembering()]), loss, (wire.D,))
    x, y = wire.arrays(3)
    with pytest.raises(UnsupportedModelError, match=r"training changes '.*', which would keep"):
        persample.try_out(model, [(x[i : i + 1], y[i : i + 1], None) for i in range(3)])
    assert not np.asarray(model._model.layers[0].kept).any()
