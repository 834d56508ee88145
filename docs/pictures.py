"""Draw what each clipper does: ``python docs/pictures.py``.

Most see one stream of norms: steady, with one spike, tenfold for good, and one NaN. The pictures
are SVG files in ``images/clippers/``, and ``docs/clippers.py`` shows each on its clipper's page.
Each file holds the numbers that were drawn, so that a test can tell whether it is current with any
version of matplotlib.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from catalogue import registered
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.utils import access_registered

import fedclip  # noqa: F401  (registers the clippers)
from fedclip.dpsgd.step import SampleClipping

Series: TypeAlias = dict[str, list[float]]
"""The numbers of a picture, by what they are."""

IMAGES = Path(__file__).parent / "images" / "clippers"
STEPS, SPIKE, RISE, BAD, SIZE = 160, 50, 90, 130, 20
BEFORE, AFTER, LIMIT = "0.6", "C0", "C1"
SETTINGS: dict[str, dict[str, Any]] = {
    "agc": {"ratio": 0.1, "axis": 0, "min_norm": 0.001},
    "clipped-averaging": {"max_norm": 1.0},
    "norm-clip": {"max_norm": 2.0},
}
"""Parameters that are not their defaults."""


# -- one stream of norms ------------------------------------------------------------------------
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


def norms_of(name: str) -> Series:
    """Return the norm of each gradient, and that of each output."""
    clipper = access_registered(name, "OptiModule")(**SETTINGS.get(name, {}))
    rows = stream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = [clipper.run(NumpyVector({"w": row})).coefs["w"] for row in rows]
    return {
        "before": np.linalg.norm(rows, axis=1).tolist(),
        "after": np.linalg.norm(outputs, axis=1).tolist(),
    }


def draw_norms(ax: Any, data: Series) -> None:
    """Draw the norms step by step."""
    steps, after = np.arange(1, STEPS + 1), np.array(data["after"])
    ax.plot(steps, data["before"], color=BEFORE, linewidth=1, label="before")
    # A gradient of zeros has no place on a logarithmic axis.
    ax.plot(steps, np.where(after > 0, after, np.nan), color=AFTER, linewidth=1.6, label="after")
    for step, text in ((SPIKE, "spike"), (RISE, "tenfold from here"), (BAD, "NaN")):
        ax.annotate(text, (step + 1, 70), ha="center", va="bottom", fontsize="small")
        ax.axvline(step + 1, color="0.85", linewidth=1, zorder=0)
    ax.set(xlabel="step", ylabel="norm", yscale="log", ylim=(0.2, 130))


def norms_in_words(data: Series) -> str:
    """Say what becomes of the stream."""
    before, after = np.array(data["before"]), np.array(data["after"])
    return (
        f"Norms near {np.median(before[:SPIKE]):.1f} become {np.median(after[20:SPIKE]):.2g}, "
        f"{before[SPIKE]:.0f} becomes {after[SPIKE]:.2g}."
    )


# -- the units of a layer, beside their weights -------------------------------------------------
def units_of(name: str) -> Series:
    """Return the norms of the weights and of the gradient, unit by unit, before and after."""
    rng = np.random.default_rng(1)
    sizes = np.geomspace(1e-5, 10, 40)[:, None]
    weights = sizes * rng.normal(size=(40, SIZE)) * SIZE**-0.5
    grads = rng.lognormal(-3.0, 1.5, (40, 1)) * rng.normal(size=(40, SIZE)) * SIZE**-0.5
    agc = access_registered(name, "Regularizer")(**SETTINGS[name])
    out = agc.run(NumpyVector({"w": grads}), NumpyVector({"w": weights})).coefs["w"]
    found = {"weights": weights, "before": grads, "after": out}
    return {key: np.linalg.norm(rows, axis=1).tolist() for key, rows in found.items()}


def draw_units(ax: Any, data: Series) -> None:
    """Draw a point for each unit, and the limit as a line."""
    ax.scatter(data["weights"], data["before"], color=BEFORE, s=14, label="before")
    ax.scatter(data["weights"], data["after"], color=AFTER, s=14, label="after")
    norms = np.geomspace(1e-5, 20, 50)
    limits = 0.1 * np.maximum(norms, 1e-3)
    ax.plot(norms, limits, color=LIMIT, linestyle="--", label="limit: 0.1 of the weights' norm")
    ax.set(xlabel="norm of a unit's weights", ylabel="norm of its gradient")
    ax.set(xscale="log", yscale="log")


def units_in_words(data: Series) -> str:
    """Say how many units are clipped."""
    clipped = sum(a < b for a, b in zip(data["after"], data["before"], strict=True))
    return (
        f"{clipped} of {len(data['before'])} units have a gradient above a tenth of their weights, "
        "and come out there."
    )


# -- the values of a tensor ---------------------------------------------------------------------
def values_of(name: str) -> Series:
    """Return how many values there are between edges, before and after."""
    values = np.random.default_rng(2).normal(0.8, 0.4, 2000)
    out = access_registered(name, "OptiModule")().run(NumpyVector({"w": values})).coefs["w"]
    edges = np.linspace(-4.0, 4.0, 81)
    found: Series = {"edges": edges.tolist()}
    for key, array in (("before", values), ("after", out)):
        found[key] = np.histogram(array, edges)[0].tolist()
        found[f"mean and deviation {key}"] = [float(array.mean()), float(array.std())]
    return found


def draw_values(ax: Any, data: Series) -> None:
    """Draw both distributions."""
    for key, colour in (("before", BEFORE), ("after", AFTER)):
        ax.stairs(data[key], data["edges"], fill=True, alpha=0.25, color=colour)
        ax.stairs(data[key], data["edges"], color=colour, linewidth=1.4, label=key)
    ax.set(xlabel="value of an element of the gradient", ylabel="elements", xlim=(-4, 4))


def values_in_words(data: Series) -> str:
    """Say mean and deviation."""
    (mean, deviation), (mean2, deviation2) = (
        data[f"mean and deviation {key}"] for key in ("before", "after")
    )
    return (
        f"Mean {mean:.2f} and standard deviation {deviation:.2f} of 2,000 values become "
        f"{abs(mean2):.2f} and {deviation2:.2f}."
    )


# -- clients, round by round --------------------------------------------------------------------
CLIENTS, ROUNDS = 6, 40


def rounds_of(client: list[Any], server: list[Any], aggregator: str, **settings: float) -> Series:
    """Return norms before and after by client, and the limit, over rounds of one step.

    The calls are those of declearn, in its order. The norms fall; the last client's are fifteen
    times as long.
    """
    rng, kind = np.random.default_rng(3), access_registered(aggregator, "Aggregator")
    clients = [(Optimizer(1.0, modules=client), kind(**settings)) for _ in range(CLIENTS)]
    central, whole = Optimizer(1.0, modules=server), kind(**settings)
    found: Series = {}
    for size in np.geomspace(3.0, 0.3, ROUNDS):
        sent, replies, limits, total = central.collect_aux_var(), {}, [], None
        for i, (optimizer, average) in enumerate(clients):
            norm = float(size * rng.lognormal(0.0, 0.2) * (15 if i == CLIENTS - 1 else 1))
            optimizer.process_aux_var(sent)
            optimizer.start_round()
            update = NumpyVector({"w": np.array([norm])})
            for module in optimizer.modules:
                update = module.run(update)
            limits += [m.last.limit[0] for m in optimizer.modules if getattr(m, "last", None)]
            shared: Any = average.prepare_for_sharing(update, n_steps=1)
            total = shared if total is None else total + shared
            found.setdefault(f"before {i}", []).append(norm)
            found.setdefault(f"after {i}", []).append(abs(float(shared.updates.coefs["w"][0])))
            for key, aux in optimizer.collect_aux_var().items():
                replies[key] = replies.get(key, 0) + aux
        limits += [m.bound for m in central.modules if hasattr(m, "bound")]
        found.setdefault("limit", []).append(max(limits, default=math.nan))
        central.process_aux_var(replies)
        gradient = whole.finalize_updates(total)
        for module in central.modules:
            gradient = module.run(gradient)
    return found


def updates_of(name: str) -> Series:
    """Return what update clipping does, with a fixed bound or with one that follows."""
    settings = SETTINGS.get(name, {})
    if name == "update-norms":
        return rounds_of([], [], "averaging")
    if not settings:
        return rounds_of(["update-clip-client"], ["update-clip-server"], "clipped-averaging")
    data = rounds_of([], [], "clipped-averaging", **settings)
    return {**data, "limit": [settings["max_norm"]] * ROUNDS}


def shared_of(name: str) -> Series:
    """Return what a clipper with a shared limit does."""
    clipper = [name.removesuffix("-server"), {"shared": True}]
    return rounds_of([clipper], [name], "averaging")


def draw_rounds(ax: Any, data: Series) -> None:
    """Draw the norms of each client, and the limit."""
    steps = np.arange(1, ROUNDS + 1)
    for i in range(CLIENTS):
        label = i == 0
        ax.plot(steps, data[f"before {i}"], color=BEFORE, linewidth=1, label="before" * label)
        ax.plot(steps, data[f"after {i}"], color=AFTER, linewidth=1.4, label="after" * label)
    ax.plot(steps, data["limit"], color=LIMIT, linestyle="--", linewidth=2, label="limit")
    ax.set(xlabel="round", ylabel="norm of each client", yscale="log")


def rounds_in_words(data: Series) -> str:
    """Say where the limit is, and what becomes of the client that is unlike the others."""
    first, tenth, last = (
        f"{limit:.2g}" if math.isfinite(limit) else "none"
        for limit in (data["limit"][0], data["limit"][9], data["limit"][-1])
    )
    before, after = (data[f"{key} {CLIENTS - 1}"][-1] for key in ("before", "after"))
    return (
        f"Limits in rounds 1, 10 and {ROUNDS}: {first}, {tenth}, {last}. There {before:.2g} "
        f"becomes {after:.2g}."
    )


# -- the records of a batch ---------------------------------------------------------------------
def records_of(name: str) -> Series:
    """Return the norms of a batch's records, before and after."""
    norms = np.sort(np.random.default_rng(4).lognormal(0.0, 0.8, 64))
    after = norms * SampleClipping().factors(norms[:, None], 1.0)[:, 0]
    return {"before": norms.tolist(), "after": after.tolist()}


