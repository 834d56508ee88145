# SPDX-License-Identifier: Apache-2.0
"""From the CSV files to the tables of docs/study.md, and to its figure.

For each trouble the score of a seed is the mean over the data. Differences are taken seed by seed;
intervals are 95 % by Student's t, and probabilities of paired t-tests are corrected by Holm over
all comparisons with "none": of all mechanisms, tuned and as they come, in all troubles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.study import mechanisms, noised, orderings
from benchmarks.study.cells import Cell, Scores, chosen, worst
from benchmarks.study.scenes import CLAIMS, SOURCES, TROUBLES
from fedclip.cli.reporting import interval
from fedclip.privacy.correlated import coefficients, error

ROOT = Path(__file__).parents[2]
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("study", "study-noise"))
FIGURE = ROOT / "docs" / "images" / "study.png"
LEVEL = 0.05
FIXED = "fixed 0.3, every round"
DRAWN = {
    True: (
        *("none", "norm-clip", "zscore-clip", "mad-clip, shared", "update, fixed"),
        *("update, adaptive", "trimmed mean", "arc"),
    ),
    False: (
        *("none", "zscore-clip", "mad-clip", "mad-clip, shared", "growth-clip", "ema-norm-clip"),
        *("agc", "update-clip-server"),
    ),
}
"""What the figure shows: with a scale that is tuned, and as it comes."""


class Difference(NamedTuple):
    """What a mechanism adds to another, in points."""

    mean: float
    half: float
    p: float


def difference(ones: Sequence[float], others: Sequence[float]) -> Difference:
    """Return the paired difference of scores, in points.

    Examples
    --------
    >>> found = difference([0.9, 0.8, 0.9], [0.7, 0.7, 0.7])
    >>> round(found.mean, 2), round(found.half, 2), round(found.p, 3)
    (16.67, 14.34, 0.038)
    >>> difference([0.9, 0.8], [0.9, 0.8])
    Difference(mean=0.0, half=0.0, p=1.0)
    """
    points = np.round(100 * (np.asarray(ones) - np.asarray(others)), 9)
    mean, half = interval(points.tolist())
    if not points.std():
        return Difference(mean, 0.0, float(not mean))
    return Difference(mean, half or 0.0, float(stats.ttest_1samp(points, 0).pvalue))


def holm(chances: Sequence[float]) -> list[float]:
    """Return probabilities corrected for their number.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order, found = np.argsort(chances), np.empty(len(chances))
    found[order] = np.maximum.accumulate(np.sort(chances) * np.arange(len(chances), 0, -1))
    return np.minimum(found, 1.0).round(12).tolist()


