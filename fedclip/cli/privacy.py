# SPDX-License-Identifier: Apache-2.0
"""``fedclip privacy``: the noise for a budget, before a run, and what a run has spent."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedclip.cli.output import JsonFlag, fail, runnable
from fedclip.core.parameters import Config
from fedclip.errors import nearest

if TYPE_CHECKING:
    from fedclip.privacy.trust_models import Prices


app = typer.Typer(
    help="Plan noise for a privacy budget, and read what was spent.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Epsilon = Annotated[float, typer.Option(help="Budget of all rounds together.")]
Rounds = Annotated[int, typer.Option(help="Number of rounds.")]
Values = Annotated[int | None, typer.Option(help="How many values the model has.")]


@app.callback()
def root() -> None:
    """Plan noise for a privacy budget, and read what was spent."""


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
        fail(exc, 1)


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
    evaluation_share: Annotated[float, typer.Option(help="Share of noise for evaluations.")] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Size the noise on averages of clipped updates, and print the lines of TOML."""
    from fedclip.core.toml import toml_line
    from fedclip.privacy import planning
    from fedclip.privacy.trust_models import Prices

    if model is not None:
        values = _counted(model, values, as_json)
    with in_one_sentence():
        noise_plan = planning.plan(
            *(epsilon, delta, rounds, clients),
            relation=relation,
            values=values,
            per_round=per_round,
            momentum=momentum,
            evaluation_share=evaluation_share,
        )
        if honest is not None and (noise_plan.separation > 1 or evaluation_share):
            what = (
                "clients that take turns" if noise_plan.separation > 1 else "evaluations with noise"
            )
            raise ValueError(f"{what} leave the noise to the server: no --honest")
        prices = Prices(noise_plan, 0.75 if honest is None else honest)
    of_client, of_server = prices.configs if honest is not None else ({}, noise_plan.config)
    client = toml_line("module", "update-clip-client", of_client)
    server = toml_line("module", "update-clip-server", of_server)
    lines = ["[optim]", 'aggregator = "clipped-averaging"']
    lines += ["[optim.client_opt]", client, "[optim.server_opt]"]
    if evaluation_share:
        lines.append("# loss_bound: a little above the logarithm of the number of classes")
    lines.append(server)
    extra: Config = {
        "noise": noise_plan.noise,
        "length": noise_plan.length,
        "drift": noise_plan.drift,
    }
    text = str(noise_plan)
    if noise_plan.separation == 1 and not evaluation_share:
        extra["prices"] = [row._asdict() for row in prices.rows]
        text += f"\n{prices}" + ("" if values is None else f"\n{_range(prices, values)}")
    _print(noise_plan, text, lines, extra, as_json)


def _range(prices: Prices, values: int) -> str:
    """Return the clipval and bitsize that secure sums of updates with noise need, as text."""
    from fedclip.engines.declearn import secagg
    from fedclip.updates.client_noise import SiteNoise

    site, clients = SiteNoise(**prices.configs[0]["noise"]), prices.plan.clients
    clipval = math.ceil(100 * site.reach(site.max_norm)) / 100
    bits, suits = 24 + math.ceil(math.log2(clients)), "the largest for float32"
    enough = secagg.plan(1.0, clients, values, clipval=clipval, tolerance=0.01).bitsize
    if enough > bits:
        bits, suits = enough, "and a model in float64"
    needed = f"clipval = {clipval:g} times max_norm, and bitsize {bits} ({suits})"
    return f"  secure sums need {needed}"


