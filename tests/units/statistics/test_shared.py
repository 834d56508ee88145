# SPDX-License-Identifier: Apache-2.0
"""One state for a whole federation: what it is, who gets it, and what a bad client can do."""

from __future__ import annotations

import copy
import json
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import AuxVar
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize
from federation_helpers import joye_libert, masked
from helpers import each_framework, needs

from fedclip import Clipper, FedclipWarning
from fedclip.arrays import NUMPY, backend_named
from fedclip.engines.declearn.statistics_server import SharedServer
from fedclip.rules.sharing import Judgement
from fedclip.statistics.client import SharedRule
from fedclip.statistics.counts import (
    _EDGES,
    ERROR,
    Bounds,
    FedclipSharedCounts,
    Round,
    Tally,
    counts_of,
)

Steps = Sequence[float | Mapping[str, float]]

# Limits that move from early on, so that a few rounds see everything; and all norms are learnt,
# so that what is merged is known. What protects the first norms has tests of its own below.
LEARNS_ALL = {"warmup": 20, "warmup_factor": None, "warmup_norm": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "zscore-clip": {**LEARNS_ALL, "action": "reciprocal", "max_norm": 1.0, "min_std": 0.0},
    "ema-clip": {**LEARNS_ALL, "ratio": 1.05, "estimator": "adagc"},
    "auto-clip": {**LEARNS_ALL, "median": "p2", "decay": None, "min_std": 1e-3},
    "percentile-norm-clip": {**LEARNS_ALL, "percentile": 80.0, "window": 60},
    "mad-clip": {**LEARNS_ALL, "window": 60},
    "adaptive-clip": {"start_norm": 1.0},
}
every_clipper = pytest.mark.parametrize("name", CONFIGS)


