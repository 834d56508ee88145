# SPDX-License-Identifier: Apache-2.0
"""States are saved, loaded, resumed from, and refused if they are none; what steps report."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from declearn.optimizer import Optimizer
from helpers import MODULES, SPECIMENS, Specimen, gradient, run, specimens, specimens_by_framework

from fedclip import AdaptiveClip, EmaClip, GrowthClip, NoOp, NormClip, ValueClip, ZScoreClip
from fedclip.core.records import read_rounds
from fedclip.errors import FedclipWarning
from fedclip.testing import apply, gradient_stream, to_vector


@specimens(MODULES)
def test_rounds_continue_each_other(specimen: Specimen) -> None:
    stream, clipper, other = gradient_stream(12), specimen.make(), specimen.make()
    got: list[Any] = []
    for start in range(0, 12, 4):
        clipper.on_round_start()
        state = clipper.get_state()
        kept = repr(state)
        got += run(clipper, stream[start : start + 4])
        assert repr(state) == kept, "a state is a copy"
    assert other.get_state() == specimen.make().get_state(), "and a clipper's own"
    np.testing.assert_equal(got, run(other, stream))


@specimens(MODULES)
def test_state_of_another_model_is_refused_at_the_first_gradient(specimen: Specimen) -> None:
    clipper, other = specimen.make(), specimen.make()
    run(other, gradient_stream(5))
    state = other.get_state()
    clipper.set_state(state)
    learnt = state["arrays"] or any(state["groups"].values())
    if specimen.config.get("scope", "global") == "global" or not learnt:
        return
    with pytest.raises(ValueError, match="stranger"):
        clipper.clip({"stranger": np.ones(3)})


def test_missing_tensor_finds_its_statistics_again() -> None:
    clipper = ZScoreClip(warmup=2, scope="tensor")
    run(clipper, gradient_stream(8))
    before = clipper.get_state()["groups"]["enc.bias"]
    clipper.clip({k: v for k, v in gradient(9).items() if k != "enc.bias"})
    assert clipper.get_state()["groups"]["enc.bias"] == before
    clipper.clip(gradient(10))
    assert clipper.get_state()["groups"]["enc.bias"]["count"] == before["count"] + 1


def test_optimizer_restores_all_modules_if_one_state_is_wrong() -> None:
    optimizer = Optimizer(lrate=0.1, modules=[("zscore-clip", {"warmup": 2}), "norm-clip"])
    run(optimizer.modules[0], gradient_stream(5))
    state = optimizer.get_state()
    wrong = {"config": optimizer.get_config(), "states": {"modules": []}}
    with pytest.raises(KeyError):
        optimizer.set_state(wrong)
    assert optimizer.get_state() == state


def feed(clipper: Any, *norms: float) -> None:
    for norm in norms:
        clipper.clip({"w": np.array([norm])})


def test_numbers_for_loggers_have_names_that_stay() -> None:
    clip = NormClip(1.0)
    clip.on_round_start()
    feed(clip, 0.5, 2.0)
    assert clip.last.as_dict() == {"norm": 2.0, "clipped": 1, "nonfinite": 0, "limit": 1.0}
    assert float(clip.last) == 2.0
    numbers = clip.rounds[0].as_dict("r/")
    names = "round steps fixed learnt warmup clipped nonfinite clipped_share norm_min norm_max"
    names += " norm_median limit limit_min limit_max"
    values = [1, 2, 2, 0, 0, 1, 0, 0.5, 0.5, 2.0, 0.5, 1.0, 1.0, 1.0]
    wanted = {f"r/{name}": value for name, value in zip(names.split(), values, strict=True)}
    assert numbers == pytest.approx(wanted, rel=0.01)


def test_numbers_of_groups_and_of_what_is_not_finite() -> None:
    clip = NormClip(scope={"a": 1.0}, max_norm=None, min_norm=0.1)
    clip.clip({"a": np.array([3.0]), "b": np.array([4.0])})
    # Nothing limits the rest, and infinity is no number for a logger.
    whole = {"norm": 5.0, "limit": 1.0, "clipped": 1, "nonfinite": 0}
    groups = {"a/norm": 3.0, "a/clipped": 1, "a/limit": 1.0, "*/norm": 4.0, "*/clipped": 0}
    assert clip.last.as_dict() == {**whole, **groups}
    with pytest.warns(FedclipWarning):
        clip.clip({"a": np.array([np.nan]), "b": np.array([4.0])})
    assert clip.last.as_dict() == {"clipped": 0, "nonfinite": 1}
    assert np.isnan(float(clip.last))


def test_quantiles_within_one_per_cent() -> None:
    norms, look = np.random.default_rng(0).lognormal(0, 2, 2000), NoOp()
    feed(look, *norms)
    (record,) = look.rounds
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = np.sort(norms)[int(q * (len(norms) - 1))]
        assert record.norm_quantile(q) == pytest.approx(exact, rel=0.0101)


def test_server_rounds_are_told_by_its_steps() -> None:
    # A server is told of no round's start; declearn asks it for AuxVar before each step.
    clip = NormClip(1.0)
    for _ in range(3):
        clip.collect_aux_var()
        feed(clip, 2.0)
    assert [(r.round, r.steps) for r in clip.rounds] == [(1, 1), (2, 1), (3, 1)]


@specimens()
def test_every_step_is_counted_once_and_records_survive_a_state(specimen: Specimen) -> None:
    clipper, again = specimen.make(), specimen.make()
    for done in (23, 46, 69):
        clipper.on_round_start()
        run(clipper, gradient_stream(23))
        assert sum(r.steps for r in clipper.rounds if r.group == "all") == done
    if specimen.kind == "module":
        again.set_state(clipper.get_state())
        assert again.rounds == read_rounds(clipper.get_state()) == clipper.rounds


def test_a_record_does_not_keep_a_gradient_alive() -> None:
    clippers = [specimen.make() for specimen in SPECIMENS]
    alive = {}
    for specimen, clipper in zip(SPECIMENS, clippers, strict=True):
        vector = to_vector(gradient_stream(1)[0])
        output = apply(clipper, vector, vector)
        arrays = [*vector.coefs.values(), *output.coefs.values()]
        alive[str(specimen)] = [weakref.ref(array) for array in arrays]
        del vector, output, arrays
    gc.collect()
    assert not [name for name, refs in alive.items() if any(ref() is not None for ref in refs)]


@pytest.mark.parametrize(
    ("clipper", "norms", "expected"),
    [
        (NoOp(), (0.5, 2.0), {}),
        (ZScoreClip(warmup=5), (1.0,) * 12, {"warmup": 4, "learnt": 7}),
        (ZScoreClip(warmup=5, max_norm=0.5), (1.0,) * 8, {"fixed": 8}),
        (EmaClip(warmup=2, warmup_factor=None), (1.0,) * 4, {"learnt": 2}),
        (AdaptiveClip(start_norm=1.0), (1.0,) * 4, {"learnt": 4}),
        (GrowthClip(1.5), (1.0, 1.2, 1.3), {"learnt": 2}),
        (ValueClip(1.0), (0.5, 2.0), {"fixed": 2}),
        (NormClip(1.0, scope="tensor"), (0.5, 2.0), {"fixed": 2}),
    ],
)
def test_a_record_says_what_set_the_limit(clipper: Any, norms: Any, expected: Any) -> None:
    feed(clipper, *norms)
    record = clipper.rounds[0]
    found = {name: getattr(record, name) for name in ("fixed", "learnt", "warmup")}
    assert found == {**dict.fromkeys(found, 0), **expected}
    assert record.limited_by == max(expected, key=expected.__getitem__, default="")


@specimens()
def test_a_step_without_a_gradient_leaves_no_stale_record(specimen: Specimen) -> None:
    if isinstance(specimen.config.get("scope"), dict):
        return
    clipper = specimen.make()
    run(clipper, [gradient(), {}])
    assert clipper.last.as_dict() == {"norm": 0.0, "clipped": 0, "nonfinite": 0}


@specimens_by_framework()
def test_records_are_the_same_on_every_framework(specimen: Specimen, framework: str) -> None:
    oracle, other = specimen.make(), specimen.make()
    run(oracle, gradient_stream(8))
    run(other, gradient_stream(8), framework)
    for got, wanted in zip(other.rounds, oracle.rounds, strict=True):
        assert (got.group, got.steps, got.clipped) == (wanted.group, wanted.steps, wanted.clipped)
        for a, b in ((got.norm_max, wanted.norm_max), (got.limit, wanted.limit)):
            assert a == b or a == pytest.approx(b, rel=1e-9)
