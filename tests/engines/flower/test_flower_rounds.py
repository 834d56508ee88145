# SPDX-License-Identifier: Apache-2.0
"""Update clipping in Flower: bounds, noise, budget and turns, with Flower's own messages."""

from typing import Any

import numpy as np
import pytest
from flower_loop import NOISE, NORMS, SEEDED, SIZE, TEN, ZEROS, Loop, directions, record, start
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from fedclip.engines.flower import UpdateClipStrategy
from fedclip.updates.store import PersistentServer, client_of


# -- noise -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [{"scope": "tensor", "combine": "arc", "n_hostile": 2}, SEEDED],
    ids=["arc", "noise"],
)
def test_rounds_are_those_of_the_core(settings: dict[str, Any]) -> None:
    served, client, model = PersistentServer(settings), client_of(settings), ZEROS
    for round_ in range(1, 9):
        sent = served.open()
        update = directions(NORMS)
        replies = [client.clip(update(node, round_), sent) for node in TEN]
        average = served.close(replies, model).average
        model = {"w": model["w"] - average["w"]}
    strategy = UpdateClipStrategy(FedAvg(), settings)
    found, _ = Loop(TEN, directions(NORMS), settings).run(strategy, ZEROS, 8)
    assert strategy.served.rounds == served.rounds
    np.testing.assert_allclose(found["w"], model["w"], rtol=1e-12)


@pytest.mark.parametrize("there", [2, 9, 11])
def test_noise_asks_as_many_nodes_as_it_is_sized_on(there: int) -> None:
    loop = Loop(range(1, there + 1), directions(np.ones(20)))
    strategy = UpdateClipStrategy(FedAvg(), NOISE)
    with pytest.raises(RuntimeError, match=rf"{there} nodes would be asked.*min_train_nodes"):
        loop.run(strategy, ZEROS, 3)
    assert loop.asked == []
    assert strategy.server.bound.epsilon == 0.0
    # Of more nodes, a small fraction is as many as noise asks for.
    loop = Loop(range(1, 21), directions(np.ones(20)))
    inner = FedAvg(fraction_train=0.01, min_train_nodes=10)
    loop.run(UpdateClipStrategy(inner, NOISE), ZEROS, 3)
    assert [len(asked) for asked in loop.asked] == [10, 10, 10]


def test_with_noise_nothing_of_the_clients_is_published() -> None:
    loop = Loop(TEN, directions(NORMS), metrics=lambda n: {"num-examples": n, "train_loss": n})
    _, noisy = loop.run(UpdateClipStrategy(FedAvg(), SEEDED), ZEROS, 2)
    assert set(noisy.train_metrics_clientapp[2]) == {"update-clip-bound", "update-clip-epsilon"}
    _, clear = loop.run(UpdateClipStrategy(FedAvg(), {"start_norm": 1.0}), ZEROS, 2)
    # Without noise, they are Flower's own: 385 / 55.
    assert clear.train_metrics_clientapp[2]["train_loss"] == pytest.approx(7.0)
    assert clear.evaluate_metrics_clientapp[1] == {"loss": pytest.approx(0.5)}
    assert not {"votes", "within"} & set(clear.train_metrics_clientapp[2])


def test_a_budget_that_is_spent_ends_the_training_and_keeps_the_model(tmp_path: Any) -> None:
    settings = {**SEEDED, "max_epsilon": 10.0}
    loop = Loop(TEN, directions(NORMS))
    strategy = UpdateClipStrategy(FedAvg(), settings, folder=tmp_path)
    models = start(strategy, loop, ZEROS, 12)
    done = len(loop.asked)
    assert 1 < done < 12
    assert strategy.server.bound.epsilon <= 10.0
    for after in models[done:]:
        np.testing.assert_array_equal(after["w"], models[done]["w"])
    assert list(strategy.configure_evaluate(13, record(ZEROS), ConfigRecord(), loop)) == []
    strategy.served.leave()
    # Another run with the same file asks nobody, and returns the first model.
    again = UpdateClipStrategy(FedAvg(), settings, folder=tmp_path)
    model, _ = loop.run(again, {"w": np.ones(SIZE)}, 3)
    assert len(loop.asked) == done
    np.testing.assert_array_equal(model["w"], 1.0)


# -- turns -------------------------------------------------------------------------------------
TURNS = {**SEEDED, "expected_clients": 2, "separation": 3}


@pytest.mark.parametrize("more", [{}, {"noise": "banded", "rounds": 7}])
def test_nodes_take_turns_by_their_numbers(more: dict[str, Any]) -> None:
    loop = Loop(range(1, 7), directions(NORMS))
    strategy = UpdateClipStrategy(FedAvg(min_available_nodes=6), {**TURNS, **more})
    loop.run(strategy, ZEROS, 7)
    assert loop.asked == [[1, 4], [2, 5], [3, 6]] * 2 + [[1, 4]]
    assert strategy.server.bound.budget.accountant.rounds == 3


def test_a_node_that_comes_later_has_no_turn_and_takes_nobodys_place() -> None:
    loop = Loop(range(1, 7), directions(np.ones(20)))
    strategy = UpdateClipStrategy(FedAvg(), TURNS)
    loop.run(strategy, ZEROS, 1)
    loop.nodes = [1, 4, 5, 6, 9]
    loop.apps[9], loop.contexts[9] = loop.apps[1], loop.contexts[1]
    loop.run(strategy, ZEROS, 2)
    assert loop.asked == [[1, 4], [5], [6]]
    loop.nodes = [2, 3, 5, 6]
    with pytest.raises(RuntimeError, match=r"whose turn it is have left \(1, 4\)"):
        loop.run(strategy, ZEROS, 1)


def test_turns_that_come_too_soon_are_refused(caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"separation=3 nodes take turns.*fraction_train"):
        UpdateClipStrategy(FedAvg(fraction_train=0.5), TURNS)
    loop = Loop(range(1, 5), directions(NORMS))
    loop.run(UpdateClipStrategy(FedAvg(), TURNS), ZEROS, 2)
    assert loop.asked == []
    assert "that takes more than 4 clients" in caplog.text


# -- what ends a run ---------------------------------------------------------------------------
def test_noise_ends_if_no_reply_of_the_first_round_can_be_used() -> None:
    loop = Loop(TEN, directions(NORMS), change=dict.fromkeys(TEN, lambda message: None))
    with pytest.raises(RuntimeError, match="of the round can be used"):
        loop.run(UpdateClipStrategy(FedAvg(), NOISE), ZEROS, 5)
    assert len(loop.asked) == 1


def test_noise_on_running_statistics_is_refused_before_the_first_message() -> None:
    loop, model = Loop(TEN, directions(NORMS)), {**ZEROS, "bn.running_var": np.ones(3)}
    why = r"bn\.running_var.*keep them at the clients.*use GroupNorm"
    with pytest.raises(ValueError, match=why):
        loop.run(UpdateClipStrategy(FedAvg(), NOISE), model, 1)
    assert loop.asked == []
    loop.run(UpdateClipStrategy(FedAvg(), {}), model, 1)
