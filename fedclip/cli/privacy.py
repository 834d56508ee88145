# SPDX-License-Identifier: Apache-2.0
"""``fedclip privacy``: the noise for a budget, before a run, and what a run has spent."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fedclip.cli.output import CsvFile, JsonFlag, commands, existing, fail, write
from fedclip.cli.running import runnable
from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.core.records import SERVED
from fedclip.core.toml import toml_line, toml_value
from fedclip.dpsgd import calibrate as dpsgd
from fedclip.errors import version
from fedclip.privacy import planning
from fedclip.privacy.accounting import ZERO_OUT, Accountant, account, merged, relation_of
from fedclip.privacy.ledger import FILE, Entry, protected, read_entries, total
from fedclip.privacy.planning import TrustModels, by_silent
from fedclip.privacy.planning import silent_in_words as trust_lines
from fedclip.report import printable
from fedclip.report.rows import write_csv
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client_noise import SiteNoise
from fedclip.updates.store import read, server_in

app = commands("Plan noise for a privacy budget, and read what was spent.")

Epsilon = Annotated[float, typer.Option(help="Budget of all rounds together.")]
Rounds = Annotated[int, typer.Option(help="Number of rounds.")]
Values = Annotated[int | None, typer.Option(help="How many values the model has.")]
Share = Annotated[float, typer.Option(help="Share of the budget for evaluations.")]

_LOSS_BOUND = "# loss_bound: a little above the logarithm of the number of classes"


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """End the command with a sentence if a number is not allowed, or an accountant missing."""
    try:
        yield
    except (TypeError, ValueError) as exc:
        fail(exc, 2)
    except ModuleNotFoundError as exc:
        if exc.name == "declearn":
            raise
        fail(exc)


@app.command()
def plan(
    epsilon: Epsilon,
    rounds: Rounds,
    clients: Annotated[int, typer.Option(help="Clients in a round; all, with --per-round.")],
    delta: Annotated[float, typer.Option(help="Chance of failure, below 1 / clients.")] = 1e-5,
    relation: Annotated[str, typer.Option(help="add-remove or replace-one.")] = "add-remove",
    values: Values = None,
    per_round: Annotated[int | None, typer.Option(help="Clients in a round, if by turns.")] = None,
    momentum: Annotated[float, typer.Option(help="Momentum of the server, if by turns.")] = 0.0,
    model: Annotated[Path | None, typer.Option(help="A model file to count --values of.")] = None,
    honest: Annotated[float | None, typer.Option(help="Share of clients that add noise.")] = None,
    evaluation_share: Share = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Size the noise on averages of clipped updates, and print the lines of TOML."""
    if model is not None:
        from fedclip.engines.declearn.personal import trained

        if values is not None:
            fail("give either --values or --model", 2)
        try:
            counts = trained(model)
        except Exception as exc:  # the file may raise anything
            fail(exc, 2)
        values = counts.shared
        if not as_json:
            print(f"{counts}.")
    with in_one_sentence():
        noise_plan = planning.plan(
            *(epsilon, delta, rounds, clients),
            relation=relation,
            values=values,
            per_round=per_round,
            momentum=momentum,
            evaluation_share=evaluation_share,
        )
        by_turns = noise_plan.separation > 1
        if honest is not None and (by_turns or evaluation_share):
            raise ValueError("turns and evaluations leave the noise to the server: no --honest")
        prices = TrustModels(noise_plan, 0.75 if honest is None else honest)
    of_client, of_server = prices.configs if honest is not None else ({}, noise_plan.config)
    lines = ["[optim]", 'aggregator = "clipped-averaging"', "[optim.client_opt]"]
    lines += [toml_line("module", "update-clip-client", of_client), "[optim.server_opt]"]
    lines += [_LOSS_BOUND] * bool(evaluation_share)
    lines += [toml_line("module", "update-clip-server", of_server)]
    extra: Config = {name: getattr(noise_plan, name) for name in ("noise", "length", "drift")}
    text = str(noise_plan)
    if not by_turns and not evaluation_share:
        extra["prices"] = [row._asdict() for row in prices.rows]
        text += f"\n{prices}" + ("" if values is None else f"\n{_range(prices, values)}")
    _print(noise_plan, text, lines, extra, as_json)


