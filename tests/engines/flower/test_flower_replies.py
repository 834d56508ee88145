# SPDX-License-Identifier: Apache-2.0
"""Flower's messages on their way: what a client sends, what it may not, and who is told."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flower_loop import Loop, context, record, rewritten
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg

from fedclip.engines.flower import UpdateClipMod, UpdateClipStrategy
from fedclip.engines.flower.clipping import RECORD

FIVE = range(1, 6)
FIXED = {"start_norm": 1.0, "learning_rate": 0.0}
TINY = {"noise_multiplier": 1e-9, "expected_clients": 5, "generator": "insecure"}
ZEROS = {"w": np.zeros(4)}


def steady(node: int, round_: int) -> dict[str, Any]:
    return {"w": np.full(4, -0.4)}  # of norm 0.8


def outcome(loop: Loop, settings: Any = FIXED, rounds: int = 1) -> tuple[Any, Any]:
    strategy = UpdateClipStrategy(FedAvg(), settings)
    found, _ = loop.run(strategy, ZEROS, rounds)
    return found["w"], strategy


# -- hostile clients -----------------------------------------------------------------------------
def test_clients_weigh_by_their_numbers_of_examples() -> None:
    loop = Loop(
        FIVE,
        lambda node, round_: {"w": np.full(4, -0.1 * node)},
        metrics=lambda node: {"num-examples": 10 * node} if node < 5 else {},
    )
    w, strategy = outcome(loop, {**FIXED, "weights": "steps"})
    np.testing.assert_allclose(w, 0.1 * (1 + 4 + 9 + 16) / 10)
    assert strategy.served.rounds[0]["refused"] == 1


def put(name: str, value: Any) -> Callable[[Message], Message]:
    return rewritten(lambda content: content.update({name: value}))


LYING = record({"w": np.zeros(4, complex)})
LYING["w"].dtype = "float64"
REFUSED = {
    "two records": put("more", record(ZEROS)),
    "other names": put("arrays", record({"v": np.zeros(4)})),
    "other shapes": put("arrays", record({"w": np.zeros((4, 2))})),
    "beyond the bound": put("arrays", record({"w": np.full(4, 1000.0)})),
    "NaN": put("arrays", record({"w": np.array([np.nan, 0, 0, 0])})),
    "complex": put("arrays", record({"w": np.zeros(4, complex)})),
    "another dtype than it says": put("arrays", LYING),
    "ten votes": put(RECORD, MetricRecord({"votes": 10, "within": 10, "clipped": 0, "zeroed": 0})),
    "no votes": put(RECORD, MetricRecord({})),
    "an attribute": put(RECORD, ConfigRecord({"votes": 1})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_honest_client_sends_counts_as_zero(name: str) -> None:
    w, strategy = outcome(Loop(FIVE, steady, change={2: REFUSED[name]}))
    expected = 5 if name == "ten votes" else 4
    np.testing.assert_allclose(w, expected * 0.4 / 5)
    assert strategy.served.rounds[0]["refused"] == 5 - expected


METRICS = {
    "other names": {"num-examples": 10, "accuracy": 1.0},
    "not finite": {"num-examples": 10, "train_loss": float("nan")},
    "a list": {"num-examples": 10, "train_loss": [1.0, 2.0]},
    "a weight of 0": {"num-examples": 0, "train_loss": 1.0},
    "a weight below 0": {"num-examples": -40, "train_loss": 1.0},
    "a list of weights": {"num-examples": [1, 2], "train_loss": 1.0},
    "nothing": {},
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_one_client_do_not_end_the_run(name: str, caplog: Any) -> None:
    usual = {"num-examples": 10, "train_loss": 0.5}
    loop = Loop(FIVE, steady, metrics=lambda node: METRICS[name] if node == 3 else usual)
    strategy = UpdateClipStrategy(FedAvg(), FIXED)
    _, result = loop.run(strategy, ZEROS, 1)
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(0.5)
    assert "metrics of 1 replies are left out" in caplog.text


def test_names_that_a_client_chooses_change_nothing() -> None:
    def rename(content: RecordDict) -> None:
        content["mine"] = content.pop("arrays")

    claimed = {"num-examples": 10, "update-clip-bound": 7.0}
    loop = Loop(FIVE, steady, metrics=lambda node: claimed, change={1: rewritten(rename)})
    strategy = UpdateClipStrategy(FedAvg(), FIXED)
    found, result = loop.run(strategy, ZEROS, 1)
    np.testing.assert_allclose(found["w"], 0.4)
    assert result.train_metrics_clientapp[1]["update-clip-bound"] == 1.0


def test_one_node_has_one_reply_and_others_have_none() -> None:
    strategy = UpdateClipStrategy(FedAvg(), {**FIXED, **TINY})
    loop = Loop(FIVE, steady)
    messages = strategy.configure_train(1, record(ZEROS), ConfigRecord(), loop)
    # Each has a content of its own, which its mod takes the bound out of.
    assert len({id(message.content) for message in messages}) == 5
    to_another = Message(RecordDict({**messages[0].content}), 9, "train")
    replies = loop.send_and_receive(messages, timeout=1.0)
    stranger = Loop([9], steady).send_and_receive([to_another], timeout=1.0)
    arrays, _ = strategy.aggregate_train(1, [*replies, *replies, *stranger])
    np.testing.assert_allclose(arrays["w"].numpy(), 0.4, rtol=1e-6)


# -- who is told what ----------------------------------------------------------------------------
def test_a_client_without_the_mod_counts_as_zero_and_is_named(caplog: Any) -> None:
    def other(message: Message, context: Context, call_next: Any) -> Message:
        message.content.pop(RECORD)
        return call_next(message, context)

    loop = Loop(FIVE, steady, mods=lambda node: [other if node == 4 else UpdateClipMod()])
    w, _ = outcome(loop)
    np.testing.assert_allclose(w, 4 * 0.4 / 5)
    assert "'4' counts as zero: its app has no UpdateClipMod" in caplog.text


@pytest.mark.parametrize("private", [False, True])
def test_a_client_that_fails_is_left_out_and_named(private: bool, caplog: Any) -> None:
    def fails(node: int, round_: int) -> Any:
        if node == 2:
            raise RuntimeError("row 7 of 93-year-old")
        return steady(node, round_)

    with caplog.at_level(logging.WARNING, "flwr"):
        w, _ = outcome(Loop(FIVE, fails), {**FIXED, **(TINY if private else {})})
    # With noise, the number of those that replied is not to be seen.
    np.testing.assert_allclose(w, 4 * 0.4 / 5 if private else 0.4, rtol=1e-6)
    assert "node 2 could not train" in caplog.text
    assert ("row 7" in caplog.text) != private


def test_local_noise_after_the_clip_is_refused_and_said(caplog: Any) -> None:
    def local() -> LocalDpMod:
        return LocalDpMod(1.0, 1.0, 1.0, 1e-5)

    w, strategy = outcome(Loop(FIVE, steady, mods=lambda node: [local(), UpdateClipMod()]))
    assert strategy.served.rounds[0]["refused"] == 5
    np.testing.assert_array_equal(w, 0.0)
    said = "UpdateClipMod must be the first of the mods, before any such as LocalDpMod"
    assert said in caplog.text
    # The other way round, noise is a part of the update that is clipped.
    w, strategy = outcome(Loop(FIVE, steady, mods=lambda node: [UpdateClipMod(), local()]))
    assert strategy.served.rounds[0]["refused"] == 0


# -- the mod -------------------------------------------------------------------------------------
def asked(content: dict[str, Any], app: ClientApp, kind: str = "train") -> Message:
    found: Message = app(Message(RecordDict(content), 1, kind), context(1))
    return found


def sent(**arrays: Any) -> dict[str, Any]:
    loop = Loop([1, 2], steady)
    strategy = UpdateClipStrategy(FedAvg(), {"start_norm": 1.0})
    messages = strategy.configure_train(1, record(arrays), ConfigRecord(), loop)
    return dict(messages[0].content)


def app_of(change: Callable[[dict[str, Any]], dict[str, Any]], mods: int = 1) -> ClientApp:
    app = ClientApp(mods=[UpdateClipMod() for _ in range(mods)])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        arrays = message.content["arrays"]
        model = {name: array.numpy() for name, array in arrays.items()}
        arrays.clear()  # as `to_torch_state_dict(keep_input=False)` does
        return Message(RecordDict(change(model)), reply_to=message)

    @app.train("slowly")
    def slowly(message: Message, context: Any) -> Message:
        return train(message, context)

    return app


@pytest.mark.parametrize(
    ("dtype", "by", "clipped"),
    [(np.float64, 0.25, 0), (np.float32, 8.0, 1), (np.float16, 8.0, 1), (np.float16, 0.25, 0)],
)
def test_an_update_is_clipped_in_its_dtype(dtype: Any, by: float, clipped: int) -> None:
    model = {"w": np.ones(4, dtype), "n": np.array([3, 4])}
    app = app_of(lambda m: {"arrays": record({"w": m["w"] - dtype(by), "n": m["n"] + 5})})
    for kind in ("train", "train.slowly"):
        reply = asked(sent(**model), app, kind)
        w = reply.content["arrays"]["w"].numpy()
        assert w.dtype == dtype
        assert np.linalg.norm(w.astype(float)) == pytest.approx(min(2 * by, 1.0), rel=2e-3)
        assert np.linalg.norm(w.astype(float)) <= 1.0
        said = dict(reply.content[RECORD])
        bin_ = 9 if clipped else 2
        expected = {"votes": 1, "within": 1 - clipped, "clipped": clipped, "zeroed": 0}
        assert said == {**expected, "bin": bin_}
        # Whole numbers count something; they are no part of the update.
        assert set(reply.content["arrays"]) == {"w"}


BOTH = {"arrays": record(ZEROS), "more": record(ZEROS)}


@pytest.mark.parametrize(
    ("given", "change", "mods", "why"),
    [
        ({"arrays": record(ZEROS)}, dict, 1, "no bound: put UpdateClipStrategy"),
        (None, dict, 2, "UpdateClipMod once into the mods"),
        (None, lambda m: BOTH, 1, "the reply holds 2 ArrayRecords"),
        (BOTH, dict, 1, "the message holds 2 ArrayRecords"),
        (None, lambda m: {"arrays": record({"v": m["w"]})}, 1, "not the model's"),
        (None, lambda m: {"arrays": record({"w": m["w"][:1]})}, 1, "not the model's"),
        (None, lambda m: {"arrays": record({**m, "v": m["w"]})}, 1, "not the model's"),
    ],
)
def test_what_can_not_be_clipped_is_not_sent(given: Any, change: Any, mods: int, why: str) -> None:
    content = sent(**ZEROS) | BOTH if given is BOTH else given or sent(**ZEROS)
    reply = asked(content, app_of(change, mods))
    assert reply.has_error()
    assert why in reply.error.reason


def test_an_app_that_fails_is_left_to_flower() -> None:
    def fails(model: Any) -> Any:
        raise ValueError("no data")

    with pytest.raises(ValueError, match=r"^no data$"):
        asked(sent(**ZEROS), app_of(fails))
    app = ClientApp(mods=[UpdateClipMod()])
    app.train()(lambda message, context: Message(Error(7, "no data"), reply_to=message))
    assert asked(sent(**ZEROS), app).error.reason == "no data"


def test_apps_of_the_older_api_get_a_sentence() -> None:
    older = ClientApp(lambda context: NumPyClient().to_client(), mods=[UpdateClipMod()])
    newer = ClientApp(mods=[UpdateClipMod(), secaggplus_mod])
    newer.train()(lambda message, context: message)
    legacy = {"fitins.parameters": record(ZEROS), "fitins.config": ConfigRecord()}
    for content, app in ((sent(**ZEROS), older), (sent(**ZEROS), newer), (legacy, app_of(dict))):
        assert "are of Flower's older API" in asked(content, app).error.reason


@pytest.mark.parametrize(
    ("model", "why"),
    [({"w": np.zeros(2, complex)}, "complex128"), ({"w": np.array(["a"])}, "no real numbers")],
)
def test_a_model_that_has_no_norm_is_refused(model: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        sent(**model)
