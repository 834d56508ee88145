"""Draw what each clipper does to one stream of norms: ``python docs/norms.py``.

The stream is steady, has one spike, rises tenfold for good, and holds one NaN. The pictures are
SVG files in ``images/clippers/``; ``docs/clippers.py`` shows each on its clipper's page.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from declearn.model.sklearn import NumpyVector
from declearn.utils import access_registered

import fedclip  # noqa: F401  (registers the clippers)

IMAGES = Path(__file__).parent / "images" / "clippers"
STEPS, SPIKE, RISE, BAD, SIZE = 160, 50, 90, 130, 20
NAMES = {
    "adaptive-clip": {},
    "auto-clip": {},
    "ema-clip": {},
    "ema-norm-clip": {},
    "ema-normalize": {},
    "ema-value-clip": {},
    "growth-clip": {},
    "growth-value-clip": {},
    "mad-clip": {},
    "no-op": {},
    "norm-clip": {"max_norm": 2.0},
    "normalize": {},
    "percentile-clip": {},
    "percentile-norm-clip": {},
    "value-clip": {},
    "zscore-clip": {},
}
"""Clippers with a picture, and the parameters that are not their defaults."""


def stream() -> np.ndarray:
    """Return the gradients, a row each; their norms are near 1 before the rise."""
    rng = np.random.default_rng(0)
    direction = np.full(SIZE, SIZE**-0.5)
    rows = direction * rng.lognormal(0.0, 0.15, (STEPS, 1))
    rows = rows * rng.lognormal(0.0, 0.3, (STEPS, SIZE))
    rows[SPIKE] *= 50
    rows[RISE:] *= 10
    rows[BAD, 3] = np.nan
    return rows


def clipped(name: str, rows: np.ndarray) -> np.ndarray:
    """Return the norm of each output."""
    clipper = access_registered(name, "OptiModule")(**NAMES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = [clipper.run(NumpyVector({"w": row})).coefs["w"] for row in rows]
    return np.linalg.norm(outputs, axis=1)


def draw(name: str) -> None:
    """Write the picture of one clipper."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = stream()
    before, after = np.linalg.norm(rows, axis=1), clipped(name, rows)
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    ax = figure.subplots()
    steps = np.arange(1, STEPS + 1)
    ax.plot(steps, before, color="0.6", linewidth=1, label="before")
    # A gradient of zeros has no place on a logarithmic axis.
    ax.plot(steps, np.where(after > 0, after, np.nan), color="C0", linewidth=1.6, label="after")
    for step, text in ((SPIKE, "spike"), (RISE, "tenfold from here"), (BAD, "NaN")):
        ax.annotate(text, (step + 1, 70), ha="center", va="bottom", fontsize="small")
        ax.axvline(step + 1, color="0.85", linewidth=1, zorder=0)
    ax.set(xlabel="step", ylabel="norm", yscale="log", ylim=(0.2, 130))
    ax.legend(frameon=False, ncols=2, loc="lower right", fontsize="small")
    IMAGES.mkdir(parents=True, exist_ok=True)
    # The same text and ids every time, so that a new picture is a new picture.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedclip"}):
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def alternative(name: str) -> str:
    """Say in words what the picture shows."""
    rows = stream()
    before, after = np.linalg.norm(rows, axis=1), clipped(name, rows)
    steady = np.median(after[20:SPIKE])
    settings = ", ".join(f"{key} = {value}" for key, value in NAMES[name].items())
    at_nan = "passes" if np.isnan(after[BAD]) else "becomes zeros" if not after[BAD] else "stays"
    return (
        f"{name} with {settings or 'its defaults'}, on {STEPS} gradients. Steady norms near "
        f"{np.median(before[:SPIKE]):.1f} come out near {steady:.2g}; a spike of "
        f"{before[SPIKE]:.0f} comes out at {after[SPIKE]:.2g}; when all norms rise tenfold, the "
        f"first comes out at {after[RISE]:.2g} and the last at {after[-1]:.2g}; a gradient with "
        f"NaN {at_nan}."
    )


if __name__ == "__main__":
    for name in NAMES:
        draw(name)
        print(alternative(name))
