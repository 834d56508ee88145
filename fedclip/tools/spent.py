# SPDX-License-Identifier: Apache-2.0
"""What was spent of a privacy budget, read from ledgers and checkpoints, by each accountant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedclip import parameters
from fedclip.dpsgd.ledger import FILE, read_ledger
from fedclip.privacy.accounting import ACCOUNTANTS, Accountant, account

__all__ = ["Spent", "in_words", "of_plan", "read_spent"]


class Spent(NamedTuple):
    """What one file says was spent, and whether that protects a record or a client."""

    where: str
    protects: str
    accountant: Accountant

    def cost(self, delta: float | None = None, relation: str | None = None) -> dict[str, Any]:
        """Return what it costs by each accountant, or why one can not say.

        Delta and relation are those of the file, unless others are given.
        """
        spent = self.accountant.spent
        delta = self.accountant.delta if delta is None else delta
        relation = self.accountant.relation if relation is None else relation
        sampled = {release.sampling != 1 for release in spent}
        # There is no closed form with samples, and no other bound of Opacus' PRV without.
        useless = ["closed form"] * (True in sampled) + ["prv"] * (False in sampled)
        found: dict[str, float | str] = {}
        for name in ACCOUNTANTS if spent else ():
            if name in useless:
                continue
            try:
                cost = account(spent, delta, relation, name)
                if cost.accountant != name:
                    found[name] = f"can not count these releases; {cost.accountant} does"
                # JSON has no infinity.
                finite = math.isfinite(cost.epsilon)
                found[cost.accountant] = cost.epsilon if finite else "no finite epsilon"
            except ModuleNotFoundError:
                package = "opacus" if name == "prv" else "dp-accounting or opacus"
                found[name] = f"not installed: pip install {package}"
            except ValueError as exc:
                if name not in ("prv", "rdp") or relation == "add-remove":
                    raise
                found[name] = str(exc)
        return {
            "where": self.where,
            "protects": self.protects,
            "delta": delta,
            "relation": relation,
            "releases": [r._asdict() for r in spent],
            "epsilons": found,
        }


def in_words(cost: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `Spent.cost` has found, line by line."""
    verb = {"add-remove": "adding or removing", "replace-one": "replacing"}[cost["relation"]]
    yield f"{cost['where']}: what {verb} one {cost['protects']} may change"
    for z, steps, rate in (release.values() for release in cost["releases"]):
        how = f"Poisson samples at rate {rate:.4g}" if rate < 1 else "without sampling"
        yield f"  {steps:,} steps at noise multiplier {z:.4g}, {how}"
    if not cost["releases"]:
        yield "  nothing was spent"
    for name, value in cost["epsilons"].items():
        sure = not isinstance(value, str)
        yield f"  {name:12} " + (
            f"epsilon {value:.4g} at delta {cost['delta']:g}" if sure else value
        )
    known = {n: value for n, value in cost["epsilons"].items() if not isinstance(value, str)}
    if len(known) > 1:
        least = min(known, key=lambda n: known[n])
        yield f"  each of them is an upper bound; quote the smallest, {known[least]:.4g} ({least})"


def of_plan(noise_multiplier: float, steps: int, rate: float, delta: float) -> Spent:
    """Return what a plan would spend."""
    accountant = Accountant(delta)
    accountant.add(noise_multiplier, parameters.integer(1, steps=steps), rate)
    return Spent("plan", "record", accountant)


def read_spent(path: Path) -> Iterator[Spent]:
    """Yield what was spent by each ledger, and each server with noise, in a folder; or one ledger.

    Raises
    ------
    ValueError
        If there is none, or a file is damaged.
    """
    if not path.is_dir():
        yield Spent(path.name, "record", read_ledger(path))
        return
    none = True
    for file in sorted(path.rglob(FILE)):
        none = False
        yield Spent(str(file.relative_to(path)), "record", read_ledger(file))
    for config in sorted(path.rglob("optimizer_config.json")):
        accountant = _of_server(config.parent)
        if accountant is not None:
            none = False
            yield Spent(str(config.parent.relative_to(path)), "client", accountant)
    if none:
        raise ValueError(
            f"nothing in {path} has spent a privacy budget: neither a ledger of DP-SGD ({FILE}) "
            "nor a checkpoint of a server with update-clip-server and noise"
        )


def _of_server(folder: Path) -> Accountant | None:
    """Return what update-clip-server has spent, by the newest checkpoint in a folder."""
    from declearn.main.utils import Checkpointer

    from fedclip.federation.restart import newest_optimizer

    try:
        newest = newest_optimizer(folder)
        modules = Checkpointer(str(folder)).load_optimizer(timestamp=newest).modules
    except Exception as exc:  # whatever a damaged file makes declearn raise
        raise ValueError(f"the checkpoint in {folder} can not be read: {exc!s:.200}") from exc
    budgets = [getattr(module, "budget", None) for module in modules]
    return next((budget.accountant for budget in budgets if budget is not None), None)
