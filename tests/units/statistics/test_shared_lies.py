# SPDX-License-Identifier: Apache-2.0
"""Shared statistics: messages that no client can have sent, and how far liars move a limit."""

import copy
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from shared_runs import CONFIGS, Federation, draw, rule_of

from fedclip.arrays import NUMPY
from fedclip.rules.sharing import Judgement
from fedclip.statistics.client import SharedRule
from fedclip.statistics.counts import _EDGES, ERROR, FedclipSharedCounts, Round, Tally, counts_of


@pytest.mark.parametrize("name", CONFIGS)
def test_many_clients_are_checked_together_and_lies_are_left_out_alone(name: str) -> None:
    fed = Federation(name)
    rng = np.random.default_rng(11)
    sent = fed.server.collect_aux_var()
    messages = []
    for place in range(60):
        client = Optimizer(0.1, modules=[(name, {**fed.config, "shared": True})])
        client.process_aux_var(sent)
        client.start_round()
        for norm in draw(rng, 3):
            client.modules[0].run(NumpyVector({"w": np.array([norm])}))
        ((_, message),) = client.collect_aux_var().items()
        counts = np.asarray(message.counts).ravel().tolist()
        # More norms than there can be, and a group that does not add up.
        messages.append((1, [10**9, *counts[1:]] if place in (7, 8, 41) else counts))
    shared = fed.counterpart.shared_state
    alone = copy.deepcopy(shared)
    assert [i for i, fault in enumerate(shared.merge(messages)) if fault] == [7, 8, 41]
    alone.merge([m for i, m in enumerate(messages) if i not in (7, 8, 41)])
    assert shared.get_state() == alone.get_state()


def fixed(value: float, digits: int, scale: int) -> list[int]:
    """Return a number >= 0 as digits of 16 bits, the lowest first, in units of 2^-scale."""
    whole = int(Fraction(value) * 2**scale)
    return [whole >> 16 * place & 0xFFFF for place in range(digits)]


@pytest.mark.parametrize(
    ("n", "up", "down", "second", "fault"),
    [
        # Norms up to 4, about a centre of 1: none, 1 and 3, 0 and 0, 4, 0 and 4.
        (0, 0.0, 0.0, 0.0, ""),
        (2, 2.0, 0.0, 4.0, ""),
        (2, 0.0, 2.0, 2.0, ""),
        (1, 3.0, 0.0, 9.0, ""),
        (2, 3.0, 1.0, 10.0, ""),
        # 4.5; -1; one and two deviations from a mean of 1; the squares of nobody; no square.
        (1, 3.5, 0.0, 12.25, "above the most"),
        (1, 0.0, 2.0, 4.0, "norms below 0"),
        (2, 0.0, 0.0, 6.1, "norms below 0"),
        (0, 0.0, 0.0, 1.0, "norms below 0"),
        (2, 4.0, 0.0, 7.9, "a negative variance"),
        # Parts that cancel: their rounding errors would excuse any variance, and any mean.
        (1, 1e12, 1e12, 4000.0, "norms below 0"),
        (1, 2.0**80, 2.0**80, 1e15, "norms below 0"),
        (0, 1.0, 1.0, 0.0, "norms below 0"),
    ],
)
def test_sums_that_no_norms_have(n: int, up: float, down: float, second: float, fault: str) -> None:
    tally, bounds = Tally(["moments"]), (np.array([1.0]), np.array([4.0]))
    column = [n, *fixed(up, 12, 100), *fixed(down, 12, 100), *fixed(second, 20, 160)]
    counts = np.array(column, dtype=np.uint64)[:, None]
    found = tally.fault(counts, 1, 10, bounds)
    assert fault in found
    assert bool(fault) == bool(found)
    # The same of each of two groups, and of two clients together.
    both = (np.array([1.0, 1.0]), np.array([9.0, 4.0]))
    assert tally.fault(np.hstack([np.zeros_like(counts), counts]), 1, 10, both) == found
    assert bool(tally.fault(counts * np.uint64(2), 2, 10, bounds)) == bool(fault)


