"""Trials of clippers and gradients drawn at random, and the smallest gradient of each breach."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import fedclip  # noqa: F401  (registers the clippers)
from benchmarks.search import clippers
from benchmarks.search.gradients import SHAPES, Gradient, Tensor, draw, kind_of
from benchmarks.search.promises import Trial
from fedclip.testing import to_vector

STEPS = 50
"""Gradients of one trial, which keeps its clipper."""
CHUNK = 40
"""Trials that a process does at a time."""
SHARES = {"numpy": 0.6, "torch": 0.26, "tensorflow": 0.07, "jax": 0.07}
"""How often each framework comes; TensorFlow and JAX take ten times as long."""


class Breach(NamedTuple):
    """A promise that was not kept."""

    promise: str
    clipper: str
    framework: str
    dtypes: str
    seen: str
    trial: int
    step: int
    config: dict[str, Any]
    gradient: Gradient
    alone: bool
    """Whether a fresh clipper breaks it as well."""
    device: bool
    """Whether the step was one for devices."""

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """What counts as the same."""
        return self.promise, self.clipper, self.framework, self.dtypes


def trial(seed: int, number: int, frameworks: list[str], device: bool = False) -> Iterator[Breach]:
    """Give a clipper, drawn at random, `STEPS` gradients, and yield what it breaks."""
    rng = np.random.default_rng([seed, number])
    shares = np.array([SHARES[f] for f in frameworks])
    framework = str(rng.choice(frameworks, p=shares / shares.sum()))
    shapes = SHAPES[rng.integers(len(SHAPES))]
    scale = float(10.0 ** rng.choice([rng.uniform(-6, 4), rng.uniform(-40, 30)], p=[0.8, 0.2]))
    name, config = clippers.draw(rng, scale, list(shapes))
    try:
        clipper = clippers.make(name, config)
    except ValueError:
        # Two parameters that do not go together are refused, with a sentence.
        config = {}
        clipper = clippers.make(name, config)
    run = Trial(name, config, framework, clipper, device)
    run.weights = _weights(shapes, framework)
    other = None
    for step in range(STEPS):
        gradient = draw(rng, framework, scale, shapes)
        if rng.random() < 0.04:
            gradient = _spoiled(rng, gradient)
        if step == STEPS // 2:
            other, broken = run.moved(clippers.make)
            for promise, seen in broken:
                yield _breach(run, gradient, promise, seen, number, step, alone=False)
        found = list(run.step(gradient))
        for promise, seen in found:
            alone = _again(run, gradient, promise, seen)
            yield _breach(run, gradient, promise, seen, number, step, alone=alone)
        if any(promise == "no error" for promise, _ in found):
            return
        seen = run.parted(other, gradient) if other is not None else ""
        if seen:
            yield _breach(run, gradient, "state goes on", seen, number, step, alone=False)
            return


def _breach(
    run: Trial,
    gradient: Gradient,
    promise: str,
    seen: str,
    number: int,
    step: int,
    *,
    alone: bool,
) -> Breach:
    dtypes = "+".join(sorted({t.dtype for t in gradient.values()}))
    if any(t.layout == "sparse" for t in gradient.values()):
        dtypes += ", sparse"
    return Breach(
        promise,
        run.name,
        run.framework,
        dtypes,
        seen,
        number,
        step,
        run.config,
        gradient,
        alone,
        run.device,
    )


def _weights(shapes: dict[str, tuple[int, ...]], framework: str) -> Any:
    rng = np.random.default_rng(0)
    return to_vector({n: np.asarray(rng.standard_normal(s)) for n, s in shapes.items()}, framework)


def _spoiled(rng: np.random.Generator, gradient: Gradient) -> Gradient:
    """Return the gradient with NaN or infinity somewhere, if it has an element."""
    names = [name for name, tensor in gradient.items() if tensor.values.size]
    if not names:
        return gradient
    name = str(rng.choice(names))
    values = gradient[name].values.copy()
    values.flat[rng.integers(values.size)] = rng.choice([np.nan, np.inf, -np.inf])
    if gradient[name].layout == "repeated":
        values = np.broadcast_to(values[:1], values.shape)
    return {**gradient, name: replace(gradient[name], values=values)}


# -- the smallest gradient that shows it -------------------------------------------------------
def _again(run: Trial, gradient: Gradient, promise: str, seen: str) -> bool:
    """Whether a fresh clipper breaks the same promise with one gradient, by the same error."""
    error = seen.partition(":")[0] if promise == "no error" else ""
    try:
        clipper = clippers.make(run.name, run.config)
        fresh = Trial(run.name, run.config, run.framework, clipper, run.device)
        fresh.weights = _weights({n: t.shape for n, t in gradient.items()}, run.framework)
        return any(
            found == promise and now.startswith(error) for found, now in fresh.step(gradient)
        )
    except Exception:
        return False


def shrunk(breach: Breach, most: int = 200) -> Breach:
    """Return the breach with a smaller gradient, where a fresh clipper shows it too."""
    if not breach.alone:
        return breach
    run = Trial(breach.clipper, breach.config, breach.framework, None, breach.device)
    gradient, tries = breach.gradient, 0
    progress = True
    while progress and tries < most:
        progress = False
        for smaller in _smaller(gradient):
            tries += 1
            if _again(run, smaller, breach.promise, breach.seen):
                gradient, progress = smaller, True
                break
    return breach._replace(gradient=gradient)


def _smaller(gradient: Gradient) -> Iterator[Gradient]:
    for name in gradient:
        if len(gradient) > 1:
            yield {n: t for n, t in gradient.items() if n != name}
    for name, tensor in gradient.items():
        if tensor.layout not in ("plain", "sparse"):
            yield {**gradient, name: replace(tensor, layout="plain")}
        n = len(tensor.values) if tensor.values.ndim else 0
        for keep in (slice(n // 2), slice(n // 2, n), slice(n - 1), slice(1, n)) if n > 1 else ():
            rows = tensor.rows[keep]
            yield {**gradient, name: replace(tensor, values=tensor.values[keep], rows=rows)}
        if tensor.values.ndim > 1 and tensor.values.shape[-1] > 1:
            yield {**gradient, name: replace(tensor, values=tensor.values[..., :1])}


def shown(breach: Breach) -> str:
    """Return the breach in words, and lines that reproduce it."""
    lines = [
        f"{breach.promise}: {breach.clipper} on {breach.framework}, {breach.dtypes}",
        f"    seen: {breach.seen}",
        f"    trial {breach.trial}, step {breach.step}"
        + ("; one step of a fresh clipper is enough" if breach.alone else ""),
        f"    make({breach.clipper!r}, {breach.config!r})",
        f"    {kind_of(breach.framework)}",
    ]
    lines += [f"    {name}: {_written(tensor)}" for name, tensor in breach.gradient.items()]
    return "\n".join(lines)


def _written(tensor: Tensor) -> str:
    values = tensor.values.tolist() if tensor.values.size <= 24 else f"{tensor.values.size} values"
    rows = f", rows {list(tensor.rows)} of {tensor.n_rows}" if tensor.layout == "sparse" else ""
    return f"{tensor.dtype} {tensor.shape} {tensor.layout}{rows}: {values}"


# -- all trials --------------------------------------------------------------------------------
def _trials(
    seed: int, numbers: list[int], frameworks: list[str], device: bool
) -> tuple[Counter[Any], list[Any]]:
    """Return how often each kind of breach came, and one of each."""
    counts: Counter[Any] = Counter()
    first: dict[Any, Breach] = {}
    for number in numbers:
        for breach in trial(seed, number, frameworks, device):
            counts[breach.kind] += 1
            known = first.get(breach.kind)
            if known is None or (breach.alone and not known.alone):
                first[breach.kind] = breach
    return counts, [shrunk(breach) for breach in first.values()]


def search(
    gradients: int,
    seed: int,
    frameworks: list[str],
    jobs: int = 1,
    progress: Any = None,
    device: bool = False,
) -> tuple[Counter[Any], dict[Any, Breach]]:
    """Return how often each kind of breach came in so many gradients, and the first of each."""
    numbers = list(range(-(-gradients // STEPS)))
    chunks = [numbers[i : i + CHUNK] for i in range(0, len(numbers), CHUNK)]
    counts: Counter[Any] = Counter()
    first: dict[Any, Breach] = {}

    def add(result: tuple[Counter[Any], list[Breach]], done: int) -> None:
        counts.update(result[0])
        new = {b.kind: b for b in result[1] if b.kind not in first}
        first.update(new)
        if progress is not None:
            progress(min(done * CHUNK, len(numbers)) * STEPS, sum(counts.values()), new.values())

    if jobs == 1:
        for done, chunk in enumerate(chunks, 1):
            add(_trials(seed, chunk, frameworks, device), done)
        return counts, first
    # Frameworks start threads, which a plain fork does not survive.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_trials, seed, chunk, frameworks, device) for chunk in chunks]
        for done, future in enumerate(futures, 1):
            add(future.result(), done)
    return counts, first