def _counted(model: Path, values: int | None, quiet: bool) -> int:
    """Return how many values a model file trains and shares, and print it."""
    from fedclip.engines.declearn.personal import trained

    if values is not None:
        fail("give either --values or --model", 2)
    try:
        counts = trained(model)
    except Exception as exc:  # the file may raise anything
        fail(exc, 2)
    if not quiet:
        print(f"{counts}.")
    return counts.shared


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
    evaluation_share: Annotated[float, typer.Option(help="Epsilon's share for evaluations.")] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Size the noise of DP-SGD on one client's records or persons; print the lines of TOML."""
    from fedclip.core import parameters
    from fedclip.core.toml import toml_line, toml_value
    from fedclip.dpsgd import calibrate as dpsgd
    from fedclip.privacy.accounting import ZERO_OUT

    if (records is None) == (persons is None):
        fail("give --records, or --persons if persons with several records are to be protected", 2)
    epochs = 1 if epochs is None and steps is None else epochs
    with in_one_sentence():
        parameters.optional(parameters.integer, 1, values=values)
        unit = "person" if persons is not None else "record"
        units = parameters.integer(1, **{f"{unit}s": records if persons is None else persons})
        each = dpsgd.steps_of_a_round(units, {"batch_size": batch_size}, epochs, steps)
        total = parameters.integer(1, rounds=rounds) * (each or 0)
        calibration = dpsgd.calibrate(epsilon, delta, units, batch_size, total, unit)
        calibration = calibration.evaluating(evaluation_share, rounds)
        text = calibration.in_words(values)
    clip: Config = {"mode": "automatic"}
    lines = [
        "[optim.client_opt]",
        '# "automatic" needs no bound; "flat" learns a little more with an sclip_norm that fits',
    ]
    if evaluation_share:
        clip |= {"evaluation_share": evaluation_share, "loss_bound": 3.0}
        lines.append("# loss_bound: a little above the logarithm of the number of classes")
    lines += [
        toml_line("module", "sample-clip", clip),
        "[run]",
        f"rounds = {rounds}",
        f"privacy = {toml_value({'budget': [epsilon, delta], 'sclip_norm': 1.0})}",
        "[run.training]",
        f"batch_size = {batch_size}",
        *([] if epochs is None else [f"n_epoch = {epochs}"]),
        *([] if steps is None else [f"n_steps = {steps}"]),
    ]
    extra: Config = {
        **{
            name: getattr(calibration, name)
            for name in ("noise", "spent", "accountant", "sampling")
        },
        **({} if values is None else {"drift": calibration.drift(values)}),
        "relation": ZERO_OUT,
    }
    _print(calibration, text, lines, extra, as_json)


def _print(found: Any, text: str, lines: list[str], extra: Config, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), **extra, "toml": lines}))
    else:
        print(text, "", *lines, sep="\n")


@app.command()
def spent(
    path: Annotated[Path, typer.Argument(help="A ledger, or a folder of checkpoints.")],
    delta: Annotated[float | None, typer.Option(help="Another delta than the file's.")] = None,
    relation: Annotated[str | None, typer.Option(help="Another than the file's.")] = None,
    as_json: JsonFlag = False,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="By round; - is stdout.")] = None,
) -> None:
    """Show the epsilon that was spent."""
    from fedclip.cli.showing import write
    from fedclip.cli.spent import COLUMNS, csv_rows, in_words, read_spent
    from fedclip.report import printable
    from fedclip.report.rows import write_csv

    if as_json and csv is not None:
        fail("give either --json or --csv", 2)
    if not path.exists():
        beside = [budgets.name for budgets in path.parent.glob("*")]
        fail(f"there is no {path}{nearest(path.name, beside)}", 2)
    with in_one_sentence():
        budgets = [*read_spent(path)]
        costs = [budget.cost(delta, relation) for budget in budgets]
    if as_json:
        print(json.dumps(costs))
    elif csv is not None:
        each = zip(budgets, costs, strict=True)
        rows = (row for budget, cost in each for row in csv_rows(budget, cost))
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
    checked = runnable(config, simulate=True)

    from fedclip.engines.local import audit as attack

    attacked = attack.audit(checked.path, seed)
    if as_json:
        result = attacked._asdict() | {"fault": attacked.fault, "audited": attacked.audited}
        print(json.dumps(result | {"guesses": attacked.guesses._asdict()}))
    else:
        print(*attacked.in_words(), sep="\n")
    raise typer.Exit(int(attacked.fault or not attacked.audited))
