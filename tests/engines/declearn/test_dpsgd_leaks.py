# SPDX-License-Identifier: Apache-2.0
"""Nothing of a record leaves a private client but the noised sum: data sets one record apart."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dpsgd_wire as wire
import numpy as np
import pytest
from declearn.aggregator import AveragingAggregator
from declearn.communication.api.backend.actions import ActionMessage, Join, Send
from declearn.dataset import Dataset, InMemoryDataset
from declearn.messaging import Error, EvaluationRequest, SerializedMessage, TrainReply
from declearn.optimizer import Optimizer
from declearn.utils import access_types_mapping
from declearn.utils.serialize import json_load, msgpack_load, msgpack_serialize
from engines.declearn.test_dpsgd_manager import Silent, client, data, manager, request, train
from helpers import require
from units.dpsgd.test_dpsgd_persample import MODELS

import fedclip
from fedclip.dpsgd.persample.base import UnsupportedModelError
from fedclip.engines.declearn import persample
from fedclip.engines.declearn.dataset_records import Records
from fedclip.engines.declearn.private_training import PrivateTrainingManager
from fedclip.engines.declearn.sample_clip import SampleClip
from fedclip.privacy.ledger import read_entries

pytestmark = pytest.mark.slow

torch: Any = require("torch")
pytest.importorskip("opacus")
nn = torch.nn
PAGE = Path(__file__).with_name("dpsgd_messages.md")


# -- on the wire -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("websockets")
    made: Path = tmp_path_factory.mktemp("wire")
    codes = wire.federation(made, wire.KINDS)
    said = {
        n: (made / f"{n}.txt").read_text(errors="replace")[-2000:] for n, c in codes.items() if c
    }
    assert not said
    return made


def messages(folder: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a client sent: the name of each message, and its fields."""
    for raw in wire.sent(folder, name):
        action = ActionMessage.deserialize(raw)
        if isinstance(action, Join):
            yield "Join", {"name": action.name, "version": action.version}
            continue
        assert isinstance(action, Send)
        message: Any = SerializedMessage.from_bin_message(action.content).deserialize()
        fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
        yield type(message).__name__, fields


def differing(folder: Path, one: str, other: str) -> set[tuple[str, str]]:
    """Return the fields in which two clients' messages differ, bit by bit."""
    mine, others = ([*messages(folder, name)] for name in (one, other))
    assert [name for name, _ in mine] == [name for name, _ in others]
    return {
        (name, field)
        for (name, fields), (_, more) in zip(mine, others, strict=True)
        for field, value in fields.items()
        if msgpack_serialize(value) != msgpack_serialize(more[field])
    }


def test_what_a_client_sends_differs_in_the_noised_sum_alone(folder: Path) -> None:
    names = [name for name, _ in messages(folder, "plain")]
    rounds = ["TrainReply", "EvaluationReply"] * 2
    assert names == ["Join", "MetadataReply", "InitReply", "PrivacyReply", *rounds]
    for kind in wire.KINDS[1:]:
        found = differing(folder, "plain", kind)
        assert found == {("Join", "name"), ("TrainReply", "updates")}, kind
        lengths = [[len(raw) for raw in wire.sent(folder, n)][1:] for n in ("plain", kind)]
        assert lengths[0] == lengths[1], kind
        assert wire.SECRET.encode() not in b"".join(wire.sent(folder, kind)), kind
        assert wire.SECRET not in (folder / "server.txt").read_text(), kind


def test_a_record_that_raises_is_one_that_is_not_there(folder: Path) -> None:
    def updates(kind: str) -> list[Any]:
        found = (fields for name, fields in messages(folder, kind) if name == "TrainReply")
        return [
            np.concatenate([np.ravel(a) for a in one["updates"].updates.coefs.values()])
            for one in found
        ]

    right = updates("nan")
    for kind in (kind for kind in wire.KINDS if kind in wire.ZERO):
        np.testing.assert_allclose(updates(kind), right, rtol=0, atol=1e-6, err_msg=kind)
        said = (folder / f"{kind}.txt").read_text()
        assert ("the first is record 0: " in said) == (kind != "nan"), kind
    assert wire.SECRET in (folder / "text.txt").read_text()
    assert np.abs(np.subtract(updates("other"), right)).max() > 1e-4


