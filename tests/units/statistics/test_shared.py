# SPDX-License-Identifier: Apache-2.0
"""One state for a whole federation: what it is, who gets it, and what a bad client can do."""

import json
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from federation_helpers import joye_libert, masked
from helpers import each_framework
from shared_runs import CONFIGS, Federation, draw, rule_of

from fedclip import FedclipWarning
from fedclip.arrays import NUMPY, backend_named
from fedclip.statistics.client import SharedRule
from fedclip.statistics.counts import ERROR

every_clipper = pytest.mark.parametrize("name", CONFIGS)


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
        expected = keep * variance + (1 - keep) * spread
        assert fed.group()["variance"] == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "error"),
    [
        ("zscore-clip", {"feedback": "raw", "action": "max", "estimator": "drytorch"}, 1e-9),
        ("ema-clip", {}, 1e-12),
        # exp() of floats and of arrays may differ in the last bit, as the processor has it.
        ("adaptive-clip", {"every": 7}, 1e-12),
        ("auto-clip", {"median": "window", "window": 60, "feedback": "raw"}, ERROR),
    ],
)
def test_one_client_with_one_step_a_round_equals_local(name: str, config: Any, error: Any) -> None:
    rng, fed = np.random.default_rng(5), Federation(name, 1, **config)
    local: Any = Optimizer(0.1, modules=[(name, fed.config)]).modules[0]
    norms = np.array(draw(rng, 100))
    norms[60:70] *= 8
    for norm in norms:
        (limit,) = fed.round({"client_0": [norm]})["client_0"]
        local.run(NumpyVector({"w": np.array([norm])}))
        assert limit == pytest.approx(local.last.limit[0], rel=error, abs=0.0)


@pytest.mark.parametrize("scope", ["tensor", ["a*"]], ids=str)
@every_clipper
def test_scopes(name: str, scope: Any) -> None:
    """Groups become known with the first update; nothing that was counted before is lost."""
    fed = Federation(name, scope=scope)
    fed.names = ("b", "a1", "a0")
    step = {"a1": 1.0, "a0": 2.0, "b": 4.0}
    assert fed.counterpart.collect_aux_var().labels == []
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
@pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning")
def test_what_is_sent_has_the_same_form_every_round(name: str) -> None:
    fed = Federation(name)
    client, forms = fed.clients["client_0"], set()
    for norms in ([], [1.0], [float("nan")], [0.0], [1e30], [1.0] * 40, []):
        client.process_aux_var(fed.server.collect_aux_var())
        client.start_round()
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
@pytest.mark.parametrize(("name", "secagg"), [*zip(CONFIGS, cycle([masked, joye_libert]))])
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


@pytest.mark.parametrize(
    ("name", "scope", "at"), [*zip(CONFIGS, cycle(["global", "tensor"]), cycle([0, 1, 4]))]
)
def test_killed_and_restarted_goes_on_as_if_nothing_had_been(
    name: str, scope: str, at: int
) -> None:
    """In both federations, all clients clip to one limit, also those that join late."""
    rng = np.random.default_rng(9)
    whole, cut = (Federation(name, scope=scope, max_norm=None) for _ in range(2))
    for t in range(8):
        if t == 5:
            whole.join("late")
            cut.join("late")
        # A spike that is above every limit, so that all clients show theirs.
        steps = {c: [*draw(rng, 7), 1e4] for c in whole.clients if c != "client_2" or t % 3 == 0}
        limits = whole.round(steps)
        assert limits == cut.round(steps)
        assert len({values[-1] for values in limits.values()}) == 1
        if t == at:
            fresh = Federation(name, scope=scope, max_norm=None)
            fresh.server.set_state(json.loads(json.dumps(cut.server.get_state())))
            for client, optimizer in fresh.clients.items():
                optimizer.set_state(json.loads(json.dumps(cut.clients[client].get_state())))
            cut = fresh
    assert whole.server.get_state() == cut.server.get_state()


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
        return int(aux.counts[0, 0])

    # The server's state stands still: nothing arrives.
    assert [go([1.0] * 3), go([1.0] * 2), go([])] == [3, 2, 0]
    # What was not sent is, as long as the state is the same that it was counted by.
    go([1.0] * 4, collect=False)
    assert go([1.0]) == 5
    go([1.0] * 4, collect=False)
    fed.round({"client_1": [1.0]})
    assert go([1.0]) == 1


def test_without_a_counterpart_it_warns_once_and_sends_nothing() -> None:
    name, rng = "zscore-clip", np.random.default_rng(14)
    alone = Optimizer(0.1, modules=[(name, {**CONFIGS[name], "shared": True})])
    local = Optimizer(0.1, modules=[(name, CONFIGS[name])])

    def train() -> None:
        for _ in range(3):
            alone.process_aux_var({})
            alone.start_round()
            for norm in draw(rng, 20):
                gradient = NumpyVector({"w": np.array([norm])})
                assert alone.modules[0].run(gradient) == local.modules[0].run(gradient)
            assert alone.collect_aux_var() == {}

    with pytest.warns(FedclipWarning, match=f"add '{name}-server' to server_opt") as caught:
        train()
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["auto-clip", "adaptive-clip"])
@each_framework(oracle=False)
def test_counting_is_the_same_text_in_every_arithmetic(name: str, framework: str) -> None:
    xp = backend_named(framework)
    rule = SharedRule(rule_of(Federation(name)), 20)
    rng = np.random.default_rng(16)
    host, native = rule.init(2, NUMPY), rule.init(2, xp)
    for _ in range(25):
        norms = rng.lognormal(0.0, 0.5, 2)
        limits, host = rule(norms, host, NUMPY)
        other, native = rule(xp.asarray(norms), native, xp)
        np.testing.assert_allclose(np.asarray(other), limits, rtol=1e-5)
    for other, counted in zip(native, host, strict=True):
        np.testing.assert_allclose(np.asarray(other), counted, rtol=1e-5, atol=1e-6)
    assert host.new.tolist() == [20.0, 20.0]