def _range(prices: TrustModels, values: int) -> str:
    """Return the clipval and bitsize that secure sums of updates with noise need, as text."""
    from fedclip.engines.declearn import secagg

    site, clients = SiteNoise(**prices.configs[0]["noise"]), prices.plan.clients
    clipval = math.ceil(100 * site.reach(site.max_norm)) / 100
    most = 24 + math.ceil(math.log2(clients))
    bits = secagg.plan(1.0, clients, values, clipval=clipval, tolerance=0.01).bitsize
    suits = "and a model in float64" if bits > most else "the largest for float32"
    needed = f"clipval = {clipval:g} times max_norm, and bitsize {max(bits, most)} ({suits})"
    return f"  secure sums need {needed}"


@app.command()
def calibrate(
    epsilon: Epsilon,
    rounds: Rounds,
    batch_size: Annotated[int, typer.Option(help="Expected size of a batch.")],
    records: Annotated[int | None, typer.Option(help="Number of training records.")] = None,
    persons: Annotated[int | None, typer.Option(help="Number of persons, to protect them.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of a round; else 1.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of a round.")] = None,
    delta: Annotated[float, typer.Option(help="Chance of failure, below 1 / records.")] = 1e-5,
    values: Values = None,
    evaluation_share: Share = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Size the noise of DP-SGD on one client's records or persons; print the lines of TOML."""
    if (records is None) == (persons is None):
        fail("give --records, or --persons if persons with several records are to be protected", 2)
    epochs = 1 if epochs is None and steps is None else epochs
    unit, units = ("person", persons) if records is None else ("record", records)
    with in_one_sentence():
        parameters.optional(parameters.integer, 1, values=values)
        units = parameters.integer(1, **{f"{unit}s": units})
        each = dpsgd.steps_of_a_round(units, {"batch_size": batch_size}, epochs, steps)
        total = parameters.integer(1, rounds=rounds) * (each or 0)
        calibration = dpsgd.calibrate(epsilon, delta, units, batch_size, total, unit)
        calibration = calibration.evaluating(evaluation_share, rounds)
        text = calibration.in_words(values)
    evaluations = {"evaluation_share": evaluation_share, "loss_bound": 3.0}
    clip: Config = {"mode": "automatic", **(evaluations if evaluation_share else {})}
    lines = [
        "[optim.client_opt]",
        '# "automatic" needs no bound; "flat" learns a little more with an sclip_norm that fits',
        *[_LOSS_BOUND] * bool(evaluation_share),
        toml_line("module", "sample-clip", clip),
        "[run]",
        f"rounds = {rounds}",
        f"privacy = {toml_value({'budget': [epsilon, delta], 'sclip_norm': 1.0})}",
        "[run.training]",
        f"batch_size = {batch_size}",
        *([] if epochs is None else [f"n_epoch = {epochs}"]),
        *([] if steps is None else [f"n_steps = {steps}"]),
    ]
    names = ("noise", "spent", "accountant", "sampling")
    extra: Config = {name: getattr(calibration, name) for name in names} | {"relation": ZERO_OUT}
    extra["drift"] = None if values is None else calibration.drift(values)
    _print(calibration, text, lines, extra, as_json)


def _print(result: Any, text: str, lines: Sequence[str], extra: Config, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**dataclasses.asdict(result), **extra, "toml": lines}))
    else:
        print(text, "", *lines, sep="\n")


