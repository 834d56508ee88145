# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers, run side by side with ours on random models and gradients.

`translate.translate` says which clipper of ours gives a peer's numbers. Here the peer itself runs,
as its users would call it, with random parameters, and gives the same; or, where it has a
defect, it is left out of what is drawn: docs/developers/peers-defects.md shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import norm, require

from fedclip import translate
from fedclip.testing import apply, to_numpy, to_vector

pytestmark = pytest.mark.slow

Array: TypeAlias = "np.ndarray[Any, Any]"
Arrays: TypeAlias = dict[str, Array]
Config: TypeAlias = dict[str, Any]

SEEDS = range(4)


class Problem(NamedTuple):
    """Weights, and a gradient of them for each step."""

    weights: Arrays
    steps: list[Arrays]


Run: TypeAlias = Callable[[str, Config, Problem], list[Arrays]]
"""Runs a class of a peer, given its parameters, and returns what it makes of each gradient."""


# -- random models, gradients and parameters --------------------------------------------------
class Draw:
    """Random numbers, in the terms of the rows below."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def real(self, low: float, high: float) -> float:
        """Return a number with a random order of magnitude."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def share(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def of(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def problem(self, steps: int, zeros: bool) -> Problem:
        """Return a model and its gradients."""
        names = ["scale", "a.weight", "a.bias", "b.weight", "b.bias", "b.c.kernel"]
        chosen = self.rng.permutation(names)[: self.rng.integers(1, len(names) + 1)]
        shapes = {
            str(name): tuple(self.rng.integers(1, 6, size=self.rng.integers(5)))
            for name in sorted(chosen)
        }
        sizes = {name: self.real(0.02, 0.5) for name in shapes}
        weights = {name: np.asarray(self.rng.normal(0, 1, s)) for name, s in shapes.items()}
        mean = {name: np.asarray(self.rng.normal(0, 1, s)) for name, s in shapes.items()}
        stream = []
        for t in range(steps):
            level = self.real(0.7, 1.4) * self.of(1, 1, 1, 1, 1, 1, 1, 1e-2, 5, 40)
            step = {
                name: np.asarray(level * sizes[name] * (mean[name] + self.rng.normal(0, 1, shape)))
                for name, shape in shapes.items()
            }
            thin = {name: self.thinned(value) for name, value in step.items()}
            # The first norms start the statistics; nothing but zeros is an edge case.
            stream.append(thin if zeros and t > 2 and norm(thin) > 0 else step)
        return Problem(weights, stream)

    def thinned(self, value: Array) -> Array:
        """Return what a rectifier leaves: no gradient in some rows, or at all."""
        if self.rng.random() < 0.05:
            return np.zeros_like(value)
        if value.ndim > 1:
            value = value.copy()
            value[self.rng.random(len(value)) < 0.1] = 0.0
        return value


# -- running ours and theirs ------------------------------------------------------------------
def build(peer: str, cls: str, config: Config, **ours: Any) -> Any:
    """Return the clipper that a peer's translates to; `ours` replaces parameters."""
    kind, name, translated = translate.translate(peer, cls, config)
    base: Any = OptiModule if kind == "module" else Regularizer
    return base.from_specs(name, {**translated, **ours})


def run_ours(clipper: Any, problem: Problem) -> list[Arrays]:
    weights = to_vector(problem.weights)
    return [to_numpy(apply(clipper, to_vector(step), weights)) for step in problem.steps]


def torch_model(weights: Mapping[str, Array]) -> Any:
    """Return a model whose parameters have these names and values."""
    torch = require("torch")
    root = torch.nn.Module()
    for name, value in weights.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, torch.nn.Parameter(torch.tensor(value)))
    return root


def in_place(problem: Problem, operation: Callable[[Any], Any]) -> list[Arrays]:
    """Return the gradients of a torch model after the operation on it."""
    torch = require("torch")
    model = torch_model(problem.weights)
    parameters = dict(model.named_parameters())
    outputs = []
    for step in problem.steps:
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(step[name])
        operation(model)
        outputs.append({name: p.grad.numpy().copy() for name, p in parameters.items()})
    return outputs


