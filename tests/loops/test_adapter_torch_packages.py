"""Optimizers and loops of other packages, as they are: clipped once a step, saved, or refused."""

import inspect
import io
from collections import Counter
from functools import partial

import pytest
from helpers import require

torch = require("torch")

from torch_loops import backward, build, closure_of, total  # noqa: E402

from fedclip import FedclipWarning, ZScoreClip  # noqa: E402
from fedclip.loops.torch import attach  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore", "error::fedclip.FedclipWarning"),
]

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def once(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def by_closure(model, optimizer):
    optimizer.step(closure_of(model, optimizer))


def both(model, optimizer):
    backward(model)
    by_closure(model, optimizer)


def two_steps(model, optimizer):
    for step in (optimizer.first_step, optimizer.second_step):
        backward(model)
        step(zero_grad=True)


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


def test_bitsandbytes():
    optim = pytest.importorskip("bitsandbytes").optim
    names = "Adam8bit AdamW8bit SGD8bit Lion8bit AdEMAMix8bit AdamW PagedAdamW8bit"
    for name in names.split():
        settings = {"momentum": 0.9} if "SGD" in name else {}
        make = partial(getattr(optim, name), lr=0.01, **settings)
        clips_and_comes_back(lambda m, make=make: make(m.parameters()))


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
    clips_and_comes_back(lambda m: package.ScheduleFreeWrapper(SGD(m.parameters(), lr=0.01)), once)


def test_each_of_pytorch_optimizer():
    package = pytest.importorskip("pytorch_optimizer")
    found = Counter()

    def make(model):
        asked = inspect.signature(kind).parameters
        settings = {"lr": 1e-3} if "lr" in asked else {}
        return kind(model if "model" in asked else [*model.parameters()], **settings)

    for kind in map(package.load_optimizer, package.get_supported_optimizers()):
        model = build()
        try:
            optimizer = make(model)
            # Those that need more than a plain step are below, or in no ordinary loop.
            once(model, optimizer)
        except NotImplementedError:
            with pytest.raises(TypeError, match=rf"{kind.__name__} has no step"):
                attach(optimizer, ZScoreClip(), model)
            found["refused"] += 1
        except Exception:
            continue
        else:
            clips_and_comes_back(make)
            found["clipped"] += 1
    assert found["refused"] >= 2
    assert found["clipped"] > 90


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

    def muon(model):
        matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
        groups = {"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}
        return package.Muon([*groups])

    clips_and_comes_back(muon)


def test_torchzero_and_accelerate():
    package = pytest.importorskip("torchzero")
    made = lambda m: package.Optimizer(m.parameters(), package.m.Adam(), package.m.LR(0.01))  # noqa: E731
    for loop in (once, by_closure):
        clips_and_comes_back(made, loop)
    prepare = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare
    clips_and_comes_back(lambda m: prepare(AdamW(m.parameters(), lr=0.01)))


def test_adapters_of_peft():
    package = pytest.importorskip("peft")
    config = package.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights="gaussian")
    model = package.get_peft_model(build(), config)
    # A class of its own, whose step multiplies the gradients and calls that of SGD.
    riemannian = pytest.importorskip("peft.optimizers.riemannian").create_riemannian_optimizer
    optimizer = riemannian(model, SGD, lr=0.01)
    handle = attach(optimizer, ZScoreClip(max_norm=0.5, scope="layer"), model)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        expected = total(model)
        optimizer.step()
        assert float(handle.last) == pytest.approx(expected, rel=1e-5)
    assert handle.metrics()["round/steps"] == 3
    assert len(handle.last.groups) == 4


def test_inner_loops_of_higher():
    package = pytest.importorskip("higher")
    model = build()
    inner = SGD(model.parameters(), lr=0.01)
    handle = attach(inner, ZScoreClip(), model)

    def round_():
        with handle, package.innerloop_ctx(model, inner) as (fast, steps):
            steps.step(fast(torch.ones(3, 5)).square().mean())
            with pytest.raises(TypeError, match="no hooks of torch"):
                attach(steps, ZScoreClip())

    with pytest.warns(FedclipWarning, match="has clipped nothing"):
        round_()