def pairwise(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows in which each value is with each clipper, or once, whichever is less."""
    rows = max(len(CONFIGS), *map(len, columns))
    names = list(CONFIGS)
    return [
        (names[i % len(names)], *(c[(i + i // len(c)) % len(c)] for c in columns))
        for i in range(rows)
    ]


class Federation:
    """Server and clients in one process, in declearn's order of calls, over its own wire."""

    def __init__(
        self,
        name: str,
        clients: int = 3,
        *,
        secagg: Callable[[Sequence[str]], tuple[dict[str, Any], Any]] | None = None,
        server: Mapping[str, Any] | None = None,
        also: Sequence[Any] = (),
        **config: Any,
    ) -> None:
        self.config: dict[str, Any] = {**CONFIGS[name], **config}
        counterpart = SharedServer.__subclasses__
        (cls,) = [c for c in counterpart() if c.name == f"{name}-server"]
        known = {k: v for k, v in self.config.items() if k in cls.clipper._shared_settings()}
        self.name = name
        self.server = Optimizer(1.0, modules=[(cls.name, {**known, **(server or {})}), *also])
        self.clients: dict[str, Optimizer] = {}
        for i in range(clients):
            self.join(f"client_{i}")
        self.secagg = secagg
        self.tamper: dict[str, Callable[[FedclipSharedCounts], Any]] = {}
        self.names: tuple[str, ...] = ("w",)

    def join(self, name: str) -> None:
        self.clients[name] = Optimizer(0.1, modules=[(self.name, {**self.config, "shared": True})])

    def clipper(self, client: str) -> Clipper:
        module = self.clients[client].modules[0]
        assert isinstance(module, Clipper)
        return module

    @property
    def counterpart(self) -> SharedServer:
        return next(m for m in self.server.modules if isinstance(m, SharedServer))

    def group(self, label: str = "all") -> dict[str, Any]:
        """Return the shared state of a group."""
        found: dict[str, Any] = self.counterpart.get_state()["groups"][label]
        return found

    def round(self, steps: Mapping[str, Steps]) -> dict[str, list[float]]:
        """Run a round with these clients, and return the limits that each has clipped to."""
        sent = msgpack_serialize(self.server.collect_aux_var())
        limits: dict[str, list[float]] = {}
        replies: dict[str, dict[str, AuxVar]] = {}
        for client, norms in steps.items():
            optimizer = self.clients[client]
            optimizer.process_aux_var(msgpack_deserialize(sent))
            optimizer.start_round()
            limits[client] = self.steps(client, norms)
            replies[client] = optimizer.collect_aux_var()
            for key in replies[client]:
                if client in self.tamper:
                    replies[client][key] = self.tamper[client](replies[client][key])  # type: ignore[arg-type]
        total: dict[str, Any] = {}
        if self.secagg is None:
            for reply in replies.values():
                got = msgpack_serialize(reply)
                for key, aux in msgpack_deserialize(got).items():
                    total[key] = total.get(key, 0) + aux
        else:
            encrypters, decrypter = self.secagg(list(steps))
            for client, reply in replies.items():
                for key, aux in reply.items():
                    secure = encrypters[client].encrypt_aggregate(aux)
                    total[key] = total[key] + secure if key in total else secure
            total = {key: decrypter.decrypt_aggregate(aux) for key, aux in total.items()}
        self.server.process_aux_var(total)
        step = NumpyVector({name: np.array([0.01]) for name in self.names})
        for module in self.server.modules:
            step = module.run(step)
        return limits

    def steps(self, client: str, norms: Steps) -> list[float]:
        clipper, limits = self.clipper(client), []
        for norm in norms:
            given = norm if isinstance(norm, Mapping) else {"w": norm}
            clipper.run(NumpyVector({n: np.array([x]) for n, x in given.items()}))
            assert clipper.last is not None
            limits.append(clipper.last.limit[0])
        return limits


def rule_of(fed: Federation) -> Any:
    """Return the rule that clients judge by."""
    sharing: Any = fed.clipper("client_0")
    return sharing._sharing.rule.rule


def draw(rng: np.random.Generator, size: int, scale: float = 1.0) -> list[float]:
    values: list[float] = (scale * rng.lognormal(0.0, 0.5, size)).tolist()
    return values


@pytest.mark.parametrize(("scale", "secagg"), [(1e-6, masked), (1.0, None), (1e4, masked)])
def test_moments_of_the_warm_up_are_those_of_all_norms(scale: float, secagg: Any) -> None:
    rng = np.random.default_rng(0)
    fed = Federation("zscore-clip", warmup=1000, max_norm=None, secagg=secagg)
    every: list[float] = []
    for _ in range(5):
        steps = {c: draw(rng, int(rng.integers(1, 30)), scale) for c in fed.clients}
        every += [x for norms in steps.values() for x in norms]
        fed.round(steps)
        assert fed.group()["count"] == len(every)
        assert fed.group()["mean"] == pytest.approx(np.mean(every), rel=1e-12)
        assert fed.group()["variance"] == pytest.approx(np.var(every), rel=1e-12)


@pytest.mark.parametrize("estimator", ["zclip", "drytorch", "smartclip"])
def test_moving_averages_are_moved_by_each_norm_once(estimator: str) -> None:
    """After warm-up: d^N of the past, and the rest from the round."""
    rng = np.random.default_rng(2)
    fed = Federation("zscore-clip", warmup=5, feedback="raw", estimator=estimator, max_norm=None)
    fed.round({c: draw(rng, 5) for c in fed.clients})
    for _ in range(3):
        mean, variance = fed.group()["mean"], fed.group()["variance"]
        steps = {c: draw(rng, 4) for c in fed.clients}
        fed.round(steps)
        norms = np.array([x for some in steps.values() for x in some])
        keep = 0.97**12
        moved = keep * mean + (1 - keep) * norms.mean()
        about = {"zclip": moved, "drytorch": mean, "smartclip": mean}[estimator]
        spread = np.mean((norms - about) ** 2)
        if estimator == "smartclip":
            spread = norms.var() + keep * (norms.mean() - mean) ** 2
        assert fed.group()["mean"] == pytest.approx(moved, rel=1e-12)
        assert fed.group()["variance"] == pytest.approx(
            keep * variance + (1 - keep) * spread, rel=1e-12
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "secagg"),
    [
        ("percentile-norm-clip", {}, masked),
        ("percentile-norm-clip", {"history": "p2", "window": 256}, None),
        ("mad-clip", {}, None),
    ],
)
def test_levels_are_those_of_the_last_rounds(name: str, config: Any, secagg: Any) -> None:
    rng = np.random.default_rng(3)
    fed = Federation(name, feedback="raw", secagg=secagg, **config)
    rounds: list[list[float]] = []
    for t in range(12):
        # As many as are kept, every now and then.
        steps = {c: draw(rng, 5 * int(rng.integers(0, 5)), 1.2**t) for c in fed.clients}
        rounds.append([x for some in steps.values() for x in some])
        fed.round(steps)
        kept: list[float] = []
        for norms in reversed(rounds):
            if "history" not in config and len(kept) >= 60:
                break
            kept += norms
        level = np.quantile(kept, 0.5 if name == "mad-clip" else 0.8)
        assert abs(fed.group()["level"] - level) <= ERROR * level
        if name == "mad-clip":
            # Each distance is known within 3 % of its norm, and the median that it is from too.
            spread = np.median(abs(kept - level))
            assert abs(fed.group()["spread"] - spread) <= 2 * ERROR * (level + spread)


