"""Clients that take turns: the schedule, what is charged, and noise that is taken back."""

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.client_sampler import instantiate_client_sampler
from declearn.communication import NetworkServerConfig
from declearn.main.config import FLOptimConfig
from federation_helpers import Clients, Server
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fedclip
from benchmarks import turns_audit as attack
from fedclip.engines.declearn.context import change
from fedclip.engines.declearn.members import Members
from fedclip.engines.declearn.samplers import guarded
from fedclip.privacy import ledger
from fedclip.privacy.accounting import Release, epsilon
from fedclip.privacy.correlated import Stream, coefficients, error, grown
from fedclip.privacy.ledger import read_entries
from fedclip.updates import noise as budget
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import Participation, Reply, Schedule
from fedclip.updates.server import UpdateServer

CLIPPED = {"name": "clipped-averaging"}
NOISE: dict[str, Any] = {"noise_multiplier": 2.0, "expected_clients": 2}
BANDED = {**NOISE, "separation": 3, "noise": "banded", "rounds": 12}


def matrix(c: tuple[float, ...], rounds: int) -> np.ndarray[Any, Any]:
    """Return C, which has the coefficients on its diagonals."""
    return sum(np.diag([x] * (rounds - j), -j) for j, x in enumerate(c[:rounds]))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 60))
