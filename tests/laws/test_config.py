# SPDX-License-Identifier: Apache-2.0
"""Configurations survive a round trip; a wrong one is refused in words that help."""

import inspect
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import mypy.api
import numpy as np
import pytest
from declearn.optimizer import list_optim_modules
from helpers import MODULES, SPECIMENS, Specimen, apply, gradient, specimens

import fedclip
from fedclip import Clipper, NormClip, ZScoreClip, to_toml
from fedclip.cli.catalogue import is_ours
from fedclip.clippers.families import Exact
from fedclip.core.docstrings import docstring_of
from fedclip.core.parameters import integer, parameter, positive
from fedclip.rules.constant import Constant
from fedclip.testing import to_vector
from fedclip.transforms import NormClipping, Transform


def make(name: str, **config: Any) -> Any:
    specimen = next(s for s in SPECIMENS if s.name == name)
    return Specimen(name, kind=specimen.kind).make(**config)


@specimens(s for s in SPECIMENS if not s.label)
def test_a_typo_is_answered_with_the_nearest_name(specimen: Specimen) -> None:
    with pytest.raises(TypeError, match=r"'on_nonfinit'; did you mean 'on_nonfinite'\?") as caught:
        specimen.make(on_nonfinit="skip")
    assert specimen.name in str(caught.value)
    with pytest.raises(ValueError, match=r"'propagate'.*got 'propagat'; did you mean 'propagate'"):
        specimen.make(on_nonfinite="propagat")
    with pytest.raises(ValueError, match=r"'enc\.wieght' matches no tensor.*'enc\.weight'"):
        apply(specimen.make(exclude="enc.wieght"), to_vector(gradient()))