def test_counts_that_can_not_be() -> None:
    def fault(counter: str, rows: dict[int, int], members: int = 1) -> str:
        tally = Tally([counter])
        column = np.zeros((tally.rows, 1), dtype=np.uint64)
        column[list(rows), 0] = list(rows.values())
        return tally.fault(column, members, 10, (np.array([0.0]), np.array([1.0])))

    # Each client counts at most ten norms.
    assert not fault("bits", {0: 10, 1: 10})
    assert not fault("bits", {0: 30, 1: 1}, members=3)
    assert "31 norms of one group, of 30 at most" in fault("bits", {0: 31}, members=3)
    assert "more unclipped norms" in fault("bits", {0: 3, 1: 4})
    # A digit has 16 bits, and the sum of three has three times as much at most.
    assert "digits" in fault("moments", {0: 3, 1: 3 * 2**16}, members=3)
    assert "digits" not in fault("moments", {0: 3, 1: 3 * 2**16 - 3}, members=3)
    # Row 1 is the bucket of 0. In 64 bits, 2^63 + 2^63 + 2 = 2.
    assert not fault("sketch", {0: 2, 1: 2})
    for rows in ({1: 1}, {1: 3}, {1: 2**63, 2: 2**63, 3: 2}):
        assert "do not add up" in fault("sketch", {0: 2, **rows})


def test_the_highest_bucket_is_that_of_the_highest_norm() -> None:
    """And of what a client in single precision takes for it."""
    tally = Tally(["sketch"])
    edge = float(_EDGES[_EDGES > 1.0][0])
    for highest, norm, believed in (
        (1.0, 1.0, True),
        (edge, edge * (1 + 2e-7), True),
        (1.0, edge * 1.01, False),
        (edge, edge * 1.1, False),
    ):
        init = tally.init(1, NUMPY)
        state = namedtuple("State", init)(**init)
        fields = tally.add(Judgement(None, np.array([norm]), True), 1, state, NUMPY)._asdict()
        column = tally.encode({k: np.asarray(v)[..., 0].tolist() for k, v in fields.items()}, 0.0)
        counts = np.array(column, dtype=np.uint64)[:, None]
        fault = tally.fault(counts, 1, 1, (np.zeros(1), np.array([highest])))
        assert bool(fault) != believed


@pytest.mark.parametrize(
    ("members", "counts", "fault"),
    [
        *((members, [0, 1], "") for members in (1, 2**24 - 1)),
        *((members, [0, 1], f"from {members} clients") for members in (2**24, 0, -1)),
        (1, [0, 2**48 - 1], ""),
        (1, np.ones((2, 1), np.uint64), ""),
        *((1, [0, count], "no counts") for count in (2**48, -1)),
        (1, [0, 1, 2], "not 2 rows of 1 numbers"),
        (1, np.ones((1, 2), np.uint64), "no counts of shape (2, 1)"),
        (1, np.ones((2, 1)), "no counts of shape (2, 1)"),
        (1, "01", "no counts of shape (2, 1)"),
    ],
)
def test_what_is_no_message(members: Any, counts: Any, fault: str) -> None:
    read, found = counts_of(members, counts, (2, 1))
    assert (read is None) == bool(fault)
    assert fault in found
    # A single client does not say for how many it speaks.
    assert FedclipSharedCounts.from_dict({"counts": [1], "members": 9}).members == 1


def test_rounding_makes_no_mean_and_no_variance_negative() -> None:
    assert Round(2, 0, Fraction(-4), Fraction(1)).moments(1.0) == (0.0, 0.0)
    assert Round(2, 0, Fraction(2), Fraction(10)).moments(1.0) == (2.0, 4.0)
    assert Round(0).moments(1.0) == (0.0, 0.0)


def test_members_speak_for_no_more_than_there_are() -> None:
    """Messages of one client and of eight, in one round: neither goes by the other's number."""
    for place in (0, 1):
        shared = Federation("adaptive-clip", server={"max_steps": 10}).counterpart.shared_state
        messages = [(8, [80, 0])]
        messages.insert(place, (1, [80, 0]))
        assert [bool(fault) for fault in shared.merge(messages)] == [i == place for i in range(2)]


