"""What `fedclip.analyse` answers, to whom, and in which words."""

import math
from fractions import Fraction
from typing import Any

import pytest
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import OptiModule
from hypothesis import given
from hypothesis import strategies as st

from fedclip import NormClip, ValueClip, ZScoreClip, analyse
from fedclip.privacy import GUARANTEES, Context, Guarantee
from fedclip.privacy.guarantees import l2_of, stretch

SHAPES = {"enc.w": (3, 2), "enc.b": (2,), "head.w": (2, 2), "none": (0, 7)}


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "a pipeline is a plug-in"),
        (("norm-clp",), ValueError, "did you mean 'norm-clip'"),
        (("norm-clip", {"w": "ab"}), TypeError, "got 'ab' for 'w'"),
        (("norm-clip", {"w": (3, -1)}), ValueError, r"shapes\['w'\] must be an int >= 0"),
        ((["norm-clip", {"exclude": "x*"}], {"w": (1,)}), ValueError, "matches no tensor"),
    ],
)
def test_what_can_not_be_analysed(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        analyse(*arguments)


@pytest.mark.parametrize(
    ("spec", "bound", "formula"),
    [
        ("norm-clip", 1.0, "1"),
        (("norm-clip", {"scope": "tensor"}), None, "1·√k for k tensors"),
        # One group more than patterns, at most.
        (("norm-clip", {"scope": ["a*", "b*"]}), 3**0.5, "1·√k for k groups"),
        (("norm-clip", {"scope": {"a*": 0.6}, "max_norm": 0.8}), 1.0, "√(Σ Cⱼ²)"),
        (("norm-clip", {"ord": "inf"}), None, "1·√d for d elements"),
        (("norm-clip", {"ord": 4, "scope": "tensor"}), None, "1·√(Σ dⱼ^(1 - 2/4))"),
        (("value-clip", {"max_value": 0.1}), None, "0.1·√d for d elements"),
        (("normalize", {"norm": 0.2, "scope": "tensor"}), None, "0.2·√k for k tensors"),
        ("standardize", None, "√(d - k) for d elements in k tensors"),
        ("agc", None, "1·√(Σ max(|W|, 1)²)"),
        ([("value-clip", {}), ("norm-clip", {"scope": "tensor"})], None, "the lesser of"),
        ([("norm-clip", {"scope": "tensor"}), "norm-clip"], 1.0, "the lesser of"),
        (["norm-clip", ("norm-clip", {"max_norm": 2.0})], 1.0, "1"),
        (("zscore-clip", {"max_norm": None, "scope": "tensor"}), None, ""),
        (["norm-clip", "adam"], None, ""),
    ],
    ids=str,
)
def test_without_shapes(spec: Any, bound: float | None, formula: str) -> None:
    found = analyse(spec)
    assert (found.l2_bound is None) == (bound is None)
    assert bound is None or bound <= found.l2_bound == pytest.approx(bound, rel=1e-5)
    assert found.formula.startswith(formula)
    assert bool(found.formula) == bool(formula)
    assert str(found)


def test_what_a_round_needs() -> None:
    assert analyse(Optimizer(lrate=0.1, w_decay=0.1, modules=["norm-clip"])).round_bound(3) is None
    assert analyse(Optimizer(lrate=0.1)).round_bound(3) is None
    falling = Optimizer(lrate=("linear-decay", {"base": 0.1, "rate": 0.01}), modules=["norm-clip"])
    for found in (analyse(falling), analyse("norm-clip")):
        with pytest.raises(ValueError, match="needs an optimizer with a learning rate"):
            found.round_bound(3)
    with pytest.raises(ValueError, match="steps must be an int >= 1"):
        analyse("norm-clip").round_bound(0)
    # No bound is rounded below the truth.
    for rate in (0.1, 0.3, 1e-3):
        found = analyse(Optimizer(lrate=rate, modules=[("norm-clip", {"max_norm": 0.7})]))
        for steps in range(1, 40):
            bound = found.round_bound(steps)
            assert Fraction(bound) >= Fraction(rate) * steps * Fraction(found.l2_bound)
            assert bound == pytest.approx(rate * steps * found.l2_bound)


def test_noise_first_makes_all_that_follows_free() -> None:
    found = analyse(["gaussian-noise", "norm-clip"], SHAPES)
    # The output has a bound, and no sensitivity follows from it.
    assert found.l2_bound == 1.0
    assert not found.per_record_safe
    assert found.sensitivity("add-remove") is None
    assert found.sensitivity("add-remove", "aggregate", 1.0) is None
    assert "comes first" in str(found)
    assert found.before_noise.guarantees == ()
    later = analyse([("norm-clip", {"max_norm": 0.5}), "gaussian-noise", "adam"], SHAPES)
    assert (later.l2_bound, later.sensitivity("add-remove")) == (None, None)
    assert later.before_noise.sensitivity("replace-one") == 1.0
    assert "Before the noise: norm-clip: the L2 norm is at most 0.5." in str(later)


class Halve(OptiModule, register=False):
    name = "halve"

    def run(self, gradients: Any) -> Any:
        return gradients * 0.5


def test_a_plugin_that_is_not_known_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = analyse(["norm-clip", Halve()], SHAPES)
    assert found.l2_bound is None
    assert "halve: no bound is known of it" in found.reasons

    def halve(module: Any, context: Context) -> Guarantee:
        finite = context.finite
        return Guarantee("halve", lipschitz=0.5, growth=0.5, finite=finite, unbounded="it halves")

    monkeypatch.setitem(GUARANTEES, "halve", halve)
    found = analyse(["norm-clip", Halve()], SHAPES)
    assert (found.l2_bound, found.lipschitz) == (0.5, 0.5)
    assert found.sensitivity("add-remove", "aggregate", 0.1) == 0.05


@given(st.floats(1e-300, 1e300), st.integers(1, 10**9), st.sampled_from([1, 2, 3, 7.5, "inf"]))
def test_no_number_is_below_the_truth(limit: float, size: int, ord: Any) -> None:
    half, power = Fraction(1, 2), Fraction(0)
    if ord not in (1, 2):
        power = half if ord == "inf" else half - 1 / Fraction(ord)
    found = l2_of(ord, limit, size)
    if not math.isinf(found):
        p, q = power.numerator, power.denominator
        assert Fraction(found) ** q >= Fraction(limit) ** q * size**p
        assert found <= limit * float(size) ** float(power) * (1 + 1e-12)
    assert stretch(ord, size) >= 1.0


def test_check_multiplies_a_fixed_number_of_steps(checked: Any) -> None:
    text = """
    network = { protocol = "websockets" }
    data = {}
    optim.client_opt = { lrate = 0.5, modules = ["norm-clip"] }
    [run]
    rounds = 3
    register = { min_clients = 1 }
    training = { batch_size = 8, n_steps = 14 }
    """
    assert "at most 0.5 times 14 steps times this limit: 7." in checked(text).places[0]
    text += "privacy = { budget = [1.0, 1e-5], sclip_norm = 1.0 }\n"
    assert "It acts on noise, which [run.privacy] adds first" in checked(text).places[0]
    text = "[client_opt]\nlrate = 0.5\nmodules = ['norm-clip']\nw_decay = 0.1\n"
    assert "A round's update has no bound: weight decay" in checked(text).places[0]
