# SPDX-License-Identifier: Apache-2.0
"""Update clipping in declearn: settings that are refused, and what hostile clients change."""

import logging
import math
from typing import Any

import numpy as np
import pytest
from declearn.aggregator import Aggregator
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from federation_helpers import Clients, Server, norm, sent
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from units.updates.test_update_clip import ADAPTIVE, CLIPPED, pair, share, vector

import fedclip
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipBound
from fedclip.errors import NonFiniteError, StateError
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.limits import refuse_statistics
from fedclip.updates.protocol import Reply
from fedclip.updates.server import UpdateServer

pytestmark = pytest.mark.usefixtures("no_round_left_open")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"bound": math.nan, "round": 3, "spent": []},
        {"bound": 1.0, "round": True, "spent": []},
        *({"bound": 1.0, "round": 3, "spent": [], "variance": x} for x in (0.0, "0", math.nan)),
        {"bound": 1.0, "round": 3, "spent": [[1.0, -2]]},
        {"bound": 1.0, "round": 3, "spent": [[1.0, 2]]},  # spent, but here without noise
    ],
)
def test_state_that_can_not_be(state: dict[str, Any]) -> None:
    optim = Optimizer(lrate=1.0, modules=[("update-clip-server", {"start_norm": 3.0})])
    before = optim.get_state()
    with pytest.raises(StateError):
        optim.set_state({**before, "modules": [("update-clip-server", state)]})
    assert optim.get_state() == before


SENT = UpdateClipBound(1.0)


@pytest.mark.parametrize(
    ("modules", "aggregator", "sent", "error", "text"),
    [
        (ADAPTIVE, CLIPPED, None, RuntimeError, "put update-clip-server into server_opt"),
        (ADAPTIVE * 2, CLIPPED, SENT, RuntimeError, "once each"),
        (ADAPTIVE, {"name": "averaging"}, SENT, RuntimeError, "set aggregator = 'clipped-avera"),
        (ADAPTIVE, {**CLIPPED, "max_norm": 1.0}, SENT, ValueError, "sends another bound"),
        ([], CLIPPED, None, ValueError, "has no bound"),
        (ADAPTIVE, CLIPPED, UpdateClipBound(0.0), ValueError, "bound must be a finite number"),
    ],
)
def test_a_client_that_can_not_clip_says_why(
    modules: Any, aggregator: Any, sent: Any, error: type[Exception], text: str
) -> None:
    clients = Clients(1, modules, aggregator)
    with pytest.raises(error, match=text):
        clients.round(0, {} if sent is None else {"update-clip": sent}, np.array([1.0]))


def test_a_client_goes_by_the_bound_of_its_round_only() -> None:
    """Not by an older one, and not another aggregator of the same thread."""
    clients = Clients(1, ADAPTIVE, CLIPPED)
    for message, error in (
        (UpdateClipBound(2.0, stop="the budget is spent"), RuntimeError),
        (UpdateClipBound(-1.0), ValueError),
        (None, None),
    ):
        aux = {"update-clip": UpdateClipBound(0.5)}
        assert norm(clients.round(0, aux, np.ones(1)).updates.updates) == pytest.approx(0.5)
        if message is not None:
            clients.optimizers[0].process_aux_var(aux)
            with pytest.raises(error):
                clients.optimizers[0].process_aux_var({"update-clip": message})
        assert norm(share({"max_norm": 2.0}, NumpyVector({"w": np.ones(1)})).updates) == 1.0
        with pytest.raises(RuntimeError, match="has received no bound"):
            clients.optimizers[0].start_round()


NOISY = ("update-clip-server", {"noise_multiplier": 1.0, "expected_clients": 1, "start_norm": 1.0})


@pytest.mark.parametrize(
    ("modules", "aggregator", "text"),
    [
        (["momentum", NOISY], CLIPPED, "put update-clip-server first"),
        ([NOISY], {**CLIPPED, "exclude": "w"}, "exclude="),
        # As when declearn's fairness puts an aggregator of its own in its place.
        (["update-clip-server"], {"name": "averaging"}, "not averaged by 'clipped-averaging'"),
        ([NOISY, "update-clip-server"], CLIPPED, "two update-clip-server"),
    ],
)
def test_server_voids_a_round_whose_bound_does_not_hold(
    modules: list[Any], aggregator: dict[str, Any], text: str
) -> None:
    """Zeros at once, and a sentence at the start of the next round, on clients and server."""
    server = Server(modules, aggregator)
    clients, aux = Clients(1, ADAPTIVE, CLIPPED), server.start()
    if not aux["update-clip"].stop:
        assert norm(server.finish([clients.round(0, aux, np.array([5.0]))])) == 0
        aux = server.start()
    with pytest.raises(RuntimeError, match=text):
        clients.round(0, aux, np.array([5.0]))