LOCAL: list[tuple[str, dict[str, Any], float]] = [
    ("zscore-clip", {"feedback": "raw", "action": "max", "estimator": "drytorch"}, 1e-9),
    ("zscore-clip", {"estimator": "smartclip"}, 1e-9),
    ("ema-clip", {}, 1e-12),
    # exp() of floats and of arrays may differ in the last bit, as the processor has it.
    ("adaptive-clip", {"every": 7}, 1e-12),
    ("auto-clip", {"median": "window", "window": 60, "feedback": "raw"}, ERROR),
    ("percentile-norm-clip", {"percentile": 100.0, "feedback": "raw"}, ERROR),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "error"), LOCAL)
def test_one_client_with_one_step_a_round_equals_local(
    name: str, config: dict[str, Any], error: float
) -> None:
    rng = np.random.default_rng(5)
    fed = Federation(name, 1, **config)
    local = Optimizer(0.1, modules=[(name, fed.config)]).modules[0]
    assert isinstance(local, Clipper)
    norms = np.array(draw(rng, 100))
    norms[60:70] *= 8
    for norm in norms:
        (limit,) = fed.round({"client_0": [norm]})["client_0"]
        local.run(NumpyVector({"w": np.array([norm])}))
        assert local.last is not None
        assert limit == pytest.approx(local.last.limit[0], rel=error, abs=0.0)


@every_clipper
def test_all_clip_to_the_same_limit_and_late_joiners_too(name: str) -> None:
    rng = np.random.default_rng(7)
    fed = Federation(name, max_norm=None)
    for t in range(8):
        if t == 5:
            fed.join("late")
        # client_2 is sampled in one round of three.
        chosen = [c for c in fed.clients if c != "client_2" or t % 3 == 0]
        # A spike that is above every limit, so that all clients show theirs.
        limits = fed.round({c: [*draw(rng, 6), 1e4] for c in chosen})
        assert len({values[-1] for values in limits.values()}) == 1, t
    state = fed.counterpart.collect_aux_var().state
    fed.round({c: [1.0] for c in fed.clients})
    for client in fed.clients:
        held = fed.clipper(client).get_state()["groups"]["all"]
        assert {k: [v] for k, v in held.items() if k in state} == state


@pytest.mark.parametrize(
    ("name", "scope"), [*pairwise(["tensor", ["a*"]]), ("auto-clip", "tensor")]
)
def test_scopes(name: str, scope: Any) -> None:
    """Groups become known with the first update; nothing that was counted before is lost."""
    fed = Federation(name, scope=scope)
    fed.names = ("b", "a1", "a0")
    step = {"a1": 1.0, "a0": 2.0, "b": 4.0}
    reply = fed.counterpart.collect_aux_var()
    assert reply.labels == []
    fed.round({"client_0": [step] * 4, "client_1": [step], "client_2": []})
    assert fed.counterpart.shared_state.version == 0
    labels = fed.counterpart.collect_aux_var().labels
    assert labels == (["a0", "a1", "b"] if scope == "tensor" else ["*", "a*"])
    fed.round({"client_0": [step] * 2, "client_1": [], "client_2": []})
    if name != "adaptive-clip":
        assert {fed.group(label)["count"] for label in labels} == {7}
    if name == "zscore-clip" and scope == "tensor":
        assert [fed.group(label)["mean"] for label in labels] == pytest.approx([2.0, 1.0, 4.0])


@every_clipper
def test_what_is_sent_has_the_same_form_every_round(name: str) -> None:
    fed = Federation(name)
    client, forms = fed.clients["client_0"], set()
    for norms in ([], [1.0], [float("nan")], [0.0], [1e30], [1.0] * 40, []):
        client.process_aux_var(fed.server.collect_aux_var())
        client.start_round()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for norm in norms:
                fed.clipper("client_0").run(NumpyVector({"w": np.array([norm])}))
        (aux,) = client.collect_aux_var().values()
        secret, clear = aux.prepare_for_secagg()
        assert clear is None
        arrays = {k: np.asarray(v) for k, v in secret.items()}
        forms.add(tuple((k, type(secret[k]), v.shape, v.dtype) for k, v in arrays.items()))
        fed.server.process_aux_var({f"{name}-shared": aux})
    assert len(forms) == 1
    assert not fed.counterpart.refused


