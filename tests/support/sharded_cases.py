"""What processes that share a model do, each case on all of them; `test_adapter_processes`."""

import math
import pickle
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fedclip
from fedclip import FedclipWarning
from fedclip.arrays.sharded import summed
from fedclip.loops.torch import PureClipping, attach, clip_, clip_grad_norm_

CASES: dict[str, Callable[[], None]] = {}

CLIPPERS = {
    "norm": lambda: fedclip.NormClip(1.0),
    "norm by tensor": lambda: fedclip.NormClip(0.5, scope="tensor"),
    "norm by layer": lambda: fedclip.NormClip(0.5, scope="layer", exclude="b.bias"),
    "norm by slices": lambda: fedclip.NormClip(0.2, dims=0),
    "norm of order inf": lambda: fedclip.NormClip(0.1, ord="inf"),
    "norm of order 0.5": lambda: fedclip.NormClip(9.0, ord=0.5, scope="layer"),
    "root mean square": lambda: fedclip.NormClip(0.1, ord="rms", scope="tensor"),
    "mean of absolutes": lambda: fedclip.ZScoreClip(warmup=2, ord="mad"),
    "deviation": lambda: fedclip.NormClip(0.1, ord="std"),
    "norm, both sides": lambda: fedclip.NormClip(2.0, min_norm=1.5, scope="layer"),
    "normalize": lambda: fedclip.Normalize(1.0, scope="tensor"),
    "values": lambda: fedclip.ValueClip(0.3),
    "z-score": lambda: fedclip.ZScoreClip(warmup=2, scope="layer"),
    "percentile of values": lambda: fedclip.PercentileClip(90),
    "moving average of values": lambda: fedclip.EmaValueClip(),
    "moving average": lambda: fedclip.EmaNormClip(),
    "standardize": lambda: fedclip.Standardize(),
    "centralize": lambda: fedclip.Centralize(),
    "agc": lambda: fedclip.AGC(0.05, axis=0),
    "agc by tensor": lambda: fedclip.AGC(0.05, unit="tensor"),
}
WORLD = 4
SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (3, 4, 2), "b.bias": (3,), "c": ()}


def case(function):
    CASES[function.__name__] = function
    return function


def layouts():
    """Return for each tensor the mesh and placements, None for a plain tensor; by name."""
    line = init_device_mesh("cpu", (WORLD,))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns, copies = ((line, (one,)) for one in (Shard(0), Shard(1), Replicate()))
    both, mixed = ((plane, (one, Shard(0))) for one in (Shard(0), Replicate()))
    places = {
        "rows": (rows, rows, rows, rows, copies),
        "mixed": (columns, copies, rows, None, (line, (Partial(),))),
        "plane": (
            *((plane, (Shard(0), Shard(1))), (plane["dp"], (Shard(0),)), both, mixed),
            (plane["tp"], (Replicate(),)),
        ),
    }
    return [(name, dict(zip(SHAPES, row, strict=True))) for name, row in places.items()]


def shared(whole, place):
    """Return this process's part of a tensor."""
    if place is None:
        return whole.clone()
    mesh, placements = place
    if placements[0].is_partial():
        # Parts that add up to the whole.
        return DTensor.from_local(whole / mesh.size(), mesh, placements)
    return distribute_tensor(whole, mesh, placements)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(count=6):
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        size = 30.0 if step == 4 else 1.0
        yield {n: size * torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def weights():
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-8)


def fill(parts):
    for parameter in parts.values():
        parameter.grad = torch.ones_like(parameter)


def same_everywhere(value):
    found = [None] * WORLD
    dist.all_gather_object(found, value)
    assert all(other == found[0] for other in found), found


def run(name):
    """Clip the same gradients whole and in parts, and compare."""
    for _, places in layouts():
        alone, together = CLIPPERS[name](), CLIPPERS[name]()
        wholes = {n: torch.nn.Parameter(w) for n, w in weights().items()}
        parts = {}
        for n, w in weights().items():
            partial_ = places[n] is not None and places[n][1][0].is_partial()
            place = (places[n][0], (Replicate(),)) if partial_ else places[n]
            parts[n] = torch.nn.Parameter(shared(w, place))
        for gradients in steps():
            for n, gradient in gradients.items():
                wholes[n].grad = gradient.clone()
                parts[n].grad = shared(gradient, places[n])
            expected, found = clip_(wholes, alone), clip_(parts, together)
            assert found.groups == expected.groups
            for n in SHAPES:
                close(whole(parts[n].grad), wholes[n].grad)
                assert isinstance(parts[n].grad, DTensor) == (places[n] is not None)
            for field in ("norm_before", "limit"):
                close(torch.tensor(getattr(found, field)), torch.tensor(getattr(expected, field)))
            assert found.clipped == expected.clipped
            same_everywhere((found.norm_before, found.limit, found.clipped))
        if isinstance(alone, fedclip.Clipper):
            state = together.get_state()
            same_everywhere(pickle.dumps({**state, "arrays": None}))
            for label, fields in alone.get_state()["groups"].items():
                for field, value in fields.items():
                    close(*map(torch.as_tensor, (state["groups"][label][field], value)))