def draw_records(ax: Any, data: Series) -> None:
    """Draw the norms, the shortest first."""
    for key, colour in (("before", BEFORE), ("after", AFTER)):
        ax.plot(range(1, 65), data[key], "o", color=colour, markersize=3.5, label=key)
    ax.axhline(1.0, color=LIMIT, linestyle="--", label="bound C")
    ax.set(xlabel="record of a batch, the shortest gradient first", ylabel="norm of its gradient")


def records_in_words(data: Series) -> str:
    """Say how many records are clipped."""
    clipped = sum(norm > 1.0 for norm in data["before"])
    return (
        f"{clipped} of 64 records have norms above 1, up to {max(data['before']):.2g}, and come "
        "out at 1, before noise."
    )


# -- all of them --------------------------------------------------------------------------------
class Picture(NamedTuple):
    """The numbers of a picture, how they are drawn, and what they say in words."""

    numbers: Callable[[str], Series]
    draw: Callable[[Any, Series], None]
    words: Callable[[Series], str]


NORMS = Picture(norms_of, draw_norms, norms_in_words)
VALUES = Picture(values_of, draw_values, values_in_words)
UPDATES = Picture(updates_of, draw_rounds, rounds_in_words)
SHARED = Picture(shared_of, draw_rounds, rounds_in_words)
OTHERS = {
    "agc": Picture(units_of, draw_units, units_in_words),
    "centralize": VALUES,
    "clipped-averaging": UPDATES,
    "sample-clip": Picture(records_of, draw_records, records_in_words),
    "standardize": VALUES,
    "update-clip-client": UPDATES,
    "update-clip-server": UPDATES,
    "update-norms": UPDATES,
}
"""The pictures of clippers that neither limit by norms nor serve those that do."""
PICTURES = {
    name: OTHERS.get(name, SHARED if name.endswith("-server") else NORMS)
    for name in (entry["name"] for entry in registered())
}


