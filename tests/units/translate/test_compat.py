# SPDX-License-Identifier: Apache-2.0
"""Translations of other packages' clippers: what is accepted, and what is said."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedclip import UpdateClipServer, translate
from fedclip.cli.catalogue import build
from fedclip.core.toml import toml_line
from fedclip.privacy.accounting import RELATIONS, Release, epsilon


def required(parameters: dict[str, Any]) -> dict[str, Any]:
    values: Any = {"clip_percentile": 10, "pct": 90, "sample_size": 4, "clip_value_min": -1}
    values |= {"min_clipbound": 0.1, "max_clipbound": 3.0, "num_sampled_clients": 3, "min_val": -1}
    needed = [key for key, default in parameters.items() if default is translate.values.REQUIRED]
    given = {key: values.get(key, 0.5) for key in needed}
    # Of the two that Fabric knows it takes one.
    return given | ({"max_norm": 0.5} if "clip_val" in parameters else {})


EVERY = [(peer, cls) for peer, classes in translate.known().items() for cls in classes]


def test_every_translation_of_defaults_makes_a_clipper() -> None:
    for peer, cls in EVERY:
        given = required(translate.PEERS[peer][cls].parameters)
        kind, name, config = translate.translate(peer, cls, given)
        made = build(kind, name, config)
        assert kind == "policy" or made.name == name
        # What is printed says the same.
        field = tomllib.loads(toml_line(kind, name, config))
        if kind == "aggregator":
            assert field == {"aggregator": {"name": name, **config}}
        elif kind == "policy":
            assert field == {"update": config}
        else:
            ((spec,),) = field.values()
            assert spec == (name if not config else [name, spec[1]])


TYPES: list[Any] = [None, True, 3, 0.5, -1, "x", "1", [1], {}, math.nan, b"x", 1j, object()]


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "cls"), EVERY)
def test_no_value_of_a_wrong_type_is_taken_in_silence(peer: str, cls: str) -> None:
    parameters = translate.PEERS[peer][cls].parameters
    for key, default in parameters.items():
        for value in TYPES:
            try:
                build(*translate.translate(peer, cls, {**required(parameters), key: value}))
            except (TypeError, ValueError):
                continue
            assert not isinstance(value, (bytes, complex, dict)), (key, value)
            assert type(value) is not object, (key, value)
            assert isinstance(value, bool) == isinstance(default, bool) or (
                key == "parameterwise" or value is None
            ), (key, value)


def test_the_page_lists_every_class_and_its_clipper() -> None:
    page = Path(__file__).parents[3] / "docs" / "coming-from.md"
    written = {
        (peer, cls): name
        for peers, pairs in re.findall(r"^- (\*\*.*?\*\*): (.*)$", page.read_text(), re.M)
        for peer in re.findall(r"\*\*([\w-]+)\*\*", peers)
        for classes, name in re.findall(r"((?:`[\w.]+`(?:, )?)+) → \[`([\w-]+)`\]", pairs)
        for cls in re.findall(r"`([\w.]+)`", classes)
    }
    for peer, cls in EVERY:
        given = required(translate.PEERS[peer][cls].parameters)
        # These have one entry for several settings.
        if peer in ("keras", "lightning", "flower") or "." in cls:
            continue
        assert written[peer, cls] == translate.translate(peer, cls, given)[1]


MEAN: dict[str, Any] = {"criterion": "ops.EMACriterion(0.9, clipping_function=ops.mean_clipping)"}
MEAN |= {"r_thresh": 1.2, "warmup_clip_strategy": " ops.GradNormClipper( 5 )"}
TO_MEAN = {"ratio": 1.2, "decay": 0.9, "action": "mean", "warmup_norm": 5}
BY_VALUE = {"gradient_clip_val": 2, "gradient_clip_algorithm": "value"}
ADAPTIVE = {"noise_multiplier": 0, "num_sampled_clients": 9, "target_clipped_quantile": 0.9}
TO_ADAPTIVE = {"start_norm": 0.1, "quantile": pytest.approx(0.1)}
TWICE = {"criterion": "EMACriterion(0.9)", "alpha": 0.9}
LOCAL = {"clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}


@pytest.mark.parametrize(
    ("peer", "cls", "config", "expected"),
    [
        ("torchzero", "ClipNorm", {"max_norm": 1, "ord": 0}, {}),
        ("drytorch", "HistClipper", MEAN, TO_MEAN),
        ("keras", "Optimizer", {"clipnorm": 0.7}, {"max_norm": 0.7, "scope": "tensor"}),
        ("keras", "Optimizer", {"clipvalue": 0.7}, {"max_value": 0.7}),
        ("keras", "Optimizer", {"clipnorm": -1.0}, {}),
        ("lightning", "Trainer", {"gradient_clip_val": 2}, {"max_norm": 2, "eps": 1e-6}),
        ("lightning", "Trainer", BY_VALUE, {"max_value": 2}),
        ("lightning", "Fabric.clip_gradients", {"clip_val": 0.1}, {"max_value": 0.1}),
        ("lightning", "Fabric.clip_gradients", {"max_norm": 3, "norm_type": 1.0}, {"ord": 1}),
        ("flower", "fixedclipping_mod", {"clipping_norm": 4.0}, {"max_norm": 4.0}),
        ("flower", "DifferentialPrivacyClientSideAdaptiveClipping", ADAPTIVE, TO_ADAPTIVE),
    ],
)
def test_what_peers_take_besides(peer: str, cls: str, config: Any, expected: Any) -> None:
    kind, name, translated = translate.translate(peer, cls, config)
    assert expected.items() <= translated.items()
    assert build(kind, name, translated).name == name


@pytest.mark.parametrize(
    ("peer", "cls", "config", "words"),
    [
        ("torchzeo", "ClipNorm", {}, "no translation from 'torchzeo'; did you mean 'torchzero'?"),
        ("optax", "clip", {"max_delt": 1}, "no parameter 'max_delt'; did you mean 'max_delta'?"),
        ("optax", "clip", {}, "clip of optax needs 'max_delta'"),
        ("torch", "clip_grad_norm_", {"max_norm": True}, "max_norm of clip_grad_norm_ must be a"),
        ("zclip", "ZClip", {"mode": "z-score"}, "did you mean 'zscore'?"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "ord": "stdd"}, "did you mean 'std'?"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "dim": [0.5]}, "dim must be an int, a list of"),
        ("torchlean", "clipByPercentileSpec", {"pct": 0.5}, "pct must be an int >= 0"),
        ("smartclip", "ZScoreClip", {"scope": "per_parm"}, "did you mean 'per_param'?"),
        ("smartclip", "AutoClip", {"percentile": 0}, "percentile must be a number > 0 and <= 100"),
        ("drytorch", "HistClipper", {"criterion": "zsta"}, "did you mean 'zstat'?"),
        ("drytorch", "HistClipper", {"warmup_clip_strategy": "GradValueClipper(1)"}, "coming-from"),
        ("drytorch", "HistClipper", TWICE, "given twice"),
        ("drytorch", "ZStatCriterion", {"clipping_function": "lambda z, c: 1.0"}, "OwnLimit of"),
        ("keras", "Optimizer", {"clipnorm": 1, "clipvalue": 1}, "Keras takes one of"),
        ("lightning", "Fabric.clip_gradients", {}, "takes one of clip_val, max_norm, got none"),
        ("flower", "LocalDpMod", {**LOCAL, "epsilon": 0}, "epsilon must be a finite number > 0"),
        ("flower", "LocalDpMod", {**LOCAL, "delta": 0.0}, "delta must be"),
        ("nvflare", "PercentilePrivacy", {}, "site policy"),
        ("drytorch", "StatsCollector", {}, str(translate.PEERS["drytorch"]["StatsCollector"])),
        ("smartclip", "clip_context", {}, str(translate.PEERS["smartclip"]["clip_context"])),
    ],
)
def test_what_a_peer_does_not_take_is_said(peer: str, cls: str, config: Any, words: str) -> None:
    for function in (translate.translate, translate.notes):
        with pytest.raises(ValueError, match=re.escape(words)):
            function(peer, cls, config)


def test_noise_is_as_large_as_in_flower() -> None:
    """Of theirs: z C on the sum; with votes (z^-2 - (2 stddev)^-2)^-1/2 in the place of z."""
    given: dict[str, Any] = {"noise_multiplier": 1.1, "num_sampled_clients": 20}
    fixed = "DifferentialPrivacyServerSideFixedClipping"
    _, _, found = translate.translate("flower", fixed, {**given, "clipping_norm": 4.0})
    wanted = {"start_norm": 4.0, "learning_rate": 0.0, "expected_clients": 20}
    assert wanted.items() <= found.items()
    assert UpdateClipServer(**found).budget.update_noise == 1.1
    said = " ".join(translate.notes("flower", fixed, {**given, "clipping_norm": 4.0}))
    assert "the noise on the sum of the updates is Flower's" in said
    adaptive = "DifferentialPrivacyServerSideAdaptiveClipping"
    _, _, found = translate.translate("flower", adaptive, {**given, "clipped_count_stddev": 0.9})
    expected = (1.1**-2 - 1.8**-2) ** -0.5
    assert UpdateClipServer(**found).budget.update_noise == pytest.approx(expected)
    assert "larger than Flower" not in said + " ".join(translate.notes("flower", adaptive, given))
    # Without a deviation of theirs, which would be 1.
    _, _, found = translate.translate("flower", adaptive, given)
    assert UpdateClipServer(**found).budget.update_noise == pytest.approx(1.1 * (4 / 3) ** 0.5)


@given(
    st.floats(0.1, 10.0), st.floats(1e-4, 10.0), st.floats(0.1, 20.0), st.sampled_from([1e-3, 1e-5])
)
def test_a_site_policy_has_the_noise_of_local_dp_and_says_what_it_costs(
    clip: float, sensitivity: float, budget: float, delta: float
) -> None:
    local = {"clipping_norm": clip, "sensitivity": sensitivity, "epsilon": budget, "delta": delta}
    kind, name, config = translate.translate("flower", "LocalDpMod", local)
    assert (kind, name, config["max_norm"]) == ("policy", "site-policy", clip)
    deviation = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / budget
    assert config["noise_multiplier"] * clip == pytest.approx(deviation)
    said = " ".join(translate.notes("flower", "LocalDpMod", local))
    for relation in RELATIONS:
        cost = epsilon([Release(config["noise_multiplier"])], delta, relation)
        assert f"epsilon {cost:.3g} at" in said or f"{cost:.3g} for replacing" in said
    needed = float(said.rpartition("noise_multiplier = ")[2])
    assert epsilon([Release(needed)], delta, "replace-one") == pytest.approx(budget, rel=1e-2)