@pytest.mark.slow
@pytest.mark.parametrize(("name", "secagg"), pairwise([masked, joye_libert]))
def test_secure_aggregation_gives_the_same_state_to_the_bit(name: str, secagg: Any) -> None:
    rng = np.random.default_rng(8)
    clear, secure = Federation(name, 4), Federation(name, 4, secagg=secagg)
    for t in range(3):
        chosen = rng.permutation(list(clear.clients))[:3]
        steps = {str(c): draw(rng, int(rng.integers(0, 9))) for c in chosen}
        clear.round(steps)
        secure.round(steps)
        assert clear.counterpart.get_state() == secure.counterpart.get_state(), t
    assert not secure.counterpart.refused


@pytest.mark.parametrize(("name", "scope", "at"), pairwise(["global", "tensor"], [0, 1, 4]))
def test_killed_and_restarted_goes_on_as_if_nothing_had_been(
    name: str, scope: str, at: int
) -> None:
    rng = np.random.default_rng(9)
    whole, cut = Federation(name, scope=scope), Federation(name, scope=scope)
    for t in range(8):
        steps = {c: draw(rng, 7) for c in whole.clients}
        assert whole.round(steps) == cut.round(steps)
        if t == at:
            fresh = Federation(name, scope=scope)
            fresh.server.set_state(json.loads(json.dumps(cut.server.get_state())))
            for client, optimizer in fresh.clients.items():
                state = json.loads(json.dumps(cut.clients[client].get_state()))
                optimizer.set_state(state)
            cut = fresh
    assert whole.server.get_state() == cut.server.get_state()


@every_clipper
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
        lie = place in (7, 8, 41)
        messages.append((1, [10**9, *counts[1:]] if lie else counts))
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
    tally, bounds = Tally(["moments"]), Bounds.of(np.array([1.0]), np.array([4.0]))
    column = [n, *fixed(up, 12, 100), *fixed(down, 12, 100), *fixed(second, 20, 160)]
    counts = np.array(column, dtype=np.uint64)[:, None]
    found = tally.fault(counts, 1, 10, bounds)
    assert fault in found
    assert bool(fault) == bool(found)
    # The same of each of two groups, and of two clients together.
    both = Bounds.of(np.array([1.0, 1.0]), np.array([9.0, 4.0]))
    empty = np.zeros_like(counts)
    assert tally.fault(np.hstack([empty, counts]), 1, 10, both) == found
    assert bool(tally.fault(counts * np.uint64(2), 2, 10, bounds)) == bool(fault)


def test_counts_that_can_not_be() -> None:
    bounds = Bounds.of(np.array([0.0]), np.array([1.0]))

    def fault(counter: str, rows: dict[int, int], members: int = 1) -> str:
        tally = Tally([counter])
        column = np.zeros((tally.rows, 1), dtype=np.uint64)
        column[list(rows), 0] = list(rows.values())
        return tally.fault(column, members, 10, bounds)

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
        state = namedtuple("State", init)(**init)  # type: ignore[misc]
        judged = Judgement(None, np.array([norm]), True)
        fields = tally.add(judged, 1, state, NUMPY)._asdict()
        column = tally.encode({k: np.asarray(v)[..., 0].tolist() for k, v in fields.items()}, 0.0)
        counts = np.array(column, dtype=np.uint64)[:, None]
        fault = tally.fault(counts, 1, 1, Bounds.of(np.zeros(1), np.array([highest])))
        assert bool(fault) != believed


