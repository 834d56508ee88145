# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip quickrun | simulate | run``: start a federation, or a script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedclip.cli.output import ConfigPath, fail, progress, runnable, say, typed
from fedclip.errors import FEDERATIONS, fits


def quickrun(
    config: ConfigPath = Path(),
    verbose: Annotated[bool, typer.Option("--verbose", help="Show declearn's log too.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Draw batches from this seed.")] = None,
) -> None:
    """Check a configuration, then run all of it on this machine."""
    result = runnable(config, quickrun=True)

    from fedclip.engines.declearn.quickrun import run

    clients, results, finished = run(
        result.path, verbose=verbose, seed=seed, progress=progress("quickrun", quiet=verbose)
    )
    if not finished:
        fail(f"interrupted; what was done until then: fedclip report {typed(results)}", code=130)
    weights = Path(results, "server", "model_state_best.mpk")
    say(f"Best weights (lowest mean loss of the healthy sites): {typed(weights)}")
    spent = any(Path(results).rglob("privacy_spent.json"))
    also = f", and what was spent:  fedclip privacy spent {typed(results)}" if spent else ""
    say(f"fedclip: {clients} clients; see  fedclip report {typed(results)}{also}")


def simulate(
    config: ConfigPath = Path(),
    seed: Annotated[int | None, typer.Option(min=0, help="A seed, not that of [simulate].")] = None,
) -> None:
    """Check a configuration, then run it in one process.

    It has as many clients as the section [simulate] says.
    """
    result = runnable(config, simulate=True)

    from fedclip.engines.local.simulate import EARLY, run

    done = run(result.path, seed, progress=progress("simulate"))
    see = f"fedclip report {typed(done.results)}"
    if done.ended:
        after = f"after {done.rounds} rounds: {done.ended}; what was done until then: {see}"
        if done.ended == EARLY:
            say(f"fedclip: {after}")
            return
        fail(after, code=130 if done.ended == "interrupted" else 1)
    say(f"fedclip: {done.clients} clients, {done.rounds} rounds of {done.seconds:.2g} s")
    say(
        f"Best weights (round {done.best}, lowest mean loss of the healthy sites): "
        f"{typed(Path(done.results, 'server', 'model_state_best.mpk'))}"
    )
    say(f"See  {see}")


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="server.py, client.py, …")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS")] = None,
) -> None:
    """Run a Python script, unedited, with fedclip registered."""
    import runpy
    from importlib.util import find_spec

    if not os.path.isfile(script):
        fail(f"there is no script {str(script)!r}", code=2)
    if fits(FEDERATIONS) and find_spec("websockets"):
        from fedclip.engines.declearn.network import watch_plain_clients

        watch_plain_clients()
    sys.argv = [str(script), *(args or [])]
    # Like `python SCRIPT`, put the script's folder first, in place of that of `fedclip`.
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
