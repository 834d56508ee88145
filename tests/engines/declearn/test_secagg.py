"""Update clipping under declearn's secure aggregation: masking and Joye-Libert."""

import logging
import math
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.messaging import EvaluationReply, TrainReply
from declearn.metrics import BinaryRocAUC
from declearn.metrics._mean import MeanState
from declearn.model.sklearn import NumpyVector
from declearn.secagg.messaging import SecaggTrainReply, aggregate_secagg_messages
from federation_helpers import Clients, Server, joye_libert, masked, norm
from helpers import each_framework, to_numpy, to_vector

from fedclip.engines.declearn.evaluation import beyond_range
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipVotes
from fedclip.engines.declearn.secagg import inside, plan

CLIPPED = {"name": "clipped-averaging"}
KINDS = ["masking", "joye-libert"]

pytestmark = pytest.mark.usefixtures("no_round_left_open")


def sent_through(kind: str, replies: list[TrainReply], **settings: Any) -> TrainReply:
    """Return the one reply that the server sees."""
    names = [str(i) for i in range(len(replies))]
    secure = {"masking": masked, "joye-libert": joye_libert}[kind]
    encrypters, decrypter = secure(names, **{"bitsize": 64, "clipval": 1e5, **settings})
    secret = {
        name: SecaggTrainReply.from_cleartext_message(reply, encrypters[name])
        for name, reply in zip(names, replies, strict=True)
    }
    return aggregate_secagg_messages(secret, decrypter)


def reply_of(updates: ClippedUpdates) -> TrainReply:
    return TrainReply(updates=updates, aux_var={}, n_epoch=1, n_steps=1, t_spent=0.0)


# -- the plan -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "bitsize", "clipval"),
    [
        ("joye-libert", 16, 1.0),
        ("masking", 32, 1e5),
        ("masking", 32, 2.0),
        ("joye-libert", 64, 1e5),
    ],
)
def test_stated_error_holds_and_is_met(kind: str, bitsize: int, clipval: float) -> None:
    n, d = 3, 400
    stated = plan(1.0, n, d, kind=kind, clipval=clipval, bitsize=bitsize, tolerance=1e9)
    rng = np.random.default_rng(0)
    vectors = [NumpyVector({"w": rng.uniform(-1, 1, size=d) / math.sqrt(d)}) for _ in range(n)]
    plain = sum(v.coefs["w"] for v in vectors) / n
    replies = [reply_of(ClippedUpdates(v, 1)) for v in vectors]
    total: Any = sent_through(kind, replies, bitsize=bitsize, clipval=clipval)
    average = total.updates.updates.coefs["w"] / n
    off = np.abs(average - plain).max()
    assert off <= stated.error
    if bitsize < 64:
        # Not by much too pessimistic for one client, either.
        assert off >= stated.error / 20


