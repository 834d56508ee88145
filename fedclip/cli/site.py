# SPDX-License-Identifier: Apache-2.0
"""``fedclip site``: what a site's policy lets out, what it can not force, what is left to spend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclip.cli.output import fail, say

if TYPE_CHECKING:
    from fedclip.site.policy import Policy


app = typer.Typer(
    help="Limit what leaves a site, whatever a server asks for.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PolicyPath = Annotated[Path, typer.Argument(metavar="FILE", help="The site's policy, a TOML file.")]


ENGINES = {
    ("declearn", "declearn"): (
        'a client made with policy = "FILE": all messages of the client',
        "code of a model that is unpickled, as those of torch and Haiku are; other programs of "
        "the machine",
    ),
    ("Flower", "flwr"): (
        "fedclip site supernode, in the place of flower-supernode: all replies of apps",
        "sockets and files of the app: it needs a process of its own, and no other network",
    ),
    ("NVFlare", "nvflare"): (
        "SitePolicy in each scope of privacy.json, and allow_log_streaming off: the results of "
        "all tasks",
        "aux messages, event streams, and code in the process: jobs with byoc are refused, unless "
        "the policy allows them",
    ),
}
"""Where a policy acts, and what it can not see there, for each engine and its package."""

# More than any budget is asked for.
_MOST = 1_000_000


@app.command()
def check(file: PolicyPath) -> None:
    """Explain a policy: what leaves, what it can not force, and what is left of its budget."""
    from fedclip.cli.catalogue import version
    from fedclip.site.policy import Policy

    try:
        policy = Policy.read(file)
        lines, problems = [*_explained(policy)], [*_problems(policy)]
    except OSError as exc:
        fail(f"{exc.filename or file} can not be read: {exc.strerror}")
    except ValueError as exc:
        fail(exc)
    say(f"{file} lets out, in all jobs and on all engines together:")
    for line in lines:
        say(f"  {line}")
    for (name, package), (where, unseen) in ENGINES.items():
        found = version(package)
        say(f"{name} {found}" if found else f"{name}, which is not installed here")
        say(f"  acts in      {where}")
        say(f"  can not see  {unseen}")
    for problem in problems:
        say(f"fedclip: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


def _explained(policy: Policy) -> Iterator[str]:
    from fedclip.site.gate import spent

    yield f"updates with an L2 norm of at most {policy.max_norm:g}; zeros for what is not finite"
    if policy.noise_multiplier:
        std = policy.noise_multiplier * policy.max_norm
        yield f"with noise of standard deviation {std:g} on each of their values"
    else:
        yield (
            "without noise: an update may tell of the data, and a hostile job may write them into "
            "its digits; whether it was within a server's bound, clipped or zeroed leaves as well"
        )
    if policy.max_epsilon is not None:
        done = spent(policy)
        left = done.affordable(policy.noise_multiplier, policy.max_epsilon, _MOST)
        yield (
            f"at most epsilon {policy.max_epsilon:g} at delta {policy.delta:g} together, for any "
            f"change of this site's data ({policy.relation})"
        )
        yield (
            f"of which {done.rounds:,} updates have spent {done.epsilon():.4g}, says "
            f"{policy.ledger}; {left:,} more fit"
        )
    elif policy.noise_multiplier:
        yield "without a budget: the noise of many updates averages out"
    runs = f" and {policy.max_replies or 10_000:,} in all" if policy.ledger else ""
    yield f"at most {policy.max_replies_per_run:,} replies in a run{runs}, refusals included"
    if policy.allow_job_code:
        yield "whatever the code of NVFlare jobs sends by other ways: allow_job_code is on"
    names = ", ".join(policy.allow_metrics) or "none"
    yield f"and these numbers, which nothing limits or counts: {names}"
    if os.name == "nt":
        yield "who may change the policy or its ledger can not be told on this system"


def _problems(policy: Policy) -> Iterator[str]:
    from fedclip.site.gate import spent
    from fedclip.site.policy import check_owned

    if policy.ledger is None:
        return
    path = Path(policy.ledger)
    limit = policy.max_epsilon
    if limit and not spent(policy).affordable(policy.noise_multiplier, limit, 1):
        yield "this site's budget is spent: no update leaves any more"
    if not path.parent.is_dir():
        yield f"there is no folder {path.parent} for the ledger: make it, for who runs the client"
        return
    try:
        check_owned(path)
    except ValueError as exc:
        yield str(exc)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context, file: PolicyPath) -> None:
    """Run Flower's SuperNode with a policy around it; all other words are flower-supernode's."""
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
