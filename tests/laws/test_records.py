# SPDX-License-Identifier: Apache-2.0
"""What steps and rounds report."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from helpers import (
    MODULES,
    SPECIMENS,
    Specimen,
    apply,
    gradient,
    needs,
    run,
    specimens,
    specimens_by_framework,
)

from fedclip import (
    AGC,
    AdaptiveClip,
    EmaClip,
    FedclipWarning,
    GrowthClip,
    NoOp,
    NormClip,
    ValueClip,
    ZScoreClip,
)
from fedclip.clippers.base import Clipper
from fedclip.core.records import read_rounds
from fedclip.testing import gradient_stream, to_vector


def feed(clipper: NormClip | NoOp, *norms: float) -> None:
    for norm in norms:
        clipper.run(to_vector({"w": np.array([norm])}))


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
    clip.run(to_vector({"a": np.array([3.0]), "b": np.array([4.0])}))
    # Nothing limits the rest, and infinity is no number for a logger.
    whole = {"norm": 5.0, "limit": 1.0, "clipped": 1, "nonfinite": 0}
    groups = {"a/norm": 3.0, "a/clipped": 1, "a/limit": 1.0, "*/norm": 4.0, "*/clipped": 0}
    assert clip.last.as_dict() == {**whole, **groups}
    with pytest.warns(FedclipWarning):
        clip.run(to_vector({"a": np.array([np.nan]), "b": np.array([4.0])}))
    assert clip.last.as_dict() == {"clipped": 0, "nonfinite": 1}
    assert np.isnan(float(clip.last))


def test_quantiles_within_one_per_cent() -> None:
    norms = np.random.default_rng(0).lognormal(0, 2, 2000)
    look = NoOp()
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


@specimens(MODULES)
def test_records_survive_a_state(specimen: Specimen) -> None:
    clipper, again = specimen.make(), specimen.make()
    clipper.on_round_start()
    run(clipper, gradient_stream(9))
    again.set_state(clipper.get_state())
    assert again.rounds == clipper.rounds
    assert read_rounds(clipper.get_state()) == clipper.rounds


@specimens()
def test_every_step_is_counted_once(specimen: Specimen) -> None:
    clipper = specimen.make()
    for count, step in enumerate(gradient_stream(70), 1):
        apply(clipper, to_vector(step))
        if count % 23 == 0:
            assert sum(r.steps for r in clipper.rounds if r.group == "all") == count


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
        (NormClip(1.0), (0.5, 2.0, 2.0), {"fixed": 3}),
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
def test_a_record_says_what_set_the_limit(
    clipper: Clipper, norms: tuple[float, ...], expected: dict[str, int]
) -> None:
    for norm in norms:
        clipper.run(to_vector({"w": np.array([norm])}))
    record = clipper.rounds[0]
    found = {name: getattr(record, name) for name in ("fixed", "learnt", "warmup")}
    assert found == {**dict.fromkeys(found, 0), **expected}
    most = max(expected, key=expected.__getitem__, default="")
    assert record.limited_by == most


@specimens()
def test_a_step_without_a_gradient_leaves_no_stale_record(specimen: Specimen) -> None:
    if isinstance(specimen.config.get("scope"), dict):
        return
    clipper = specimen.make()
    for step in (gradient(), {}):
        _ = clipper.clip(step, gradient(1)) if isinstance(clipper, AGC) else clipper.clip(step)
    assert clipper.last.as_dict() == {"norm": 0.0, "clipped": 0, "nonfinite": 0}


@specimens_by_framework()
def test_records_are_the_same_on_every_framework(specimen: Specimen, framework: str) -> None:
    needs(framework)
    oracle, other = specimen.make(), specimen.make()
    run(oracle, gradient_stream(8))
    run(other, gradient_stream(8), framework)
    for got, wanted in zip(other.rounds, oracle.rounds, strict=True):
        assert (got.group, got.steps, got.clipped) == (wanted.group, wanted.steps, wanted.clipped)
        for a, b in ((got.norm_max, wanted.norm_max), (got.limit, wanted.limit)):
            assert a == b or a == pytest.approx(b, rel=1e-9)
