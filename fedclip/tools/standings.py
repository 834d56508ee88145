# SPDX-License-Identifier: Apache-2.0
"""How settings stand against no clipping, by the metric of each site, over the same seeds.

Runs of one seed draw the same, so that settings are compared seed by seed: the interval is that of
the differences, Student's, of 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedclip.report import number
from fedclip.tools.compare import interval, shown

NONE = "no clipping"
"""The setting that all others are compared with."""
AS_IS = "as configured"
"""The file as it is, if it clips."""


@dataclass
class Standings:
    """What came out of each setting so far.

    Attributes
    ----------
    metric, higher
        What sites are judged by, and whether more of it is better.
    sites, counted
        The sites, and those of them that the ranking counts.
    values
        By setting and seed, the last value at each site; NaN where it or the loss is no number.
    ended
        Why a setting was given up before it had all seeds.
    left_out
        Why the other sites do not count.
    losses
        Of no clipping, run by run, the loss of each site: it shows draws that accuracies hide.
    """

    metric: str
    higher: bool
    sites: Sequence[str]
    counted: Sequence[str]
    values: dict[str, dict[int, Mapping[str, float]]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    losses: list[Mapping[str, float]] = field(default_factory=list)

    def means(self, name: str, sites: Iterable[str] = ()) -> dict[int, float]:
        """Return the mean over some sites, by default those that count, of each seed."""
        chosen = [*sites] or self.counted
        return {
            seed: statistics.fmean(found.get(site, math.nan) for site in chosen)
            for seed, found in self.values.get(name, {}).items()
        }

    def mean(self, name: str, *sites: str) -> tuple[float, float | None]:
        """Return mean and half of the interval over seeds."""
        return _interval(self.means(name, sites).values())

    def gain(self, name: str, over: str, *sites: str) -> tuple[float, float | None]:
        """Return the mean difference between two settings over the seeds of both, and half."""
        one, other = self.means(name, sites), self.means(over, sites)
        return _interval(one[seed] - other[seed] for seed in one if seed in other)

    def better(self, name: str, over: str, *sites: str) -> bool:
        """Whether a setting is better than another by more than the interval."""
        mean, half = self.gain(name, over, *sites)
        return half is not None and (mean if self.higher else -mean) > half

    def clearly(self, name: str, over: str, *sites: str) -> bool:
        """Whether it is better, and the seeds differ; few records often give the same by chance."""
        return self.better(name, over, *sites) and bool(self.gain(name, over, *sites)[1])

    def lost(self, name: str) -> list[int]:
        """Return the seeds with which a site that counts has no number."""
        return [seed for seed, mean in self.means(name).items() if math.isnan(mean)]

    def worst(self, name: str) -> str:
        """Return the site that counts with the worst mean."""
        means = {site: self.mean(name, site)[0] for site in self.counted}
        sign = 1 if self.higher else -1
        return min(means, key=lambda site: (not math.isnan(means[site]), sign * means[site]))

    def ranking(self) -> list[str]:
        """Return the settings, the best first; those that diverged or were given up come last."""

        def place(name: str) -> tuple[bool, bool, float]:
            mean = self.mean(name)[0]
            return bool(self.lost(name)), name in self.ended, -mean if self.higher else mean

        return sorted(self.values, key=place)

    def give_up(self) -> dict[str, str]:
        """Give up what is hopeless; return it, and why. No clipping is needed to compare with."""
        best, found = self.ranking()[0], {}
        for name, seeds in self.values.items():
            if name in (NONE, *self.ended):
                continue
            if lost := self.lost(name):
                found[name] = f"it diverged with seed {', '.join(map(str, lost))}"
            elif all(self.clearly(best, name, site) for site in self.counted):
                found[name] = (
                    f"after {len(seeds)} seeds, {best} is better at each site that counts by more "
                    "than the interval"
                )
        self.ended |= found
        return found

    @property
    def alike(self) -> bool:
        """Whether all seeds of no clipping came to the same, which tells nothing of chance."""
        return len(self.losses) > 1 and all(found == self.losses[0] for found in self.losses)

    @property
    def winner(self) -> str:
        """The best of those that beat no clipping by more than the interval; or ""."""
        fit = [n for n in self.ranking() if n not in (NONE, *self.ended) and not self.lost(n)]
        won = [n for n in fit if self.lost(NONE) or self.clearly(n, NONE)]
        return won[0] if won and not self.alike else ""

    def answer(self) -> str:
        """Return what came out, in sentences."""
        first, seeds = self.winner, len(self.values[NONE])
        of = f"(the mean {self.metric} of {_listed(self.counted)}, over {seeds} seeds)"
        if self.alike:
            return (
                "All seeds came to the same, so that nothing can be said of chance: let batches "
                "be drawn (shuffle = true in [run.training])."
            )
        if not first:
            if even := [n for n in self.ranking() if n not in self.ended and self.better(n, NONE)]:
                text = f"No winner: {even[0]} differs from no clipping by the same with all seeds, "
                text += f"{self.against(even[0])} {of}, which is no interval to judge by: take "
                return text + "more seeds, or more records to validate with."
            text = f"No proposal is better than no clipping by more than its interval {of}."
            near = [name for name in self.ranking() if name != NONE and not self.lost(name)][:1]
            return text + "".join(f" The nearest is {n}: {self.against(n)}." for n in near)
        if self.lost(NONE):
            value = shown(*self.mean(first))
            return (
                f"Without clipping the model diverged; {first} is best of the others: {value} {of}."
            )
        text = f"{first} is better than no clipping by more than its interval: "
        text += f"{self.against(first)} {of}. The {self.worse} site with it is "
        text += f"{self._worst(first)}; with no clipping {self._worst(NONE)}."
        hurt = [site for site in self.counted if self.better(NONE, first, site)]
        return text + f" But it is worse at {_listed(hurt)} by more than the interval." * bool(hurt)

    @property
    def worse(self) -> str:
        """What the worst site is called."""
        return "lowest" if self.higher else "highest"

    def against(self, name: str, *sites: str) -> str:
        """Return the difference to no clipping in words."""
        mean, half = self.gain(name, NONE, *sites)
        if name == NONE or math.isnan(mean):
            return "-"
        text = shown(mean, half)
        return text if text.startswith("-") else f"+{text}"

    def _worst(self, name: str) -> str:
        return f"{(site := self.worst(name))}, {shown(*self.mean(name, site))}"

    def _cell(self, name: str, site: str) -> str:
        mean = number(self.mean(name, site)[0])
        return mean if name == NONE else f"{mean} ({self.against(name, site)})"

    def tables(self) -> list[dict[str, Any]]:
        """Return as text the ranking, the sites with the best setting, and those with each."""
        others = [site for site in self.sites if site not in self.counted]
        ranked, count = self.ranking(), {n: str(len(seeds)) for n, seeds in self.values.items()}
        count |= {name: f"{count[name]}, given up" for name in self.ended}
        note = f"Mean over seeds of the {self.metric} on the validation data of "
        note += f"{_listed(self.counted)} ± 95 % interval (Student's); differences to no clipping "
        note += "are those of the same seeds."
        note += f" Not counted: {_listed(others)}{self.left_out}." * bool(others)
        worst = f"{self.worse.capitalize()} site"
        heads = ["Setting", "Seeds", f"Mean {self.metric}", "Difference", worst]
        rows = [
            [n, count[n], shown(*self.mean(n)), self.against(n), self._worst(n)] for n in ranked
        ]
        caption = f"The {self.metric} of each site, and its difference to no clipping."
        pair = [NONE, *[n for n in (self.winner, *ranked) if n not in ("", NONE)][:1]]
        names = [f"{site}{' (not counted)' * (site in others)}" for site in self.sites]
        by_site = [[n, *(self._cell(n, site) for site in self.sites)] for n in ranked]
        with_best = [
            [head, *(number(self.mean(n, site)[0]) for n in pair), self.against(pair[-1], site)]
            for head, site in zip(names, self.sites, strict=True)
        ]
        two, all_ = ["Site", *pair, "Difference"], ["Setting", *names]
        return [
            {"name": "Ranking", "caption": note, "heads": heads, "rows": rows},
            {"name": "Sites", "caption": caption, "heads": two, "rows": with_best},
            {"name": "All settings", "caption": caption, "heads": all_, "rows": by_site},
        ]

    def as_dict(self) -> dict[str, object]:
        """Return plain values; None for what is no number."""

        def plain(name: str, *sites: str) -> dict[str, float | None]:
            found = (*self.mean(name, *sites), *self.gain(name, NONE, *sites))
            names = ("mean", "half_width", "difference", "difference_half_width")
            pairs = zip(names, found, strict=True)
            return {key: x if x is not None and math.isfinite(x) else None for key, x in pairs}

        facts = {key: getattr(self, key) for key in ("metric", "higher", "sites", "counted")}
        settings = [
            {"name": name, "seeds": [*self.values[name]], "given_up": self.ended.get(name, "")}
            | plain(name)
            | {"sites": {site: plain(name, site) for site in self.sites}}
            for name in self.ranking()
        ]
        return facts | {"winner": self.winner, "answer": self.answer(), "settings": settings}


def _interval(values: Iterable[float]) -> tuple[float, float | None]:
    # Beyond twelve digits there is nothing but errors of rounding, which are no spread.
    return interval([round(value, 12) for value in values] or [math.nan])


def _listed(names: Sequence[str]) -> str:
    if len(names) > 8:
        return f"{len(names)} sites"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