def test_each_group_has_its_own_bounds_and_its_own_norms() -> None:
    """Norms that are usual in one group are none of another, whoever replies with it."""
    # Long memories: in a short one, the norms of one group would drive out those of the other.
    for name, long in (("percentile-norm-clip", {"window": 1000}), ("zscore-clip", {})):
        fed = Federation(name, 4, scope="tensor", max_norm=None, **long)
        fed.names = ("a", "b")
        step = {"a": 1.0, "b": 1000.0}
        for _ in range(3):
            fed.round({c: [step, {"a": 1.1, "b": 1100.0}] * 9 for c in fed.clients})
        before = {label: fed.counterpart.get_state()["groups"][label] for label in "ab"}
        field = "level" if name[0] == "p" else "mean"
        assert before["b"][field] == pytest.approx(1000 * before["a"][field], rel=0.1)
        # Of b nobody else says anything.
        for client, norm in (("client_0", 1.0), ("client_1", 1000.0)):
            column = claim(fed, [norm] * 2)(FedclipSharedCounts(1, [])).counts
            lie = FedclipSharedCounts(1, np.hstack([column, np.zeros_like(column)]))
            fed.tamper[client] = lambda _, lie=lie: lie
        fed.round({"client_0": [], "client_1": []})
        assert fed.counterpart.refused == 1, name
        # A group without norms keeps its state, and what it remembers.
        assert fed.group("b") == before["b"]


def said(fed: Federation, fields: Mapping[str, Any]) -> FedclipSharedCounts:
    """Return the message of a client that has counted this."""
    shared = fed.counterpart.shared_state
    column = shared.tally.encode(fields, fed.group(shared.labels[0]).get("mean", 0.0))
    return FedclipSharedCounts(1, np.array(column, dtype=np.uint64)[:, None])


def claim(fed: Federation, values: Sequence[float]) -> Callable[[FedclipSharedCounts], Any]:
    """Return what claims these norms, in sound form."""

    def tamper(_: FedclipSharedCounts) -> Any:
        rule = SharedRule(rule_of(fed), len(values))
        state = rule.init(1, NUMPY)
        for value in values:
            seen = np.array([value])
            judged = Judgement(None, seen, True, unclipped=seen)
            state = rule.tally.add(judged, len(values), state, NUMPY)
        names = rule.tally.init(1, NUMPY)
        return said(fed, {name: getattr(state, name)[..., 0].tolist() for name in names})

    return tamper


def highest(fed: Federation) -> float:
    """Return the most that the server believes of one norm."""
    return float(fed.counterpart.shared_state.rule.ceiling(fed.counterpart.shared_state.state)[0])


def limit_of(fed: Federation) -> float:
    field = {"percentile-norm-clip": "level", "adaptive-clip": "limit"}.get(fed.name)
    return float(fed.group()[field]) if field else highest(fed)


HONEST = np.linspace(0.9, 1.1, 36)
"""What honest clients see in every round: no spikes."""

WIDE = np.linspace(0.5, 1.5, 36)
"""The same for clippers that follow a quantile."""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clipper", "zscore-clip-server"),
        ("groups", {"all": {"mean": 1.0}}),
        ("history", {}),
        *(
            ("history", {"all": [rounds]})
            for rounds in ([[1, 2], [3]], [[10_000], [3]], [[1], [0]])
        ),
        ("version", -1),
        ("refused", None),
    ],
)
def test_states_that_are_not_valid_are_refused(key: str, value: Any) -> None:
    fed = Federation("auto-clip")
    fed.round({c: [1.0, 2.0, 3.0] for c in fed.clients})
    good, clipper = fed.counterpart.get_state(), fed.clipper("client_0")
    with pytest.raises(KeyError):
        fed.counterpart.set_state({**good, key: value})
    assert fed.counterpart.get_state() == good
    with pytest.raises(KeyError, match="shared"):
        clipper.set_state({**clipper.get_state(), "shared": {"version": -1}})


ATTACKS: dict[str, Callable[[int, int, float, float], list[float]]] = {
    # The round, how many norms, the highest that is believed, the mean.
    **{
        f"{part:.0%} at the top": lambda _, size, top, __, part=part: (
            [top] * round(part * size) + [0.0] * (size - round(part * size))
        )
        for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    },
    "by turns": lambda t, size, top, _: [top * (t % 2)] * size,
    "the mean": lambda _, size, __, mean: [mean] * size,
}


def attacked(name: str, lies: int, attack: Any, rounds: int, **config: Any) -> list[float]:
    """Return the limits of rounds in which liars claim so many norms, next to the honest ones."""
    fed = Federation(name, 2, max_norm=None, **config)
    norms = (WIDE if name in ("adaptive-clip", "percentile-norm-clip") else HONEST).tolist()
    for _ in range(2):
        fed.round({"client_0": norms})
    limits = [limit_of(fed)]
    for t in range(rounds):
        claims = attack(t, lies, highest(fed), fed.group().get("mean", 1.0))
        fed.tamper = {"client_1": claim(fed, claims)}
        fed.round({"client_0": norms, "client_1": []})
        limits.append(limit_of(fed))
    assert not fed.counterpart.refused
    return limits


