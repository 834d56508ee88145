# SPDX-License-Identifier: Apache-2.0
"""Clippers on numbers: norms learnt and asked about, statistics as values, limits of one's own."""

import math
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import MODULES, Specimen, specimens
from hypothesis import given, settings
from hypothesis import strategies as st

import fedclip
from fedclip import AGC, EmaClip, NormClip, OwnLimit, ValueClip, ZScoreClip, to_toml


def to_the_mean(norm: float, past: Mapping[str, float]) -> float:
    return past["mean"] if past["ready"] and norm > past["threshold"] else math.inf


NORMS = [1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 30.0, 1.0, 0.5, 40.0]


@specimens(MODULES)
def test_a_number_is_learnt_as_the_gradient_that_it_is_the_norm_of(specimen: Specimen) -> None:
    numbers, arrays = specimen.make(), specimen.make()
    try:
        specimen.make().observe(1.0)
    except (TypeError, ValueError):
        pytest.skip("it does not learn from norms")
    for norm in NORMS:
        record = numbers.observe(norm)
        arrays.clip({"w": np.array([0.0, -norm])})
        assert record.norm_before == pytest.approx(arrays.last.norm_before)
        assert record.limit == pytest.approx(arrays.last.limit)
    found, expected = (c.get_state()["groups"] for c in (numbers, arrays))
    assert found.keys() == expected.keys()
    for group, fields in expected.items():
        for field, value in fields.items():
            np.testing.assert_allclose(found[group][field], value, rtol=1e-9)


def test_to_ask_is_not_to_learn() -> None:
    clip = ZScoreClip(warmup=3, warmup_factor=None)
    for norm in NORMS[:6]:
        assert not clip.should_clip(norm)
        clip.observe(norm)
    before = clip.get_state()
    assert clip.should_clip(30.0)
    limit = clip.get_limit(30.0)
    assert clip.get_state() == before
    assert clip.last.norm_before == (1.0,)
    # What would have been is what then is.
    assert clip.observe(30.0).limit == (limit,)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: NormClip().run({"w": np.ones(2)}), "got dict: give a dict of arrays to clip"),
        (lambda: AGC().run(np.ones(2), np.ones(2)), "got ndarray: give a dict of arrays to clip"),
        (lambda: ValueClip().clip(np.ones(2)), r"got ndarray: write clip\({\"w\": array}\)"),
        (lambda: AGC().clip({"w": np.ones(2)}, [np.ones(2)]), "got list: write clip"),
        (lambda: NormClip().clip({"w": [1.0]}), "got builtins.list: convert it"),
        (lambda: to_toml("zscore-clip"), "got 'zscore-clip': make one first"),
        (lambda: to_toml(ZScoreClip), "make one first, as in to_toml"),
        (lambda: ZScoreClip(scope="head*"), r"a pattern goes in a list, scope = \['head\*'\]"),
        (lambda: NormClip(scope="per_layer"), "did you mean 'layer'"),
        (lambda: NormClip(math.inf), r"got inf: for no limit, give None .*; take NoOp"),
        (lambda: NormClip(np.float32(math.inf)), "for no limit, give None"),
        (lambda: NormClip().observe(-1.0), r"must be a number >= 0, got -1\.0"),
        (lambda: NormClip(scope="tensor").observe(1.0), "dict of norms by tensor"),
        (lambda: ValueClip().observe(1.0), "goes by the elements of tensors"),
        (lambda: NormClip(ord="std").observe(1.0), "goes by the elements of tensors"),
        (lambda: NormClip(dims=0).observe(1.0), "goes by the elements of tensors"),
        *(
            (partial(ZScoreClip().observe, {"w": odd}), r"a norm must be a number >= 0, .* for 'w'")
            for odd in ("3", "x", [1.0], None, 1j, 10**400, 10**5000, np.ones(2))
        ),
        (lambda: OwnLimit(1.0), "must be a function"),
        (lambda: OwnLimit(lambda norm: norm), "a norm and a dict"),
        (lambda: OwnLimit(to_the_mean, ValueClip()), "keeps no statistics of norms"),
        *(
            (partial(OwnLimit(lambda *_, odd=odd: odd).clip, {"w": np.ones(2)}), "must be > 0, or")
            for odd in (0.0, -1, math.nan, None, "1", [1.0], 1j, 10**400, np.ones(2))
        ),
    ],
)
def test_what_is_given_in_the_wrong_form_gets_a_hint(call: Any, hint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=hint):
        call()