@app.command()
def spent(
    path: Annotated[Path, typer.Argument(help="A ledger, or a folder of checkpoints.")],
    delta: Annotated[float | None, typer.Option(help="Another delta than the file's.")] = None,
    relation: Annotated[str | None, typer.Option(help="Another than the file's.")] = None,
    as_json: JsonFlag = False,
    csv: CsvFile = None,
) -> None:
    """Show the epsilon that was spent."""
    if as_json and csv is not None:
        fail("give either --json or --csv", 2)
    with in_one_sentence():
        budgets = [*read_spent(existing(path))]
        costs = [budget.cost(delta, relation) for budget in budgets]
    if as_json:
        print(json.dumps(costs))
    elif csv is not None:
        rows = (row for each in zip(budgets, costs, strict=True) for row in csv_rows(*each))
        write_csv(COLUMNS, rows, table := io.StringIO())
        write(csv, table.getvalue())
    else:
        print(*(printable(line) for cost in costs for line in in_words(cost)), sep="\n")


@app.command()
def audit(
    config: Annotated[Path, typer.Argument(help="A quickrun file, or its folder.")] = Path(),
    seed: Annotated[int | None, typer.Option(min=0, help="Of canaries and batches alone.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Attack the privacy that a configuration claims, with its own model and data."""
    path = runnable(config, simulate=True)

    from fedclip.engines.local import audit as attack

    attacked = attack.audit(path, seed)
    if as_json:
        result = attacked._asdict() | {"fault": attacked.fault, "audited": attacked.audited}
        print(json.dumps(result | {"guesses": attacked.guesses._asdict()}))
    else:
        print(*attacked.in_words(), sep="\n")
    raise typer.Exit(int(attacked.fault or not attacked.audited))


# -- what was spent -------------------------------------------------------------------------------
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

    def cost(self, delta: float | None = None, relation: str | None = None) -> Config:
        """Return what it costs, and by which accountant; or why it cannot be counted.

        Delta and relation are those of the file, unless others are given.
        """
        spent = self.accountant.spent
        delta = self.accountant.delta if delta is None else delta
        relation = self.accountant.relation if relation is None else relation
        order, epsilons = self.accountant.order_of(spent), dict[str, float | str]()
        try:
            cost = account(spent, delta, relation, order)
            ordered = order is not None and cost.accountant == "rdp"
            name = f"rdp at order {order:.4g}" if ordered else cost.accountant
            # JSON has no infinity.
            epsilons[name] = cost.epsilon if math.isfinite(cost.epsilon) else "no finite epsilon"
        except ModuleNotFoundError as exc:
            epsilons["epsilon"] = str(exc)

        def by_noise(silent: int) -> float:
            times = self.site.multiplier(silent) / self.site.noise_multiplier if self.site else 1.0
            releases = [r._replace(noise_multiplier=r.noise_multiplier * times) for r in spent]
            return account(releases, delta, relation).epsilon

        site = self.site
        evaluated = (r.noise_multiplier for e in self.entries if e.evaluation for r in e.spent)
        names = ("where", "protects", "separation", "planned")
        return {name: getattr(self, name) for name in names} | {
            "evaluated": [*dict.fromkeys(evaluated)],
            "delta": delta,
            "relation": relation_of(relation, self.protects),
            "silent": site and by_silent(by_noise, site.expected_clients, site.sure),
            "rounds": sum(entry.round > 0 for entry in self.entries),
            "releases": [r._asdict() for r in merged(spent)],
            "entries": [
                {"time": e.time, **r._asdict(), "data": e.data, "fedclip": e.fedclip}
                for e in self.entries
                for r in e.spent
            ],
            "epsilons": epsilons if spent else {},
            "versions": {name: version(name) for name in ("fedclip", "dp-accounting")},
        }


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
    for data in dict.fromkeys(entry["data"] for entry in cost["entries"] if entry["data"]):
        yield f"  of {data}"
    for name, value in cost["epsilons"].items():
        counted = isinstance(value, float)
        text = f"epsilon {value:.4g} at delta {cost['delta']:g}" if counted else value
        yield f"  {name:12} {text}"
    if cost["silent"]:
        yield "  the clients added the noise:"
        yield from trust_lines(cost["silent"]).split("\n")
    if cost["planned"] is not None:
        when = "report this one if the clients' data decided when the run ended"
        yield f"  planned: at most epsilon {cost['planned']:.4g}; {when}"


COLUMNS = (
    *("where", "protects", "mechanism", "relation", "delta", "turn", "time", "noise_multiplier"),
    *("sampling", "separation", "steps", "accountant", "epsilon", "data", "fedclip"),
)


def csv_rows(budget: Spent, cost: Config) -> Iterator[Config]:
    """Yield a row for each turn that was charged, with the epsilon of all until then.

    A turn is a line of a ledger; of a server, a round, or as many as its clients take turns in.
    The last epsilon is what `Spent.cost` says by the same accountant.
    """
    accountant = budget.accountant
    relation = "add-remove" if cost["relation"] == ZERO_OUT else cost["relation"]
    so_far = Accountant(cost["delta"], relation, accountant.order)
    so_far.plan = accountant.plan
    each = [{**r._asdict(), "steps": 1} for r in accountant.spent for _ in range(r.steps)]
    for turn, row in enumerate(cost["entries"] or each, 1):
        so_far.add(row["noise_multiplier"], row["steps"], row["sampling"])
        mechanism = "Poisson-sampled " * (row["sampling"] < 1) + budget.mechanism
        mechanism += " on evaluations" * (row["noise_multiplier"] in cost["evaluated"])
        yield {**cost, **row, **so_far.cost()._asdict(), "turn": turn, "mechanism": mechanism}


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
        bound = _bound_in(config)
        if bound is not None and (budget := bound.budget) is not None:
            where = str(config.parent.relative_to(path))
            noise = "correlated " * (len(budget.coefficients) > 1)
            noise += "discrete " * (bound.site is not None) + "Gaussian"
            terms = budget.separation, budget.max_epsilon, noise, bound.site
            servers.append(Spent(where, "client", budget.accountant, (), *terms))
            known.add(budget.path)
    for file in sorted(path.rglob(FILE)) if folder else [path]:
        if file.resolve() not in known:
            known.add(file.resolve())
            entries = [*read_entries(file).values()]
            where = str(file.relative_to(path)) if folder else path.name
            unit = protected(entries[-1].data)[1] or "record"
            protects = "site's data set" if unit == "site" else unit
            ledgers.append(Spent(where, protects, total(entries), entries))
    if not ledgers + servers:
        files = f"a ledger ({FILE}), or a checkpoint or {SERVED} of a server with noise"
        raise NothingSpent(f"{path} shows no spent privacy budget: give a folder with {files}")
    yield from ledgers + servers


def _bound_in(file: Path) -> AdaptiveBound | None:
    """Return update-clip-server, as what was spent by all of the checkpoints in a folder.

    Their names hold local time, so that the latest need not be the newest. A file `SERVED` is of a
    server on another engine.
    """
    if file.name == SERVED:
        stored = read(file)
        server = server_in(file.parent, stored.settings)
        server.set_state(dict(stored.state))
        return server.bound
    folder = file.parent
    try:
        # Without noise, the checkpoint may have modules that are not registered here.
        if "'noise_multiplier'" not in str(json.loads(file.read_text(encoding="utf-8"))):
            return None
        from declearn.main.utils import Checkpointer

        saved = Checkpointer(str(folder))
        optimizer = saved.load_optimizer(load_state=False)
        bounds = (m for m in optimizer.modules if isinstance(m, AdaptiveBound) and m.budget)
        bound = next(bounds, None)
        for state in sorted(folder.glob("optimizer_state_*.mpk")) if bound else ():
            saved.load_optimizer(optimizer, state.stem.removeprefix("optimizer_state_"))
    except Exception as exc:  # whatever a damaged file makes declearn raise
        raise ValueError(f"cannot read the checkpoint in {folder}: {exc!s:.200}") from exc
    return bound