# Of each kind of measure, scope and transform, one; the others differ in what needs no collective.
ALIKE = ("norm by layer", "norm by slices", "norm of order inf", "norm of order 0.5", "deviation")
ALIKE += ("values", "z-score", "moving average", "centralize", "agc", "agc by tensor")
CASES |= {f"clips alike: {name}": partial(run, name) for name in ALIKE}


@case
def nan_on_one_process_is_nan_on_all():
    for name, places in layouts():
        for policy, order in (("skip", 2), ("raise", "std"), ("skip", "std")):
            clipper, others = fedclip.ZScoreClip(on_nonfinite=policy, ord=order), weights()
            del others["c"]
            parts = {n: torch.nn.Parameter(shared(w, places[n])) for n, w in others.items()}
            fill(parts)
            if dist.get_rank() == 1:
                parts["a.bias"].grad.to_local().fill_(math.nan)
            error = pytest.raises(fedclip.NonFiniteError, match=r"a\.bias")
            with warnings.catch_warnings(), error if policy == "raise" else nullcontext():
                warnings.simplefilter("ignore", FedclipWarning)
                clip_(parts, clipper)
            if policy == "skip":
                assert all(p.grad is None for p in parts.values()), name
                assert clipper.rounds[0].nonfinite == 1
                same_everywhere(pickle.dumps(clipper.get_state()))


@case
def pure_functions_clip_parts_alike():
    clippers = ("norm by layer", "norm of order 0.5", "values", "z-score")
    clippers += ("norm by slices", "agc", "agc by tensor")
    for _, places in layouts():
        for name in clippers:
            wholes, parts = PureClipping(CLIPPERS[name]()), PureClipping(CLIPPERS[name]())
            first = weights()
            own = {n: summed(shared(w, places[n])) for n, w in first.items()}
            one = wholes.init(first)
            other = parts.init(own)
            for gradients in steps(count=3):
                pieces = {n: shared(g, places[n]) for n, g in gradients.items()}
                expected, one = wholes.update(gradients, one, first)
                found, other = parts.update(pieces, other, own)
                for n, value in expected.items():
                    close(whole(found[n]), value)
                    # Nothing has been changed in place.
                    torch.testing.assert_close(whole(pieces[n]), gradients[n], rtol=1e-6, atol=0)
    whole_only = PureClipping(fedclip.PercentileClip(90))
    with pytest.raises(NotImplementedError, match="percentile-clip needs whole arrays"):
        whole_only.update(pieces, whole_only.init(pieces))


# Of the first, some get the arrays whole.
COLLECTIVES = dict.fromkeys(("norm by tensor", "z-score", "norm of order inf"), 1)
COLLECTIVES |= dict.fromkeys(("root mean square", "percentile of values", "standardize"), 1)
COLLECTIVES |= dict.fromkeys(("moving average of values", "centralize", "moving average"), 1)
COLLECTIVES |= dict.fromkeys(("agc", "normalize", "norm, both sides"), 2)
# The largest element first, in whose unit nothing can overflow.
COLLECTIVES |= dict.fromkeys(("values", "norm of order 0.5", "mean of absolutes"), 2)
COLLECTIVES["deviation"] = 3


@case
def each_step_needs_one_collective_or_two():
    for name, places in layouts():
        places = {n: p for n, p in places.items() if p is None or not p[1][0].is_partial()}
        parts = {n: torch.nn.Parameter(shared(weights()[n], place)) for n, place in places.items()}
        wrong = {}
        for clipper, most in COLLECTIVES.items():
            fill(parts)
            made = CLIPPERS[clipper]()
            with CommDebugMode() as counted:
                clip_(parts, made)
            if counted.get_total_counts() != most:
                wrong[clipper] = counted.get_total_counts()
        assert not wrong, (name, wrong)


def net():
    torch.manual_seed(0)
    layers = {"first": torch.nn.Linear(5, 8), "act": torch.nn.Tanh()}
    return torch.nn.Sequential(OrderedDict(**layers, second=torch.nn.Linear(8, 3)))