def test_unknown_scope() -> None:
    for value in ("globl", "", 3, None, [], [1], [""], ["a", "a"]):
        with pytest.raises((TypeError, ValueError), match="scope"):
            NormClip(scope=value)
    with pytest.raises(ValueError, match=r"'global'.*did you mean 'global'\?"):
        NormClip(scope="globl")
    with pytest.raises(ValueError, match=r"scope pattern 'encoder\.\*' matches no tensor"):
        NormClip(scope=["encoder.*"]).run(to_vector(gradient()))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("norm-clip", {"max_norm": 1.0, "min_norm": 2.0}, "min_norm must be <= max_norm"),
        ("norm-clip", {"max_norm": 0}, "^max_norm must be a finite number > 0, got 0"),
        ("norm-clip", {"max_norm": math.nan}, "must be a finite number > 0, got nan"),
        ("value-clip", {"max_value": True}, "^max_value must be a finite number > 0, got True"),
        ("zscore-clip", {"max_norm": "1"}, "must be a finite number > 0, got '1'"),
        ("zscore-clip", {"decay": 1}, "^decay must be a number strictly between 0 and 1, got 1"),
        ("ema-clip", {"ratio": None}, "^ratio must be a finite number > 0, got None"),
        ("adaptive-clip", {"rate": -1}, "^rate must be a number > 0 and <= 10, got -1"),
        ("agc", {"ratio": math.inf}, "^ratio must be a finite number > 0, got inf"),
        ("norm-clip", {"max_norm": 10**400}, "max_norm must be .*, got"),
        ("norm-clip", {"ord": 10**5000}, "ord must be .*, got"),
        ("norm-clip", {"ord": "sum"}, "ord must be"),
        ("norm-clip", {"ord": 0}, "ord must be a number > 0"),
        ("norm-clip", {"eps": -1e-6}, "eps must be a finite number >= 0"),
        ("norm-clip", {"dims": [0, 0]}, "different ints"),
        ("norm-clip", {"dims": 0, "scope": "layer"}, "scope must be 'tensor'"),
        ("norm-clip", {"inverse_dims": True}, "inverse_dims=True needs dims"),
        ("norm-clip", {"inverse_dims": 1, "dims": 0}, "inverse_dims must be True or False"),
        ("norm-clip", {"min_size": 0}, "min_size must be an int >= 1"),
        ("norm-clip", {"scope": {"a": 0}}, r"scope\['a'\] must be a finite number > 0"),
        ("value-clip", {"max_value": 1.0, "min_value": 2.0}, "min_value must be <= max_value"),
        ("zscore-clip", {"include_current": True}, "needs feedback='raw'"),
        ("zscore-clip", {"factor": 2.0, "action": "max"}, "factor goes with"),
        ("zscore-clip", {"action": "recip"}, "did you mean 'reciprocal'"),
        ("normalize", {"min_size": 3}, "min_size=3 needs dims or scope='tensor'"),
        ("percentile-clip", {"percentile": 101}, r"percentile must be a number in \[0, 100\]"),
        ("percentile-clip", {"method": "linaer"}, "did you mean 'linear'"),
        ("ema-value-clip", {"init": 1.0, "debias": True}, "debias=True is for averages"),
        ("ema-norm-clip", {"max_growth": 0.9}, "max_growth must be a finite number >= 1"),
        ("ema-clip", {"ratio": 0.9}, "ratio < 1 needs feedback='raw'"),
        ("ema-clip", {"warmup_scope": "global", "ord": "inf"}, "needs ord=2.*got ord=.inf.$"),
        ("auto-clip", {"median": "p2", "window": 9}, "window goes with median='window'"),
        ("auto-clip", {"median": "window", "window": 4}, "window must be an int >= 5"),
        ("percentile-norm-clip", {"window": 65_537}, "window must be an int <= 65536"),
        ("percentile-norm-clip", {"percentile": 0}, "percentile must be a number > 0 and <= 100"),
        ("percentile-norm-clip", {"percentile": 100, "history": "p2"}, "needs history='window'"),
        ("percentile-norm-clip", {"rate": 0.1}, "rate goes with history='stream'"),
        ("percentile-norm-clip", {"history": "p2", "window": 9}, "window goes with history='win"),
        ("adaptive-clip", {"start_norm": 2.0, "max_norm": 1.0}, "between min_norm and max_norm"),
        ("agc", {"axis": 0, "dims": [1]}, "give axis or dims, not both"),
        ("agc", {"axis": 0, "unit": "tensor"}, "axis and dims go with unit='output'"),
    ],
)
def test_what_does_not_go_together(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        make(name, **config)
    assert len(str(caught.value)) < 500


def test_numpy_numbers_are_numbers() -> None:
    assert NormClip(np.float32(0.5)).get_config()["max_norm"] == 0.5
    assert ZScoreClip(warmup=np.int64(3)).get_config()["warmup"] == 3


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


@specimens(MODULES)
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

    class Renamed(Declares, register=False):
        name = "renamed"

    common = ["scope", "ord", "eps", "exclude", "on_nonfinite", "keep_memory"]
    assert list(Declares().get_config()) == ["limit", "floor", *common]
    assert (Declares(2).limit, Declares().floor, Declares().scope) == (2.0, None, "tensor")
    assert [*Derived(more=2).get_config().values()][:3] == [3.0, None, 2]
    assert "limit : float, default=1.0\n    Limit, > 0.\nfloor" in str(Declares.__doc__)
    assert "more : int\nscope" in docstring_of(Derived, "Sum.")
    # Without parameters of its own it has its base's sections, unless it has written them itself.
    own = "Sum.\n\nParameters\n----------\nnone"
    assert docstring_of(Renamed, "Sum.").partition("\n")[2] == Declares.__doc__.partition("\n")[2]
    assert docstring_of(Renamed, own) == own
    assert (Writes("b.*").exclude, Writes("b.*").get_config()) == (["b.*"], {"skipped": "b.*"})
    refused: list[tuple[Any, tuple[float, ...], dict[str, Any], str]] = [
        (Declares, (), {"ords": 1}, "no parameter 'ords'; did you mean 'ord'"),
        (Writes, (), {"exclude": "b"}, "no parameter 'exclude'; its parameters are skipped"),
        (Declares, (), {"floor": "1"}, "floor must be a finite number > 0, got '1'"),
        (Derived, (), {}, "missing a required argument: 'more'"),
        (Declares, (1.0, 2.0), {}, "too many positional arguments"),
    ]
    for cls, args, config, words in refused:
        with pytest.raises(TypeError, match=words):
            cls(*args, **config)


@pytest.mark.slow
def test_type_checkers_see_every_parameter(tmp_path: Path) -> None:
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
    # With the options of `make lint`, whose cache knows torch and JAX already.
    (tmp_path / "loop.py").write_text("\n".join(lines), encoding="utf-8")
    out, _, _ = mypy.api.run([str(tmp_path / "loop.py")])
    found = set(re.findall(r"loop.py:(\d+): error", out))
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
