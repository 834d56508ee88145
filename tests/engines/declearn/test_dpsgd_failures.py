# SPDX-License-Identifier: Apache-2.0
"""Records that raise under DP-SGD, and what of them is in errors, times, counts and logs."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import dpsgd_wire as wire
import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from declearn.messaging import Error, EvaluationRequest, MetadataQuery, MetadataReply, TrainReply
from dpsgd_managers import client, data, manager, private, request, total, train
from dpsgd_models import MODELS
from helpers import require

import fedclip
from fedclip.engines.declearn import persample
from fedclip.engines.declearn.persample import Records
from fedclip.engines.declearn.sample_clip import SampleClip

pytestmark = pytest.mark.slow

torch: Any = require("torch")
pytest.importorskip("opacus")
nn = torch.nn


@pytest.mark.parametrize("kind", wire.ZERO)
def test_a_record_that_raises_counts_as_zero_and_the_others_as_ever(kind: str, caplog: Any) -> None:
    right = total(private(wire.dataset("plain")), np.arange(1, wire.N))
    found = total(private(wire.dataset(kind)), np.arange(wire.N))
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    assert ("1 of this step, the first is record 0" in caplog.text) == (kind != "nan")


def labels(bad: list[int], x: Any, y: Any, w: Any) -> Any:
    return x, np.where(np.isin(np.arange(wire.N), bad), 9, y), w


def lacking(kind: str, x: Any, y: Any, w: Any) -> Any:
    series: Any = pytest.importorskip("pandas").Series
    return x, series(y).astype(kind).mask(np.arange(wire.N) == 4), w


def text_in_a_table(x: Any, y: Any, w: Any) -> Any:
    frame = pytest.importorskip("pandas").DataFrame(x).astype(object)
    frame.iloc[4, 1] = wire.SECRET
    return frame, y, w


def text_for_a_weight(x: Any, y: Any, w: Any) -> Any:
    w[4] = wire.SECRET
    return x, y, w


# How inputs, labels and weights are changed, and the bad records.
BAD: dict[str, tuple[Any, list[int]]] = {
    "labels": (partial(labels, [0, 1, 39]), [0, 1, 39]),
    "nearly all labels": (partial(labels, [*range(1, 40)]), [*range(1, 40)]),
    "a missing number": (partial(lacking, "float64"), [4]),
    "a missing integer": (partial(lacking, "Int64"), [4]),
    "a missing category": (partial(lacking, "category"), [4]),
    "a text in a table": (text_in_a_table, [4]),
    "a text for a weight": (text_for_a_weight, [4]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_values_change_their_records_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    change, bad = BAD[kind]
    x, y, weights = change(*wire.arrays(), np.ones(wire.N, dtype=object))
    made = private(InMemoryDataset(x, target=y, s_wght=weights))
    found = total(made, np.arange(wire.N))
    right = total(private(wire.dataset("plain")), np.delete(np.arange(wire.N), bad))
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    told = f"{len(bad)} of this step, the first is record {bad[0]}: IndexError"
    assert (told in caplog.text) == ("labels" in kind)


# What record 0 is, among others that are a tensor and a number.
ODD: dict[str, Any] = {
    "no input": lambda x, y: ([], y),
    "a list of labels": lambda x, y: (x, [y]),
    "sparse": lambda x, y: (torch.tensor(x).to_sparse(), y),
    "nested": lambda x, y: (torch.nested.nested_tensor([torch.tensor(x)]), y),
    "without numbers": lambda x, y: (torch.tensor(x, device="meta"), torch.tensor(y)),
    "with a gradient": lambda x, y: (torch.tensor(x).requires_grad_(), y),
    "of another structure at times": lambda x, y: ([x], y) if torch.rand(()) < 0.5 else x,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_record_of_another_structure_moves_the_sum_by_its_bound_at_most(name: str) -> None:
    plain = private(wire.dataset("plain"))
    found = total(private(wire._torch_dataset(*wire.arrays(), ODD[name])), np.arange(wire.N))
    right = total(plain, np.arange(1, wire.N))
    assert np.linalg.norm(found - right) <= plain.sclip_norm * (1 + 1e-5)


def test_an_interrupt_is_no_record() -> None:
    def stop(x: Any, y: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Records(wire._torch_dataset(*wire.arrays(), stop))


@pytest.mark.parametrize("backend", ["sklearn", "sparse", "tensorflow", "jax"])
def test_records_that_raise_in_other_frameworks(backend: str) -> None:
    model, x, y = MODELS["sklearn" if backend == "sparse" else backend]()
    rows, labels = x.astype(object), y.astype(object)
    rows[3, 1] = wire.SECRET
    if backend == "sparse":
        x = rows = pytest.importorskip("scipy.sparse").csr_matrix(x)
        labels[3] = wire.SECRET
    failed: list[int] = []
    note = lambda record, exc: failed.append(record)  # noqa: E731
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


def test_what_fails_in_an_evaluation_or_trial_is_logged_alone(tmp_path: Path, caplog: Any) -> None:
    x, y = wire.arrays()
    valid = InMemoryDataset(x.astype(object), target=y)
    valid.data[0, 0] = wire.SECRET
    refused = "the trial of the model failed on this client; its log says why"
    with pytest.raises(RuntimeError, match=refused):
        private(wire.dataset("plain"), valid=valid)
    made = private(wire.dataset("plain"))
    made.valid_data = valid
    ask = EvaluationRequest(1, None, {"batch_size": 30}, None, None)
    reply = made.evaluation_round(ask)
    assert isinstance(reply, Error)
    assert reply.message == "RuntimeError('the evaluation failed on this client; its log says why')"
    assert "TypeError" in caplog.text
    # A model that runs for no record, and pays for none.
    made.model._raw_model.module.weight = nn.Parameter(torch.zeros(3, 9))
    with pytest.raises(RuntimeError, match=refused) as caught:
        made.make_private(request(), path=tmp_path / "spent.json")
    assert caught.value.__cause__ is None
    assert not [*tmp_path.iterdir()]


def test_a_reply_tells_no_time() -> None:
    made = manager()
    for i in range(2):
        reply = made.training_round(train(round_i=i))
        assert isinstance(reply, TrainReply)
        assert (reply.t_spent, reply.n_steps, reply.n_epoch) == (0.0, 4, 1)


def test_metadata_is_told_of_the_validation_records() -> None:
    x, y = wire.arrays(30)
    y[7] = 99
    settings = {"train_data": InMemoryDataset(x, target=y, expose_classes=True)}
    made = client(**settings, valid_data=data(seed=1))
    ask = MetadataQuery(["classes", "n_samples"])
    asyncio.run(made._collect_and_send_metadata(ask))
    assert made.netwk.messages == [MetadataReply({"classes": {0, 1}, "n_samples": 30})]
    made = client(**settings, valid_data=InMemoryDataset(x, target=y))
    with pytest.raises(RuntimeError, match="valid_data does not tell classes"):
        asyncio.run(made._collect_and_send_metadata(ask))
    (sent,) = made.netwk.messages
    assert "expose_classes=True" in sent.message


@pytest.mark.parametrize("mode", ["flat", "adaptive"])
def test_nothing_is_recorded_before_sample_clip(mode: str) -> None:
    before = [fedclip.ValueClip(max_value=0.01), fedclip.NormClip(0.005)]
    made = private(wire.dataset("plain"), modules=[*before, SampleClip(mode=mode)])
    fresh = [module.get_state() for module in before]
    assert np.abs(total(made, np.arange(wire.N))).max() <= 0.005 * wire.N
    assert [module.get_state() for module in before] == fresh
    assert [module.last for module in before] == [None, None]
    assert made.stage._fields == ("settings", "before", "after", "groups")
