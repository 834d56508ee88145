# SPDX-License-Identifier: Apache-2.0
"""Configurations survive a round trip; a wrong one is refused in words that help."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from typing import Any

import mypy.api
import numpy as np
import pytest
from declearn.optimizer import Optimizer, list_optim_modules
from declearn.optimizer.modules import OptiModule
from helpers import SPECIMENS, Specimen, apply, gradient, specimens

import fedclip
from fedclip import (
    AGC,
    AdaptiveClip,
    AutoClip,
    Centralize,
    Clipper,
    EmaClip,
    EmaNormClip,
    EmaValueClip,
    GrowthClip,
    GrowthValueClip,
    Normalize,
    NormClip,
    PercentileClip,
    PercentileNormClip,
    Standardize,
    ValueClip,
    ZScoreClip,
    to_toml,
)
from fedclip.cli.catalogue import is_ours
from fedclip.clippers.families import Exact
from fedclip.core.docstrings import docstring_of
from fedclip.core.parameters import integer, parameter, positive
from fedclip.rules.constant import Constant
from fedclip.testing import to_vector
from fedclip.transforms import NormClipping, Transform

ABOVE_0 = "a finite number > 0"
INSIDE_0_1 = "a number strictly between 0 and 1"
# Parameters that are a number: what is allowed, and whether None is.
NUMBERS = [
    ("norm-clip", "max_norm", ABOVE_0, False),
    ("norm-clip", "min_norm", ABOVE_0, True),
    ("value-clip", "max_value", ABOVE_0, False),
    ("zscore-clip", "max_norm", ABOVE_0, True),
    ("zscore-clip", "decay", INSIDE_0_1, False),
    ("ema-clip", "ratio", ABOVE_0, False),
    ("percentile-norm-clip", "decay", INSIDE_0_1, False),
    ("adaptive-clip", "start_norm", ABOVE_0, True),
    ("adaptive-clip", "rate", "a number > 0 and <= 10", False),
    ("ema-norm-clip", "decay", INSIDE_0_1, False),
    ("agc", "ratio", ABOVE_0, False),
]


def make(name: str, **config: Any) -> Any:
    specimen = next(s for s in SPECIMENS if s.name == name)
    return Specimen(name, kind=specimen.kind).make(**config)


@specimens(label=False)
def test_a_typo_is_answered_with_the_nearest_name(specimen: Specimen) -> None:
    with pytest.raises(TypeError, match=r"'on_nonfinit'; did you mean 'on_nonfinite'\?") as caught:
        specimen.make(on_nonfinit="skip")
    assert specimen.name in str(caught.value)
    with pytest.raises(ValueError, match=r"'propagate'.*got 'propagat'; did you mean 'propagate'"):
        specimen.make(on_nonfinite="propagat")
    clipper = specimen.make(exclude="enc.wieght")
    with pytest.raises(ValueError, match=r"'enc\.wieght' matches no tensor.*'enc\.weight'"):
        apply(clipper, to_vector(gradient()))


def test_a_typo_through_declearns_optimizer() -> None:
    with pytest.raises(Exception, match=r"'maxnorm'; did you mean 'max_norm'\?"):
        Optimizer(lrate=0.1, modules=[("norm-clip", {"maxnorm": 1.0})])


@pytest.mark.parametrize(("name", "parameter", "allowed", "optional"), NUMBERS)
def test_what_is_no_such_number(name: str, parameter: str, allowed: str, optional: bool) -> None:
    for value in (0, -1, math.nan, math.inf, True, "1", *[None] * (not optional)):
        with pytest.raises((TypeError, ValueError)) as caught:
            make(name, **{parameter: value})
        assert str(caught.value).startswith(f"{parameter} must be {allowed}, got {value!r}")
    if optional:
        assert make(name, **{parameter: None}).get_config()[parameter] is None


def test_a_warm_up_that_is_no_count() -> None:
    for value in (-1, 2.0, True, "3", None):
        with pytest.raises((TypeError, ValueError), match="warmup must be an int >= ") as caught:
            make("zscore-clip", warmup=value)
        assert repr(value) in str(caught.value)


def test_unknown_scope() -> None:
    for value in ("globl", "", 3, None, [], [1], [""], ["a", "a"]):
        with pytest.raises((TypeError, ValueError), match="scope"):
            NormClip(scope=value)
    with pytest.raises(ValueError, match=r"'global'.*did you mean 'global'\?"):
        NormClip(scope="globl")


def test_pattern_of_a_scope_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"scope pattern 'encoder\.\*' matches no tensor"):
        NormClip(scope=["encoder.*"]).run(to_vector(gradient()))


@pytest.mark.parametrize(
    ("cls", "config", "words"),
    [
        (NormClip, {"max_norm": 1.0, "min_norm": 2.0}, "min_norm must be <= max_norm"),
        (NormClip, {"ord": "sum"}, "ord must be"),
        (NormClip, {"ord": 0}, "ord must be a number > 0"),
        (NormClip, {"eps": -1e-6}, "eps must be a finite number >= 0"),
        (NormClip, {"dims": [0, 0]}, "different ints"),
        (NormClip, {"dims": 0, "scope": "layer"}, "scope must be 'tensor'"),
        (NormClip, {"inverse_dims": True}, "inverse_dims=True needs dims"),
        (NormClip, {"inverse_dims": 1, "dims": 0}, "inverse_dims must be True or False"),
        (NormClip, {"min_size": 0}, "min_size must be an int >= 1"),
        (NormClip, {"scope": {"a": 0}}, r"scope\['a'\] must be a finite number > 0"),
        (ValueClip, {"max_value": 1.0, "min_value": 2.0}, "min_value must be <= max_value"),
        (ZScoreClip, {"include_current": True}, "needs feedback='raw'"),
        (ZScoreClip, {"factor": 2.0, "action": "max"}, "factor goes with"),
        (ZScoreClip, {"action": "recip"}, "did you mean 'reciprocal'"),
        (Normalize, {"norm": 0}, "norm must be a finite number > 0, got 0"),
        (Normalize, {"min_size": 3}, "min_size=3 needs dims or scope='tensor'"),
        (Standardize, {"eps": -1}, "eps must be a finite number >= 0"),
        (Centralize, {"inverse_dims": True}, "inverse_dims=True needs dims"),
        (PercentileClip, {"percentile": 101}, r"percentile must be a number in \[0, 100\]"),
        (PercentileClip, {"method": "linaer"}, "did you mean 'linear'"),
        (EmaValueClip, {"decay": 1.0}, "decay must be a number strictly between 0 and 1"),
        (EmaValueClip, {"init": 1.0, "debias": True}, "debias=True is for averages"),
        (EmaNormClip, {"init": "frist"}, "did you mean 'first'"),
        (EmaNormClip, {"max_growth": 0.9}, "max_growth must be a finite number >= 1"),
        (GrowthValueClip, {"max_decay": 0.5}, "max_decay must be a finite number >= 1"),
        (EmaClip, {"include_current": True}, "needs feedback='raw'"),
        (EmaClip, {"ratio": 0.9}, "ratio < 1 needs feedback='raw'"),
        (EmaClip, {"warmup_scope": "global", "ord": "inf"}, "needs ord=2.*got ord=.inf.$"),
        (AutoClip, {"include_current": True}, "needs feedback='raw'"),
        (PercentileNormClip, {"include_current": True}, "needs feedback='raw'"),
        (AutoClip, {"median": "p2", "window": 9}, "window goes with median='window'"),
        (AutoClip, {"median": "window", "window": 4}, "window must be an int >= 5"),
        (PercentileNormClip, {"window": 65_537}, "window must be an int <= 65536"),
        (PercentileNormClip, {"percentile": 0}, "percentile must be a number > 0 and <= 100"),
        (PercentileNormClip, {"percentile": 100, "history": "p2"}, "needs history='window'"),
        (PercentileNormClip, {"rate": 0.1}, "rate goes with history='stream'"),
        (PercentileNormClip, {"history": "p2", "window": 9}, "window goes with history='window'"),
        (AdaptiveClip, {"start_norm": 2.0, "max_norm": 1.0}, "between min_norm and max_norm"),
        (GrowthClip, {"mul": 0.9}, "mul must be a finite number >= 1"),
        (AGC, {"ratio": 0}, "ratio must be a finite number > 0"),
        (AGC, {"unit": "ouput"}, "did you mean 'output'"),
        (AGC, {"axis": 0, "dims": [1]}, "give axis or dims, not both"),
        (AGC, {"axis": 0, "unit": "tensor"}, "axis and dims go with unit='output'"),
        (AGC, {"min_norm": 0}, "min_norm must be a finite number > 0"),
        (AGC, {"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
    ],
)
def test_what_does_not_go_together(cls: Any, config: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        cls(**config)


def test_numpy_numbers_are_numbers() -> None:
    assert NormClip(np.float32(0.5)).get_config()["max_norm"] == 0.5
    assert ZScoreClip(warmup=np.int64(3)).get_config()["warmup"] == 3


def test_tensors_of_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="'steps' is int64: convert it, or put its name in exclude"):
        NormClip().run(to_vector({"w": np.ones(2), "steps": np.ones(2, "int64")}))
    clip = NormClip(exclude="steps")
    out = clip.run(to_vector({"w": np.full(2, 9.0), "steps": np.ones(2, "int64")}))
    assert out.coefs["steps"].dtype == "int64"


def test_a_line_of_toml_holds_what_is_not_the_default() -> None:
    for name, cls in list_optim_modules().items():
        if not is_ours(cls):
            continue
        plugin = cls()
        assert to_toml(plugin) == f'modules = ["{name}"]'
        for key, other in (("warmup", 7), ("on_nonfinite", "raise"), ("start_norm", 0.25)):
            if key in plugin.get_config():
                changed = cls(**{key: other})
                (line,) = tomllib.loads(to_toml(changed))["modules"]
                assert line == [name, {key: other}]
                assert cls(**line[1]).get_config() == changed.get_config()


@specimens(kind="module")
def test_every_parameter_is_documented(specimen: Specimen) -> None:
    """The docstring has an entry for each parameter of the signature, with its default."""
    cls = type(specimen.make())
    section = inspect.getdoc(cls).split("\nParameters\n")[1].split("\n\nRaises\n")[0]
    heads = {
        name.strip(): line.rpartition("default=")[2]
        for line in section.splitlines()
        if line and not line.startswith((" ", "-"))
        for name in line.partition(" :")[0].split(",")
    }
    parameters = inspect.signature(cls).parameters
    assert list(heads) == list(parameters) == list(specimen.make().get_config())
    for name, formal in parameters.items():
        default = f'"{formal.default}"' if isinstance(formal.default, str) else None
        assert heads[name] in (default, repr(formal.default), str(formal.default).rstrip(".0"))


def test_a_clipper_of_ones_own_declares_its_parameters_or_writes_an_init() -> None:
    class Declares(Exact, Clipper, register=False):
        """Halves what is too long."""

        name = "declares"

        limit: float = parameter(positive, default=1.0, kw_only=False)
        """Limit, > 0."""
        floor: float | None = parameter(positive, default=None)
        scope = parameter(default="tensor")

        def build(self) -> Transform:
            return NormClipping(Constant((self.limit,)), self.ord)

    class Writes(Clipper, register=False):
        name = "writes"

        def __init__(self, skipped: str | None = None) -> None:
            self.skipped = skipped
            super().__init__(exclude=skipped)

        def build(self) -> Transform:
            return NormClipping(Constant((1.0,)))

    class Derived(Declares, register=False):
        name = "derived"

        more: int = parameter(integer, 1)
        limit: float = parameter(default=3.0)

    common = ["scope", "ord", "eps", "exclude", "on_nonfinite", "keep_memory"]
    assert list(Declares().get_config()) == ["limit", "floor", *common]
    assert (Declares(2).limit, Declares().floor, Declares().scope) == (2.0, None, "tensor")
    assert [*Derived(more=2).get_config().values()][:3] == [3.0, None, 2]
    assert "limit : float, default=1.0\n    Limit, > 0.\nfloor" in str(Declares.__doc__)
    assert "more : int\nscope" in docstring_of(Derived, "Sum.")
    assert (Writes("b.*").exclude, Writes("b.*").get_config()) == (["b.*"], {"skipped": "b.*"})
    with pytest.raises(TypeError, match="no parameter 'ords'; did you mean 'ord'"):
        Declares(ords=1)
    with pytest.raises(TypeError, match="no parameter 'exclude'; its parameters are skipped"):
        Writes(exclude="b")
    with pytest.raises(TypeError, match="floor must be a finite number > 0, got '1'"):
        Declares(floor="1")
    with pytest.raises(TypeError, match="missing a required argument: 'more'"):
        Derived()
    with pytest.raises(TypeError, match="too many positional arguments"):
        Declares(1.0, 2.0)


@pytest.mark.slow
def test_type_checkers_see_every_parameter() -> None:
    """The signature that mypy derives from the declarations is that of the constructor."""
    wrong = "NormClip('1')", "NormClip(1.0, 2.0)", "ZScoreClip(z=1)", "AGC(axis='0')"
    right = (
        "Optimizer(0.1, modules=[NormClip(1), ZScoreClip(warmup=3, shared=True)])",
        "norm: float = float(clip_(torch.nn.Linear(2, 1), NormClip(1.0)))",
        "steps: jax.Array = as_optax(NormClip(1.0)).init({}).steps",
        "limits: dict[str, float] = NormClip(scope='tensor').get_limit({'w': 2.0})",
    )
    wrong = (*wrong, "as_optax(NormClip(1.0)).init({}).stops")
    imports = (
        "import jax, torch",
        "from declearn.optimizer._base import Optimizer",
        "from fedclip import AGC, NormClip, ZScoreClip",
        "from fedclip.loops.jax import as_optax",
        "from fedclip.loops.torch import clip_",
    )
    lines = [*imports, *right, *wrong]
    out, _, _ = mypy.api.run(["--strict", "--config-file=", "-c", "\n".join(lines)])
    found = set(re.findall(r"<string>:(\d+): error", out))
    first = len(imports) + len(right) + 1
    assert found == {str(first + place) for place in range(len(wrong))}, out


@specimens()
def test_clippers_are_shown_and_compared_by_their_configuration(specimen: Specimen) -> None:
    one, other = specimen.make(), specimen.make()
    assert one == other
    name = type(one).__name__
    assert eval(repr(one), {name: getattr(fedclip, name)}) == one
    apply(one, to_vector(gradient()))
    assert one == other != type(one)(**{**one.get_config(), "on_nonfinite": "raise"})
    assert (one == "x") is (one == None) is False  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


@pytest.mark.parametrize(
    ("name", "parameter", "digits"),
    [
        ("norm-clip", "max_norm", 400),
        ("norm-clip", "ord", 5000),
        ("percentile-norm-clip", "window", 400),
        ("percentile-norm-clip", "history", 5000),
        ("norm-clip", "keep_memory", 5000),
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_in_words(
    name: str, parameter: str, digits: int
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{parameter} must be .*, got") as caught:
        OptiModule.from_specs(name, {parameter: 10**digits})
    assert len(str(caught.value)) < 500
