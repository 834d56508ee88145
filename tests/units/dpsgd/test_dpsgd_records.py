# SPDX-License-Identifier: Apache-2.0
"""Records of torch and TensorFlow datasets: each by itself, whatever makes batches of them."""

from typing import Any

import numpy as np
import pytest
from declearn.dataset import InMemoryDataset
from dpsgd_models import calls, flat
from helpers import require

from fedclip.dpsgd.persample.base import UnsupportedModelError
from fedclip.engines.declearn.persample import Records, clipped_sum, first_records

pytestmark = pytest.mark.slow

torch: Any = require("torch")
LENGTHS = (2, 5, 3, 5, 2, 7)


def sentences() -> list[Any]:
    """Return records of unequal lengths: tokens, a label, and a weight."""
    rng = np.random.default_rng(0)
    rows = [torch.from_numpy(rng.integers(1, 9, n)) for n in LENGTHS]
    return [(row, torch.tensor(i % 3), torch.tensor(i / 2)) for i, row in enumerate(rows)]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


def padded(samples: Any) -> Any:
    """Fill all records up to the longest."""
    tokens, *others = zip(*samples, strict=True)
    joined = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return (joined, *(torch.stack(other) for other in others))


def times_first(samples: Any) -> Any:
    """Put the records on the second axis."""
    tokens, *others = padded(samples)
    return tokens.T, *others


def dataset(source: Any, collate: Any = padded) -> Any:
    from declearn.dataset.torch import TorchDataset

    return TorchDataset(source, collate_fn=collate)


def model() -> Any:
    """Return a model for which the length of what is filled up matters."""
    from declearn.model.torch import TorchModel

    torch.manual_seed(0)
    embed, out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)
    net = calls(lambda net, x: net.out(net.embed(x).mean(1)), embed=embed, out=out)
    return TorchModel(net, torch.nn.CrossEntropyLoss())


def total(of: Any, batches: Any) -> Any:
    return np.concatenate([a.ravel() for a in clipped_sum(of, batches, flat)[0].values()])


def test_no_record_depends_on_how_long_others_are() -> None:
    of, records = model(), Records(dataset(sentences()))
    each = [total(of, records.take([i])) for i in range(6)]
    np.testing.assert_allclose(total(of, records.take(np.arange(6))), sum(each), atol=1e-6)
    others = total(of, records.take([0, 1, 2, 4, 5]))
    np.testing.assert_allclose(sum(each) - others, each[3], atol=1e-6)
    batches = records.take(np.arange(6))
    assert sorted(len(x) for x, _, _ in batches) == [1, 1, 2, 2]
    assert all(w is not None for _, _, w in batches)


def test_datasets_whose_records_can_not_be_drawn_are_refused() -> None:
    with pytest.raises(TypeError, match="Endless has no length"):
        Records(dataset(Endless()))
    with pytest.raises(ValueError, match="has to be the records"):
        Records(dataset(sentences(), times_first)).take([1])
    with pytest.raises(ValueError, match="valid_data holds no record"):
        first_records(InMemoryDataset(np.zeros((0, 3)), target=np.zeros(0)))


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


def test_a_variable_that_training_changes_is_restored_and_refused() -> None:
    tf: Any = require("tensorflow")
    from fedclip.dpsgd.persample.tensorflow_records import _refuse_changed

    same, other = tf.Variable([np.nan, 1.0]), tf.Variable([2.0], name="memory")
    _refuse_changed([(same, same.numpy()), (other, other.numpy())])
    with pytest.raises(UnsupportedModelError, match="training changes 'memory"):
        _refuse_changed([(same, same.numpy()), (other, np.ones(1, np.float32))])
    assert other.numpy() == 1.0
