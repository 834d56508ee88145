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

__all__ = ["AS_IS", "NONE", "Standings"]

NONE, AS_IS = "no clipping", "as configured"
_FEW_SITES = 8


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
    """

    metric: str
    higher: bool
    sites: Sequence[str]
    counted: Sequence[str]
    values: dict[str, dict[int, Mapping[str, float]]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    left_out: str = ""

    def means(self, name: str, sites: Iterable[str] = ()) -> dict[int, float]:
        """Return the mean over some sites, by default those that count, of each seed."""
        chosen = [*sites] or self.counted
        return {
            seed: statistics.fmean(found.get(site, math.nan) for site in chosen)
            for seed, found in self.values.get(name, {}).items()
        }

    def mean(self, name: str, *sites: str) -> tuple[float, float | None]:
        """Return mean and half of the interval over seeds."""
        return interval([*self.means(name, sites).values()] or [math.nan])

    def gain(self, name: str, over: str, *sites: str) -> tuple[float, float | None]:
        """Return the mean difference between two settings over the seeds of both, and half."""
        one, other = self.means(name, sites), self.means(over, sites)
        # What is left of equal means is no difference, but an error of rounding.
        found = [round(one[seed] - other[seed], 12) for seed in one if seed in other]
        return interval(found or [math.nan])

    def better(self, name: str, over: str, *sites: str) -> bool:
        """Whether a setting is better than another by more than the interval."""
        mean, half = self.gain(name, over, *sites)
        return half is not None and (mean if self.higher else -mean) > half

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
            elif all(self.better(best, name, site) for site in self.counted):
                found[name] = (
                    f"after {len(seeds)} seeds, {best} is better at each site that counts by more "
                    "than the interval"
                )
        self.ended |= found
        return found

    @property
    def alike(self) -> bool:
        """Whether all seeds of no clipping came to the same, which tells nothing of chance."""
        first, *others = self.values[NONE].values()
        return bool(others) and all(found == first for found in others)

    @property
    def winner(self) -> str:
        """The best of those that beat no clipping by more than the interval; or ""."""
        fit = [n for n in self.ranking() if n not in (NONE, *self.ended) and not self.lost(n)]
        won = [n for n in fit if self.lost(NONE) or self.better(n, NONE)]
        return won[0] if won and not self.alike else ""

    def answer(self) -> str:
        """Return what came out, in sentences."""
        first, seeds = self.winner, len(self.values[NONE])
        of = f"the mean {self.metric} of {_listed(self.counted)}, over {seeds} seeds"
        if self.alike:
            return (
                "All seeds came to the same, so that nothing can be said of chance: let batches "
                "be drawn (shuffle = true in [run.training])."
            )
        if not first:
            others = [name for name in self.ranking() if name != NONE]
            nearest = others[0] if others and not self.lost(others[0]) else ""
            near = f"; the nearest, {nearest}: {self.against(nearest)}" * bool(nearest)
            text = f"No proposal is better than no clipping by more than its interval ({of}{near})."
            worse = AS_IS in self.values and self.better(NONE, AS_IS)
            return text + f" It is worse {AS_IS}: {self.against(AS_IS)}." * worse
        if self.lost(NONE):
            text = f"Without clipping the model diverged; {first} is the best of what did not ({of}"
            return f"{text}: {shown(*self.mean(first))})."
        text = (
            f"{first} is better than no clipping by more than its interval: {self.against(first)}"
        )
        worst = [
            f"{name}: {site}, {number(self.mean(name, site)[0])}"
            for name, site in ((name, self.worst(name)) for name in (first, NONE))
        ]
        text += f" ({of}). The {'lowest' if self.higher else 'highest'} site with {worst[0]}"
        text += f"; with {worst[1]}."
        if hurt := [site for site in self.counted if self.better(NONE, first, site)]:
            text += f" But it is worse at {_listed(hurt)} by more than the interval there."
        return text

    def against(self, name: str, *sites: str) -> str:
        """Return the difference to no clipping in words."""
        mean, half = self.gain(name, NONE, *sites)
        if name == NONE or math.isnan(mean):
            return "-"
        digits = max(0, 1 - math.floor(math.log10(half))) if half else 3
        return f"{mean:+.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")

    def tables(self, all_sites: bool = False) -> list[dict[str, Any]]:
        """Return the ranking, and the metric of each site unless there are many, as text."""
        others = [site for site in self.sites if site not in self.counted]
        note = f"Mean over seeds of {self.metric} on the validation data of "
        note += f"{_listed(self.counted)} ± 95 % interval (Student's); differences to no clipping "
        note += "are those of the same seeds."
        note += f" Not counted: {_listed(others)}{self.left_out}." * bool(others)
        worst = "lowest site" if self.higher else "highest site"
        rows, by_site = [], []
        for name in self.ranking():
            site = self.worst(name)
            count = f"{len(self.values[name])}{', given up' * (name in self.ended)}"
            cells = [shown(*self.mean(name)), self.against(name)]
            rows.append([name, count, *cells, f"{site}: {shown(*self.mean(name, site))}"])
            cells = [self._cell(name, site) for site in self.sites]
            by_site.append([name, *cells])
        heads = [
            "Setting",
            "Seeds",
            f"Mean {self.metric}",
            "Against no clipping",
            worst.capitalize(),
        ]
        found = [{"name": "Ranking", "caption": note, "heads": heads, "rows": rows}]
        if all_sites or len(self.sites) <= _FEW_SITES:
            names = [f"{site}{' (not counted)' * (site in others)}" for site in self.sites]
            caption = f"{self.metric.capitalize()} of each site, and its difference to no clipping."
            heads = ["Setting", *names]
            found += [{"name": "Sites", "caption": caption, "heads": heads, "rows": by_site}]
        return found

    def _cell(self, name: str, site: str) -> str:
        mean = number(self.mean(name, site)[0])
        return mean if name == NONE else f"{mean} ({self.against(name, site)})"

    def as_dict(self) -> dict[str, object]:
        """Return plain values; None for what is no number."""

        def plain(pair: tuple[float, float | None]) -> dict[str, float | None]:
            whole = [x if x is not None and math.isfinite(x) else None for x in pair]
            return dict(zip(("mean", "half_width"), whole, strict=True))

        def both(name: str, *sites: str) -> dict[str, object]:
            gain = plain(self.gain(name, NONE, *sites))
            return {**plain(self.mean(name, *sites)), "difference": gain}

        settings = [
            {
                "name": name,
                "seeds": sorted(self.values[name]),
                **both(name),
                "sites": {site: both(name, site) for site in self.sites},
                "worst_site": self.worst(name),
                "given_up": self.ended.get(name, ""),
            }
            for name in self.ranking()
        ]
        facts = {"metric": self.metric, "higher_is_better": self.higher, "sites": [*self.sites]}
        return {
            **facts,
            "counted": [*self.counted],
            "settings": settings,
            "winner": self.winner,
            "answer": self.answer(),
        }


def _listed(names: Sequence[str]) -> str:
    if len(names) > _FEW_SITES:
        return f"{len(names)} sites"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
