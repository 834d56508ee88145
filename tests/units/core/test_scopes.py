# SPDX-License-Identifier: Apache-2.0
"""Which tensors share a norm: words, name patterns, tables, slices, exclusions."""

from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from helpers import gradient
from hypothesis import given
from hypothesis import strategies as st

from fedclip import FedclipWarning, NoOp, NormClip
from fedclip.core.scopes import matched, resolve
from fedclip.testing import to_vector


def test_tensors_without_the_dims_and_small_slices_are_left_alone() -> None:
    arrays = {"scalar": np.array(9.0), "row": np.full(3, 9.0), "table": np.full((3, 2), 9.0)}
    vector = to_vector(arrays)
    out = NormClip(1.0, dims=[1]).run(vector).coefs
    assert out["scalar"] is vector.coefs["scalar"]
    assert out["row"] is vector.coefs["row"]
    np.testing.assert_allclose(np.linalg.norm(out["table"], axis=1), 1)


@pytest.mark.parametrize("of", [{"dims": 5}, {"dims": [-3]}, {"scope": "tensor", "min_size": 10}])
def test_slices_that_no_tensor_has_are_named(of: dict[str, Any]) -> None:
    clip = NormClip(1.0, **of)
    arrays = {"row": np.full(3, 9.0), "table": np.full((3, 2), 9.0)}
    with pytest.warns(FedclipWarning, match=r"-clip clips nothing.* shapes are \(3,\), \(3, 2\)"):
        clip.clip(arrays)
    clip.clip(arrays)
    clip.clip({**arrays, "deep": np.full((1, 2, 1, 3, 1, 2), 9.0)})


@pytest.mark.parametrize(
    ("ord", "reference"),
    [
        (1, lambda x: np.abs(x).sum()),
        (2, np.linalg.norm),
        (3, lambda x: (np.abs(x) ** 3).sum() ** (1 / 3)),
        (0.5, lambda x: (np.abs(x) ** 0.5).sum() ** 2),
        ("inf", lambda x: np.abs(x).max()),
        ("rms", lambda x: np.sqrt(np.mean(x**2))),
        ("mad", lambda x: np.mean(np.abs(x))),
        ("std", lambda x: np.std(x, ddof=1)),
        ("var", lambda x: np.var(x, ddof=1)),
    ],
)
def test_measures(ord: Any, reference: Any) -> None:
    arrays = gradient(4)
    flat = np.concatenate([v.ravel() for v in arrays.values()])
    look = NoOp(ord=ord)
    look.run(to_vector(arrays))
    assert look.last.norm_before[0] == pytest.approx(reference(flat), rel=1e-12)
    limit = 0.5 * float(reference(flat))
    out = NormClip(limit, ord=ord).run(to_vector(arrays)).coefs
    after = reference(np.concatenate([v.ravel() for v in out.values()]))
    assert after == pytest.approx(limit, rel=1e-10)


ANY_NAMES = st.text("ab.[]1*", min_size=1, max_size=6)
ANY_PATTERNS = st.text("ab.*?[]!1-", min_size=1, max_size=5)


@given(
    st.lists(ANY_NAMES, min_size=1, max_size=8, unique=True),
    st.lists(ANY_PATTERNS, min_size=1, max_size=3, unique=True),
)
def test_patterns_match_as_fnmatch_does(names: list[str], patterns: list[str]) -> None:
    def hits(pattern: str) -> list[str]:
        found = [n for n in names if fnmatchcase(n, pattern)]
        # Without a wildcard, it may be the name of a layer.
        plain = not set("*?[") & set(pattern)
        return found or [n for n in names if plain and n.startswith(f"{pattern}.")]

    if not all(map(hits, patterns)):
        with pytest.raises(ValueError, match="matches no tensor"):
            resolve(patterns, None, names)
        return
    groups = resolve(patterns, None, names)
    first = [next((p for p in patterns if n in hits(p)), "*") for n in names]
    assert [groups.labels[group] for group in groups.owners] == first


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("head", [1, 2]), ("out.weight", [4]), ("*.lora_A.weight", [3]), ("out/kernel:0", [6])],
)
def test_patterns_ignore_what_wrappers_add_to_names(pattern: str, found: list[int]) -> None:
    names = [
        "module.enc.weight",
        "module.head.weight",
        "module._orig_mod.head.bias",
        "module.base_model.model.enc.lora_A.default.weight",
        "base_model.model.out.modules_to_save.default.weight",
        "header.weight",
        "sequential_1/out/kernel:0",
        "net/~/linear:w",
    ]
    assert [i for i, name in enumerate(names) if name in matched("", [pattern], names)] == found
    assert [*matched("", ["net/~/linear"], names)] == names[7:]


@pytest.mark.parametrize(
    "twin",
    ["module.module.head.weight", "module._orig_mod.head.weight", "module.head.default.weight"],
)
def test_names_that_only_wrappers_tell_apart_are_not_guessed(twin: str) -> None:
    names = ["module.head.weight", twin]
    with pytest.raises(ValueError, match=f"finds 'module.head.weight', '{twin}', some of which"):
        matched("scope", ["head"], names)
    assert [*matched("scope", [names[0]], names)] == names[:1]


def test_a_tensor_called_all_is_not_the_whole_gradient() -> None:
    look = NoOp(scope="tensor")
    look.run(to_vector({"all": np.array([3.0]), "b": np.array([4.0])}))
    assert {r.group: r.norm_max for r in look.rounds} == {"all": 5.0, "'all'": 3.0, "b": 4.0}
    clip = NormClip(9.0, scope={"all": 0.5})
    assert clip.run(to_vector({"all": np.array([3.0])})).coefs["all"] == pytest.approx(0.5)


@pytest.mark.slow
def test_statistics_of_names_that_never_come_back_are_dropped() -> None:
    clip = OptiModule.from_specs("zscore-clip", {"scope": "tensor"})
    for step in range(1001):
        clip.run(to_vector({f"w{step}": np.ones(1)}))
    with pytest.warns(FedclipWarning, match="give tensors the same names"):
        clip.run(to_vector({"last": np.ones(1)}))
    groups = clip.get_state()["groups"]
    assert len(groups) == 1001
    assert "w0" not in groups


def test_a_name_that_is_no_string_is_refused() -> None:
    for name in (1, None, ("a", "b"), b"w"):
        with pytest.raises(TypeError, match="names of tensors must be strings, got"):
            NormClip(1.0, scope="tensor").clip({name: np.ones(2)})
