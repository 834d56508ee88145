"""Time clip_ on a GPU beside torch.nn.utils.clip_grad_norm_; prints ratios, asserts nothing."""

import functools

import torch

from fedclip import NormClip, ZScoreClip
from fedclip.loops.torch import clip_


def median(f, n=50):
    times = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[n // 2]


def rows(count, shape):
    """Return what each way takes on `count` gradients of one shape."""
    parameters = {
        f"p{i}": torch.nn.Parameter(torch.zeros(shape, device="cuda")) for i in range(count)
    }
    for p in parameters.values():
        p.grad = torch.randn(shape, device="cuda")
    values = list(parameters.values())
    runs = {"torch": lambda: torch.nn.utils.clip_grad_norm_(values, 1e9)}
    for policy in ("propagate", "skip"):
        for clipper in (
            NormClip(1e9, on_nonfinite=policy),
            ZScoreClip(max_norm=1e9, on_nonfinite=policy),
        ):
            runs[f"{clipper.name} {policy}"] = functools.partial(clip_, parameters, clipper)
    for f in runs.values():
        f()
    base = median(runs["torch"])
    return {name: f"{median(f):.3f} ms, {median(f) / base:.2f}x" for name, f in runs.items()}


def main():
    print(torch.cuda.get_device_name(), torch.__version__)
    shapes = [(20, (135,)), (200, (136, 136)), (1000, (64, 64)), (40, (725, 725))]
    for count, shape in [*shapes, (40, (4096, 4096))]:
        print(f"{count} x {shape}:", rows(count, shape))


if __name__ == "__main__":
    main()