def sharded(model, **options):
    """Shard each layer, and what is around them."""
    for layer in (model.first, model.second, model):
        fully_shard(layer, **options)
    return model


def assert_trained_alike(alone, model, rtol=1e-5, msg=None):
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a, rtol=rtol, atol=rtol, msg=msg)


def batches(count=5):
    generator = torch.Generator().manual_seed(3)
    return [10 * torch.randn(8, 5, generator=generator) for _ in range(count)]


def train(model, optimizer, clipper):
    handle = attach(optimizer, clipper, model)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return handle


@case
def training_is_that_of_one_process():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    alone, adam = net(), torch.optim.AdamW
    make = partial(fedclip.ZScoreClip, warmup=2, scope="layer", max_norm=1.0)
    train(alone, adam(alone.parameters(), lr=0.01), make())
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=adam)
    ways = ((sharded, adam), (DistributedDataParallel, adam), (DistributedDataParallel, zero))
    for spread, kind in ways:
        model = spread(net())
        optimizer = kind(model.parameters(), lr=0.01)
        handle = train(model, optimizer, make())
        assert_trained_alike(alone, model)
        same_everywhere(pickle.dumps(handle.get_state()))
        if kind is zero:
            optimizer.consolidate_state_dict(0)
        if kind is adam or dist.get_rank() == 0:
            saved = optimizer.state_dict()
            assert saved["fedclip:zscore-clip"] == handle.get_state()
        if kind is zero and dist.get_rank() == 0:
            handle.reset()
            optimizer.load_state_dict(saved)
            assert handle.get_state() == saved["fedclip:zscore-clip"]


@case
def fully_sharded_after_attach_is_refused_until_the_optimizer_has_the_new_parameters():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(optimizer, fedclip.NormClip(1.0), model)
    fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model(batches()[0]).square().mean().backward()
    optimizer.step()
    norms = [p.grad.full_tensor().norm() for p in model.parameters()]
    assert torch.stack(norms).norm() <= 1.0
    assert all(handle.last.clipped)


@case
def tensor_parallel_and_fully_sharded():
    from torch.distributed.tensor import parallel

    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = ("norm", "z-score", "values", "agc", "norm by slices", "deviation")
    for name in (*names, "percentile of values"):
        alone, model = net(), net()
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.01), CLIPPERS[name]())
        styles = {"first": parallel.ColwiseParallel(), "second": parallel.RowwiseParallel()}
        parallel.parallelize_module(model, plane["tp"], styles)
        fully_shard(model, mesh=plane["dp"])
        handle = train(model, torch.optim.SGD(model.parameters(), lr=0.01), CLIPPERS[name]())
        assert_trained_alike(alone, model, 1e-4, name)
        same_everywhere(handle.last.norm_before)


@case
def what_torch_expects_of_fully_sharded_models():
    for order in (2, 1, 3, math.inf):
        for sizes in ((WORLD,), (2, 2)):
            # On two dimensions, the second holds copies of the model: HSDP.
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
            alone, model = net(), sharded(net(), mesh=mesh)
            for batch in batches(3):
                for one in (alone, model):
                    one.zero_grad()
                    one(batch).square().sum().backward()
                expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0, order)
                found = clip_grad_norm_(model.parameters(), 1.0, order)
                assert math.isclose(found.full_tensor().item(), expected.item(), rel_tol=1e-5)
                assert len(found.placements) == len(sizes)
                # Together first: a process that fails alone would leave the others waiting.
                after = [p.grad.full_tensor() for p in model.parameters()]
                for parameter, value in zip(alone.parameters(), after, strict=True):
                    torch.testing.assert_close(value, parameter.grad, rtol=1e-4, atol=1e-6)


@case
def fsdp1_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    for orig in (True, False):
        options = {"use_orig_params": orig, "device_id": torch.device("cpu")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for given in (model, model.module):
            with pytest.raises(TypeError, match="fully_shard"):
                attach(optimizer, fedclip.NormClip(1.0), given)
            with pytest.raises(TypeError, match="fully_shard"):
                clip_(given, fedclip.NormClip(1.0))


def main(rank: int, folder: str) -> None:
    """Run cases, and write down how each went."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    own = Path(folder) / f"{rank}"
    own.mkdir()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        # Where one process fails alone, the others wait for so long, and end.
        timeout=timedelta(seconds=600),
    )
    for name, run_case in CASES.items():
        said = ""
        try:
            run_case()
        except Exception:
            said = traceback.format_exc()
        (own / name).write_text(said)
        dist.barrier()
    dist.destroy_process_group()