def test_a_checkpoint_holds_nothing_of_a_record(folder: Path) -> None:
    def kept(kind: str) -> Any:
        saved = folder / f"saved_{kind}"
        states = msgpack_load(str(max(saved.glob("optimizer_state*"))))["modules"]
        # All but momentum, which stands after the noise.
        assert [name for name, _ in states] == [
            "value-clip",
            "norm-clip",
            "sample-clip",
            "momentum",
        ]
        assert all(not state["groups"] and not state["rounds"] for _, state in states[:2])
        losses = json_load(str(saved / "training_losses.json"))
        assert all(not one["training_losses"] for one in losses.values())
        # All but time and id; a torch data set tells no shape.
        paid = [
            e._replace(time="", data=e.data.removesuffix(f", features ({wire.D},)"))
            for e in read_entries(saved / "privacy_spent.json").values()
        ]
        return states[:3], losses, paid

    right = kept("plain")
    for kind in wire.KINDS[1:]:
        assert kept(kind) == right, kind


# -- the table of messages ---------------------------------------------------------------------
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


def test_the_table_says_of_each_field_what_is_on_the_wire(folder: Path) -> None:
    told = table()
    found = set().union(*(differing(folder, "plain", kind) for kind in wire.KINDS[1:]))
    for name, fields in messages(folder, "plain"):
        for field in fields or [""]:
            word = told[name, field]
            if (name, field) == ("Join", "name"):
                assert word == "no"
            elif (name, field) in found:
                assert word == "the noised sum"
            else:
                assert word in ("no", "how many there are"), (name, field)


# -- records that raise ------------------------------------------------------------------------
def private(source: Dataset, net: Any = None, valid: Any = None, modules: Any = ()) -> Any:
    """Return a manager that adds no noise, with the updates that it would have added noise to."""
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    model = TorchModel(net or nn.Linear(wire.D, wire.CLASSES), nn.CrossEntropyLoss())
    x, y = wire.arrays(20, seed=1)
    made = PrivateTrainingManager(
        *(model, Optimizer(lrate=1.0, modules=[*modules]), AveragingAggregator(), source),
        valid_data=InMemoryDataset(x, target=y) if valid is None else valid,
        verbose=False,
    )
    made.make_private(request())
    made.noise = Silent()
    return made


def total(made: Any, positions: Any) -> Any:
    """Return the clipped sum of a step, as an array."""
    made.run_train_step(made.records.take(positions, made._fail))
    return np.concatenate([a.ravel() for a in made.noise.seen[-1][0].values()])


