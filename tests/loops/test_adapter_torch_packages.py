"""Optimizers and loops of other packages, as they are: clipped once a step, saved, or refused."""

import copy
import inspect
import io

import pytest
from helpers import require

torch = require("torch")

from fedclip import FedclipWarning, ZScoreClip  # noqa: E402
from fedclip.loops.torch import attach, handles  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore", "error::fedclip.FedclipWarning"),
]

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def backward(model):
    loss = (10 * model(torch.ones(2, 8))).square().mean()
    loss.backward(create_graph=torch.is_grad_enabled() and getattr(model, "twice", False))
    return loss


def once(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def by_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        return backward(model)

    return optimizer.step(closure)


def both(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    by_closure(model, optimizer)


def two_steps(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.first_step(zero_grad=True)
    backward(model)
    optimizer.second_step(zero_grad=True)


def clips_and_comes_back(make, loop=once, clips=3):
    """Run three steps, and load what was saved into the same again."""

    def made():
        model = build()
        optimizer = make(model)
        getattr(optimizer, "train", lambda: None)()
        return model, optimizer, attach(optimizer, ZScoreClip(max_norm=0.5), model)

    model, optimizer, handle = made()
    for _ in range(3):
        loop(model, optimizer)
    assert handle.metrics()["round/steps"] == clips
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _, other, loaded = made()
    other.load_state_dict(torch.load(file, weights_only=False))
    assert repr(loaded.get_state()) == repr(handle.get_state())
    assert loaded.get_state()["groups"]


EIGHT = ["Adam8bit", "AdamW8bit", "SGD8bit", "Lion8bit", "AdEMAMix8bit", "AdamW", "PagedAdamW8bit"]


@pytest.mark.parametrize("name", EIGHT)
def test_bitsandbytes(name):
    optim = pytest.importorskip("bitsandbytes").optim
    settings = {"momentum": 0.9} if "SGD" in name else {}
    clips_and_comes_back(lambda m: getattr(optim, name)(m.parameters(), lr=0.01, **settings))


def test_schedulefree():
    package = pytest.importorskip("schedulefree")

    def by_turns(model, optimizer):
        optimizer.train()
        once(model, optimizer)
        optimizer.eval()

    for kind in ("AdamW", "SGD", "RAdam"):
        for end, loop in (("", by_turns), ("Closure", by_closure)):
            make = getattr(package, f"{kind}ScheduleFree{end}")
            clips_and_comes_back(lambda m, make=make: make(m.parameters(), lr=0.01), loop)
    wrap = package.ScheduleFreeWrapper
    clips_and_comes_back(lambda m: wrap(SGD(m.parameters(), lr=0.01)), once)


def test_each_of_pytorch_optimizer():
    package = pytest.importorskip("pytorch_optimizer")
    found = []
    for name in package.get_supported_optimizers():
        make = package.load_optimizer(name)
        asked = inspect.signature(make).parameters
        settings = {"lr": 1e-3} if "lr" in asked else {}
        model = build()
        try:
            optimizer = make(model if "model" in asked else list(model.parameters()), **settings)
            # Those that need more than a plain step are below, or in no ordinary loop.
            once(model, optimizer)
        except NotImplementedError:
            with pytest.raises(TypeError, match=rf"{make.__name__} has no step"):
                attach(optimizer, ZScoreClip(), model)
            found.append("refused")
            continue
        except Exception:
            continue
        clips_and_comes_back(
            lambda m, make=make, asked=asked, settings=settings: make(
                m if "model" in asked else list(m.parameters()), **settings
            )
        )
        found.append("clipped")
    assert found.count("refused") >= 2
    assert found.count("clipped") > 90


def test_wrappers_of_pytorch_optimizer():
    package = pytest.importorskip("pytorch_optimizer")
    for kind in ("Lookahead", "TRAC", "OrthoGrad", "PCGrad"):
        make = getattr(package, kind)
        clips_and_comes_back(lambda m, make=make: make(AdamW(m.parameters(), lr=0.01)))
    for loop in (both, two_steps):
        clips_and_comes_back(lambda m: package.SAM(m.parameters(), AdamW, lr=0.01), loop)
    clips_and_comes_back(lambda m: package.WSAM(m, m.parameters(), AdamW, lr=0.01), both)
    clips_and_comes_back(lambda m: package.LookSAM(m.parameters(), AdamW, lr=0.01), both)
    # It asks for two gradients a step, at weights with noise.
    clips_and_comes_back(lambda m: package.BSAM(m.parameters(), num_data=10), both, clips=6)

    def surrogate(model):
        base = AdamW(model.parameters(), lr=0.01)
        rate = torch.optim.lr_scheduler.ConstantLR(base)
        rho = package.ProportionScheduler(rate, max_lr=0.01)
        optimizer = package.GSAM(model.parameters(), base, model, rho)
        optimizer.set_closure(torch.nn.functional.mse_loss, torch.ones(2, 8), torch.ones(2, 4))
        return optimizer

    clips_and_comes_back(surrogate)

    def muon(model):
        held = [
            [p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)
        ]
        return package.Muon(
            [{"params": held[0], "use_muon": True}, {"params": held[1], "use_muon": False}]
        )

    clips_and_comes_back(muon)


def test_torchzero():
    package = pytest.importorskip("torchzero")
    for loop in (once, by_closure):
        clips_and_comes_back(
            lambda m: package.Optimizer(m.parameters(), package.m.Adam(), package.m.LR(0.01)), loop
        )


def test_accelerate_and_zero():
    accelerate = pytest.importorskip("accelerate")
    prepare = accelerate.Accelerator(cpu=True).prepare
    clips_and_comes_back(lambda m: prepare(AdamW(m.parameters(), lr=0.01)))
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        kind = pytest.importorskip("torch.distributed.optim").ZeroRedundancyOptimizer

        class Gathered(kind):
            def state_dict(self):
                self.consolidate_state_dict()
                return super().state_dict()

        clips_and_comes_back(lambda m: Gathered(m.parameters(), SGD, lr=0.01))
    finally:
        distributed.destroy_process_group()


def test_adapters_of_peft():
    package = pytest.importorskip("peft")
    model = package.get_peft_model(
        build(), package.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights="gaussian")
    )
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    handle = attach(optimizer, ZScoreClip(scope="layer"), model)
    for _ in range(3):
        once(model, optimizer)
    assert handle.metrics()["round/steps"] == 3
    assert len(handle.last.groups) == 4
    # A class of its own, whose step multiplies the gradients and calls that of SGD.
    riemannian = pytest.importorskip("peft.optimizers.riemannian").create_riemannian_optimizer
    optimizer = riemannian(model, SGD, lr=0.01)
    handle = attach(optimizer, ZScoreClip(max_norm=0.5), model)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        assert float(handle.last) == pytest.approx(float(expected.norm()), rel=1e-5)
    assert handle.metrics()["round/steps"] == 3


def test_inner_loops_of_higher():
    package = pytest.importorskip("higher")
    model = build()
    inner, outer = SGD(model.parameters(), lr=0.01), AdamW(model.parameters(), lr=1e-3)

    def round_(**settings):
        with package.innerloop_ctx(model, inner, **settings) as (fast, steps):
            for _ in range(2):
                steps.step((10 * fast(torch.ones(2, 8))).square().mean())
            with pytest.raises(TypeError, match="no hooks of torch"):
                attach(steps, ZScoreClip())
            if settings:
                outer.zero_grad()
                fast(torch.ones(2, 8)).square().mean().backward()
                outer.step()

    handle = attach(inner, ZScoreClip(), model)
    with pytest.warns(FedclipWarning, match="has clipped nothing"), handle:
        round_()
    handle = attach(inner, ZScoreClip(), model)
    round_(copy_initial_weights=False)
    with pytest.warns(FedclipWarning, match=r"no step of the optimizer \(SGD\)"):
        round_(copy_initial_weights=False)
    handle.remove()
    # For one that has stepped before, attach warns.
    outer = AdamW(model.parameters(), lr=1e-3)
    handle = attach(outer, ZScoreClip(), model)
    for _ in range(2):
        round_(copy_initial_weights=False)
    assert handle.metrics()["round/steps"] == 2
    assert handles(copy.deepcopy(outer))[0].get_state() == handle.get_state()