class Study:
    """All scores, and what follows from them."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.seeds = range(1 + max(cell.seed for cell in scores if cell.seed < 1000))

    def of(self, trouble: str, data: str, name: str, factor: float = 1.0) -> list[float]:
        """Return the scores of the seeds, the worst for those that are lost."""
        return [worst(self.scores[Cell(trouble, data, name, factor, s)]) for s in self.seeds]

    def best_factor(self, trouble: str, data: str, name: str, tuned: bool) -> float:
        """Return the factor that was chosen on the seeds for that; 1 where nothing is tuned."""
        return (tuned and chosen(self.scores, trouble, data, name)) or 1.0

    def means(self, trouble: str, name: str, tuned: bool = True) -> list[float]:
        """Return the mean over the data, seed by seed."""
        tuned = tuned and mechanisms.MECHANISMS[name].tuned
        each = [
            self.of(trouble, data, name, self.best_factor(trouble, data, name, tuned))
            for data in SOURCES
        ]
        return np.mean(each, axis=0).tolist()

    def noisy(self, trouble: str, name: str) -> list[float]:
        """Return the scores under noise, at the rate that was chosen."""
        return self.of(trouble, "digits", name, self.best_factor(trouble, "digits", name, True))

    @cached_property
    def over_none(self) -> Mapping[tuple[str, str, bool], tuple[Difference, float]]:
        """Each mechanism less none by trouble, tuned or not, with the corrected probability."""
        found = {}
        for name, mechanism in mechanisms.MECHANISMS.items():
            for tuned in [mechanism.tuned] * (name != "none") + [False] * mechanism.default:
                for trouble in TROUBLES:
                    bare = self.means(trouble, "none")
                    found[name, trouble, tuned] = difference(self.means(trouble, name, tuned), bare)
        corrected = holm([one.p for one in found.values()])
        return {key: (one, p) for (key, one), p in zip(found.items(), corrected, strict=True)}

    @cached_property
    def over_fixed(self) -> Mapping[tuple[str, str], tuple[Difference, float]]:
        """Each mechanism under noise less the plain one, with its own corrected probability."""

        found = {
            (name, trouble): difference(self.noisy(trouble, name), self.noisy(trouble, FIXED))
            for name in noised.MECHANISMS
            for trouble in noised.EPSILONS
            if name != FIXED
        }
        corrected = holm([one.p for one in found.values()])
        return {key: (one, p) for (key, one), p in zip(found.items(), corrected, strict=True)}


def _shown(one: Difference, p: float = 1.0) -> str:
    text = f"{one.mean + 0.0:+.1f}±{one.half:.1f}"
    return f"**{text}**" if p < LEVEL else text


def _percent(scores: Sequence[float]) -> str:
    mean, half = interval([100 * score for score in scores])
    return f"{mean:.1f}±{half or 0.0:.1f}"


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _tuned(study: Study) -> Iterator[Sequence[str]]:
    yield (
        "none: accuracy, %",
        *(_percent(study.means(trouble, "none")) for trouble in TROUBLES),
    )
    for name, mechanism in mechanisms.MECHANISMS.items():
        if name != "none" and (mechanism.tuned or not mechanism.default):
            key = mechanism.tuned
            yield name, *(_shown(*study.over_none[name, t, key]) for t in TROUBLES)


def _defaults(study: Study) -> Iterator[Sequence[str]]:
    for name, mechanism in mechanisms.MECHANISMS.items():
        if mechanism.default:
            cells = (_shown(*study.over_none[name, trouble, False]) for trouble in TROUBLES)
            yield f"`{name}`", *cells


def _noised(study: Study) -> Iterator[Sequence[str]]:
    for name, mechanism in noised.MECHANISMS.items():
        cells = []
        for trouble in noised.EPSILONS:
            factor = study.best_factor(trouble, "digits", name, True)
            rate = factor * (noised.SLOWER if name == noised.SLOW else 1.0)
            points = _shown(*study.over_fixed[name, trouble]) if name != FIXED else ""
            plain = _percent(study.of(trouble, "digits", name)) if mechanism.default else ""
            cells += [
                *(_percent(study.of(trouble, "digits", name, factor)), points),
                *(f"{rate:g}", plain),
            ]
        yield name, *cells


def _instead(study: Study) -> Iterator[Sequence[str]]:
    troubles = (*("sizes", "sizes and labels", "hostile"), CLAIMS)
    bare = {trouble: study.means(trouble, "none", tuned=False) for trouble in troubles}
    yield "none: accuracy, %", *map(_percent, bare.values())
    for name in ("update-clip-server", *mechanisms.INSTEAD):
        ones = {trouble: study.means(trouble, name, tuned=False) for trouble in troubles}
        yield name, *(_shown(difference(ones[trouble], bare[trouble])) for trouble in troubles)


def _left(study: Study) -> Iterator[Sequence[str]]:
    for trouble, b in orderings.SEPARATIONS.items():
        bare, banded = (study.of(trouble, "zeros", name) for name in ("independent", "banded"))
        mean, half = interval((np.asarray(banded) / bare).tolist())
        yield str(b), f"{mean:.3f}±{half:.3f}", f"{error(coefficients(100, b), 100):.3f}"


def _count(study: Study) -> str:
    lost = sum(map(math.isnan, study.scores.values()))
    places = len({(cell.trouble, cell.data) for cell in study.scores})
    return (
        f"{len(study.scores):,} runs in {places} federations, {len(study.seeds)} seeds and two for "
        f"the scales. In {lost} of them the weights became NaN or infinite; these count as 0 %. "
        f"{len(study.over_none)} comparisons with no clipping are corrected."
    )


TABLES: Mapping[str, Callable[[Study], str]] = {
    "count": _count,
    "tuned": lambda study: _table(["", *TROUBLES], _tuned(study)),
    "defaults": lambda study: _table(["", *TROUBLES], _defaults(study)),
    "instead": lambda study: _table(
        ["", "sizes", "sizes and labels", "hostile", "hostile, and claims"], _instead(study)
    ),
    "noise": lambda study: _table(
        [
            "",
            *("epsilon 2", "points", "rate", "rate 1"),
            *("epsilon 8", "points", "rate", "rate 1"),
        ],
        _noised(study),
    ),
    "left": lambda study: _table(["rounds apart", "noise left", "in theory"], _left(study)),
}


def rewritten(page: str, study: Study) -> str:
    """Return the page with each table as it follows from the scores."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]](study)}\n{found[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def draw(study: Study, file: Path) -> None:
    """Draw in how many federations a mechanism is so many points below the best, or fewer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    places = [(trouble, data) for trouble in TROUBLES for data in SOURCES]
    names = mechanisms.MECHANISMS
    for axes, tuned in zip(figure.subplots(1, 2, sharey=True), (True, False), strict=True):
        best = {
            at: max(
                np.mean(study.of(*at, n, study.best_factor(*at, n, m.tuned)))
                for n, m in names.items()
            )
            for at in places
        }
        drawn = DRAWN[tuned]
        for place, name in enumerate(drawn):
            factor = [study.best_factor(*at, name, tuned and names[name].tuned) for at in places]
            behind = np.sort(
                [
                    100 * (best[at] - np.mean(study.of(*at, name, f)))
                    for at, f in zip(places, factor, strict=True)
                ]
            )
            steps = np.arange(1, len(behind) + 1) / len(behind)
            style = {"color": "black", "lw": 2} if name == "none" else {"color": f"C{place % 10}"}
            dashes = "--" if place > 5 else "-"
            axes.step(
                [0.05, *np.maximum(behind, 0.05)],
                [0, *steps],
                dashes,
                where="post",
                label=name,
                **style,
            )
        axes.set_xscale("log")
        axes.set_xlim(0.05, 100)
        axes.set_ylim(0, 1.02)
        axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.set_xlabel("points of accuracy below the best")
        axes.set_title("scale chosen on two seeds" if tuned else "as they come", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3)
    figure.axes[0].set_ylabel(f"share of {len(places)} federations")
    figure.savefig(file, dpi=130)