def test_what_stops_a_run_is_told_until_another_state_is_loaded() -> None:
    server, clients = pair(1, start_norm=0.5)
    module = server.module
    good, update = module.get_state(), NumpyVector({"w": np.ones(2)})
    for _ in range(2):
        server.round(clients, [np.ones(2)])
        # Another aggregator of the same thread does not go by the bound of a round that is over.
        alone = Aggregator.from_config({**CLIPPED, "max_norm": 1.0})
        shared = alone.prepare_for_sharing(updates=vector(0.9), n_steps=1)
        assert norm(alone.finalize_updates(shared)) == pytest.approx(0.9)
        # A round without votes, after one with them, is void; and so is one without a bound.
        server.start()
        assert norm(module.run(update)) == 0
        assert norm(module.run(update)) == 0
        # The first reason is the one that is told.
        assert server.start()["update-clip"].stop.startswith("no votes have come: put update-clip")
        module.set_state(good)
    assert not server.start()["update-clip"].stop


def forged(reply: TrainReply, **fields: Any) -> TrainReply:
    for key, value in fields.items():
        target = reply.updates if hasattr(reply.updates, key) else reply.aux_var["update-clip"]
        setattr(target, key, value)
    return reply


HOSTILE: dict[str, dict[str, Any]] = {
    "nan": {"updates": NumpyVector({"w": np.array([math.nan, 0.0])})},
    "slightly above": {"updates": NumpyVector({"w": np.array([1.001, 0.0])})},
    "shape": {"updates": NumpyVector({"w": np.zeros(3)})},
    "complex": {"updates": NumpyVector({"w": np.zeros(2, dtype=np.complex128)})},
    "text in it": {"updates": NumpyVector({"w": "text"})},
    "nothing": {"updates": None},
    "negative count": {"n_zeroed": -5},
    "enormous count": {"n_clients": 10**12},
    "both counts": {"n_clipped": 1, "n_zeroed": 1},
}


