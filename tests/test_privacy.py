"""What `fedclip.privacy.analyse` answers, to whom, and in which words."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import OptiModule
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedclip.tools.cli
from fedclip import AGC, NormClip, ValueClip, ZScoreClip
from fedclip.privacy import MAPS, Analysis, Context, Map, analyse
from fedclip.privacy.lengths import l2_of, outwards, root_of_squares, stretch
from fedclip.tools.check import check_config

SHAPES = {"enc.w": (3, 2), "enc.b": (2,), "head.w": (2, 2), "none": (0, 7)}


# -- forms that a pipeline may have -----------------------------------------------------------
@pytest.mark.parametrize(
    "pipeline",
    [
        NormClip(max_norm=0.5),
        ("norm-clip", {"max_norm": 0.5}),
        ["norm-clip", {"max_norm": 0.5}],
        [NormClip(max_norm=0.5)],
        ["no-op", ["norm-clip", {"max_norm": 0.5}]],
        {"lrate": 0.1, "modules": [["norm-clip", {"max_norm": 0.5}]]},
        Optimizer(lrate=0.1, modules=[NormClip(max_norm=0.5)]),
        Optimizer(lrate=0.1, regularizers=["ridge"], modules=[NormClip(max_norm=0.5)]),
        Optimizer(lrate=("linear-decay", {"base": 0.1, "rate": 0.01}), modules=[NormClip(0.5)]),
    ],
)
def test_every_form_of_a_pipeline(pipeline: Any) -> None:
    found = analyse(pipeline, SHAPES)
    assert (found.l2_bound, found.per_record_safe, found.non_expansive) == (0.5, True, True)
    assert found.reasons == ()


def test_a_clipper_answers_for_itself() -> None:
    assert NormClip(max_norm=0.5).l2_bound(SHAPES) == 0.5
    assert NormClip(max_norm=0.5).sensitivity("add-remove", SHAPES) == 0.5
    assert NormClip(max_norm=0.5).sensitivity("replace-one", SHAPES) == 1.0
    # An empty tensor is none of the k.
    assert NormClip(scope="tensor").l2_bound(SHAPES) == pytest.approx(3**0.5, rel=1e-12)
    assert ValueClip(0.5).l2_bound(SHAPES) == pytest.approx(0.5 * 12**0.5, rel=1e-12)
    assert ZScoreClip(max_norm=None).l2_bound(SHAPES) is None
    assert ZScoreClip(max_norm=2.0).l2_bound(SHAPES) == 2.0
    assert ZScoreClip(max_norm=2.0).sensitivity("add-remove", SHAPES) is None


def test_an_optimizer_without_modules_bounds_nothing() -> None:
    found = analyse(Optimizer(lrate=0.1), SHAPES)
    assert found.l2_bound is None
    assert found.sensitivity("add-remove") is None
    assert found.sensitivity("add-remove", "aggregate", 0.3) == 0.3
    assert found.non_expansive
    assert str(found).startswith("no module: no L2 bound (nothing limits it).")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "a pipeline is a module"),
        (("norm-clp",), ValueError, "did you mean 'norm-clip'"),
        (([["norm-clip"]],), TypeError, "a pipeline is a module"),
        (("norm-clip", [(3, 2)]), TypeError, "shapes must be a dict"),
        (("norm-clip", {"w": 3}), TypeError, "got 3 for 'w'"),
        (("norm-clip", {"w": "ab"}), TypeError, "got 'ab' for 'w'"),
        (("norm-clip", {"w": (3, -1)}), ValueError, "shapes['w'] must be an int >= 0"),
        (("norm-clip", {"w": (3.0,)}), TypeError, "shapes['w'] must be an int >= 0"),
        ((["norm-clip", {"exclude": "x*"}], {"w": (1,)}), ValueError, "matches no tensor"),
    ],
)
def test_what_can_not_be_analysed(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        analyse(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("add-or-remov",), ValueError, "one of 'add-remove', 'replace-one'"),
        (("add-remove", "sum"), ValueError, "one of 'record', 'aggregate'"),
        (("add-remove", "record", 1.0), ValueError, "incoming goes with on='aggregate'"),
        (("add-remove", "aggregate", -1.0), ValueError, "incoming must be"),
        (("add-remove", "aggregate", math.nan), ValueError, "incoming must be"),
    ],
)
def test_what_is_no_sensitivity(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        analyse("norm-clip", SHAPES).sensitivity(*arguments)
    assert message in str(caught.value)


# -- values that are known without shapes, and formulas ---------------------------------------
@pytest.mark.parametrize(
    ("spec", "bound", "formula"),
    [
        ("norm-clip", 1.0, "1"),
        (("norm-clip", {"ord": 1.5}), 1.0, "1"),
        (("norm-clip", {"scope": "tensor"}), None, "1·√k for k tensors"),
        (("norm-clip", {"scope": "layer"}), None, "1·√k for k layers"),
        # One group more than patterns, at most.
        (("norm-clip", {"scope": ["a*", "b*"]}), 3**0.5, "1·√k for k groups"),
        (("norm-clip", {"scope": {"a*": 0.6}, "max_norm": 0.8}), 1.0, "√(Σ Cⱼ²)"),
        (("norm-clip", {"ord": "inf"}), None, "1·√d for d elements"),
        (("norm-clip", {"ord": "rms", "scope": "tensor"}), None, "1·√d for d elements"),
        (("norm-clip", {"ord": "mad"}), None, "1·d for d elements"),
        (("norm-clip", {"ord": 3}), None, "1·d^(1/2 - 1/3) for d elements"),
        (("norm-clip", {"ord": 4, "scope": "tensor"}), None, "1·√(Σ dⱼ^(1 - 2/4))"),
        (("norm-clip", {"ord": "mad", "scope": "tensor"}), None, "1·√(Σ dⱼ²)"),
        (("value-clip", {"max_value": 0.1}), None, "0.1·√d for d elements"),
        (("normalize", {"norm": 0.2, "scope": "tensor"}), None, "0.2·√k for k tensors"),
        ("standardize", None, "√(d - k) for d elements in k tensors"),
        (("standardize", {"scope": "global"}), None, "√(d - 1) for d elements"),
        ("agc", None, "0.01·√(Σ max(|W|, 0.001)²)"),
        (["norm-clip", "momentum"], 10.0, "10 times 1"),
        ([("value-clip", {}), ("norm-clip", {"scope": "tensor"})], None, "the lesser of"),
        ([("norm-clip", {"scope": "tensor"}), "norm-clip"], 1.0, "the lesser of"),
        (("zscore-clip", {"max_norm": None, "scope": "tensor"}), None, ""),
        (("norm-clip", {"exclude": "b"}), None, ""),
        (("norm-clip", {"dims": 0}), None, ""),
        (("norm-clip", {"max_norm": None, "min_norm": 1.0, "scope": "tensor"}), None, ""),
        (["norm-clip", "adam"], None, "2.34543·√d for d elements"),
        (["norm-clip", "yogi"], None, ""),
    ],
    ids=str,
)
def test_without_shapes(spec: Any, bound: float | None, formula: str) -> None:
    found = analyse(spec)
    if bound is None:
        assert found.l2_bound is None
    else:
        assert found.l2_bound == pytest.approx(bound, rel=1e-5)
        assert found.l2_bound >= bound
    assert found.formula.startswith(formula)
    assert bool(found.formula) == bool(formula)
    assert str(found)


def test_shapes_give_what_the_formula_says() -> None:
    found = analyse([("norm-clip", {"scope": "tensor"}), ("value-clip", {"max_value": 0.01})])
    assert found.l2_bound is None
    assert found.per_record_safe
    assert found.sensitivity("add-remove") is None
    assert found.explain("add-remove") == "There is no sensitivity to state without shapes."
    same = analyse(
        [("norm-clip", {"scope": "tensor"}), ("value-clip", {"max_value": 0.01})], SHAPES
    )
    assert same.l2_bound == pytest.approx(0.01 * 12**0.5, rel=1e-12)
    assert same.formula == "0.01·√d for d elements"


# -- weights ----------------------------------------------------------------------------------
def test_agc_is_judged_at_its_weights() -> None:
    weights = {"w": np.array([[3.0, 0.0], [4.0, 0.0]]), "b": np.array([0.0, 0.0])}
    agc = AGC(ratio=0.1, min_norm=0.5)
    # Columns of w of norms 5 and 0, and a vector of zeros: units of 0.5, 0.05 and 0.05.
    wanted = math.hypot(0.5, 0.05, 0.05)
    for given_ in (weights, NumpyVector(weights)):
        found = analyse(agc, weights=given_)
        assert found.l2_bound == pytest.approx(wanted, rel=1e-12)
        assert found.l2_bound >= wanted
    assert analyse(agc, {"w": (2, 2), "b": (2,)}).l2_bound is None
    assert "which have to be public" in analyse(agc).formula
    broken = {"w": np.array([[np.nan, 0.0], [4.0, 0.0]]), "b": np.zeros(2)}
    # Weights that are not finite count as zero.
    assert analyse(agc, weights=broken).l2_bound == pytest.approx(0.05 * 3**0.5)


# -- a round of local steps -------------------------------------------------------------------
def test_a_round_is_no_longer_than_its_bound() -> None:
    optimizer = Optimizer(lrate=0.5, modules=["norm-clip", ("momentum", {"beta": 0.8})])
    bound = analyse(optimizer, {"w": (4,)}).round_bound(steps=40)
    total = np.zeros(4)
    for _ in range(40):
        step = optimizer.compute_updates_from_gradients(None, NumpyVector({"w": np.ones(4)}))
        total += step.coefs["w"]
    assert 0.85 * bound < np.linalg.norm(total) <= bound
    assert bound == pytest.approx(0.5 * 40 * 5.0, rel=1e-5)


def test_no_bound_of_a_round_is_rounded_below_it() -> None:
    found = analyse(("norm-clip", {"max_norm": 0.7}))
    assert found.l2_bound is not None
    for rate in (0.1, 0.3, 1e-3):
        for steps in range(1, 40):
            bound = found.round_bound(steps, rate)
            assert bound is not None
            assert Fraction(bound) >= Fraction(rate) * steps * Fraction(found.l2_bound)
            assert bound == pytest.approx(rate * steps * found.l2_bound)


def test_what_a_round_needs() -> None:
    assert analyse(Optimizer(lrate=0.1, w_decay=0.1, modules=["norm-clip"])).round_bound(3) is None
    assert analyse(Optimizer(lrate=0.1)).round_bound(3) is None
    falling = Optimizer(lrate=("linear-decay", {"base": 0.1, "rate": 0.01}), modules=["norm-clip"])
    with pytest.raises(ValueError, match="needs lrate"):
        analyse(falling).round_bound(3)
    assert analyse(falling).round_bound(3, lrate=0.1) == pytest.approx(0.3)
    assert analyse("norm-clip").round_bound(3, lrate=-0.1) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="steps must be an int >= 1"):
        analyse("norm-clip").round_bound(0, lrate=0.1)


# -- noise ------------------------------------------------------------------------------------
def test_noise_first_makes_all_that_follows_free() -> None:
    found = analyse(["gaussian-noise", "norm-clip"], SHAPES)
    # The output has a bound, and no sensitivity follows from it.
    assert found.l2_bound == 1.0
    assert not found.per_record_safe
    assert found.sensitivity("add-remove") is None
    assert found.sensitivity("add-remove", "aggregate", 1.0) is None
    assert "comes first" in found.explain("add-remove")
    assert found.before_noise.maps == ()


def test_what_comes_before_noise_is_what_noise_is_sized_on() -> None:
    found = analyse([("norm-clip", {"max_norm": 0.5}), "gaussian-noise", "adam"], SHAPES)
    assert found.l2_bound is None
    assert found.sensitivity("add-remove") is None
    assert found.before_noise.sensitivity("replace-one") == 1.0
    assert "Before the noise: norm-clip: the L2 norm is at most 0.5." in str(found)


# -- tables that others extend ----------------------------------------------------------------
class Halve(OptiModule, register=False):
    name = "halve"

    def run(self, gradients: Any) -> Any:
        return gradients * 0.5


def test_a_plugin_that_is_not_known_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = analyse(["norm-clip", Halve()], SHAPES)
    assert found.l2_bound is None
    assert "halve: fedclip does not know what it does" in found.reasons

    def halve(module: Any, context: Context) -> Map:
        return Map("halve", lipschitz=0.5, growth=0.5, finite=context.finite, unbounded="it halves")

    monkeypatch.setitem(MAPS, "halve", halve)
    found = analyse(["norm-clip", Halve()], SHAPES)
    assert (found.l2_bound, found.lipschitz) == (0.5, 0.5)
    assert found.sensitivity("add-remove", "aggregate", 0.1) == 0.05


# -- numbers are rounded up -------------------------------------------------------------------
@given(st.floats(1e-300, 1e300), st.integers(1, 10**9), st.sampled_from([1, 2, 3, 7.5, "inf"]))
def test_no_number_is_below_the_truth(limit: float, size: int, ord: Any) -> None:
    from fractions import Fraction

    power = {1: 0, 2: 0, 3: Fraction(1, 6), 7.5: Fraction(1, 2) - Fraction(2, 15)}.get(
        ord, Fraction(1, 2)
    )
    found = l2_of(ord, limit, size)
    if not math.isinf(found):
        p, q = (power.numerator, power.denominator) if power else (0, 1)
        assert Fraction(found) ** q >= Fraction(limit) ** q * size**p
        assert found <= limit * float(size) ** float(power) * (1 + 1e-12)
    assert stretch(ord, size) >= 1.0


@given(st.lists(st.tuples(st.floats(1e-200, 1e200), st.integers(1, 1000)), min_size=1))
def test_no_root_of_squares_is_below_the_truth(terms: list[tuple[float, int]]) -> None:
    from fractions import Fraction

    found = root_of_squares(terms)
    truth = sum(n * Fraction(v) ** 2 for v, n in terms)
    assert Fraction(found) ** 2 >= truth
    assert Fraction(found) ** 2 <= truth * Fraction(outwards(outwards(outwards(1.0))))


# -- in words ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            ("norm-clip", {"scope": "tensor"}),
            "norm-clip: the L2 norm is at most 1.73205 (1·√k for k tensors). Per record: the "
            "sensitivity of a sum is 1.73205 if a record is added or removed, and twice that if "
            "one is replaced. On an aggregate: it makes no sensitivity larger (it is "
            "non-expansive).",
        ),
        (
            ["norm-clip", "momentum"],
            "norm-clip, momentum: the L2 norm is at most 10 (10 times 1). Not safe per record "
            "(momentum: it carries the gradients of earlier steps along). On an aggregate: it can "
            "make a sensitivity larger (momentum: gradients add up over steps, to 1 / (1 - beta) = "
            "10 times the largest); that is then at most 10 times the one before and at most 20.",
        ),
        (
            "percentile-clip",
            "percentile-clip: no L2 bound (its limit is a percentile of the very gradient that it "
            "clips). On an aggregate: it can make a sensitivity larger (one element moves the "
            "limit of all); that is then not bounded.",
        ),
        (
            "l2-global-clipping",
            "l2-global-clipping: no L2 bound (it passes NaN and infinity on, which have no norm; "
            "for finite gradients it is 1, and norm-clip with max_norm=1.0 is so for all). On an "
            "aggregate: it makes no sensitivity larger (it is non-expansive).",
        ),
    ],
    ids=str,
)
def test_sentences(spec: Any, said: str) -> None:
    assert str(analyse(spec, SHAPES)) == said


def test_explanations() -> None:
    def explain(spec: Any, *arguments: Any) -> str:
        found: Analysis = analyse(spec, SHAPES)
        return found.explain(*arguments)

    assert explain("norm-clip", "replace-one") == "The sensitivity (replace-one, record) is 2."
    assert explain("zscore-clip", "add-remove") == (
        "There is no sensitivity: its limit is learnt from the gradients of earlier steps, and "
        "max_norm is not set; its limit is learnt from the gradients of earlier steps."
    )
    assert explain(("zscore-clip", {"max_norm": 1.0}), "add-remove") == (
        "There is no sensitivity per record: its limit is learnt from the gradients of earlier "
        "steps."
    )
    assert explain("centralize", "add-remove") == (
        "There is no sensitivity: it takes the mean away, and limits nothing."
    )


# -- fedclip check ----------------------------------------------------------------------------
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        (tmp_path / "c.toml").write_text(textwrap.dedent(text))
        return tmp_path / "c.toml"

    return write


def test_check_says_what_is_clipped_where(write: Write) -> None:
    file = write(
        """
        [client_opt]
        lrate = 0.5
        modules = [["norm-clip", {max_norm = 2.0}]]
        [server_opt]
        lrate = 1.0
        modules = [["norm-clip", {scope = "tensor"}]]
        [aggregator]
        name = "clipped-averaging"
        max_norm = 0.3
        """
    )
    step, update, aggregate = check_config(file).places
    assert step.startswith("step: norm-clip: the L2 norm is at most 2.")
    assert step.endswith("A round's update is at most 0.5 times the number of steps times that.")
    assert update.startswith("update: clipped-averaging: the L2 norm is at most 0.3.")
    assert "the sensitivity of the sum is 0.3 if a client is added or removed" in update
    assert "at most 1·√k for k tensors" in aggregate
    result = CliRunner().invoke(fedclip.tools.cli.app, ["check", str(file)])
    assert "What is clipped where:\n  step: norm-clip" in result.stdout
    found = json.loads(
        CliRunner().invoke(fedclip.tools.cli.app, ["check", str(file), "--json"]).stdout
    )
    assert found["places"] == [step, update, aggregate]


def test_check_says_what_an_adaptive_bound_is(write: Write) -> None:
    file = write(
        """
        [client_opt]
        lrate = 0.5
        modules = ["update-clip-client"]
        [server_opt]
        lrate = 1.0
        modules = [["update-clip-server", {max_norm = 7.0}]]
        [aggregator]
        name = "clipped-averaging"
        """
    )
    _, update, _ = check_config(file).places
    assert "at most the bound C that update-clip-server sends in the round, never above 7" in update


def test_check_says_nothing_of_a_file_with_problems(write: Write) -> None:
    assert check_config(write("[client_opt]\nlrate = 0.5\nmodules = ['norm-clp']")).places == []


def test_check_multiplies_a_fixed_number_of_steps(write: Write) -> None:
    file = write(
        """
        [network]
        protocol = "websockets"
        [data]
        [optim.client_opt]
        lrate = 0.5
        modules = ["norm-clip"]
        [run]
        rounds = 3
        [run.register]
        min_clients = 1
        [run.training]
        batch_size = 8
        n_steps = 14
        """
    )
    assert "at most 0.5 times 14 steps times that, 7." in check_config(file).places[0]
    file = write(file.read_text() + "[run.privacy]\nbudget = [1.0, 1e-5]\nsclip_norm = 1.0\n")
    assert "It acts on noise, which [run.privacy] adds first" in check_config(file).places[0]
    file = write("[client_opt]\nlrate = 0.5\nw_decay = 0.1\nmodules = ['norm-clip']")
    assert "A round's update has no bound: weight decay" in check_config(file).places[0]


@pytest.mark.parametrize(
    ("modules", "warning"),
    [
        ('["norm-clip", "momentum"]', "momentum comes after norm-clip and lets its bound"),
        ('["norm-clip", "adam"]', "adam comes after norm-clip and lets its bound be exceeded"),
        ('["norm-clip", "normalize"]', "normalize comes after norm-clip"),
        ('["l2-global-clipping", "momentum"]', "momentum comes after l2-global-clipping"),
        ('["l2-clipping"]', "l2-clipping limits each tensor by itself, all k together to 1·√k"),
        (
            '[["zscore-clip", {max_norm = 1.0}], "gaussian-noise"]',
            "zscore-clip is an adaptive rule before gaussian",
        ),
        ('["zscore-clip", "gaussian-noise"]', "nothing bounds what gaussian-noise is added to"),
        ('["ema-clip", "gaussian-noise"]', "nothing bounds what gaussian-noise is added to"),
        (
            '[["norm-clip", {scope = "tensor"}], "gaussian-noise"]',
            "gaussian-noise must be sized on 1·√k for k tensors, not on the limit of one of them",
        ),
    ],
)
def test_check_warns_of_what_does_not_hold(write: Write, modules: str, warning: str) -> None:
    found = check_config(write(f"[client_opt]\nlrate = 0.5\nmodules = {modules}"))
    assert found.ok
    assert any(warning in f.message for f in found.findings if f.level == "note")


@pytest.mark.parametrize(
    "modules",
    [
        '["momentum", "norm-clip"]',
        '["norm-clip", "zscore-clip"]',
        '["norm-clip", ["ewma", {beta = 0.9}]]',
        '["norm-clip", "gaussian-noise", "adam"]',
        '["norm-clip", "centralize"]',
        '["adam"]',
    ],
)
def test_check_does_not_warn_of_what_holds(write: Write, modules: str) -> None:
    found = check_config(write(f"[client_opt]\nlrate = 0.5\nmodules = {modules}"))
    # What declearn releases is said of all noise, whatever the clippers before it bound.
    notes = [f.message for f in found.findings if f.level == "note" and "run" not in f.where]
    assert all("clients need fedclip" in note for note in notes)


# -- without declearn -------------------------------------------------------------------------
WITHOUT = """
import sys, types, importlib.abc
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("declearn", "torch", "tensorflow", "jax", "opacus"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
package = types.ModuleType("fedclip")
package.__path__ = [sys.argv[1]]
sys.modules["fedclip"] = package
"""


def test_the_arithmetic_works_without_declearn() -> None:
    code = """
    import numpy as np
    from fedclip.privacy import Context, Map, kinds
    from fedclip.privacy.accounting import Accountant, split_noise
    from fedclip.privacy.noise import add_noise, secure_normals
    from fedclip.privacy.sensitivity import compose
    class Clip:
        name, scope, exclude, ord, on_nonfinite = "mine", "tensor", None, 2, "skip"
        max_norm, min_norm = 0.5, None
    found = compose((kinds.fixed_limit(Clip(), Context({"a": (3,), "b": (2, 2)})),))
    assert 0.70 < found.sensitivity("add-remove") < 0.71
    assert split_noise(1.0, 1.0) > 1.0
    assert add_noise({"w": np.zeros(3)}, 1.0, secure_normals)["w"].shape == (3,)
    assert not [name for name in sys.modules if name.startswith(("declearn", "opacus"))]
    """
    script = WITHOUT + textwrap.dedent(code)
    folder = Path(fedclip.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
