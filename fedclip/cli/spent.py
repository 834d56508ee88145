# SPDX-License-Identifier: Apache-2.0
"""Read the spent privacy budget from ledgers and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedclip.cli.catalogue import version
from fedclip.core.parameters import Config
from fedclip.core.records import SERVED
from fedclip.privacy.accounting import ZERO_OUT, Accountant, Release, account, merged, relation_of
from fedclip.privacy.ledger import FILE, Entry, protected, read_entries, total
from fedclip.privacy.planning import by_silent, silent_in_words
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client_noise import SiteNoise
from fedclip.updates.store import read, server_in

_COUNTED_BY = ("fedclip", "dp-accounting")


class NothingSpent(ValueError):
    """No file in a folder shows a spent privacy budget."""


class Spent(NamedTuple):
    """The budget that one file shows as spent, for a record, a person or a client.

    A ledger has `entries`. A client takes part at most once in `separation` rounds. `planned` is
    the budget that a server may spend at most.
    """

    where: str
    protects: str
    accountant: Accountant
    entries: Sequence[Entry] = ()
    separation: int = 1
    planned: float | None = None
    mechanism: str = "Gaussian"
    site: SiteNoise | None = None
    """The noise of the clients, if they have added it."""

    @property
    def evaluated(self) -> list[float]:
        """The noise multipliers that are those of evaluations."""
        multipliers = (r.noise_multiplier for e in self.entries if e.evaluation for r in e.spent)
        return [*dict.fromkeys(multipliers)]

    def cost(self, delta: float | None = None, relation: str | None = None) -> Config:
        """Return what it costs, and by which accountant; or why it cannot be counted.

        Delta and relation are those of the file, unless others are given.
        """
        spent = self.accountant.spent
        delta = self.accountant.delta if delta is None else delta
        relation = self.accountant.relation if relation is None else relation
        order = self.accountant.order_of(spent)
        try:
            cost = account(spent, delta, relation, order)
            ordered = order is not None and cost.accountant == "rdp"
            name = f"rdp at order {order:.4g}" if ordered else cost.accountant
            # JSON has no infinity.
            finite = math.isfinite(cost.epsilon)
            epsilons: dict[str, float | str] = {
                name: cost.epsilon if finite else "no finite epsilon"
            }
        except ModuleNotFoundError as exc:
            epsilons = {"epsilon": str(exc)}
        return {
            "evaluated": self.evaluated,
            "where": self.where,
            "protects": self.protects,
            "delta": delta,
            "relation": relation_of(relation, self.protects),
            "separation": self.separation,
            "planned": self.planned,
            "silent": self.site and self._by_silent(self.site, spent, delta, relation),
            "rounds": sum(entry.round > 0 for entry in self.entries),
            "releases": [r._asdict() for r in merged(spent)],
            "entries": [
                {"time": e.time, **r._asdict(), "data": e.data, "fedclip": e.fedclip}
                for e in self.entries
                for r in e.spent
            ],
            "epsilons": epsilons if spent else {},
            "versions": {name: version(name) for name in _COUNTED_BY},
        }

    @staticmethod
    def _by_silent(
        site: SiteNoise, spent: Iterable[Release], delta: float, relation: str
    ) -> dict[int, float | None]:
        def epsilon(silent: int) -> float:
            times = site.multiplier(silent) / site.noise_multiplier
            releases = [r._replace(noise_multiplier=r.noise_multiplier * times) for r in spent]
            return account(releases, delta, relation).epsilon

        return by_silent(epsilon, site.expected_clients, site.sure)


def in_words(cost: Config) -> Iterator[str]:
    """Yield what `Spent.cost` has found, line by line."""
    relation, unit = cost["relation"], cost["protects"]
    verb = {"add-remove": "adding or removing", "replace-one": "replacing", ZERO_OUT: "zeroing out"}
    yield f"{cost['where']}: privacy loss for {verb[relation]} one {unit}"
    if relation == ZERO_OUT:
        yield f"  zero-out: the number of {unit}s is public, because rate and steps depend on it"
    for z, steps, rate in (release.values() for release in cost["releases"]):
        how = f"Poisson samples at rate {rate:.4g}" if rate < 1 else "without sampling"
        what = "evaluations" if z in cost["evaluated"] else "steps"
        yield f"  {steps:,} {what} at noise multiplier {z:.4g}, {how}"
    if cost["separation"] > 1:
        yield f"  a client takes part in at most one of {cost['separation']} rounds"
    if cost["rounds"]:
        yield f"  in {cost['rounds']:,} rounds of a server"
    if not cost["releases"]:
        yield "  nothing was spent"
    for data in dict.fromkeys(entry["data"] for entry in cost["entries"]):
        if data:
            yield f"  of {data}"
    for name, value in cost["epsilons"].items():
        sure = not isinstance(value, str)
        yield f"  {name:12} " + (
            f"epsilon {value:.4g} at delta {cost['delta']:g}" if sure else value
        )
    if cost["silent"]:
        yield "  the clients added the noise:"
        yield from silent_in_words(cost["silent"]).split("\n")
    if cost["planned"] is not None:
        yield (
            f"  planned: at most epsilon {cost['planned']:.4g}; report this one if the clients' "
            "data decided when the run ended"
        )


COLUMNS = (
    *("where", "protects", "mechanism", "relation", "delta", "turn", "time", "noise_multiplier"),
    *("sampling", "separation", "steps", "accountant", "epsilon", "data", "fedclip"),
)


def csv_rows(one: Spent, cost: Config) -> Iterator[Config]:
    """Yield a row for each turn that was charged, with the epsilon of all until then.

    A turn is a line of a ledger; of a server, a round, or as many as its clients take turns in.
    The last epsilon is what `Spent.cost` says by the same accountant.
    """
    accountant = one.accountant
    relation = "add-remove" if cost["relation"] == ZERO_OUT else cost["relation"]
    so_far = Accountant(cost["delta"], relation, accountant.order)
    so_far.plan = accountant.plan
    each = [{**r._asdict(), "steps": 1} for r in accountant.spent for _ in range(r.steps)]
    for turn, row in enumerate(cost["entries"] or each, 1):
        so_far.add(row["noise_multiplier"], row["steps"], row["sampling"])
        mechanism = "Poisson-sampled " * (row["sampling"] < 1) + one.mechanism
        mechanism += " on evaluations" * (row["noise_multiplier"] in one.evaluated)
        more = {"turn": turn, "mechanism": mechanism}
        yield {**cost, **row, **so_far.cost()._asdict(), **more}


def read_spent(path: Path) -> Iterator[Spent]:
    """Yield what was spent by each ledger, and each server with noise, in a folder; or one ledger.

    Raises
    ------
    ValueError
        If no budget was spent, or a file is damaged.
    """
    path = path.parent if path.name == SERVED else path
    folder = path.is_dir()
    ledgers: list[Spent] = []
    servers: list[Spent] = []
    known: set[Path | None] = set()
    for config in sorted([*path.rglob("optimizer_config.json"), *path.rglob(SERVED)]):
        bound = _of_engine(config) if config.name == SERVED else _of_server(config.parent)
        budget = None if bound is None else bound.budget
        if bound is not None and budget is not None:
            where = str(config.parent.relative_to(path))
            noise = "correlated " * (len(budget.coefficients) > 1)
            noise += "discrete " * (bound.site is not None) + "Gaussian"
            terms = budget.separation, budget.max_epsilon, noise, bound.site
            servers.append(Spent(where, "client", budget.accountant, (), *terms))
            known.add(budget.path)
    for file in sorted(path.rglob(FILE)) if folder else [path]:
        if (real := file.resolve()) in known:
            continue
        known.add(real)
        entries = [*read_entries(file).values()]
        where = str(file.relative_to(path)) if folder else path.name
        unit = protected(entries[-1].data)[1] or "record"
        protects = "site's data set" if unit == "site" else unit
        ledgers.append(Spent(where, protects, total(entries), entries))
    yield from (ledgers := ledgers + servers)
    if not ledgers:
        raise NothingSpent(
            f"{path} shows no spent privacy budget: it has neither a ledger of DP-SGD ({FILE}), "
            f"nor a checkpoint or {SERVED} of a server with noise in update-clip-server"
        )


def _of_engine(file: Path) -> AdaptiveBound:
    """Return the bound of a server on another engine, and what was spent."""
    stored = read(file)
    server = server_in(file.parent, stored.settings)
    server.set_state(dict(stored.state))
    return server.bound


def _of_server(folder: Path) -> AdaptiveBound | None:
    """Return update-clip-server, as what was spent by all of the checkpoints in a folder.

    Their names hold local time, so that the latest need not be the newest.
    """
    try:
        config = json.loads((folder / "optimizer_config.json").read_text(encoding="utf-8"))
        # Without noise, the checkpoint may have modules that are not registered here.
        if "'noise_multiplier'" not in str(config):
            return None
        from declearn.main.utils import Checkpointer

        saved = Checkpointer(str(folder))
        optimizer = saved.load_optimizer(load_state=False)
        bounds = (m for m in optimizer.modules if isinstance(m, AdaptiveBound) and m.budget)
        bound = next(bounds, None)
        for file in sorted(folder.glob("optimizer_state_*.mpk")) if bound else ():
            saved.load_optimizer(optimizer, file.stem.removeprefix("optimizer_state_"))
    except Exception as exc:  # whatever a damaged file makes declearn raise
        raise ValueError(f"cannot read the checkpoint in {folder}: {exc!s:.200}") from exc
    return bound