def drytorch(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    if cls.endswith("Criterion"):
        clipper = ops.HistClipper(getattr(ops, cls)(**config), ops.NoOp(), 0)
    elif "criterion" not in config:
        clipper = getattr(ops, cls)(**config)
    else:
        functions = {name: getattr(ops, f"{name}_clipping") for name in ("max", "reciprocal")}
        # To the running mean, as is documented: drytorch's own zeroes the gradient.
        functions["mean"] = (
            ops.mean_clipping if config["criterion"] == "zstat" else lambda ratio, limit: 1.0
        )
        criteria = {"zstat": ops.ZStatCriterion, "ema": ops.EMACriterion}
        criterion = criteria[config["criterion"]](
            config["alpha"], config["thresh"], functions[config["clipping_function"]]
        )
        warmup = {
            "norm1": ops.GradNormClipper(1),
            "noop": ops.NoOp(),
            "GradNormClipper(0.3)": ops.GradNormClipper(0.3),
        }
        clipper = getattr(ops, cls)(
            criterion, warmup[config["warmup_clip_strategy"]], config["n_warmup_steps"]
        )
    return in_place(problem, lambda model: clipper(model.parameters()))


def smartclip(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    package = pytest.importorskip("smartclip")
    clipper = getattr(package, cls)(**config)
    return in_place(problem, lambda model: package.apply(model, clipper))


def torchzero(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    package = pytest.importorskip("torchzero")
    # Together, all tensors would get the dims of the first: a defect.
    if "dim" in config and config["dim"] is None and len(problem.weights) > 1:
        alone = [torchzero(cls, config, only(problem, name)) for name in problem.weights]
        return [{k: v for one in step for k, v in one.items()} for step in zip(*alone, strict=True)]
    if cls.endswith("_"):
        clip = getattr(package.m, cls)
        return in_place(problem, lambda model: clip(model.parameters(), **config))
    return torchzero_steps(package, getattr(package.m, cls)(**config), problem)


def torchzero_steps(package: Any, module: Any, problem: Problem) -> list[Arrays]:
    """Return the updates: the weights start from zero at each step."""
    torch = require("torch")
    model = torch_model({name: np.zeros_like(g) for name, g in problem.steps[0].items()})
    parameters = dict(model.named_parameters())
    optimizer = package.Optimizer(list(parameters.values()), module)
    outputs = []
    for step in problem.steps:
        for name, parameter in parameters.items():
            parameter.data.zero_()
            parameter.grad = torch.tensor(step[name])
        optimizer.step()
        outputs.append({name: -p.detach().numpy() for name, p in parameters.items()})
    return outputs


def only(problem: Problem, name: str) -> Problem:
    return Problem({name: problem.weights[name]}, [{name: step[name]} for step in problem.steps])


RUN: dict[str, Run] = {"drytorch": drytorch, "smartclip": smartclip, "torchzero": torchzero}


# -- the same numbers -------------------------------------------------------------------------
class Row(NamedTuple):
    """A class of a peer, and how its parameters are drawn."""

    peer: str
    cls: str
    config: Callable[[Draw], Config]
    label: str = ""
    steps: int = 8
    """How many; those with statistics need more."""
    zeros: bool = True
    """Some tensors, or rows of them, are zero."""
    nan: bool = False
    """The peer makes NaN of tensors of one element; ours stay finite."""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.peer, self.cls, self.label)))


def history(criterion: str, function: str) -> Callable[[Draw], Config]:
    def config(draw: Draw) -> Config:
        return {
            "criterion": criterion,
            "clipping_function": function,
            "n_warmup_steps": draw.of(0, 1, 2, 5, 20),
            "warmup_clip_strategy": draw.of("norm1", "noop", "GradNormClipper(0.3)"),
            "alpha": draw.share(0.7, 0.99),
            "thresh": draw.share(1.0, 3.0) if criterion == "zstat" else draw.share(1.01, 1.6),
        }

    return config


def gate(draw: Draw) -> Config:
    return {
        "scope": draw.of("global", "per_layer", "per_param"),
        "warmup_steps": int(draw.rng.integers(0, 20)),
        "min_history": int(draw.rng.integers(0, 20)),
        "eps": draw.of(1e-8, 1e-4),
    }