def test_each_client_has_one_turn_in_as_many_rounds(clients: int, most: int, rounds: int) -> None:
    schedule = Schedule([f"client_{i}" for i in range(clients)], most)
    drawn = [schedule.due(t) for t in range(rounds)]
    assert all(0 < len(due) <= most for due in drawn)
    for start in range(rounds):
        window = list(itertools.chain(*drawn[start : start + schedule.turns.separation]))
        assert len(set(window)) == len(window)
    assert set(itertools.chain(*drawn[: schedule.turns.separation])) <= set(schedule.clients)
    if rounds >= schedule.turns.separation:
        assert set(itertools.chain(*drawn)) == set(schedule.clients)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_turns_move_no_more_than_accounting_has_it(rounds: int, band: int, data: Any) -> None:
    """By brute force, over all turns that are far enough apart, with updates of either sign."""
    numbers = st.floats(-1, 1) if band > 1 else st.nothing()
    c = (1.0, *(data.draw(numbers) for _ in range(band - 1)))
    apart = data.draw(st.integers(band, 7))
    columns = matrix(c, rounds)
    worst = 0.0
    for taken in itertools.product((0, 1), repeat=rounds):
        at = np.flatnonzero(taken)
        if len(at) > 1 and np.diff(at).min() < apart:
            continue
        worst = max(worst, float(np.linalg.norm(columns @ np.array(taken))))
    assert worst <= math.sqrt(-(-rounds // apart)) * math.hypot(*c) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("rounds", "band", "momentum", "known"),
    [(100, 2, 0, 0.729), (100, 5, 0, 0.5091), (100, 10, 0, 0.415), (100, 10, 0.9, 0.339)],
)
def test_no_other_coefficients_have_less_error(
    rounds: int, band: int, momentum: float, known: float
) -> None:
    best = coefficients(rounds, band, momentum)
    assert error(best, rounds, momentum) == pytest.approx(known, abs=6e-4)
    for j, step in itertools.product(range(1, band), (-0.01, 0.01)):
        moved = (*best[:j], best[j] + step, *best[j + 1 :])
        assert error(moved, rounds, momentum) > error(best, rounds, momentum)


def test_a_stream_is_the_inverse_of_its_matrix() -> None:
    rng, c = np.random.default_rng(0), coefficients(20, 4)
    draws = rng.normal(size=(20, 3))
    source, stream = iter(draws), Stream(c)
    made = np.array([stream.draw(3, lambda size: next(source)) for _ in range(20)])
    np.testing.assert_allclose(matrix(c, 20) @ made, draws, atol=1e-12)
    assert grown(c, 20) == pytest.approx(np.linalg.norm(np.linalg.inv(matrix(c, 20))[-1]))


def seeded(**changes: Any) -> AdaptiveBound:
    settings = {"start_norm": 1.0, "learning_rate": 0.0, "generator": "insecure", "seed": 3}
    return AdaptiveBound(**{**settings, **BANDED, **changes})


def played(
    bound: AdaptiveBound, rounds: int, names: str = "vw", later: float = 1.0
) -> Iterator[dict[str, Any]]:
    """Yield averages of zeros, in units of the bound, which is another one from round 4 on."""
    server, due = UpdateServer(bound), Participation(bound.separation, 12)
    like = {name: np.zeros((2, 1) if name == "v" else 3) for name in names}
    for round_ in range(rounds):
        sent = server.open(due)
        average = server.close([Reply(like)], like).average
        yield {name: np.asarray(array) / sent.bound for name, array in average.items()}
        bound.bound = later if round_ >= 2 else 1.0


@pytest.mark.parametrize("later", [1.0, 8.0])
def test_what_is_released_is_the_stream_in_units_of_the_bound(later: float) -> None:
    """So what a later round takes back is scaled to that round."""
    plain = [*played(seeded(noise="independent", rounds=None), 6)]
    banded = [*played(seeded(), 6, later=later)]
    c = coefficients(12, 3)
    for name in "vw":
        drawn, made = (np.array([a[name].ravel() for a in run]) for run in (plain, banded))
        np.testing.assert_allclose(matrix(c, 6) @ made / math.hypot(*c), drawn, atol=1e-6)
    again = [*played(seeded(), 6, names="wv", later=later)]
    # Another order of the names is no other noise.
    assert [sorted(a) for a in again] == [["v", "w"]] * 6
    np.testing.assert_array_equal([a["w"] for a in again], [a["w"] for a in banded])


def test_a_first_round_that_only_votes_begins_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its votes are charged; the schedule and its noise begin with the round after it."""
    drawn, draw = [], Stream.draw
    monkeypatch.setattr(Stream, "draw", lambda *args: drawn.append(args[1]) or draw(*args))
    bound = AdaptiveBound(**{**BANDED, "start_norm": None, "bits_noise": 1.01})
    server, like = UpdateServer(bound), {"w": np.ones(5)}
    owed = [[2.02, 1], [2.0, 1]]
    assert bound.budget.cost(4) == epsilon([Release(*o) for o in owed], 1e-5)
    for round_ in range(4):
        sent = server.open(Participation(3, 6))
        assert sent.only_votes == (round_ == 0)
        replies = [UpdateClient().clip(like, sent, steps=1)] * 2
        assert bool(np.any(replies[0].arrays["w"])) == (round_ > 0)
        closed = server.close(replies, like)
        assert (closed.withheld, closed.record["withheld"]) == (round_ == 0, round_ == 0)
        assert bool(np.any(closed.average["w"])) == (round_ > 0)
        assert sorted(bound.get_state()["spent"]) == sorted(owed[: 1 + (round_ > 0)])
    assert drawn == [5] * 3


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_a_client_is_charged_for_its_turns(noise: str) -> None:
    changes = {} if noise == "banded" else {"noise": noise, "rounds": None}
    bound = seeded(**changes, max_epsilon=epsilon([Release(2.0, 4)], 1e-5) * (1 + 1e-12))
    assert bound.rounds_left() == 12
    for round_, _ in enumerate(played(bound, 12), start=1):
        owed = epsilon([Release(2.0, -(-round_ // 3))], 1e-5)
        assert bound.epsilon == pytest.approx(owed, rel=1e-12)
        assert bound.rounds_left() == 12 - round_
    assert "turns of each client" in bound.open(Participation(3, 12)).stop


LIFE = st.sampled_from(["round", "round", "ask", "save", "restart", "forget", "again", "newcomer"])


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["turns", "banded", "independent"]), st.lists(LIFE, max_size=25))
@example("turns", ["round", "again", "round"])
@example("banded", ["save", "round", "ask", "restart", "round", "newcomer", "round"])
def test_whatever_happens_to_a_server_what_was_asked_for_is_charged(kind: str, life: Any) -> None:
    """A restart goes on from a state or from none; or the same objects serve another run."""
    config = {**BANDED, "separation": 2, "rounds": 9}
    if kind != "banded":
        del config["noise"], config["rounds"]
    config["separation"] = 1 if kind == "independent" else 2
    with tempfile.TemporaryDirectory() as folder:
        copy_context().run(lived, {**config, "ledger": f"{folder}/spent"}, life)


def lived(config: dict[str, Any], life: list[str]) -> None:
    names, asked, saved = "abcde", Counter[str](), None
    server, draws = Server([("update-clip-server", config)], CLIPPED), sampler(names, 2)
    clients = Clients(6, ["update-clip-client"], CLIPPED)
    for event in life:
        if event in ("round", "ask"):
            due = sorted(draws.run())
            aux = server.start()
            assert not aux["update-clip"].stop
            entry = [*read_entries(Path(config["ledger"])).values()][-1]
            sent = aux["update-clip"]
            assert (entry.schedule, entry.round) == (sent.schedule, sent.round)
            asked.update(due if config["separation"] > 1 else names)
            if event == "round":
                server.finish([clients.round(i, aux, np.ones(2)) for i, _ in enumerate(due)])
        elif event == "save":
            saved = server.optim.get_state()
        else:
            names += "f" if event == "newcomer" and len(names) < 6 else ""
            draws = sampler(names, 2)
            if event in ("restart", "forget"):
                change(server=None)
                server = Server([("update-clip-server", config)], CLIPPED)
                if event == "restart" and saved:
                    server.optim.set_state(saved)
        charged = server.module.budget.accountant
        assert sum(r.steps for r in charged.spent) >= max(asked.values(), default=0)


@pytest.mark.parametrize("how", ["gone", "older", "another", "put back", "damaged"])
def test_a_restart_without_its_ledger_is_refused(how: str, tmp_path: Path) -> None:
    path, other = tmp_path / "spent", {"gone": None, "older": None, "another": "other"}
    plain = {"noise": "independent", "rounds": None}
    bound = seeded(**plain, ledger=str(path))
    list(played(bound, 1))
    before = path.read_bytes()
    list(played(bound, 4))
    state, name = bound.get_state(), other.get(how, "spent")
    again = seeded(**plain, ledger=name and str(tmp_path / name))
    if name is None:
        budget._OF_THIS_PROCESS.clear()
    if how == "older":
        del state["ledger"]
    if how in ("put back", "damaged"):
        ledger._OF_THIS_PROCESS.clear()
        path.write_bytes(before if how == "put back" else b"{" + before)
    again.set_state(state)
    stop = again.open(Participation(3, 12)).stop
    assert ("is damaged" if how == "damaged" else "what it spent") in stop
    # What is refused is not charged.
    assert how != "put back" or path.read_bytes() == before


def sampler(names: str, per_round: int) -> Any:
    inner = {"strategy": "round-robin", "per_round": per_round}
    found = instantiate_client_sampler("named-clients", sampler=inner)
    found.init_clients(set(names))
    return found


def opened(names: str | None, per_round: int = 2) -> str:
    """Return why a server stops in its first round, with such clients; "" if it does not."""
    server = fedclip.UpdateClipServer(**BANDED)

    def first() -> str:
        if names is not None:
            sampler(names, per_round).run()
        return str(server.collect_aux_var().stop)

    return copy_context().run(first)


def test_the_server_stops_where_turns_are_closer_than_it_charges_for() -> None:
    assert not opened("abcde")
    assert not opened("abc", per_round=1)
    assert "'round-robin', 'per_round': 2" in opened(None)
    assert "4 clients have a turn every 2 rounds" in opened("abcd")
    # A guarded server draws by turns where noise is accounted so.
    for config, per_round in ((BANDED, 2), ({}, None)):
        server = {"lrate": 1.0, "modules": [("update-clip-server", config)]}
        optim = {"client_opt": 0.1, "aggregator": "clipped-averaging", "server_opt": server}
        network = NetworkServerConfig("websockets", "127.0.0.1", 8765)
        inner = guarded(network, FLOptimConfig.from_params(**optim))["client_sampler"].sampler
        assert getattr(inner, "per_round", None) == per_round
    # A round follows in its own schedule only.
    for schedule, round_, follows in (("a", 3, True), ("b", 3, False), ("a", 4, False)):
        assert Participation(2, 4, schedule, round_).follows(Participation(2, 4, "a", 2)) is follows


@pytest.mark.usefixtures("no_round_left_open")
def test_nobody_takes_the_place_of_a_client_that_has_left() -> None:
    found = sampler("abcd", 2)
    members = Members(set("abcd"), min_replies=1)
    change(members=members)
    members.leave("a", "{client} is gone")
    assert [found.run() for _ in range(3)] == [{"c"}, {"b", "d"}, {"c"}]
    members.leave("b", "{client} is gone")
    members.leave("d", "{client} is gone")
    with pytest.raises(RuntimeError, match="no client may replace them"):
        found.run()


def test_a_reply_out_of_turn_ends_the_run() -> None:
    found = instantiate_client_sampler("round-robin", per_round=2)
    found.init_clients(set("abcd"))
    found.run()
    found.update({"a": None}, None)
    with pytest.raises(RuntimeError, match="'b' has replied, whose turn it was not"):
        found.update({"a": None, "b": None}, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", attack.CASES)
def test_a_short_audit_finds_the_faults_and_no_others(name: str) -> None:
    case = attack.CASES[name]
    found = attack.audit(case, runs=4)
    # Six standard deviations of an estimate are 0.21.
    assert found.mu > 1.1 if case.found else found.mu < 1.22
