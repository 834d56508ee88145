# SPDX-License-Identifier: Apache-2.0
"""Translations of other packages' clippers: what is accepted, and what is said."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from declearn.optimizer.modules import OptiModule

from fedclip import UpdateClipServer, compat
from fedclip.toml import toml_line
from fedclip.tools.catalogue import build

INDEX = json.loads((Path(__file__).parent / "golden" / "index.json").read_text())["files"]


@pytest.mark.parametrize(
    ("peer", "cls", "config", "name", "expected"),
    [
        ("drytorch", "NoOp", {}, "no-op", {}),
        ("torch", "clip_grad_value_", {"clip_value": 2}, "value-clip", {"max_value": 2}),
        (
            "torch",
            "clip_grad_norm_",
            {"max_norm": 2, "error_if_nonfinite": True},
            "norm-clip",
            {"max_norm": 2, "ord": 2.0, "eps": 1e-6, "on_nonfinite": "raise"},
        ),
        ("declearn", "L2GlobalClipping", {}, "norm-clip", {"max_norm": 1.0}),
        ("timm", "adaptive_clip_grad", {}, "agc", {"ratio": 0.01, "min_norm": 1e-3, "axis": 0}),
    ],
)
def test_translation(
    peer: str, cls: str, config: dict[str, Any], name: str, expected: dict[str, Any]
) -> None:
    kind = "regularizer" if name == "agc" else "module"
    assert compat.translate(peer, cls, config) == (kind, name, expected)


@pytest.mark.parametrize(
    ("given", "ord"),
    [
        (2, 2),
        (2.0, 2),
        ("2", 2),
        ("2.0", 2),
        ("l2", 2),
        ("l1", 1),
        (0.5, 0.5),
        ("0.5", 0.5),
        ("inf", "inf"),
        ("linf", "inf"),
        (float("inf"), "inf"),
        ("mad", "mad"),
        ("std", "std"),
        ("var", "var"),
    ],
)
def test_every_way_to_write_an_order(given: Any, ord: Any) -> None:
    _, _, config = compat.translate("torchzero", "ClipNorm", {"max_norm": 1, "ord": given})
    assert config["ord"] == ord


@pytest.mark.parametrize(
    ("dim", "inverse", "expected"),
    [
        ("global", False, {"scope": "global"}),
        (None, False, {"scope": "tensor", "min_size": 1}),
        (1, False, {"scope": "tensor", "dims": [1], "inverse_dims": False, "min_size": 1}),
        ([0, 1], True, {"scope": "tensor", "dims": [0, 1], "inverse_dims": True, "min_size": 1}),
        ((0,), False, {"scope": "tensor", "dims": [0], "inverse_dims": False, "min_size": 1}),
        ([], True, {"scope": "tensor", "min_size": 1}),
    ],
)
def test_every_way_to_write_dims(dim: Any, inverse: bool, expected: dict[str, Any]) -> None:
    given = {"max_norm": 1, "dim": dim, "inverse_dims": inverse}
    _, name, config = compat.translate("torchzero", "ClipNorm", given)
    assert name == "norm-clip"
    assert config == {"max_norm": 1, "ord": 2, **expected}
    OptiModule.from_specs(name, config)


@pytest.mark.parametrize("given", [{"inverse_dims": True}, {"dim": []}, {"ord": 0}])
def test_what_the_peer_never_clips_is_a_no_op_and_said(given: dict[str, Any]) -> None:
    config = {"max_norm": 1, **given}
    assert compat.translate("torchzero", "ClipNorm", config) == ("module", "no-op", {})
    assert any(
        "nothing is clipped" in note for note in compat.notes("torchzero", "ClipNorm", config)
    )


@pytest.mark.parametrize("record", INDEX, ids=lambda r: r["file"])
def test_left_out_parameters_have_the_peers_defaults(record: dict[str, Any]) -> None:
    # What is recorded holds every parameter in force: leaving out one that is at its default
    # changes nothing.
    entry = compat.PEERS[record["peer"]][record["cls"]]
    short = {
        key: value
        for key, value in record["config"].items()
        if not (key in entry.parameters and entry.parameters[key] == value)
    }
    full = compat.translate(record["peer"], record["cls"], record["config"])
    assert compat.translate(record["peer"], record["cls"], short) == full


def required(parameters: dict[str, Any]) -> dict[str, Any]:
    values = {"clip_percentile": 10, "pct": 90, "sample_size": 4, "clip_value_min": -1}
    limits = {"min_clipbound": 0.1, "max_clipbound": 3.0, "target_unclipped_quantile": 0.5}
    limits["num_sampled_clients"] = 3
    return {
        key: {**values, **limits, "min_val": -1}.get(key, 0.5)
        for key, default in parameters.items()
        if default is compat.REQUIRED
    }


EVERY = [(peer, cls) for peer, classes in compat.known().items() for cls in classes]


@pytest.mark.parametrize(("peer", "cls"), EVERY)
def test_every_translation_of_defaults_makes_a_clipper(peer: str, cls: str) -> None:
    given = required(compat.PEERS[peer][cls].parameters)
    if cls == "Fabric.clip_gradients":
        given["max_norm"] = 0.5
    kind, name, config = compat.translate(peer, cls, given)
    assert build(kind, name, config).name == name
    # What is printed says the same.
    field = tomllib.loads(toml_line(kind, name, config))
    if kind == "aggregator":
        assert field == {"aggregator": {"name": name, **config}}
    else:
        ((spec,),) = field.values()
        assert spec == (name if not config else [name, spec[1]])


@pytest.mark.parametrize(
    ("peer", "cls", "config", "words"),
    [
        ("torchzeo", "ClipNorm", {}, "no translation from 'torchzeo'; did you mean 'torchzero'?"),
        ("numpy", "clip", {}, "no translation from 'numpy'; it must be one of drytorch, smartclip"),
        ("optax", "clip_by_norm", {}, "optax has no clipper 'clip_by_norm'; did you mean"),
        ("optax", "clip", {"max_delt": 1}, "no parameter 'max_delt'; did you mean 'max_delta'?"),
        ("optax", "clip", {}, "clip of optax needs 'max_delta'"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "ord": "stdd"}, "did you mean 'std'?"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "dim": "globl"}, "did you mean 'global'?"),
        ("drytorch", "HistClipper", {"criterion": "zsta"}, "did you mean 'zstat'?"),
        ("smartclip", "ZScoreClip", {"scope": "per_parm"}, "did you mean 'per_param'?"),
        ("zclip", "ZClip", {"mode": "z-score"}, "did you mean 'zscore'?"),
        ("timm", "adaptive_clip_grad", {"norm_type": 1}, "norm_type must be 2"),
    ],
)
def test_what_is_unknown_is_answered_with_the_nearest_name(
    peer: str, cls: str, config: dict[str, Any], words: str
) -> None:
    for function in (compat.translate, compat.notes):
        with pytest.raises(ValueError, match=re.escape(words)):
            function(peer, cls, config)


def test_every_recorded_defect_has_a_note() -> None:
    for record in INDEX:
        if not record["match"]:
            assert compat.notes(record["peer"], record["cls"], record["config"])


def test_smartclips_warm_up_is_told() -> None:
    given = {"scope": "per_param", "warmup_steps": 8, "min_history": 5}
    _, _, config = compat.translate("smartclip", "ZScoreClip", given)
    assert config["warmup"] == 8
    assert any("counts calls" in note for note in compat.notes("smartclip", "ZScoreClip", given))


def test_the_callers_config_is_not_changed() -> None:
    given = {"max_norm": 1, "dim": [0, 1]}
    _, _, config = compat.translate("torchzero", "ClipNorm", given)
    config["dims"].append(7)
    assert given == {"max_norm": 1, "dim": [0, 1]}


@pytest.mark.parametrize(
    ("peer", "cls", "config", "expected"),
    [
        ("torchlean", "clipGradientsSpec", {"max_norm": -2.5}, {"max_norm": 2.5}),
        (
            "tensorflow",
            "clip_by_value",
            {"clip_value_min": float("-inf"), "clip_value_max": 0.25},
            {"min_value": float("-inf"), "max_value": 0.25},
        ),
        ("torchzero", "ClipNormGrowth", {"parameterwise": False}, {"scope": "global"}),
        ("torchzero", "ClipNormByEMA", {"parameterwise": True, "eps": 1e-6}, {"scope": "tensor"}),
        ("torchzero", "ClipNormByEMA", {"ema_init": "update"}, {"init": "first"}),
        ("torchzero", "NormalizeByEMA", {"ema_init": "zeros"}, {"init": 0.0}),
        ("torchzero", "ClipValueByEMA", {"ema_init": "update"}, {"init": 1.0}),
        ("torchzero", "ClipNorm", {"max_norm": 3, "target": "update"}, {"max_norm": 3}),
        ("torchzero", "ClipValueGrowth", {"target": "grad"}, {"mul": 1.5}),
        ("smartclip-tf", "ZScoreClip", {"scope": "per_layer"}, {"scope": "tensor"}),
        ("smartclip-tf", "AutoClip", {"scope": "global"}, {"scope": "global"}),
        ("keras", "Optimizer", {"clipnorm": 0.7}, {"max_norm": 0.7, "scope": "tensor"}),
        ("keras", "Optimizer", {"global_clipnorm": 0.7}, {"max_norm": 0.7}),
        ("keras", "Optimizer", {"clipvalue": 0.7}, {"max_value": 0.7}),
        ("keras", "Optimizer", {"clipnorm": -1.0}, {}),
        ("lightning", "Trainer", {"gradient_clip_val": 2}, {"max_norm": 2, "eps": 1e-6}),
        ("lightning", "Trainer", {"gradient_clip_val": 0}, {}),
        (
            "lightning",
            "Trainer",
            {"gradient_clip_val": 2, "gradient_clip_algorithm": "value"},
            {"max_value": 2},
        ),
        ("lightning", "Fabric.clip_gradients", {"clip_val": 0.1}, {"max_value": 0.1}),
        ("flower", "fixedclipping_mod", {"clipping_norm": 4.0}, {"max_norm": 4.0}),
        (
            "flower",
            "DifferentialPrivacyServerSideFixedClipping",
            {"noise_multiplier": 1.1, "clipping_norm": 4.0, "num_sampled_clients": 20},
            {"start_norm": 4.0, "learning_rate": 0.0, "expected_clients": 20},
        ),
        (
            "flower",
            "DifferentialPrivacyClientSideAdaptiveClipping",
            {"noise_multiplier": 0, "num_sampled_clients": 9, "target_clipped_quantile": 0.9},
            {"start_norm": 0.1, "quantile": pytest.approx(0.1), "learning_rate": 0.2},
        ),
    ],
)
def test_what_peers_take_besides(
    peer: str, cls: str, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    kind, name, translated = compat.translate(peer, cls, config)
    assert expected.items() <= translated.items()
    assert build(kind, name, translated).name == name


@pytest.mark.parametrize(
    ("peer", "cls", "config", "words"),
    [
        ("optax", "clip", {"max_delta": "abc"}, "max_delta of clip must be a number, got 'abc'"),
        ("zclip", "ZClip", {"z_thresh": [1]}, "z_thresh of ZClip must be a number, got [1]"),
        ("torch", "clip_grad_norm_", {"max_norm": True}, "max_norm of clip_grad_norm_ must be a"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "dim": 0.5}, "ClipNorm of torchzero takes no"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "dim": [0.5]}, "dim must be an int, a list of"),
        ("torchzero", "ClipNorm", {"max_norm": 1, "target": "closure"}, "target can not be"),
        ("torchzero", "ClipNormByEMA", {"ema_init": "one"}, "ema_init can not be 'one'"),
        ("keras", "Optimizer", {"clipnorm": 1, "clipvalue": 1}, "Keras takes one of"),
        ("lightning", "Trainer", {"gradient_clip_algorithm": "nrm"}, "did you mean 'norm'?"),
        ("lightning", "Fabric.clip_gradients", {}, "takes one of clip_val and max_norm"),
        ("flower", "fixedclipping_mod", {}, "needs 'clipping_norm'"),
    ],
)
def test_what_a_peer_does_not_take_is_a_sentence(
    peer: str, cls: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        compat.translate(peer, cls, config)


def test_noise_is_as_large_as_in_flower() -> None:
    """Of theirs: z C on the sum; with votes (z^-2 - (2 stddev)^-2)^-1/2 in the place of z."""
    given: dict[str, Any] = {"noise_multiplier": 1.1, "num_sampled_clients": 20}
    fixed = "DifferentialPrivacyServerSideFixedClipping"
    _, _, found = compat.translate("flower", fixed, {**given, "clipping_norm": 4.0})
    assert UpdateClipServer(**found).noise == 1.1
    said = " ".join(compat.notes("flower", fixed, {**given, "clipping_norm": 4.0}))
    assert "the noise on the sum of the updates is Flower's" in said
    adaptive = "DifferentialPrivacyServerSideAdaptiveClipping"
    _, _, found = compat.translate("flower", adaptive, {**given, "clipped_count_stddev": 0.9})
    assert UpdateClipServer(**found).noise == pytest.approx((1.1**-2 - 1.8**-2) ** -0.5)
    assert "larger than Flower" not in said + " ".join(compat.notes("flower", adaptive, given))
    # Without a deviation of theirs, which would be 1.
    _, _, found = compat.translate("flower", adaptive, given)
    assert UpdateClipServer(**found).noise == pytest.approx(1.1 * (4 / 3) ** 0.5)