def test_range_and_bits_for_a_bound() -> None:
    settings = plan(0.7, 30, 10**6)
    assert settings.clipval == 1.0
    assert settings.norm_added <= 1e-3 * 0.7
    assert settings.tight_limit == 0.7 - settings.norm_added
    assert "clipval 1, bitsize 32" in str(settings)
    # A range that is out of proportion takes bits away.
    assert plan(0.7, 30, 10**6, clipval=1e5).bitsize > settings.bitsize
    # So do peers, under masking.
    assert plan(1.0, 3, 10, bitsize=32).step < plan(1.0, 300, 10, bitsize=32).step
    assert plan(1.0, 3, 10, kind="joye-libert").step == plan(1.0, 300, 10, kind="joye-libert").step


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"clipval": 0.5}, "clipval must be at least the bound"),
        ({"clipval": 1e5, "bitsize": 16}, "above the tolerance"),
        ({"bitsize": 2}, "leaves no bit"),
        ({"kind": "paillier"}, "kind must be one of"),
    ],
)
def test_plan_that_can_not_be(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(1.0, 30, 10**4, **config)


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        (kind, dtype, size)
        for kind in KINDS
        for dtype, size in (("float64", 1.0), ("float64", 0.7), ("float32", 1e5), ("float16", 3.0))
    ],
)
def test_values_at_the_edge_of_a_range_keep_their_sign(kind: str, dtype: str, size: float) -> None:
    """With 64 bits declearn's integers reach 2^64 there, and come round to 0."""
    edge = float(np.dtype(dtype).type(size))
    values = np.array([edge, -edge, edge / 2, 0.0, math.nextafter(edge, 0)], dtype=dtype)
    n = 1 if kind == "masking" else 2
    config = {**CLIPPED, "max_norm": 2 * edge, "secagg_range": edge}
    aggregator = Aggregator.from_config(config)
    update = NumpyVector({"w": values})
    shared = [aggregator.prepare_for_sharing(updates=update, n_steps=1) for _ in range(n)]
    total: Any = sent_through(kind, [reply_of(one) for one in shared], clipval=edge)
    found = np.asarray(total.updates.updates.coefs["w"], dtype=np.float64) / n
    rounding = {"float64": 2e-14, "float32": 2e-7, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(found, values.astype(float), rtol=0, atol=rounding * edge)


# -- rounds -------------------------------------------------------------------------------------
def test_values_beyond_declearns_range_are_not_clipped_in_silence(caplog: Any) -> None:
    """Where nobody said what the range is: zeros, an error that names the tensor, a count."""
    known = Aggregator.from_config({**CLIPPED, "max_norm": 50.0, "secagg_range": 8.0})
    update = NumpyVector({"fine": np.array([1.0]), "head.w": np.array([9.0, 1.0])})
    with pytest.raises(ValueError, match=r"beyond secagg_range=±8 in 'head\.w' \(9\)"):
        known.prepare_for_sharing(updates=update, n_steps=1)
    n = 3
    config = {**CLIPPED, "max_norm": 1.0, "exclude": "head.*"}
    aggregator = Aggregator.from_config(config)
    replies = []
    for i in range(n):
        head = np.array([3e5 if i == 1 else 0.3])
        update = NumpyVector({"w": np.array([7.0 if i == 1 else 0.5]), "head.w": head})
        shared = aggregator.prepare_for_sharing(updates=update, n_steps=1)
        replies.append(reply_of(shared))
    with caplog.at_level(logging.INFO):
        total: Any = sent_through("masking", replies)
        average = aggregator.finalize_updates(total.updates)
    assert "beyond secagg_range=±100000 in 'head.w' (3e+05)" in caplog.text
    # The one that is zeroed does not count as clipped, too.
    assert (total.updates.n_clipped, total.updates.n_zeroed) == (0, 1)
    assert float(average.coefs["w"][0]) == pytest.approx(1 / 3)
    assert float(average.coefs["head.w"][0]) == pytest.approx(0.2)


def test_lie_in_a_secure_sum_of_votes(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows whose enormous counts are; the nearest possible counts move the bound."""
    server = Server([("update-clip-server", {"start_norm": 1.0})], CLIPPED)
    clients = Clients(3, ["update-clip-client"], CLIPPED)
    aux = server.start()
    replies = [clients.round(i, aux, np.array([9.0])) for i in range(3)]
    replies[1].aux_var["update-clip"] = UpdateClipVotes(1, 10**9, 10**9, n_bins=[10**9] + [0] * 9)
    out = server.finish([sent_through("masking", replies)])
    assert norm(out) == pytest.approx(1.0)
    assert 1 / 8 <= server.module.bound < 1.0
    assert "no 3 clients vote like that" in caplog.text


@each_framework()
def test_the_edge_in_every_framework(framework: str) -> None:
    arrays = {"w": np.array([1.0, -1.0, 0.5], np.float32), "b": np.array([0.25], np.float32)}
    update = to_vector(arrays, framework)
    moved = inside(update.coefs, 1.0)
    found = to_numpy(type(update)(dict(moved)))
    assert found["w"].dtype == np.float32
    assert found["w"].tolist() == [1 - 2.0**-24, -1 + 2.0**-24, 0.5]
    assert moved["b"] is update.coefs["b"]
    assert inside(update.coefs, 2.0) is update.coefs


# -- evaluations ----------------------------------------------------------------------------------
def evaluation(loss: float, total: float, records: float) -> EvaluationReply:
    return EvaluationReply(loss, 1, 0.0, {"loss": MeanState(total, records)})


@pytest.mark.parametrize(
    ("reply", "beyond", "said"),
    [
        (evaluation(0.7, 42.0, 60.0), [], ""),
        (evaluation(0.7, 300.0, 60.0), ["loss"], ""),
        (evaluation(math.inf, math.inf, 60.0), ["loss"], ""),
        (evaluation(math.nan, 42.0, 60.0), [], "NaN"),
        (evaluation(0.7, math.nan, 60.0), [], "NaN"),
        (evaluation(0.1, 30.0, 300.0), [], "more records than the range ±256 of secure"),
        (
            EvaluationReply(0.7, 1, 0.0, {"roc": BinaryRocAUC(bound=None).build_initial_states()}),
            [],
            "does not support Secure Aggregation",
        ),
    ],
)
def test_what_of_an_evaluation_secure_sums_do_not_hold(reply: Any, beyond: Any, said: str) -> None:
    if not said:
        assert beyond_range(reply, 256.0) == beyond
    else:
        with pytest.raises((NotImplementedError, ValueError), match=said):
            beyond_range(reply, 256.0)
