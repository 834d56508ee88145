"""What processes that share a model do, each case on all of them; `test_adapter_torch_sharded`."""

import math
import pickle
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fedclip
from fedclip import FedclipWarning
from fedclip.arrays.sharded import summed
from fedclip.loops.torch import PureClipping, attach, clip_, clip_grad_norm_

CASES: dict[str, Callable[[], None]] = {}

CLIPPERS = {
    "norm": lambda: fedclip.NormClip(1.0),
    "norm by tensor": lambda: fedclip.NormClip(0.5, scope="tensor"),
    "norm by layer": lambda: fedclip.NormClip(0.5, scope="layer", exclude="b.bias"),
    "norm by table": lambda: fedclip.NormClip(0.5, scope={"a.*": 0.1}),
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
    "agc of all": lambda: fedclip.AGC(0.05, unit="global"),
}
SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (3, 4, 2), "b.bias": (3,), "c": ()}


def case(function):
    CASES[function.__name__] = function
    return function


def layouts():
    """Yield name, and for each tensor the mesh and placements; None for a plain tensor."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    one = (line, (Shard(0),))
    yield "rows", {name: one for name in SHAPES if name != "c"} | {"c": (line, (Replicate(),))}
    yield (
        "mixed",
        {
            "a.weight": (line, (Shard(1),)),
            "a.bias": (line, (Replicate(),)),
            "b.weight": one,
            "b.bias": None,
            "c": (line, (Partial(),)),
        },
    )
    if world == 4:
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        yield (
            "plane",
            {
                "a.weight": (plane, (Shard(0), Shard(1))),
                "a.bias": (plane["dp"], (Shard(0),)),
                "b.weight": (plane, (Shard(0), Shard(0))),
                "b.bias": (plane, (Replicate(), Shard(0))),
                "c": (plane["tp"], (Replicate(),)),
            },
        )


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


def steps(dtype=torch.float32, count=6):
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        size = 30.0 if step == 4 else 1.0
        yield {
            name: size * torch.randn(shape, generator=generator, dtype=dtype)
            for name, shape in SHAPES.items()
        }


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in SHAPES.items()}


def same_everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(other == found[0] for other in found), found


def run(name, places, dtype=torch.float32):
    """Clip the same gradients whole and in parts, and compare."""
    alone, together = CLIPPERS[name](), CLIPPERS[name]()
    first = weights(dtype)
    wholes = {n: torch.nn.Parameter(w.clone()) for n, w in first.items()}
    parts = {}
    for n, w in first.items():
        place = places[n]
        if place is not None and place[1][0].is_partial():
            place = place[0], (Replicate(),)
        parts[n] = torch.nn.Parameter(shared(w, place))
    for gradients in steps(dtype):
        for n, gradient in gradients.items():
            wholes[n].grad = gradient.clone()
            parts[n].grad = shared(gradient, places[n])
        expected, found = clip_(wholes, alone), clip_(parts, together)
        assert found.groups == expected.groups
        for n in SHAPES:
            torch.testing.assert_close(whole(parts[n].grad), wholes[n].grad, rtol=3e-6, atol=1e-8)
            assert isinstance(parts[n].grad, DTensor) == (places[n] is not None)
        for field in ("norm_before", "limit"):
            pair = [torch.tensor(getattr(r, field)) for r in (found, expected)]
            torch.testing.assert_close(*pair, rtol=2e-6, atol=1e-8, msg=field)
        assert found.clipped == expected.clipped
        same_everywhere((found.norm_before, found.limit, found.clipped))
    if isinstance(alone, fedclip.Clipper):
        state = together.get_state()
        same_everywhere(pickle.dumps({**state, "arrays": None}))
        for label, fields in alone.get_state()["groups"].items():
            for field, value in fields.items():
                pair = [
                    torch.tensor(v, dtype=torch.float64)
                    for v in (state["groups"][label][field], value)
                ]
                torch.testing.assert_close(*pair, rtol=3e-6, atol=1e-8)


def clips_alike(name):
    for _, places in layouts():
        run(name, places)


# Of each kind of measure, scope and transform, one; the others differ in what needs no collective.
ALIKE = ("norm by layer", "norm by slices", "norm of order inf", "norm of order 0.5", "deviation")
ALIKE += ("values", "z-score", "moving average", "centralize", "agc", "agc by tensor")
CASES |= {f"clips alike: {name}": partial(clips_alike, name) for name in ALIKE}


@case
def nan_on_one_process_is_nan_on_all():
    for name, places in layouts():
        for policy, order in (("skip", 2), ("raise", "std"), ("skip", "std")):
            clipper = fedclip.ZScoreClip(on_nonfinite=policy, ord=order)
            parts = {
                n: torch.nn.Parameter(shared(w, places[n]))
                for n, w in weights().items()
                if n != "c"
            }
            for parameter in parts.values():
                parameter.grad = torch.ones_like(parameter)
            grad = parts["a.bias"].grad
            if dist.get_rank() == 1:
                grad.to_local().fill_(math.nan)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FedclipWarning)
                if policy == "raise":
                    with pytest.raises(fedclip.NonFiniteError, match=r"a\.bias"):
                        clip_(parts, clipper)
                else:
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
                more = (first, own) if name.startswith("agc") else (None, None)
                expected, one = wholes.update(gradients, one, more[0])
                found, other = parts.update(pieces, other, more[1])
                for n, value in expected.items():
                    torch.testing.assert_close(whole(found[n]), value, rtol=3e-6, atol=1e-8)
                    # Nothing has been changed in place.
                    torch.testing.assert_close(whole(pieces[n]), gradients[n], rtol=1e-6, atol=0)
    percentiles = PureClipping(fedclip.PercentileClip(90))
    state = percentiles.init(pieces)
    with pytest.raises(NotImplementedError, match="percentile-clip needs whole arrays"):
        percentiles.update(pieces, state)


@case
def each_step_needs_one_collective_or_two():
    from torch.distributed.tensor.debug import CommDebugMode

    for name, places in layouts():
        places = {n: p for n, p in places.items() if p is None or not p[1][0].is_partial()}
        parts = {n: torch.nn.Parameter(shared(weights()[n], place)) for n, place in places.items()}
        ones = ("norm by tensor", "z-score", "norm of order inf", "root mean square")
        # These get the arrays whole.
        ones += ("percentile of values", "moving average of values")
        ones += ("standardize", "centralize", "moving average")
        twos = ("agc", "normalize", "norm, both sides")
        # The largest element first, in whose unit nothing can overflow.
        twos += ("values", "norm of order 0.5", "mean of absolutes")
        threes = ("deviation",)
        wrong = {}
        counts = {**dict.fromkeys(ones, 1), **dict.fromkeys(twos, 2), **dict.fromkeys(threes, 3)}
        for clipper, most in counts.items():
            for parameter in parts.values():
                parameter.grad = torch.ones_like(parameter)
            made = CLIPPERS[clipper]()
            with CommDebugMode() as counted:
                clip_(parts, made)
            if counted.get_total_counts() != most:
                wrong[clipper] = counted.get_total_counts()
        assert not wrong, (name, wrong)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def net():
    torch.manual_seed(0)
    return Net()


def batches(count=5):
    generator = torch.Generator().manual_seed(3)
    return [10 * torch.randn(8, 5, generator=generator) for _ in range(count)]


def train(model, optimizer, clipper, own=None):
    handle = attach(optimizer, clipper, model)
    for batch in batches():
        optimizer.zero_grad()
        (own(model) if own else model)(batch).square().mean().backward()
        optimizer.step()
    return handle


@case
def fully_sharded_training_is_that_of_one_process():
    alone = net()
    clipper = fedclip.ZScoreClip(warmup=2, scope="layer", max_norm=1.0)
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), clipper)
    model = net()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = train(model, optimizer, fedclip.ZScoreClip(warmup=2, scope="layer", max_norm=1.0))
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a, rtol=1e-5, atol=1e-6)
    same_everywhere(pickle.dumps(handle.get_state()))
    assert optimizer.state_dict()["fedclip:zscore-clip"] == handle.get_state()


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
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    world = dist.get_world_size()
    plane = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    names = ("norm", "z-score", "values", "agc", "norm by slices", "deviation")
    for name in (*names, "percentile of values"):
        alone = net()
        first = CLIPPERS[name]()
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.01), first)
        model = net()
        parallelize_module(
            model, plane["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
        fully_shard(model, mesh=plane["dp"])
        handle = train(model, torch.optim.SGD(model.parameters(), lr=0.01), CLIPPERS[name]())
        for a, b in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b.full_tensor(), a, rtol=1e-4, atol=1e-5, msg=name)
        same_everywhere(handle.last.norm_before)


@case
def what_torch_expects_of_fully_sharded_models():
    from torch.distributed.tensor.debug import CommDebugMode

    world = dist.get_world_size()
    for order in (2, 1, 3, math.inf):
        for sizes in ((world,), (world // 2, 2)):
            alone, model = net(), net()
            names = ("dp", "tp")[: len(sizes)]
            # On two dimensions, the second holds copies of the model: HSDP.
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            for layer in (model.first, model.second):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for batch in batches(3):
                for one in (alone, model):
                    one.zero_grad()
                    one(batch).square().sum().backward()
                before = [p.grad.to_local().clone() for p in model.parameters()]
                expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0, order)
                with CommDebugMode() as counted:
                    found = clip_grad_norm_(model.parameters(), 1.0, order)
                assert math.isclose(found.full_tensor().item(), expected.item(), rel_tol=1e-5)
                assert len(found.placements) == len(sizes)
                counts = counted.get_comm_counts()
                # Of other orders, the largest element first.
                most = 1 if order in (2, math.inf) else 2
                assert counts[torch.ops.c10d_functional.all_reduce] == most, counts
                assert counted.get_total_counts() == most, counts
                # Together first: a process that fails alone would leave the others waiting.
                after = [p.grad.full_tensor() for p in model.parameters()]
                for parameter, value in zip(alone.parameters(), after, strict=True):
                    torch.testing.assert_close(value, parameter.grad, rtol=1e-4, atol=1e-6)
                for parameter, old in zip(model.parameters(), before, strict=True):
                    own = parameter.grad.to_local()
                    # A process may have no part of a small tensor.
                    if old.count_nonzero():
                        assert torch.linalg.vector_norm(own, order) <= 1.0 + 1e-6
                        assert not torch.equal(own, old)


@case
def distributed_data_parallel_and_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    alone = net()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), fedclip.ZScoreClip(max_norm=1.0))
    for zero in (False, True):
        model = DistributedDataParallel(net())
        optimizer = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            if zero
            else torch.optim.Adam(model.parameters(), lr=0.01)
        )
        handle = train(model, optimizer, fedclip.ZScoreClip(max_norm=1.0))
        for a, b in zip(alone.parameters(), model.module.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        same_everywhere(pickle.dumps(handle.get_state()))
        if zero:
            optimizer.consolidate_state_dict(0)
            if dist.get_rank() == 0:
                saved = optimizer.state_dict()
                assert saved["fedclip:zscore-clip"] == handle.get_state()
                handle.reset()
                optimizer.load_state_dict(saved)
                assert handle.get_state() == saved["fedclip:zscore-clip"]


@case
def fsdp1_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    for orig in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(
                net(), use_orig_params=orig, device_id=torch.device("cpu")
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for given in (model, model.module):
            with pytest.raises(TypeError, match="fully_shard"):
                attach(optimizer, fedclip.NormClip(1.0), given)
            with pytest.raises(TypeError, match="fully_shard"):
                clip_(given, fedclip.NormClip(1.0))


def main(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run cases, and write down how each went."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    own = Path(folder) / f"{rank}"
    own.mkdir()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        # Where one process fails alone, the others wait for so long, and end.
        timeout=timedelta(seconds=600),
    )
    for name in names:
        try:
            CASES[name]()
        except Exception:
            (own / name).write_text(traceback.format_exc())
        else:
            (own / name).write_text("")
        dist.barrier()
    dist.destroy_process_group()
