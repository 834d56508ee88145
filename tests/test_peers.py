# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers, run side by side with ours on random models and gradients.

`compat.translate` says which clipper of ours gives a peer's numbers. Here the peer itself runs,
as its users would call it, with random parameters, and gives the same; or, where it has a
defect, it does what the test says and ours does not.
"""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from helpers import norm, require

from fedclip import compat
from fedclip.testing import apply, to_numpy, to_vector

pytestmark = pytest.mark.slow

Array: TypeAlias = "np.ndarray[Any, Any]"
Arrays: TypeAlias = dict[str, Array]
Config: TypeAlias = dict[str, Any]

SEEDS = range(8)


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

    def problem(self, steps: int, dims: int, zeros: bool) -> Problem:
        """Return a model of tensors that have at least so many dimensions, and its gradients."""
        names = ["scale", "a.weight", "a.bias", "b.weight", "b.bias", "b.c.kernel"]
        chosen = self.rng.permutation(names)[: self.rng.integers(1, len(names) + 1)]
        shapes = {
            str(name): tuple(self.rng.integers(1, 6, size=self.rng.integers(dims, 5)))
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
    kind, name, translated = compat.translate(peer, cls, config)
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
        # To the running mean, as is documented: see test_mean_clipping_erases.
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


def smartclip_tf(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    tf = require("tensorflow")
    package = pytest.importorskip("smartclip")
    backend = pytest.importorskip("smartclip.backends.tf")
    clipper = getattr(package, cls)(**config)
    variables = [tf.Variable(value) for value in problem.weights.values()]
    model = SimpleNamespace(trainable_variables=variables)

    def clip(values: list[Any]) -> list[Any]:
        return list(backend.apply_grads(values, model, clipper))

    return as_lists(clip, problem)


def torchzero(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    package = pytest.importorskip("torchzero")
    # Together, all tensors would get the dims of the first: see test_dims_of_the_first.
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


def torch_utils(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    utils = require("torch.nn.utils")
    return in_place(problem, lambda model: getattr(utils, cls)(model.parameters(), **config))


def optax(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    # This turns on float64 for all of JAX.
    require("haiku")
    weights = dict(to_vector(problem.weights, "jax").coefs)
    jax, package = require("jax"), require("optax")
    clip = getattr(package, cls)(**config)
    # Compiled as a whole, which takes less time than each operation does for each shape.
    update = jax.jit(clip.update)
    outputs, state = [], clip.init(weights)
    for step in problem.steps:
        updates, state = update(dict(to_vector(step, "jax").coefs), state, weights)
        outputs.append({name: np.asarray(value) for name, value in updates.items()})
    return outputs


def tensorflow(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    tf = require("tensorflow")
    function = getattr(tf, cls)
    if cls == "clip_by_global_norm":
        return as_lists(lambda values: function(values, **config)[0], problem)
    return as_lists(lambda values: [function(value, **config) for value in values], problem)


def as_lists(clip: Callable[[list[Any]], list[Any]], problem: Problem) -> list[Arrays]:
    """Return what a function makes of lists of TensorFlow's tensors."""
    tf = require("tensorflow")
    outputs = []
    for step in problem.steps:
        values = clip([tf.constant(value) for value in step.values()])
        outputs.append({n: v.numpy() for n, v in zip(step, values, strict=True)})
    return outputs