def along(draw: Draw, *, ord: bool = True, least: Sequence[int] = (1, 1, 2, 3)) -> Config:
    """Return what torchzero measures, and along which dims."""
    kind = draw.of("none", "int", "list", "global")
    dim = {"none": None, "int": draw.of(0, 1, 2), "list": draw.of([0, 1], [1, 2], [0, 3], [])}
    config = {
        "dim": dim.get(kind, "global"),
        # Without dims, inverting them leaves nothing.
        "inverse_dims": kind in ("int", "list") and draw.of(True, False),
        "min_size": draw.of(*least),
    }
    if ord:
        config["ord"] = draw.of(1, 2, 2, 3, math.inf, "l1", "l2", "l3", "l4", "linf", "mad", "std")
        if config["ord"] == "std":
            # One element has no spread: theirs is NaN.
            config["min_size"] = draw.of(2, 3)
    return config


def max_norm(draw: Draw, **config: Any) -> Config:
    return {"max_norm": draw.real(0.05, 5.0), **config}


def agc(draw: Draw) -> Config:
    return {
        "clipping": draw.real(0.01, 1.0),
        "exclude_bias_bn": draw.of(True, False),
        "scope": draw.of("global", "per_layer", "per_param"),
        "eps": draw.of(1e-8, 1e-3),
    }


def by_ema(draw: Draw) -> Config:
    tensorwise = draw.of(True, False)
    return {
        "beta": draw.share(0.5, 0.99),
        # Words are for the whole only: theirs differ.
        "ord": draw.of(1, 2, 3, math.inf) if tensorwise else draw.of(1, 2, "l1", "linf", "mad"),
        "tensorwise": tensorwise,
        "max_ema_growth": draw.of(None, 1.1, 1.5, 3.0),
        "init": draw.of(0.0, 0.1),
        "min_norm": draw.of(1e-6, 1e-2),
    }


def growth(draw: Draw, *floors: float | None) -> Config:
    add, mul = draw.of((None, 1.5), (0.1, None), (0.05, 1.2), (None, 1.05), (1.0, 3.0))
    return {
        "add": add,
        "mul": mul,
        "min_value": draw.of(*floors),
        "max_decay": draw.of(None, 1.1, 2, 5.0),
    }


ROWS = [
    Row("drytorch", "NoOp", lambda draw: {}),
    Row("drytorch", "GradNormClipper", lambda draw: {"threshold": draw.real(0.05, 5.0)}),
    Row("drytorch", "GradValueClipper", lambda draw: {"threshold": draw.real(0.02, 2.0)}),
    Row("drytorch", "GradParamNormalizer", lambda draw: {}),
    Row("drytorch", "GradZScoreNormalizer", lambda draw: {}, nan=True),
    *(
        Row("drytorch", cls, history(criterion, function), f"{criterion}-{function}", steps=45)
        for cls in ("HistClipper", "ParamHistClipper")
        for criterion in ("zstat", "ema")
        for function in ("max", "mean", "reciprocal")
    ),
    *(
        Row(
            "drytorch",
            f"{criterion}Criterion",
            lambda draw, limit=limit: {"alpha": draw.share(0.7, 0.99), limit: draw.share(1.0, 3.0)},
            steps=45,
        )
        for criterion, limit in (("ZStat", "z_thresh"), ("EMA", "r_thresh"))
    ),
    Row(
        "smartclip",
        "ZScoreClip",
        lambda draw: {
            "zmax": draw.share(0.5, 3.0),
            "ema_decay": draw.share(0.7, 0.99),
            **gate(draw),
        },
        steps=45,
        zeros=False,
    ),
    Row(
        "smartclip",
        "AutoClip",
        lambda draw: {
            "mode": "percentile",
            "history": "window",
            "percentile": draw.of(1.0, 10, 50.0, 83.3, 95.0, 100.0),
            "window_size": draw.of(1, 2, 7, 20, 1024),
            **gate(draw),
        },
        steps=45,
        zeros=False,
    ),
    # Its warm-up, which ours does without, is left out.
    Row("smartclip", "AGC", agc),
    Row("torchzero", "ClipNorm", lambda draw: max_norm(draw, **along(draw))),
    Row(
        "torchzero",
        "clip_grad_norm_",
        lambda draw: {
            "max_norm": draw.of(None, 0.3, 2.0),
            "min_norm": draw.of(None, 0, 0.1, 0.2),
            **along(draw, least=(1, 2, 3)),
        },
    ),
    Row("torchzero", "Normalize", lambda draw: {"norm_value": draw.real(0.05, 5.0), **along(draw)}),
    Row(
        "torchzero",
        "normalize_grads_",
        lambda draw: {"norm_value": draw.real(0.05, 5.0), **along(draw)},
    ),
    Row("torchzero", "Centralize", lambda draw: along(draw, ord=False, least=(1, 2, 3))),
    Row("torchzero", "ClipValue", lambda draw: {"value": draw.real(0.02, 2.0)}),
    Row("torchzero", "clip_grad_value_", lambda draw: {"value": draw.real(0.02, 2.0)}),
    Row("torchzero", "ClipNormByEMA", by_ema, steps=30),
    Row("torchzero", "NormalizeByEMA", by_ema, steps=30),
    Row(
        "torchzero",
        "ClipValueByEMA",
        lambda draw: {"beta": draw.share(0.5, 0.99), "init": draw.of(0, 0.5, 1)},
        steps=30,
    ),
    Row(
        "torchzero",
        "ClipNormGrowth",
        lambda draw: {
            "ord": draw.of(1, 2, 3, math.inf),
            "tensorwise": draw.of(True, False),
            # Its floor is another one where it is more than 1: a defect.
            **growth(draw, 1e-4, 1e-6),
        },
        steps=30,
    ),
    Row("torchzero", "ClipValueGrowth", lambda draw: growth(draw, 1e-4, 0.1, 2.0), steps=30),
]


