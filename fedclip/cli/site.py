# SPDX-License-Identifier: Apache-2.0
"""``fedclip site``: what a policy lets out, and what budget remains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedclip.cli.output import commands, fail, say
from fedclip.site.gate import spent
from fedclip.site.policy import Policy, check_owned

app = commands("Limit what leaves a site, whatever a server asks for.")

PolicyPath = Annotated[Path, typer.Argument(metavar="FILE", help="The site's policy, a TOML file.")]


# More than any budget is asked for.
_MOST = 1_000_000


@app.command()
def check(file: PolicyPath) -> None:
    """Explain a policy: what it allows out, and its remaining budget."""
    try:
        policy = Policy.read(file)
        lines, problems = [*_explained(policy)], [*_problems(policy)]
    except OSError as exc:
        fail(f"cannot read {exc.filename or file}: {exc.strerror}")
    except ValueError as exc:
        fail(exc)
    say(f"{file} allows these to leave the site, in all jobs and engines together:")
    say(*(f"  {line}" for line in lines))
    say("Each engine has ways out that a policy cannot check: docs/site-policy.md")
    say(*(f"fedclip: {problem}" for problem in problems), err=True)
    raise typer.Exit(1 if problems else 0)


def _explained(policy: Policy) -> Iterator[str]:
    z, budget = policy.noise_multiplier, policy.max_epsilon
    yield f"updates with an L2 norm of at most {policy.max_norm:g}; NaN and infinity become zeros"
    if z:
        yield f"Gaussian noise of standard deviation {z * policy.max_norm:g} is added to each value"
    else:
        yield "without noise: an update can reveal data, and a malicious job can encode data in it"
    if budget is not None:
        done = spent(policy)
        updates = done.affordable(z, budget, _MOST)
        text = f"budget: epsilon {budget:g} at delta {policy.delta:g} for all updates"
        yield f"{text}, protecting this site's data set ({policy.relation})"
        text = f"spent: epsilon {done.epsilon():.4g} by {done.rounds:,} updates ({policy.ledger})"
        yield f"{text}; remaining: {updates:,} updates"
    elif z:
        yield "without a budget: averaging many updates removes the noise; set max_epsilon"
    runs = f" and {policy.max_replies or 10_000:,} in all" if policy.ledger else ""
    yield f"at most {policy.max_replies_per_run:,} replies in a run{runs}, refusals included"
    if policy.allow_job_code:
        yield "anything that code in NVFlare jobs sends directly, as allow_job_code is on"
    yield f"these metrics, without limit or accounting: {', '.join(policy.allow_metrics) or 'none'}"
    if os.name == "nt":
        yield "on this system, fedclip cannot check who may change the policy or its ledger"


def _problems(policy: Policy) -> Iterator[str]:
    if policy.ledger is None:
        return
    limit, folder = policy.max_epsilon, Path(policy.ledger).parent
    if limit and not spent(policy).affordable(policy.noise_multiplier, limit, 1):
        yield "the budget of this site is spent: it sends no more updates; raise max_epsilon"
    if not folder.is_dir():
        yield f"the ledger's folder {folder} does not exist: create it for the user of the client"
        return
    try:
        check_owned(Path(policy.ledger))
    except ValueError as exc:
        yield str(exc)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context, file: PolicyPath) -> None:
    """Run Flower's SuperNode with a policy; other arguments go to flower-supernode."""
    # Before flwr is imported, and for the processes that it starts.
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
    try:
        from fedclip.engines.flower.supernode import run
    except ImportError as exc:
        fail(f"a site's SuperNode needs flwr 1.41.0 or 1.42.0: pip install flwr==1.42.0 ({exc})")
    try:
        run(file, context.args)
    except (OSError, RuntimeError, ValueError) as exc:
        fail(exc)