@pytest.mark.parametrize("kind", wire.ZERO)
def test_a_record_that_raises_counts_as_zero_and_the_others_as_ever(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = total(private(wire.dataset("plain")), np.arange(1, wire.N))
    found = total(private(wire.dataset(kind)), np.arange(wire.N))
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    assert ("1 of this step, the first is record 0" in caplog.text) == (kind != "nan")


def values(**settings: Any) -> Any:
    x, y = wire.arrays()
    return InMemoryDataset(**{"data": x, "target": y, **settings})


def with_labels(make: Any, bad: Any, value: Any) -> Any:
    labels = make(wire.arrays()[1])
    labels[bad] = value
    return values(target=labels)


def text_in_a_table() -> Any:
    frame = pytest.importorskip("pandas").DataFrame(wire.arrays()[0]).astype(object)
    frame.iloc[4, 1] = wire.SECRET
    return values(data=frame)


def text_for_a_weight() -> Any:
    # Validation records have none.
    weights = np.ones(wire.N, dtype=object)
    weights[4] = wire.SECRET
    return values(s_wght=weights)


def of_pandas(kind: str) -> Any:
    pandas: Any = pytest.importorskip("pandas")
    return lambda y: pandas.Series(y).astype(kind)


# Data sets, and their bad records.
BAD: dict[str, tuple[Any, list[int]]] = {
    "labels": (lambda: with_labels(np.copy, [0, 1, 39], 9), [0, 1, 39]),
    "nearly all labels": (lambda: with_labels(np.copy, slice(1, 40), 9), [*range(1, 40)]),
    "a missing number": (lambda: with_labels(of_pandas("float64"), 4, np.nan), [4]),
    "a missing integer": (lambda: with_labels(of_pandas("Int64"), 4, None), [4]),
    "a missing category": (lambda: with_labels(of_pandas("category"), 4, None), [4]),
    "a text in a table": (text_in_a_table, [4]),
    "a text for a weight": (text_for_a_weight, [4]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_values_change_their_records_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, bad = BAD[kind]
    found = total(private(make()), np.arange(wire.N))
    right = total(private(wire.dataset("plain")), np.delete(np.arange(wire.N), bad))
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    told = f"{len(bad)} of this step, the first is record {bad[0]}: IndexError"
    assert (told in caplog.text) == ("labels" in kind)


def as_lists(x: Any, y: Any) -> Any:
    return [torch.tensor(x)], torch.tensor(y)


# What record 0 is, among others that are a tensor and a number.
ODD: dict[str, Any] = {
    "a list of inputs": as_lists,
    "no input": lambda x, y: ([], y),
    "a list of two": lambda x, y: [x, y],
    "a list of labels": lambda x, y: (x, [y]),
    "sparse": lambda x, y: (torch.tensor(x).to_sparse(), y),
    "nested": lambda x, y: (torch.nested.nested_tensor([torch.tensor(x)]), y),
    "without numbers": lambda x, y: (torch.tensor(x, device="meta"), torch.tensor(y)),
    "with a gradient": lambda x, y: (torch.tensor(x).requires_grad_(), y),
    "of another structure at times": lambda x, y: as_lists(x, y) if torch.rand(()) < 0.5 else x,
}


@pytest.mark.parametrize(
    ("name", "mode"), [(name, ("flat", "automatic")[i % 2]) for i, name in enumerate(ODD)]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_record_of_another_structure_moves_the_sum_by_its_bound_at_most(
    name: str, mode: str
) -> None:
    x, y = wire.arrays()
    found = total(
        private(wire._torch_dataset(x, y, ODD[name]), modules=[SampleClip(mode=mode)]),
        np.arange(wire.N),
    )
    plain = private(wire.dataset("plain"), modules=[SampleClip(mode=mode)])
    right = total(plain, np.arange(1, wire.N))
    assert np.linalg.norm(found - right) <= plain._plan.bound * (1 + 1e-5)


def test_types_and_classes_of_training_records_are_not_asked_for() -> None:
    pandas: Any = pytest.importorskip("pandas")
    x, y = wire.arrays()
    labels, frame = y.astype(object), pandas.DataFrame(x).astype({1: object})
    labels[3] = frame.iloc[3, 1] = wire.SECRET
    shown = {"expose_classes": True, "expose_data_type": True}
    first, second = (
        private(InMemoryDataset(rows, target=target, **shown)).ledger.data
        for rows, target in ((pandas.DataFrame(x), y), (frame, labels))
    )
    assert first == second


def test_an_interrupt_is_no_record() -> None:
    def stop(x: Any, y: Any) -> Any:
        raise KeyboardInterrupt

    x, y = wire.arrays()
    with pytest.raises(KeyboardInterrupt):
        Records(wire._torch_dataset(x, y, stop))


@pytest.mark.parametrize("backend", ["sklearn", "sparse", "tensorflow", "jax"])
def test_records_that_raise_in_other_frameworks(backend: str) -> None:
    model, x, y = MODELS["sklearn" if backend == "sparse" else backend]()
    rows, labels = x.astype(object), y.astype(object)
    rows[3, 1] = wire.SECRET
    if backend == "sparse":
        x = rows = pytest.importorskip("scipy.sparse").csr_matrix(x)
        labels[3] = wire.SECRET
    failed: list[int] = []

    def note(record: int, exc: BaseException) -> None:
        failed.append(record)

    records = Records(InMemoryDataset(rows, target=labels), (x[:1], y[:1], None))
    batches = records.take(np.arange(len(y)), note)
    found, _ = persample.clipped_sum(model, batches, np.ones_like, failed=note)
    good = np.delete(np.arange(len(y)), 3)
    right, _ = persample.clipped_sum(model, [(x[good], y[good], None)], np.ones_like)
    assert failed == [3]
    for name, array in right.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5)
    if backend == "tensorflow":
        y[5] = 9
        persample.clipped_sum(model, [(x, y, None)], np.ones_like, failed=note)
        assert failed == [3, 5]


def test_a_data_set_that_can_not_be_read_fails_before_the_client_connects() -> None:
    class Never(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return wire.N

        def __getitem__(self, i: int) -> Any:
            raise OSError("nothing is there")

    from declearn.dataset.torch import TorchDataset

    with pytest.raises(OSError, match="nothing is there"):
        client(train_data=TorchDataset(Never()))


# -- texts, times and counts -------------------------------------------------------------------
def test_what_fails_in_an_evaluation_or_a_trial_is_in_the_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = wire.arrays()
    valid = InMemoryDataset(x.astype(object), target=y)
    valid.data[0, 0] = wire.SECRET
    with pytest.raises(RuntimeError, match="the trial of the model failed on this client"):
        private(wire.dataset("plain"), valid=valid)
    made = private(wire.dataset("plain"))
    made.valid_data = valid
    ask = EvaluationRequest(1, None, {"batch_size": 30}, None, None)
    reply = made.evaluation_round(ask)
    assert isinstance(reply, Error)
    assert reply.message == "RuntimeError('the evaluation failed on this client; its log says why')"
    assert "TypeError" in caplog.text


def test_a_model_that_runs_for_no_record_is_refused_and_nothing_is_paid(tmp_path: Path) -> None:
    made = private(wire.dataset("plain"))
    made.model._raw_model.module.weight = nn.Parameter(torch.zeros(3, 9))
    with pytest.raises(RuntimeError) as caught:
        made.make_private(request(), path=tmp_path / "spent.json")
    assert str(caught.value) == "the trial of the model failed on this client; its log says why"
    assert caught.value.__cause__ is None
    assert not [*tmp_path.iterdir()]


def test_a_reply_tells_no_time() -> None:
    made = manager()
    for i in range(2):
        reply = made.training_round(train(round_i=i))
        assert isinstance(reply, TrainReply)
        assert (reply.t_spent, reply.n_steps, reply.n_epoch) == (0.0, 4, 1)


def test_metadata_is_told_of_the_validation_records() -> None:
    import asyncio

    from declearn.messaging import MetadataQuery, MetadataReply

    x, y = wire.arrays(30)
    y[7] = 99
    settings = {"train_data": InMemoryDataset(x, target=y, expose_classes=True)}
    made = client(**settings, valid_data=data(seed=1))
    ask = MetadataQuery(["classes", "n_samples"])
    asyncio.run(made._collect_and_send_metadata(ask))
    assert made.netwk.sent == [MetadataReply({"classes": {0, 1}, "n_samples": 30})]
    made = client(**settings, valid_data=InMemoryDataset(x, target=y))
    with pytest.raises(RuntimeError, match="valid_data does not tell classes"):
        asyncio.run(made._collect_and_send_metadata(ask))
    (sent,) = made.netwk.sent
    assert "expose_classes=True" in sent.message


# -- what stands before sample-clip ------------------------------------------------------------
@pytest.mark.parametrize("mode", ["flat", "adaptive"])
def test_nothing_is_recorded_before_sample_clip(mode: str) -> None:
    before = [fedclip.ValueClip(max_value=0.01), fedclip.NormClip(0.005)]
    made = private(wire.dataset("plain"), modules=[*before, SampleClip(mode=mode)])
    fresh = [module.get_state() for module in before]
    assert np.abs(total(made, np.arange(wire.N))).max() <= 0.005 * wire.N
    assert [module.get_state() for module in before] == fresh
    assert [module.last for module in before] == [None, None]
    assert not vars(made._plan.stage).keys() - {"settings", "before", "after", "groups"}


# -- models that remember ----------------------------------------------------------------------
class Remembers(nn.Module):  # type: ignore[misc]
    """Does something with each input, and with what it has kept."""

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


def later(count: int, x: Any) -> Any:
    """Return another value from the hundredth time on."""
    return x if count < 100 else 2 * x


def counted(net: Any, x: Any) -> Any:
    net.kept += 1
    return later(net.kept, x)


def by_class(net: Any, x: Any) -> Any:
    type(net).count += 1
    return later(net.count, x)


HOLDER: Any = SimpleNamespace(kept=0)


def in_globals(net: Any, x: Any) -> Any:
    HOLDER.kept += 1
    return later(HOLDER.kept, x)


def in_defaults(net: Any, x: Any, *, kept: Any = []) -> Any:  # noqa: B006
    kept.append(0)
    return later(len(kept), x)


def boxed(box: Any, net: Any, x: Any) -> Any:
    box["kept"] = box.get("kept", 0) + 1
    return later(box["kept"], x)


def on_itself(net: Any, x: Any) -> Any:
    on_itself.kept = getattr(on_itself, "kept", 0) + 1  # type: ignore[attr-defined]
    return later(on_itself.kept, x)  # type: ignore[attr-defined]


def enclosed() -> Any:
    kept: Any = {}
    return lambda net, x: boxed(kept, net, x)


class Slotted:
    """Counts in a slot."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = 0

    def __call__(self, net: Any, x: Any) -> Any:
        self.kept += 1
        return later(self.kept, x)


def hooked() -> Any:
    net, box = nn.Linear(wire.D, wire.CLASSES), {"out": 0.0}

    def hook(layer: Any, args: Any, out: Any) -> None:
        box["out"] = out.detach()

    net.register_forward_hook(hook)
    return net


REMEMBERING: dict[str, Any] = {
    "an average": lambda: Remembers(average, torch.zeros(wire.D)),
    "a counter": lambda: Remembers(counted, 0),
    "a buffer that is set": lambda: Remembers(average, torch.zeros(wire.D), buffer=True),
    "a buffer in place": lambda: Remembers(in_place, torch.zeros(wire.D), buffer=True),
    "a class": lambda: Remembers(by_class),
    "globals": lambda: Remembers(in_globals),
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
    """Keep what depends on the shape alone."""
    net.kept.setdefault(x.shape[-1], torch.arange(float(x.shape[-1])))
    return x + net.kept[x.shape[-1]]


def drawn(net: Any, x: Any) -> Any:
    return x * np.random.uniform(0.5, 1.5) + torch.rand(x.shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(wire.D, wire.CLASSES)),
        lambda: Remembers(cached, {}),
        lambda: Remembers(drawn),
        lambda: nn.Sequential(nn.Linear(wire.D, 6), nn.LayerNorm(6), nn.Linear(6, wire.CLASSES)),
    ],
)
def test_random_numbers_and_what_follows_shapes_are_no_memory(make: Any) -> None:
    private(wire.dataset("plain"), make())


@pytest.mark.parametrize("tracked", [True, False])
def test_a_variable_that_keras_does_not_know_is_seen_and_restored(tracked: bool) -> None:
    keras, tf = require("keras"), require("tensorflow")
    from declearn.model.tensorflow import TensorflowModel

    @keras.saving.register_keras_serializable()
    class Remembering(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.inner = keras.layers.Dense(wire.CLASSES)
            if tracked:
                self.kept = self.add_weight(shape=(wire.D,), initializer="zeros", trainable=False)
            else:
                self.kept = tf.Variable(tf.zeros(wire.D))

        def call(self, x: Any) -> Any:
            found = self.inner(x - self.kept)
            self.kept.assign(x[0])
            return found

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = TensorflowModel(keras.Sequential([Remembering()]), loss)
    model.initialize({"features_shape": (wire.D,), "data_type": "float32"})
    x, y = wire.arrays(3)
    with pytest.raises(UnsupportedModelError, match=r"training changes '.*', which would keep"):
        persample.try_out(model, [(x[i : i + 1], y[i : i + 1], None) for i in range(3)])
    assert not np.asarray(model._model.layers[0].kept).any()