@pytest.mark.parametrize(("place", "kind"), [(2 * (i % 3), k) for i, k in enumerate(HOSTILE)])
def test_hostile_update(kind: str, place: int, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as a zeroed one, and the server's log says so."""
    server, clients = pair(5)
    aux = server.start()
    replies = [clients.round(i, aux, np.array([5.0, 0.0])) for i in range(5)]
    replies[place] = forged(replies[place], **HOSTILE[kind])
    with caplog.at_level(logging.INFO):
        out = server.finish([sent(r) for r in replies])
    np.testing.assert_allclose(out.coefs["w"], [0.8, 0.0], rtol=1e-9)
    # All votes count: 5 times the bound.
    assert 4.0 < server.module.bound < 8.0
    assert "1 refused" in caplog.text
    assert "the update of one of the replies counts as zero" in caplog.text
    assert server.start()["update-clip"].stop == ""


@pytest.mark.parametrize("scope", ["tensor", ["0"]])
def test_groups_that_reach_the_bound_each_by_itself_are_refused(scope: Any) -> None:
    """Together they are longer than the bound, on which noise is sized."""
    config = {**CLIPPED, "scope": scope}
    server = Server([("update-clip-server", {"start_norm": 1.0})], config)
    clients, aux = Clients(2, ADAPTIVE, config), server.start()
    update = NumpyVector({"0": np.array([5.0]), "1": np.array([5.0])})
    replies = [clients.round(i, aux, update) for i in range(2)]
    forged(replies[1], updates=NumpyVector({"0": np.array([0.9]), "1": np.array([0.9])}))
    assert norm(server.finish([sent(r) for r in replies])) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "votes",
    [
        {"n_votes": -1},
        {"n_votes": 1, "n_within": 2},
        {"n_votes": 0, "n_within": 1},
        {"n_within": None},
        {"n_votes": True},
        {"n_clients": 0},
        *({"n_bins": bins} for bins in ([0] * 10, [1] + [0] * 9, [0] * 8 + [2, -1], [1], 8, [])),
    ],
    ids=str,
)
def test_hostile_votes(votes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    server, clients = pair(3)
    aux = server.start()
    replies = [clients.round(i, aux, np.array([5.0])) for i in range(3)]
    vars(replies[0].aux_var["update-clip"]).update(votes)
    with caplog.at_level(logging.WARNING):
        server.finish([sent(r) for r in replies])
    # The two honest ones were 5 times above it.
    assert 4.0 < server.module.bound < 8.0
    assert "no proper vote in 1 of 3 replies" in caplog.text


@given(
    arrays(np.float64, (2, 6), elements=st.floats(-10, 10)),
    st.sampled_from(["global", "tensor", {"a": 3.0, "*": 4.0}]),
    st.sampled_from([0.1, 1.0, 1e4]),
    st.sampled_from(["<f8", "<f4"]),
)
def test_no_two_secure_sums_are_further_apart_afterwards(
    sums: np.ndarray, scope: Any, scale: float, dtype: str
) -> None:
    """None is refused, however many clients do not clip; where sums overflow, too."""
    rows = (sums * scale).astype(dtype)
    if scale > 1 and dtype == "<f4":
        rows[:, 5] = [np.finfo(dtype).max, np.inf]
    found = []
    for row in rows:
        like = {"a": row[:2], "b": row[2:]}
        core = UpdateServer(AdaptiveBound(1.0), scope=scope)
        core.open()
        average = core.close([Reply(like, clients=3)], like).average
        plug_in = Aggregator.from_config({**CLIPPED, "max_norm": 1.0, "scope": "global"})
        total = plug_in.finalize_updates(ClippedUpdates(NumpyVector(like), 3, 3, 1, 0)).coefs
        found.append([np.concatenate([v[n].astype("f8") for n in "ab"]) for v in (average, total)])
        assert all(np.linalg.norm(v) <= 1 + 1e-6 for v in found[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        apart = float(np.linalg.norm(rows[0].astype("f8") - rows[1].astype("f8")))
    for one, other in zip(*found, strict=True):
        assert 3 * np.linalg.norm(one - other) <= apart * (1 + 1e-6) + 1e-6


def test_a_secure_sum_within_its_bound_stays_and_a_longer_one_is_shortened() -> None:
    server = Aggregator.from_config({**CLIPPED, "max_norm": 1.0})
    for length, left in ((2.5, 2.5), (3.01, 3.0), (1e5, 3.0)):
        total = ClippedUpdates(NumpyVector({"w": np.array([length, 0.0])}), 3, 3, 1, 0)
        assert norm(server.finalize_updates(total)) == pytest.approx(left / 3)
    # No reply at all is a sentence.
    with pytest.raises(TypeError, match="give clients clipped-averaging"):
        server.finalize_updates(sum([]))


@pytest.mark.parametrize(("value", "exclude"), [(math.nan, "layer1.*"), (-math.inf, None)])
def test_update_that_is_not_finite_is_zeroed_and_counted(value: float, exclude: Any) -> None:
    update = vector(3.0, 4.0)
    update.coefs["layer1.w"][0, 0] = value
    with pytest.warns(fedclip.FedclipWarning, match=r"NaN or infinity in 'layer1\.w'"):
        shared = share({"max_norm": 1.0, "exclude": exclude}, update)
    assert norm(shared.updates) == 0
    assert (shared.n_clipped, shared.n_zeroed) == (0, 1)
    with pytest.raises(NonFiniteError, match=r"layer1\.w"):
        share({"max_norm": 1.0, "on_nonfinite": "raise", "exclude": exclude}, update)


@pytest.mark.parametrize(
    ("config", "zeroed"),
    [
        # The largest value; with others, the norm. Above it, and not at it.
        ({"zeroing_norm": 15.9}, 1),
        ({"zeroing_norm": 16.0}, 0),
        ({"zeroing_norm": 19.9, "zeroing_ord": 2}, 1),
        ({"zeroing_norm": 29.0, "zeroing_ord": 1}, 0),
        ({"zeroing_factor": 20.0}, 0),
        # Either of the two is enough.
        ({"zeroing_norm": 100.0, "zeroing_factor": 19.9}, 1),
        ({"zeroing_norm": 10.0, "zeroing_factor": 20.1}, 1),
    ],
)
def test_far_out_of_range_is_zeroed(config: dict[str, Any], zeroed: int) -> None:
    update = NumpyVector({"w": np.array([12.0, -16.0]), "b": np.zeros(())})
    shared = share({"max_norm": 1.0, **config}, update)
    assert (shared.n_clipped, shared.n_zeroed) == (1 - zeroed, zeroed)
    assert norm(shared.updates) == (0.0 if zeroed else pytest.approx(1.0))


@pytest.mark.parametrize(("layers", "more"), [(1, ""), (4, ""), (6, " and 2 more")])
def test_four_running_statistics_are_named(layers: int, more: str) -> None:
    model = {f"{i}.running_mean": np.zeros(2) for i in range(layers)}
    with pytest.raises(ValueError, match="holds running statistics") as caught:
        refuse_statistics(model)
    named = ", ".join(f"'{i}.running_mean'" for i in range(min(layers, 4)))
    assert f"({named}{more})" in str(caught.value)