def widened(p: float, z: float) -> tuple[float, float]:
    """Return the stated bounds at z deviations: of p, the worst part b claims it, the rest 0."""
    top = 0.0
    for b in np.linspace(0.0, p, 1001):
        others = (1 - p) / (1 - b)
        mean = others * HONEST.mean()
        std = (others * (HONEST**2).mean() - mean**2) ** 0.5
        top = max(top, mean + z * std / (1 - b * (1 + z * z)) ** 0.5)
    return float(np.quantile(HONEST, 1 - 1 / ((1 - p) * (1 + z * z)), method="lower")), top


def between(p: float, q: float) -> tuple[float, float]:
    low = np.quantile(WIDE, (q - p) / (1 - p), method="lower")
    return float(low), float(np.quantile(WIDE, q / (1 - p), method="higher"))


# Clipper, its settings, how many norms liars claim (2, 4 or 12, for a share of 5, 10 or 25 %),
# the bounds, their error, and how many rounds it takes. Clients may round to single precision.
LIES: list[tuple[Any, ...]] = [
    ("zscore-clip", {"action": "max"}, 4, partial(widened, z=2.5), 1e-4, 25),
    # An error of one step.
    ("adaptive-clip", {"quantile": 0.4, "rate": 0.1}, 12, partial(between, q=0.4), 0.06, 60),
    ("percentile-norm-clip", {"percentile": 60.0}, 12, partial(between, q=0.6), ERROR, 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "lies", "bounds", "error", "rounds"), LIES)
def test_liars_move_a_limit_no_further_than_stated(
    name: str, config: Any, lies: int, bounds: Any, error: float, rounds: int
) -> None:
    """Whatever they claim, of what is believed; and some attack gets near the upper bound."""
    low, top = bounds(lies / (HONEST.size + lies))
    reached = {}
    for attack, claims in ATTACKS.items():
        limits = attacked(name, lies, claims, rounds, **config)
        assert low * (1 - error) <= min(limits), attack
        assert max(limits) <= top * (1 + error), attack
        reached[attack] = max(limits)
    without = attacked(name, 0, ATTACKS["the mean"], rounds, **config)[-1]
    assert max(reached.values()) >= without + 0.8 * (top - without), reached


@pytest.mark.parametrize(
    ("name", "mean"), [*zip(["zscore-clip", "auto-clip", "ema-clip"], [0, 0.5, 0.99], strict=True)]
)
def test_a_variance_that_no_norms_of_that_mean_have_is_refused(name: str, mean: float) -> None:
    """Norms between 0 and H have ``sum(u^2) <= H sum(u)``."""
    fed = Federation(name, 2, max_norm=None)
    for _ in range(2):
        fed.round({"client_0": HONEST.tolist()})
    before, top = fed.group(), highest(fed)
    fields = {"new": 4, "new_mean": mean * top, "new_squares": 4 * (1 - mean**2) * top**2}
    if name == "auto-clip":
        # Its buckets would be sound.
        level = float(limit_of(fed))
        fields["new_above"] = [4 * (level * 0.5 > edge) for edge in _EDGES]
    fed.tamper = {"client_1": lambda _: said(fed, fields)}
    fed.round({"client_0": [], "client_1": []})
    assert fed.group() == before
    assert fed.counterpart.refused == 1


def test_max_steps_bounds_what_a_client_counts_and_may_claim() -> None:
    fed = Federation("auto-clip", server={"max_steps": 10})
    fed.round({"client_0": [1.0] * 25, "client_1": [2.0] * 10})
    assert fed.group()["count"] == 20
    fed.tamper = {"client_0": claim(fed, [1.0] * 11)}
    fed.round({"client_0": [], "client_1": [1.0]})
    assert fed.counterpart.refused == 1
    assert fed.group()["count"] == 21
    # What is not counted is not in the mean, either.
    fed = Federation("zscore-clip", server={"max_steps": 2}, max_norm=None)
    fed.round({"client_0": [1.0, 3.0, 50.0]})
    assert [fed.group()[key] for key in ("count", "mean", "variance")] == [2, 2.0, 1.0]