def test_statistics_are_values_that_can_be_read_and_set() -> None:
    clip = ZScoreClip(z_max=2.0, warmup=3, warmup_factor=None, min_std=0.0)
    nothing = {"mean": 0.0, "variance": 0.0, "count": 0, "threshold": math.inf, "ready": False}
    assert clip.statistics() == nothing
    clip.set_statistics(mean=2.0, variance=0.25)
    something = {"mean": 2.0, "variance": 0.25, "count": 3, "threshold": 3.0, "ready": True}
    assert clip.statistics() == something
    assert (clip.should_clip(2.9), clip.should_clip(3.1)) == (False, True)
    clip.observe(2.5)
    variance = clip.statistics()["variance"]
    clip.set_statistics(mean=7.0)
    found = clip.statistics()
    assert (found["mean"], found["variance"], found["count"]) == (7.0, variance, 4)
    with pytest.raises(TypeError, match="no statistic 'man'; did you mean 'mean'"):
        clip.set_statistics(man=2.0)
    with pytest.raises(fedclip.StateError, match="must be a finite number >= 0"):
        clip.set_statistics(mean=-1.0)
    by_tensor = EmaClip(scope="tensor")
    by_tensor.set_statistics("w", mean=1.0)
    assert not by_tensor.statistics("b")
    assert by_tensor.observe({"w": 5.0}).limit == (2.0,)


@pytest.mark.parametrize("warmup_factor", [2.25, None])
@specimens(s for s in MODULES if "warmup" in s.make().parameters)
@given(warmup=st.integers(0, 30), feedback=st.sampled_from(["clipped", "raw"]))
@settings(max_examples=10, deadline=None)
def test_a_warm_up_of_n_norms_is_over_after_n(
    specimen: Specimen, warmup_factor: float | None, warmup: int, feedback: str
) -> None:
    """There is no threshold before, and the next norm is judged by one."""
    config = {"warmup": warmup, "warmup_factor": warmup_factor, "max_norm": None}
    if "feedback" in specimen.make().parameters and not specimen.config.get("include_current"):
        config["feedback"] = feedback
    clip: Any = specimen.make(scope="global", **config)
    wanted = max(warmup, clip._transform.rule.least)
    for count in range(wanted + 3):
        found = clip.statistics()
        assert (found["ready"], found["threshold"] < math.inf) == (count >= wanted,) * 2
        clip.observe(1.0 + 0.01 * (count % 3))
    assert sum(record.learnt for record in clip.rounds) >= 3


def test_a_function_is_told_of_each_step() -> None:
    told: list[fedclip.StepRecord] = []
    clip = NormClip(1.0)
    clip.on_record = told.append
    clip.observe(2.0)
    clip.get_limit(3.0)
    with pytest.warns(fedclip.FedclipWarning):
        clip.clip({"w": np.array([np.nan])})
    assert [record.as_dict().get("norm") for record in told] == [2.0, None]
    assert told[1].nonfinite == ("w",)
    with pytest.warns(fedclip.FedclipWarning):
        record = ZScoreClip().observe(math.nan)
    assert record.as_dict() == {"clipped": 0, "nonfinite": 1}


def test_a_function_is_never_written_down() -> None:
    clip = OwnLimit(to_the_mean, ZScoreClip())
    for write in (clip.get_config, lambda: to_toml(clip)):
        with pytest.raises(TypeError, match="own-limit holds a function"):
            write()
    assert pickle.loads(pickle.dumps(clip)).observe(1.0).limit == (math.inf,)