@cache
def numbers(name: str) -> Series:
    """Return the numbers of a clipper's picture, to six digits."""
    found = PICTURES[name].numbers(name)
    return {key: [float(f"{x:.6g}") for x in values] for key, values in found.items()}


def drawn(name: str) -> Series:
    """Return the numbers that the committed picture was drawn from."""
    text = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    (found,) = re.findall(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    data: Series = json.loads(found)
    return data


def draw(name: str) -> None:
    """Write the picture of one clipper."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    ax = figure.subplots()
    PICTURES[name].draw(ax, numbers(name))
    ax.legend(frameon=False, ncols=3, loc="best", fontsize="small")
    IMAGES.mkdir(parents=True, exist_ok=True)
    # The same text and ids every time, so that a new picture is a new picture.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedclip"}):
        metadata = {"Date": None, "Description": json.dumps(numbers(name))}
        figure.savefig(IMAGES / f"{name}.svg", metadata=metadata)


def alternative(name: str) -> str:
    """Say in words what the picture shows."""
    settings = ", ".join(f"{key} = {value}" for key, value in SETTINGS.get(name, {}).items())
    words = PICTURES[name].words(numbers(name))
    return f"{settings}: {words}" if settings else words


if __name__ == "__main__":
    for name in PICTURES:
        draw(name)
        print(alternative(name))