def keras(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    require("tensorflow")
    optimizer = require("keras").optimizers.SGD(**config)
    return as_lists(lambda values: list(optimizer._clip_gradients(values)), problem)


def lightning(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    torch = require("torch")
    plugins = pytest.importorskip("lightning.pytorch.plugins")
    fabric = pytest.importorskip("lightning.fabric")

    def clip(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if cls == "Fabric.clip_gradients":
            fabric.Fabric(accelerator="cpu").clip_gradients(model, optimizer, **config)
            return
        algorithm = pytest.importorskip("lightning.pytorch.utilities").GradClipAlgorithmType
        plugins.Precision().clip_gradients(
            optimizer,
            config["gradient_clip_val"],
            algorithm(config["gradient_clip_algorithm"]),
        )

    return in_place(problem, clip)


def declearn(cls: str, config: Config, problem: Problem) -> list[Arrays]:
    names = {"L2Clipping": "l2-clipping", "L2GlobalClipping": "l2-global-clipping"}
    clipper: Any = OptiModule.from_specs(names[cls], config)
    # It divides by the norms, those of zero gradients as well.
    with np.errstate(divide="ignore"):
        return [to_numpy(clipper.run(to_vector(step))) for step in problem.steps]


RUN: dict[str, Run] = {
    "drytorch": drytorch,
    "smartclip": smartclip,
    "smartclip-tf": smartclip_tf,
    "torchzero": torchzero,
    "torch": torch_utils,
    "optax": optax,
    "tensorflow": tensorflow,
    "keras": keras,
    "lightning": lightning,
    "declearn": declearn,
}


# -- the same numbers -------------------------------------------------------------------------
class Row(NamedTuple):
    """A class of a peer, and how its parameters are drawn."""

    peer: str
    cls: str
    config: Callable[[Draw], Config]
    label: str = ""
    steps: int = 8
    """How many; those with statistics need more."""
    dims: int = 0
    """How many dimensions the peer needs, at least."""
    zeros: bool = True
    """Some tensors, or rows of them, are zero."""
    nan: bool = False
    """The peer makes NaN of tensors of one element; ours stay finite."""
    rtol: float = 1e-9

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


def gate(draw: Draw, least: int = 0) -> Config:
    return {
        "scope": draw.of("global", "per_layer", "per_param"),
        "warmup_steps": int(draw.rng.integers(least, least + 20)),
        "min_history": int(draw.rng.integers(0, 20)),
        "eps": draw.of(1e-8, 1e-4),
    }


def without_warmup(draw: Draw) -> Config:
    """Return the gate that is always open: a warm-up counts otherwise there, as a note says."""
    return {**gate(draw), "warmup_steps": 0, "min_history": 0}


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
            # One element has no spread: see test_spread_of_one_element.
            config["min_size"] = draw.of(2, 3)
    return config


def max_norm(draw: Draw, **config: Any) -> Config:
    return {"max_norm": draw.real(0.05, 5.0), **config}


def agc(draw: Draw, **config: Any) -> Config:
    return {
        "clipping": draw.real(0.01, 1.0),
        "exclude_bias_bn": draw.of(True, False),
        "scope": draw.of("global", "per_layer", "per_param"),
        "eps": draw.of(1e-8, 1e-3),
        **config,
    }


def by_ema(draw: Draw) -> Config:
    tensorwise = draw.of(True, False)
    return {
        "beta": draw.share(0.5, 0.99),
        # Words are for the whole only: see test_words_for_norms.
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


def axes(draw: Draw) -> Config:
    return {"clip_norm": draw.real(0.05, 1.0), "axes": draw.of(0, [1], [-1], [0, 1], [-2, -1])}


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
    Row(
        "smartclip",
        "AGC",
        # Its warm-up, which ours does without, is left out.
        agc,
    ),
    Row("smartclip-tf", "AGC", agc, rtol=1e-6),
    Row(
        "smartclip-tf",
        "ZScoreClip",
        lambda draw: {
            "zmax": draw.share(0.5, 3.0),
            "ema_decay": draw.share(0.7, 0.99),
            **without_warmup(draw),
        },
        steps=45,
        zeros=False,
        rtol=1e-6,
    ),
    Row(
        "smartclip-tf",
        "AutoClip",
        lambda draw: {
            "mode": "percentile",
            "history": "window",
            "percentile": draw.of(1.0, 10, 50.0, 83.3, 95.0, 100.0),
            "window_size": draw.of(1, 2, 7, 20, 1024),
            **without_warmup(draw),
        },
        steps=45,
        zeros=False,
        rtol=1e-6,
    ),
    Row(
        "keras",
        "Optimizer",
        lambda draw: {draw.of("clipnorm", "global_clipnorm", "clipvalue"): draw.real(0.02, 5.0)},
        rtol=1e-6,
    ),
    Row(
        "lightning",
        "Trainer",
        lambda draw: {
            "gradient_clip_val": draw.real(0.02, 5.0),
            "gradient_clip_algorithm": draw.of("norm", "value"),
        },
    ),
    Row(
        "lightning",
        "Fabric.clip_gradients",
        lambda draw: draw.of(
            {"clip_val": draw.real(0.02, 2.0)},
            {"max_norm": draw.real(0.05, 5.0), "norm_type": draw.of(1.0, 2.0, math.inf)},
        ),
    ),
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
    Row(
        "torchzero",
        "Normalize",
        lambda draw: {"norm_value": draw.real(0.05, 5.0), **along(draw)},
    ),
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
            # Its floor is another one where it is more than 1: see test_floor_of_growth.
            **growth(draw, 1e-4, 1e-6),
        },
        steps=30,
    ),
    Row(
        "torchzero",
        "ClipValueGrowth",
        lambda draw: growth(draw, 1e-4, 0.1, 2.0),
        steps=30,
    ),
    Row(
        "torch",
        "clip_grad_norm_",
        lambda draw: max_norm(draw, norm_type=draw.of(0.5, 1, 2.0, 3, math.inf)),
    ),
    Row("torch", "clip_grad_value_", lambda draw: {"clip_value": draw.real(0.02, 2.0)}),
    Row("optax", "clip", lambda draw: {"max_delta": draw.real(0.02, 2.0)}, steps=4),
    Row("optax", "clip_by_global_norm", max_norm, steps=4),
    Row("optax", "clip_by_block_rms", lambda draw: {"threshold": draw.real(0.02, 1.0)}, steps=4),
    Row(
        "optax",
        "adaptive_grad_clip",
        lambda draw: {"clipping": draw.real(0.01, 1.0), "eps": draw.of(1e-3, 1.0)},
        steps=4,
    ),
    Row(
        "optax",
        "adaptive_grad_clip",
        lambda draw: {"clipping": draw.real(0.01, 1.0), "axis": draw.of(0, -1)},
        "axis",
        steps=4,
        dims=1,
    ),
    Row(
        "optax",
        "adaptive_grad_clip",
        lambda draw: {"clipping": draw.real(0.01, 1.0), "axis": draw.of((0, 1), (-1, 0))},
        "axes",
        steps=4,
        dims=2,
    ),
    Row(
        "tensorflow",
        "clip_by_global_norm",
        lambda draw: {"clip_norm": draw.real(0.05, 5.0)},
    ),
    Row("tensorflow", "clip_by_norm", lambda draw: {"clip_norm": draw.real(0.05, 5.0)}),
    Row("tensorflow", "clip_by_norm", axes, "axes", dims=2),
    Row(
        "tensorflow",
        "clip_by_value",
        lambda draw: {
            "clip_value_min": draw.of(-0.1, -1.0, 0.0),
            "clip_value_max": draw.of(0.1, 0.3, 2.0),
        },
    ),
    Row("declearn", "L2Clipping", max_norm),
    Row("declearn", "L2GlobalClipping", max_norm),
]


# A problem may have one small tensor only, of which no slice is limited.
@pytest.mark.filterwarnings("ignore:.* leaves all tensors alone")
# torch, of the spread of one element.
@pytest.mark.filterwarnings(r"ignore:std\(\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_same_numbers(row: Row) -> None:
    acted = False
    for seed in SEEDS:
        draw = Draw(ROWS.index(row), seed)
        config = row.config(draw)
        problem = draw.problem(row.steps, row.dims, row.zeros)
        theirs = RUN[row.peer](row.cls, config, problem)
        with np.errstate(all="raise", under="ignore"):
            ours = run_ours(build(row.peer, row.cls, config, **gate_of(config, problem)), problem)
        compare(ours, theirs, problem, f"seed {seed}, {config}", row.rtol, row.nan)
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
    ours: list[Arrays],
    theirs: list[Arrays],
    problem: Problem,
    where: str,
    rtol: float = 1e-9,
    nan: bool = False,
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
            np.testing.assert_allclose(got[name], wanted[name], rtol, 1e-12, err_msg=message)


@pytest.mark.parametrize(
    ("peer", "cls", "config", "problem"),
    [
        # The first norm is its own threshold, and eps is added to it.
        (
            "smartclip",
            "ZScoreClip",
            {"warmup_steps": 0, "min_history": 0, "eps": 1e-4},
            Problem({"w": np.ones(1)}, [{"w": np.array([0.01])}, {"w": np.array([0.01])}]),
        ),
        # Without a warm-up, its clipper is never called.
        (
            "drytorch",
            "HistClipper",
            {
                "criterion": "zstat",
                "clipping_function": "max",
                "n_warmup_steps": 0,
                "warmup_clip_strategy": "norm1",
                "alpha": 0.9,
                "thresh": 1.5,
            },
            Problem({"w": np.ones(1)}, [{"w": np.array([9.0])}, {"w": np.array([9.0])}]),
        ),
        (
            "torchzero",
            "clip_grad_norm_",
            {"max_norm": None, "min_norm": None},
            Problem({"w": np.ones(2)}, [{"w": np.array([3.0, 4.0])}]),
        ),
    ],
    ids=["eps", "no-warm-up", "no-limit"],
)
def test_same_numbers_at_the_edge(peer: str, cls: str, config: Config, problem: Problem) -> None:
    theirs = RUN[peer](cls, config, problem)
    compare(run_ours(build(peer, cls, config), problem), theirs, problem, cls)


@pytest.mark.parametrize("scope", ["global", "per_layer", "per_param"])
def test_auto_clip_but_for_a_division(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the division that its parabola lacks, smartclip has the published median, and ours.
    stats = pytest.importorskip("smartclip.core.stats")

    def parabolic(self: Any, i: int, d: int) -> float:
        step: float = shipped(self, i, d) - self._q[i]
        return float(self._q[i] + step / (self._npos[i + 1] - self._npos[i - 1]))

    shipped = stats.P2Quantile._parabolic
    for seed in SEEDS:
        draw = Draw(len(ROWS), seed)
        problem = draw.problem(60, dims=0, zeros=False)
        # No group is clipped before its 5th norm: see the defects.
        config = {"mode": "auto", **gate(draw, 5 * len(problem.weights)), "scope": scope}
        ours = run_ours(build("smartclip", "AutoClip", config, **gate_of(config, problem)), problem)
        with monkeypatch.context() as patch:
            patch.setattr(stats.P2Quantile, "_parabolic", parabolic)
            theirs = smartclip("AutoClip", config, problem)
        compare(ours, theirs, problem, f"seed {seed}, {config}")


def test_adaptive_bound() -> None:
    torch = require("torch")
    opacus = pytest.importorskip("opacus.optimizers.adaclipoptimizer")
    for seed in SEEDS:
        draw = Draw(len(ROWS) + 1, seed)
        config = {
            "clipbound_learning_rate": draw.real(0.05, 2.0),
            "target_unclipped_quantile": draw.share(0.1, 0.9),
            "max_clipbound": draw.real(3.0, 9.0),
            "min_clipbound": draw.real(0.01, 0.5),
        }
        start, size = draw.real(0.6, 2.0), int(draw.rng.integers(1, 9))
        problem = draw.problem(20 * size, dims=0, zeros=True)
        model = torch_model(problem.weights)
        optimizer = opacus.AdaClipDPOptimizer(
            torch.optim.SGD(model.parameters()),
            **config,
            noise_multiplier=0.0,
            unclipped_num_std=1.0,
            max_grad_norm=start,
            expected_batch_size=size,
        )
        ours: Any = build(
            "opacus", "AdaClipDPOptimizer", {**config, "initial": start, "sample_size": size}
        )
        for t in range(0, len(problem.steps), size):
            samples = problem.steps[t : t + size]
            for name, parameter in model.named_parameters():
                parameter.grad_sample = torch.tensor(np.stack([step[name] for step in samples]))
            optimizer.clip_and_accumulate()
            bound = float(optimizer.max_grad_norm)
            outputs = run_ours(ours, Problem(problem.weights, samples))
            # Its bound is in float32 from the first update on.
            assert ours.last.limit == pytest.approx((bound,), rel=1e-5)
            for name, parameter in model.named_parameters():
                total = np.sum([output[name] for output in outputs], axis=0)
                np.testing.assert_allclose(total, parameter.summed_grad.numpy(), 1e-5, 1e-6)
            optimizer.update_max_grad_norm()
            optimizer.zero_grad()


# -- defects: what a peer does, and ours does not ---------------------------------------------
def stream(*steps: Any, dtype: str = "float64", weights: float = 1.0) -> Problem:
    """Return the problem of one tensor `w`, whose gradients these are."""
    arrays = [{"w": np.array(step, dtype=dtype)} for step in steps]
    return Problem({"w": np.full_like(arrays[0]["w"], weights)}, arrays)


def both(peer: str, cls: str, config: Config, problem: Problem) -> tuple[list[Array], list[Array]]:
    """Return what theirs and ours make of the tensor `w`."""
    theirs = RUN[peer](cls, config, problem)
    ours = run_ours(build(peer, cls, config), problem)
    return [step["w"] for step in theirs], [step["w"] for step in ours]


@pytest.mark.parametrize(
    ("peer", "cls", "config"),
    [
        ("declearn", "L2Clipping", {"max_norm": 1.0}),
        ("declearn", "L2GlobalClipping", {"max_norm": 1.0}),
        ("drytorch", "GradNormClipper", {"threshold": 1}),
        ("torch", "clip_grad_norm_", {"max_norm": 1.0}),
        ("torchzero", "ClipNorm", {"max_norm": 1.0}),
        ("torchzero", "ClipNorm", {"max_norm": 1.0, "dim": "global"}),
        ("torchzero", "Normalize", {"norm_value": 1.0}),
        ("optax", "clip_by_global_norm", {"max_norm": 1.0}),
        ("optax", "clip_by_block_rms", {"threshold": math.sqrt(0.5)}),
        ("optax", "adaptive_grad_clip", {"clipping": math.sqrt(0.5)}),
        ("tensorflow", "clip_by_norm", {"clip_norm": 1.0}),
        ("tensorflow", "clip_by_global_norm", {"clip_norm": 1.0}),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_overflow_erases(peer: str, cls: str, config: Config) -> None:
    theirs, ours = both(peer, cls, config, stream([1e20, 1e20], dtype="float32"))
    assert not np.nan_to_num(theirs[0]).any()
    assert norm(ours[0]) == pytest.approx(1.0, rel=2e-6)


USUAL = [[1 + 0.1 * (i % 3)] for i in range(25)]
NAN, SPIKE = [math.nan], [20.0]
HISTORY = {"n_warmup_steps": 5, "warmup_clip_strategy": "noop"}


SKIPPED = pytest.mark.filterwarnings(
    "ignore:.*NaN or infinity in .*; the step is skipped:fedclip.errors.FedclipWarning"
)


@SKIPPED
@pytest.mark.parametrize("cls", ["HistClipper", "ParamHistClipper"])
@pytest.mark.parametrize("criterion", ["zstat", "ema"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_step_ends_the_clipping(cls: str, criterion: str, bad: float) -> None:
    config = {"criterion": criterion, "clipping_function": "max", "alpha": 0.9, "thresh": 1.5}
    problem = stream(*USUAL, [bad], SPIKE, SPIKE)
    theirs, ours = both("drytorch", cls, {**config, **HISTORY}, problem)
    assert [float(x[0]) for x in theirs[-2:]] == [20.0, 20.0]
    assert float(ours[-2][0]) < 2
    assert float(ours[-1][0]) < 20


@SKIPPED
@pytest.mark.parametrize("cls", ["ClipNormByEMA", "NormalizeByEMA", "ClipValueByEMA"])
def test_one_bad_step_spoils_all_that_follow(cls: str) -> None:
    problem = stream(*USUAL[:3], NAN, *USUAL)
    theirs, ours = both("torchzero", cls, {}, problem)
    assert all(np.isnan(x).all() for x in theirs[3:])
    assert all(np.isfinite(x).all() and x.any() for x in ours[4:])


@SKIPPED
def test_guard_does_not_guard_the_gradient() -> None:
    config = {"warmup_steps": 5, "min_history": 0}
    problem = Problem(
        {"a": np.ones(2), "b": np.ones(1)},
        [{"a": np.ones(2), "b": np.array([b])} for b in (1.0, 1.0, 1.0, 1.0, 1.0, math.nan)],
    )
    theirs = smartclip("ZScoreClip", config, problem)[-1]
    ours = run_ours(build("smartclip", "ZScoreClip", config), problem)[-1]
    assert all(np.isnan(value).all() for value in theirs.values())
    assert all(np.isfinite(value).all() for value in ours.values())


def test_clippers_share_their_statistics() -> None:
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    one, other = ops.HistClipper(), ops.HistClipper()
    assert one.criterion is other.criterion
    one, other = (build("drytorch", "HistClipper", {}) for _ in range(2))
    run_ours(one, stream(*USUAL))
    assert one.get_state() != other.get_state()


def test_mean_clipping_erases() -> None:
    ops = pytest.importorskip("drytorch.lib.gradient_ops")
    criterion = ops.EMACriterion(clipping_function=ops.mean_clipping)
    clipper = ops.HistClipper(criterion, ops.NoOp(), 5)
    problem = stream(*USUAL, SPIKE)
    theirs = in_place(problem, lambda model: clipper(model.parameters()))
    config = {"criterion": "ema", "clipping_function": "mean", **HISTORY}
    ours = run_ours(build("drytorch", "HistClipper", config), problem)
    assert theirs[-1]["w"] == 0
    assert 1.0 < float(ours[-1]["w"][0]) < 1.2


def test_a_warm_up_of_zeros_lets_all_pass() -> None:
    problem = stream(*5 * [[0.0]], [1e9])
    for criterion in ("zstat", "ema"):
        config = {"criterion": criterion, "alpha": 0.9, "thresh": 1.5, "clipping_function": "max"}
        config |= {"n_warmup_steps": 5, "warmup_clip_strategy": "norm1"}
        theirs, ours = both("drytorch", "HistClipper", config, problem)
        assert theirs[-1] == 1e9
        assert float(ours[-1][0]) < 2


def test_eps_is_lost_in_half_precision() -> None:
    problem = stream([0.0, 0.0], dtype="float16")
    for cls in ("GradParamNormalizer", "GradZScoreNormalizer"):
        theirs, ours = both("drytorch", cls, {}, problem)
        assert np.isnan(theirs[0]).all()
        assert not ours[0].any()


def test_erased_before_the_fifth_norm() -> None:
    config = {"warmup_steps": 0, "min_history": 0}
    theirs, ours = both("smartclip", "AutoClip", config, stream([5.0], [5.0]))
    assert float(theirs[-1][0]) < 2e-8
    assert float(ours[-1][0]) >= 1


def test_percentile_never_falls() -> None:
    config = {"mode": "percentile", "percentile": 50.0, "ema_decay": 0.9}
    rng = np.random.default_rng(0)
    problem = stream(*([x] for x in rng.lognormal(0.0, 0.3, 300)), SPIKE)
    theirs, ours = both("smartclip", "AutoClip", config, problem)
    assert theirs[-1] == 20.0
    assert float(ours[-1][0]) < 3


def test_warm_up_is_shorter_with_more_tensors() -> None:
    config = {"scope": "per_param", "warmup_steps": 20, "min_history": 0}
    steps = [{name: np.array([1.0]) for name in "abcd"} for _ in range(6)]
    problem = Problem(steps[0], steps)
    theirs = smartclip("ZScoreClip", config, problem)
    ours = run_ours(build("smartclip", "ZScoreClip", config), problem)
    # The eps makes what is at the limit a little smaller: that shows when it starts.
    assert [step["a"][0] < 1 for step in theirs] == 4 * [False] + 2 * [True]
    assert [step["a"][0] < 1 for step in ours] == 6 * [False]


def test_tensors_of_the_root_are_one_layer() -> None:
    rng = np.random.default_rng(0)
    names = ("w", "b", "enc.w", "enc.b")
    steps = [{name: rng.lognormal(0, 1, (3,)) for name in names} for _ in range(20)]
    problem = Problem(steps[0], steps)
    config = {"scope": "per_layer", "warmup_steps": 0, "min_history": 0, "zmax": 0.5}
    theirs = smartclip("ZScoreClip", config, problem)
    apart = run_ours(build("smartclip", "ZScoreClip", config), problem)
    assert not np.allclose(apart[-1]["w"], theirs[-1]["w"], rtol=1e-3)
    ours = run_ours(build("smartclip", "ZScoreClip", config, scope=["enc.*"]), problem)
    compare(ours, theirs, problem, "layers as patterns")


def test_what_has_no_gradient_is_noted_as_eps() -> None:
    config = {"scope": "per_param", "warmup_steps": 0, "min_history": 0, "ema_decay": 0.5}
    steps = [{name: np.array([1.0]) for name in ("ab" if t % 2 else "a")} for t in range(1, 40)]
    clipper = build("smartclip", "ZScoreClip", config)
    for step in steps:
        clipper.clip(step)
    package, torch = pytest.importorskip("smartclip"), require("torch")
    their = package.ZScoreClip(**config)
    model = torch_model({name: np.ones(1) for name in "ab"})
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = torch.tensor(step[name]) if name in step else None
        package.apply(model, their)
    assert their.stats(("param", "0"))[0] == pytest.approx(1.0)
    assert their.stats(("param", "1"))[0] < 0.7
    assert clipper.statistics("a")["mean"] == clipper.statistics("b")["mean"] == 1.0


def test_weights_of_zero_are_frozen() -> None:
    config = {"exclude_bias_bn": False}
    theirs, ours = both("smartclip", "AGC", config, stream([3.0, 4.0], weights=0.0))
    assert norm(theirs[0]) < 1e-9
    assert norm(ours[0]) > 1e-6


def test_dims_of_the_first() -> None:
    package = pytest.importorskip("torchzero")
    step = {"a": np.ones((2, 3)), "b": np.ones((2, 2, 2, 2))}
    problem = Problem(step, [step])
    theirs = torchzero_steps(package, package.m.Normalize(1.0), problem)[0]
    ours = run_ours(build("torchzero", "Normalize", {}), problem)[0]
    assert norm(theirs["b"]) == pytest.approx(2.0)
    assert norm(ours["b"]) == pytest.approx(1.0)


def test_order_decides() -> None:
    package = pytest.importorskip("torchzero")
    step = {"a": np.array(1.0), "b": np.arange(3.0)}
    theirs = torchzero_steps(package, package.m.Centralize(), Problem(step, [step]))[0]
    ours = run_ours(build("torchzero", "Centralize", {}), Problem(step, [step]))[0]
    assert theirs["b"].tolist() == [0.0, 1.0, 2.0]
    assert ours["b"].tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.filterwarnings(r"ignore:std\(\). degrees of freedom is <= 0:UserWarning")
def test_spread_of_one_element() -> None:
    theirs, ours = both("torchzero", "ClipNorm", {"max_norm": 1.0, "ord": "std"}, stream([5.0]))
    assert np.isnan(theirs[0]).all()
    assert ours[0] == 5.0


def test_variance_overshoots() -> None:
    rng = np.random.default_rng(0)
    config = {"max_norm": 0.5, "ord": "var"}
    theirs, ours = both("torchzero", "ClipNorm", config, stream(rng.normal(0, 2, 50)))
    assert np.var(theirs[0], ddof=1) < 0.4
    assert np.var(ours[0], ddof=1) == pytest.approx(0.5)


def test_sum_turns_the_gradient_round() -> None:
    config = {"norm_value": 1.0, "ord": "sum", "dim": "global"}
    theirs, ours = both("torchzero", "Normalize", config, stream([-3.0, 1.0]))
    assert theirs[0].tolist() == [1.5, -0.5]
    assert ours[0] == pytest.approx(np.array([-0.75, 0.25]))


def test_count_of_non_zeros() -> None:
    config = {"max_norm": 1.0, "ord": "l0"}
    theirs, ours = both("torchzero", "ClipNorm", config, stream([1.0, 2.0, 0.0]))
    assert theirs[0].tolist() == [0.5, 1.0, 0.0]
    assert ours[0].tolist() == [1.0, 2.0, 0.0]


def test_zeros_become_nan() -> None:
    theirs, ours = both("torchzero", "Normalize", {"dim": "global"}, stream([0.0, 0.0]))
    assert np.isnan(theirs[0]).all()
    assert not ours[0].any()


def test_tiny_norm_is_taken_as_one() -> None:
    theirs, ours = both("torchzero", "ClipNorm", {"max_norm": 0.1}, stream([1e-13]))
    assert theirs[0][0] < 1.1e-14
    assert ours[0][0] == 1e-13


def test_floor_of_growth() -> None:
    config = {"min_value": 2.0}
    theirs, ours = both("torchzero", "ClipNormGrowth", config, stream(*5 * [[1.0]]))
    assert [float(x[0]) for x in theirs] == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert [float(x[0]) for x in ours] == 5 * [1.0]


def test_floor_of_the_first_norm() -> None:
    theirs, ours = both("torchzero", "ClipNormGrowth", {}, stream([1e-9], [1.0], [1.0]))
    assert [float(x[0]) for x in theirs] == pytest.approx([1e-9, 1.5e-9, 1.5e-4])
    assert [float(x[0]) for x in ours] == pytest.approx([1e-9, 1.5e-4, 2.25e-4])
    assert any("first" in note for note in compat.notes("torchzero", "ClipNormGrowth", {}))


@pytest.mark.parametrize("cls", ["ClipNormGrowth", "ClipValueGrowth"])
def test_frozen_at_zero(cls: str) -> None:
    config = {"min_value": None, "max_decay": None}
    theirs, ours = both("torchzero", cls, config, stream([1.0], [0.0], [1.0], [9.0]))
    assert [float(x[0]) for x in theirs] == [1.0, 0.0, 0.0, 0.0]
    assert [float(x[0]) for x in ours] == pytest.approx([1.0, 0.0, 1.0, 1.5])
    assert any("0 for ever" in note for note in compat.notes("torchzero", cls, config))


@pytest.mark.parametrize("history", ["window", "ema"])
def test_percentile_of_zeros_erases(history: str) -> None:
    config = {"mode": "percentile", "history": history, "percentile": 20}
    config |= {"warmup_steps": 0, "min_history": 0}
    theirs, ours = both("smartclip", "AutoClip", config, stream(*9 * [[0.0]], [1e-3]))
    assert float(theirs[-1][0]) < 1e-4
    assert float(ours[-1][0]) == pytest.approx(1e-3, rel=1e-4)


def test_negative_dims_inverted() -> None:
    # All dims but the last: a norm for each column.
    config = {"dim": -1, "inverse_dims": True}
    theirs, ours = both("torchzero", "Normalize", config, stream([[3.0, 1.0], [4.0, 0.0]]))
    assert norm(theirs[0]) == pytest.approx(1.0)
    assert [norm(column) for column in ours[0].T] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("peer", "cls", "config", "gradient", "error"),
    [
        (
            "torchzero",
            "ClipNorm",
            {"max_norm": 1.0, "ord": "l0", "dim": "global"},
            [1.0, 2.0],
            ZeroDivisionError,
        ),
        ("torchzero", "Centralize", {"dim": -2}, [1.0, 2.0], IndexError),
        ("torchzero", "ClipNormByEMA", {"ord": "mad"}, [1.0, 2.0], (TypeError, RuntimeError)),
        ("torchzero", "ClipNormGrowth", {"add": None, "mul": None}, [1.0, 2.0], ValueError),
        ("optax", "adaptive_grad_clip", {"clipping": 0.1, "axis": 0}, 1.0, ValueError),
        ("tensorflow", "clip_by_norm", {"clip_norm": 0.1, "axes": 0}, 1.0, Exception),
    ],
)
def test_raises_where_ours_runs(
    peer: str, cls: str, config: Config, gradient: Any, error: Any
) -> None:
    problem = stream(gradient, gradient, gradient)
    with pytest.raises(error):
        RUN[peer](cls, config, problem)
    for output in run_ours(build(peer, cls, config), problem):
        assert np.isfinite(output["w"]).all()


def test_count_of_tensors() -> None:
    config = {"max_norm": 1.0, "norm_type": 0}
    step = {"a": np.array([3.0]), "b": np.array([4.0])}
    theirs = torch_utils("clip_grad_norm_", config, Problem(step, [step]))[0]
    ours = run_ours(build("torch", "clip_grad_norm_", config), Problem(step, [step]))[0]
    assert theirs["a"] == pytest.approx(1.5)
    assert ours["a"] == 3.0


@pytest.mark.parametrize(
    ("peer", "cls", "limit"),
    [
        ("torch", "clip_grad_norm_", "max_norm"),
        ("declearn", "L2GlobalClipping", "max_norm"),
        ("optax", "clip_by_global_norm", "max_norm"),
    ],
)
def test_negative_limit_turns_the_gradient_round(peer: str, cls: str, limit: str) -> None:
    theirs = RUN[peer](cls, {limit: -1.0}, stream([3.0, 4.0]))
    np.testing.assert_allclose(theirs[0]["w"], [-0.6, -0.8], rtol=1e-6)
    with pytest.raises(ValueError, match="max_norm must be a finite number > 0"):
        build(peer, cls, {limit: -1.0})


def test_below_the_limit_bits_change() -> None:
    config = {"clip_norm": 1e3}
    gradients = np.random.default_rng(0).normal(0, 1, 1000)
    theirs, ours = both("tensorflow", "clip_by_norm", config, stream(gradients, dtype="float32"))
    assert not np.array_equal(theirs[0], gradients.astype("float32"))
    assert np.array_equal(ours[0], gradients.astype("float32"))
    theirs, ours = both("tensorflow", "clip_by_norm", config, stream([1e37], dtype="float32"))
    assert not np.isfinite(theirs[0]).any()
    assert ours[0] == pytest.approx(1e3, rel=2e-6)


@pytest.mark.parametrize("cls", ["L2Clipping", "L2GlobalClipping"])
def test_shape_and_dtype_change(cls: str) -> None:
    require("torch")
    names = {"L2Clipping": "l2-clipping", "L2GlobalClipping": "l2-global-clipping"}
    their: Any = OptiModule.from_specs(names[cls], {"max_norm": 1.0})
    for gradient, dtype in ((np.array(3.0), "float32"), (np.array([3.0, 4.0]), "float16")):
        vector = to_vector({"w": gradient}, "torch", dtype)
        theirs = to_numpy(their.run(vector))["w"]
        ours = to_numpy(build("declearn", cls, {"max_norm": 1.0}).run(vector))["w"]
        assert (theirs.shape, theirs.dtype) != (gradient.shape, dtype)
        assert (ours.shape, ours.dtype) == (gradient.shape, dtype)


def test_optax_asks_of_ours_what_it_asks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/coming-from.md has the count, and why one does not hold.
    jax = require("jax")
    from fedclip.adapters.jax import as_optax

    theirs = pytest.importorskip("optax.transforms._clipping")
    tests = pytest.importorskip("optax.transforms._clipping_test")
    used = set()

    def stand_in(cls: str) -> Callable[..., Any]:
        def make(*args: Any, **config: Any) -> Any:
            used.add(cls)
            names = list(compat.PEERS["optax"][cls].parameters)
            ours = as_optax(build("optax", cls, {**dict(zip(names, args, strict=False)), **config}))
            # Their tests give no state to what has none.
            return ours._replace(update=lambda u, _, p=None: ours.update(u, ours.init(u), p))

        return make

    for cls in compat.known()["optax"]:
        monkeypatch.setattr(theirs, cls, stand_in(cls))
    # Each of their 50 rounds is compiled anew.
    monkeypatch.setattr(tests, "STEPS", 5)
    loaded = unittest.defaultTestLoader.loadTestsFromTestCase(tests.ClippingTest)
    result = unittest.TestResult()
    with jax.enable_x64(False):
        loaded.run(result)
    assert used == set(compat.known()["optax"])
    assert result.testsRun == 9
    assert not result.errors
    assert [case.id().rpartition(".")[2] for case, _ in result.failures] == [
        "test_clip_by_block_rms"
    ]


def test_every_class_that_is_here_is_compared() -> None:
    compared = {(row.peer, row.cls) for row in ROWS}
    # smartclip's default percentile has a defect; opacus has its own test.
    for peer in RUN:
        assert {cls for p, cls in compared if p == peer} == set(compat.known()[peer])