# A problem may have one small tensor only, of which no slice is limited.
@pytest.mark.filterwarnings("ignore:.* clips nothing")
# torch, of the spread of one element.
@pytest.mark.filterwarnings(r"ignore:std\(\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_same_numbers(row: Row) -> None:
    acted = False
    for seed in SEEDS:
        draw = Draw(ROWS.index(row), seed)
        config = row.config(draw)
        problem = draw.problem(row.steps, row.zeros)
        theirs = RUN[row.peer](row.cls, config, problem)
        with np.errstate(all="raise", under="ignore"):
            ours = run_ours(build(row.peer, row.cls, config, **gate_of(config, problem)), problem)
        compare(ours, theirs, problem, f"seed {seed}, {config}", row.nan)
        acted |= any(
            not np.array_equal(output[name], gradient)
            for step, output in zip(problem.steps, ours, strict=True)
            for name, gradient in step.items()
        )
    assert acted == (row.cls != "NoOp")


def gate_of(config: Config, problem: Problem) -> Config:
    """Return our warm-up, in calls, for smartclip's, in norms of any group."""
    if "min_history" not in config:
        return {}
    layers = {name.rpartition(".")[0] for name in problem.weights}
    groups = {"global": 1, "per_layer": len(layers), "per_param": len(problem.weights)}
    norms = max(config["warmup_steps"], config["min_history"])
    return {"warmup": math.ceil(norms / groups[config["scope"]])}


def compare(
    ours: list[Arrays], theirs: list[Arrays], problem: Problem, where: str, nan: bool
) -> None:
    assert len(ours) == len(theirs)
    for t, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        for name, gradient in problem.steps[t].items():
            assert got[name].shape == gradient.shape
            assert got[name].dtype == gradient.dtype
            assert np.isfinite(got[name]).all()
            if nan and gradient.size == 1:
                assert np.isnan(wanted[name]).all()
                continue
            message = f"{where}, step {t}, {name}"
            np.testing.assert_allclose(got[name], wanted[name], 1e-9, 1e-12, err_msg=message)


def test_every_class_that_is_here_is_compared() -> None:
    compared = {(row.peer, row.cls) for row in ROWS}
    # smartclip's default percentile has a defect. Those that are not here are in tests/golden.
    for peer in RUN:
        assert {cls for p, cls in compared if p == peer} == set(translate.known()[peer])