@pytest.mark.parametrize(
    ("members", "counts", "fault"),
    [
        (1, [0, 2**48 - 1], ""),
        (1, np.ones((2, 1), np.uint64), ""),
        (2**24 - 1, [0, 1], ""),
        (2**24, [0, 1], "from 16777216 clients"),
        (0, [0, 1], "from 0 clients"),
        (1, [0, 2**48], "no counts"),
        (1, [0, -1], "no counts"),
        (1, [0, 1, 2], "not 2 rows of 1 numbers"),
        (1, np.ones((1, 2), np.uint64), r"of shape (1, 2)"),
        (1, np.ones((2, 1)), "of the type float64"),
        (1, "01", "str in place of counts"),
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
        clear = [claim(fed, [1.0] * 2), claim(fed, [1000.0] * 2)]

        def tamper(who: int, which: Any = clear) -> Any:
            def forge(message: FedclipSharedCounts) -> Any:
                column = which[who](message).counts
                return FedclipSharedCounts(1, np.hstack([column, np.zeros_like(column)]))

            return forge

        fed.tamper = {f"client_{i}": tamper(i) for i in range(2)}
        fed.round({"client_0": [], "client_1": []})
        assert fed.counterpart.refused == 1, name
        # A group without norms keeps its state, and what it remembers.
        assert fed.group("b") == before["b"]


@every_clipper
def test_a_group_without_norms_stands_still(name: str) -> None:
    fed = Federation(name, scope="tensor")
    fed.names = ("a", "b")
    fed.round({c: [] for c in fed.clients})
    begun = fed.counterpart.get_state()
    assert begun["version"] == 0
    for _ in range(2):
        fed.round({c: [{"a": x} for x in (1.0, 2.0, 3.0)] for c in fed.clients})
    state = fed.counterpart.get_state()
    assert state["groups"]["b"] == begun["groups"]["b"]
    assert state["history"].get("b") == begun["history"].get("b")
    assert state["groups"]["a"] != begun["groups"]["a"]
    assert state["version"] == 2
    assert fed.clipper("client_0").get_state()["shared"] == {"version": 1}
    # To the last bit, whatever it has learnt.
    rng = np.random.default_rng(10)
    for _ in range(4):
        fed.round({c: [{"a": x} for x in draw(rng, 3)] for c in fed.clients})
        before = fed.group("a")
        fed.round({c: [{"b": 1.0}] for c in fed.clients})
        assert fed.group("a") == before
    # An older state is taken as it is.
    fed.counterpart.set_state(begun)
    assert fed.counterpart.get_state() == begun


def test_the_first_norm_of_a_client_is_not_counted_and_spikes_are_as_what_is_learnt() -> None:
    fed = Federation("zscore-clip", warmup_factor=10.0, warmup_norm=None, max_norm=None)
    fed.round({"client_0": [1.0], "client_1": [50.0], "client_2": [3.0, 3.0]})
    # The one norm that followed another.
    assert (fed.group()["count"], fed.group()["mean"]) == (1, 3.0)
    # Each remembers its own first norm; a spike counts as 1.1 of the median, which is that.
    fed.round({"client_0": [2.0], "client_1": [40.0], "client_2": []})
    assert fed.group()["count"] == 3
    assert fed.group()["mean"] == pytest.approx((3.0 + 2.0 + 40.0) / 3)
    fed = Federation("zscore-clip", warmup_factor=10.0, warmup_norm=None, max_norm=None)
    fed.round({"client_0": [1.0, 500.0], "client_1": [], "client_2": []})
    assert (fed.group()["count"], fed.group()["mean"]) == (1, pytest.approx(1.1))


def test_no_norm_is_sent_twice_nor_with_another_state() -> None:
    fed = Federation("zscore-clip")
    client = fed.clients["client_0"]

    def go(norms: list[float], collect: bool = True) -> int:
        client.process_aux_var(fed.server.collect_aux_var())
        client.start_round()
        fed.steps("client_0", norms)
        if not collect:
            return 0
        (aux,) = client.collect_aux_var().values()
        return int(aux.counts[0, 0])  # type: ignore[attr-defined]

    # The server's state stands still: nothing arrives.
    assert [go([1.0] * 3), go([1.0] * 2), go([])] == [3, 2, 0]
    # What was not sent is, as long as the state is the same that it was counted by.
    go([1.0] * 4, collect=False)
    assert go([1.0]) == 5
    go([1.0] * 4, collect=False)
    fed.round({"client_1": [1.0]})
    assert go([1.0]) == 1


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
        return said(
            fed, {name: getattr(state, name)[..., 0].tolist() for name in rule.tally.init(1, NUMPY)}
        )

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
    """Return the bounds that the documentation states of a limit at z deviations.

    Of the share p the part b claims the limit, the rest 0, whichever b is worst.
    """
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
    name: str,
    config: dict[str, Any],
    lies: int,
    bounds: Callable[[float], tuple[float, float]],
    error: float,
    rounds: int,
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
    ("name", "mean"), [("zscore-clip", 0.0), ("auto-clip", 0.5), ("ema-clip", 0.99)]
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
        above = [4 * (level * 0.5 > edge) for edge in _EDGES]
        fields["new_above"] = above
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


def test_without_a_counterpart_it_warns_once_and_sends_nothing() -> None:
    name, rng = "zscore-clip", np.random.default_rng(14)
    alone = Optimizer(0.1, modules=[(name, {**CONFIGS[name], "shared": True})])
    local = Optimizer(0.1, modules=[(name, CONFIGS[name])])
    with pytest.warns(FedclipWarning, match=f"add '{name}-server' to server_opt") as caught:
        for _ in range(3):
            alone.process_aux_var({})
            alone.start_round()
            for norm in draw(rng, 20):
                gradient = NumpyVector({"w": np.array([norm])})
                assert alone.modules[0].run(gradient) == local.modules[0].run(gradient)
            assert alone.collect_aux_var() == {}
    assert len(caught) == 1


def table(*modules: tuple[str, str]) -> str:
    return ", ".join(f'["{name}", {{{settings}}}]' for name, settings in modules)


Z, E, SHARED = "zscore-clip", "ema-clip", "shared = true"


@pytest.mark.parametrize(
    ("client", "server", "message"),
    [
        (table((Z, SHARED)), '"no-op"', "needs 'zscore-clip-server' in"),
        (f'"{Z}"', f'"{Z}-server"', "needs 'zscore-clip' with shared = true"),
        (
            table((Z, f"{SHARED}, decay = 0.5")),
            f'"{Z}-server"',
            "has decay = 0.5, zscore-clip-server 0.97",
        ),
        (
            table((Z, f'{SHARED}, shared_name = "a"')),
            table((f"{Z}-server", 'shared_name = "b"')),
            "needs 'zscore-clip-server' with shared_name = 'a'",
        ),
        (
            table((Z, f'{SHARED}, shared_name = "a"')),
            table((f"{E}-server", 'shared_name = "a"')),
            "'a' is zscore-clip's, and ema-clip-server's in [server_opt]",
        ),
        (
            table((Z, f'{SHARED}, include_current = true, feedback = "raw"')),
            '"no-op"',
            "does not go with include_current=True",
        ),
        (
            table((Z, f"{SHARED}, decay = 0.9"), (E, f'{SHARED}, shared_name = "b", ratio = 2')),
            table(
                (f"{Z}-server", "decay = 0.9"), (f"{E}-server", 'shared_name = "b", ratio = 2.0')
            ),
            "",
        ),
    ],
)
def test_check_finds_it_before_the_run(
    client: str, server: str, message: str, checked: Any
) -> None:
    optim = f"[client_opt]\nlrate = 0.1\nmodules = [{client}]\n"
    found = checked(f"{optim}[server_opt]\nlrate = 1.0\nmodules = [{server}]\n")
    assert found.ok == (not message)
    assert found.ok or any(message in problem.message for problem in found.problems)


@pytest.mark.parametrize(("name", "shared", "first_"), pairwise([False, True], [False, True, True]))
def test_the_server_clips_its_own_steps_by_their_own_statistics(
    name: str, shared: bool, first_: bool
) -> None:
    """Next to a counterpart, with or without shared = true, before it or behind it."""
    rng = np.random.default_rng(15)
    config = {**CONFIGS[name], "shared": shared}
    fed, without = Federation(name, also=[(name, config)]), Federation(name)
    if first_:
        fed.server.modules.reverse()
    own = fed.server.modules[0 if first_ else 1]
    for _ in range(4):
        steps = {c: draw(rng, 9) for c in fed.clients}
        message = {c: list(s) for c, s in steps.items()}
        fed.round(steps)
        without.round(message)
    assert fed.counterpart.get_state() == without.counterpart.get_state()
    assert isinstance(own, Clipper)
    assert sum(r.steps for r in own.rounds if r.group == "all") == 4


@pytest.mark.parametrize("name", ["auto-clip", "adaptive-clip"])
@each_framework(oracle=False)
def test_counting_is_the_same_text_in_every_arithmetic(name: str, framework: str) -> None:
    needs(framework)
    xp = backend_named(framework)
    rule = SharedRule(rule_of(Federation(name)), 20)
    rng = np.random.default_rng(16)
    host, native = rule.init(2, NUMPY), rule.init(2, xp)
    for _ in range(25):
        norms = rng.lognormal(0.0, 0.5, 2)
        limits, host = rule(norms, host, NUMPY)
        other, native = rule(xp.asarray(norms), native, xp)
        np.testing.assert_allclose(np.asarray(other), limits, rtol=1e-5)
    for name_ in host._fields:
        np.testing.assert_allclose(
            np.asarray(getattr(native, name_)), getattr(host, name_), rtol=1e-5, atol=1e-6
        )
    assert host.new.tolist() == [20.0, 20.0]
