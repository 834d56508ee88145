# SPDX-License-Identifier: Apache-2.0
"""``fedclip privacy``: what a budget costs in noise, before a run."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="What privacy costs in noise, before a run.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def root() -> None:
    """Say what privacy costs in noise, before a run."""


@app.command()
def plan(
    epsilon: Annotated[float, typer.Option(help="Budget of all rounds together.")],
    rounds: Annotated[int, typer.Option(help="Number of rounds.")],
    clients: Annotated[int, typer.Option(help="Number of clients in a round.")],
    delta: Annotated[
        float, typer.Option(help="Probability with which it may fail, below 1 / clients.")
    ] = 1e-5,
    relation: Annotated[
        str, typer.Option(help="add-remove of one client, or replace-one.")
    ] = "add-remove",
    values: Annotated[
        int | None, typer.Option(help="How many values the model has, for what noise adds up to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Size the noise on averages of clipped updates, and print the lines of TOML."""
    from fedclip.privacy import planning
    from fedclip.toml import toml_line

    try:
        found = planning.plan(epsilon, delta, rounds, clients, relation=relation, values=values)
    except (TypeError, ValueError) as exc:
        typer.echo(f"fedclip: {exc}", err=True)
        raise typer.Exit(2) from None
    lines = [
        "[optim]",
        'aggregator = "clipped-averaging"',
        "[optim.client_opt]",
        toml_line("module", "update-clip-client", {}),
        "[optim.server_opt]",
        toml_line("module", "update-clip-server", found.config),
    ]
    if as_json:
        facts = dataclasses.asdict(found)
        extra = {"noise": found.noise, "length": found.length, "drift": found.drift}
        print(json.dumps({**facts, **extra, "toml": lines}))
        return
    print(found)
    print()
    print("\n".join(lines))
