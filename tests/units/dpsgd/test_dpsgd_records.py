# SPDX-License-Identifier: Apache-2.0
"""Records of torch and TensorFlow datasets: each by itself, whatever makes batches of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.optimizer import Optimizer
from dpsgd_managers import request
from helpers import require

from fedclip.dpsgd.step import SampleClipping
from fedclip.engines.declearn.persample import Records, clipped_sum, first_records
from fedclip.engines.declearn.private_client import PrivateTrainingManager

pytestmark = pytest.mark.slow

torch: Any = require("torch")
C = 0.3
LENGTHS = (2, 5, 3, 5, 2, 7)


class Sentences(torch.utils.data.Dataset):  # type: ignore[misc]
    """Records of unequal lengths: tokens, a label, and perhaps a weight."""

    def __init__(self, weights: bool = False, repeat: int = 1) -> None:
        rng = np.random.default_rng(0)
        rows = [rng.integers(1, 9, n) for n in LENGTHS * repeat]
        self.rows = [
            (torch.from_numpy(row), torch.tensor(i % 3), *[torch.tensor(i / 2)] * weights)
            for i, row in enumerate(rows)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Endless(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter([])


def padded(samples: Any) -> Any:
    """Fill all records up to the longest."""
    tokens, *others = zip(*samples, strict=True)
    joined = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return (joined, *(torch.stack(other) for other in others))


def times_first(samples: Any) -> Any:
    """Put the records on the second axis."""
    tokens, labels = zip(*samples, strict=True)
    return torch.nn.utils.rnn.pad_sequence(tokens), torch.stack(labels)


def dataset(source: Any, collate: Any = padded) -> Any:
    from declearn.dataset.torch import TorchDataset

    return TorchDataset(source, collate_fn=collate)


def model() -> Any:
    """Return a model for which the length of what is filled up matters."""
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)

    class Mean(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.out(self.embed(x).mean(1))

    return TorchModel(Mean(), torch.nn.CrossEntropyLoss())


def total(of: Any, batches: Any) -> Any:
    sums, _ = clipped_sum(of, batches, lambda norms: SampleClipping().factors(norms, C))
    return np.concatenate([a.ravel() for a in sums.values()])


def test_no_record_depends_on_how_long_others_are() -> None:
    of, records = model(), Records(dataset(Sentences(weights=True)))
    each = [total(of, records.take([i])) for i in range(6)]
    np.testing.assert_allclose(total(of, records.take(np.arange(6))), sum(each), atol=1e-6)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        change = total(of, records.take(np.arange(6))) - total(of, records.take(others))
        np.testing.assert_allclose(change, each[i], atol=1e-6)
    batches = records.take(np.arange(6))
    assert sorted(len(x) for x, _, _ in batches) == [1, 1, 2, 2]
    assert all(w is not None for _, _, w in batches)


def test_datasets_whose_records_can_not_be_drawn_are_refused() -> None:
    with pytest.raises(TypeError, match="Endless has no length"):
        Records(dataset(Endless()))
    with pytest.raises(ValueError, match="has to be the records"):
        Records(dataset(Sentences(), times_first)).take([1])


def manager(source: Any, collate: Any = padded, **changes: Any) -> PrivateTrainingManager:
    data = dataset(source, collate)
    made = PrivateTrainingManager(
        *(model(), Optimizer(lrate=0.1), AveragingAggregator(), data, data), verbose=False
    )
    pytest.importorskip("opacus")
    made.make_private(request(**changes))
    return made


def test_a_collate_function_that_fails_for_records_fails_before_anything_is_paid() -> None:
    with pytest.raises(ValueError, match="has to be the records"):
        manager(Sentences(repeat=10), times_first)


def test_padded_tensorflow_records_do_not_depend_on_each_other() -> None:
    tf: Any = require("tensorflow")
    from declearn.dataset.tensorflow import TensorflowDataset

    rows = [[float(i + 1)] * n for i, n in enumerate(LENGTHS)]
    ragged = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(rows), list(range(6))))
    source = ragged.map(lambda x, y: (x, y)).apply(tf.data.experimental.assert_cardinality(6))
    records = Records(TensorflowDataset(source, batch_mode="padded"))
    assert len(records) == 6
    for position, row in enumerate(rows):
        ((x, y, _),) = records.take([position])
        assert np.asarray(x).tolist() == [row]
        assert np.asarray(y).tolist() == [position]


def test_records_of_one_shape_are_one_batch() -> None:
    pairs = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.arange(20))
    records = Records(dataset(pairs, None))
    ((x, y, weights),) = records.take(np.array([3, 3, 19]))
    assert torch.equal(x, pairs.tensors[0][[3, 3, 19]])
    assert y.tolist() == [3, 3, 19]
    assert weights is None
    assert records.take([]) == []


def test_validation_data_without_a_record_is_refused() -> None:
    empty = InMemoryDataset(np.zeros((0, 3)), target=np.zeros(0))
    with pytest.raises(ValueError, match="valid_data holds no record"):
        first_records(empty)
