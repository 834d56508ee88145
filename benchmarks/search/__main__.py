"""Search for a gradient that breaks a promise.

``python -m benchmarks.search --gradients 1000000 --seed 1`` draws clippers, parameters and
gradients: four frameworks, four dtypes, every layout, sparse tensors with rows that repeat,
extreme values, NaN. It prints how often each promise was broken, and of each kind of breach the
smallest gradient that shows it. ``--trial N`` runs one trial of a seed again. ``--device`` takes
the steps that clippers have for arrays on a GPU, without one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable

from benchmarks.search.trials import CHUNK, STEPS, Breach, search, shown, trial
from fedclip.testing import FRAMEWORKS


def main(argv: list[str] | None = None) -> int:
    """Search, and print what was found; return 1 if anything was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--gradients", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--trial", type=int, help="run this trial of the seed again, and no other")
    parser.add_argument("--device", action="store_true", help="steps as on a GPU; not for numpy")
    options = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    frameworks = options.frameworks.split(",")
    if options.device:
        frameworks = [framework for framework in frameworks if framework != "numpy"]
    if options.trial is not None:
        for breach in trial(options.seed, options.trial, frameworks, options.device):
            print(shown(breach))
        return 0
    start = time.monotonic()

    def progress(done: int, broken: int, new: Iterable[Breach]) -> None:
        for breach in new:
            print(shown(breach), file=sys.stderr, flush=True)
        if sys.stderr.isatty() or done % 100_000 < CHUNK * STEPS:
            print(f"{done:,} gradients, {broken:,} breaches", file=sys.stderr, flush=True)

    counts, first = search(
        options.gradients, options.seed, frameworks, options.jobs, progress, options.device
    )
    for kind, breach in sorted(first.items()):
        print(f"{counts[kind]} times: {shown(breach)}\n")
    minutes = (time.monotonic() - start) / 60
    print(
        f"{options.gradients:,} gradients of seed {options.seed} in {minutes:.1f} minutes: "
        f"{sum(counts.values()):,} breaches of {len(first)} kinds"
    )
    return bool(first)


if __name__ == "__main__":
    sys.exit(main())
