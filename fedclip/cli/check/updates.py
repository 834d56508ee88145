# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in a configuration of update clipping, before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedclip.cli.check.findings import Found, Setting
from fedclip.engines.declearn.aggregator import RAISES, ClippedAveraging
from fedclip.engines.declearn.messages import AUX_NAME, DECLEARN_RANGE
from fedclip.engines.declearn.update_modules import UpdateClipClient, UpdateClipServer
from fedclip.privacy.accounting import Release, epsilon
from fedclip.updates.aggregation import num_shortened
from fedclip.updates.client_noise import UNSURE_MASKS, UNSURE_PEERS
from fedclip.updates.protocol import Participation
from fedclip.updates.weights import WITH_NOISE, Shares, shares_of

CLIENT, SERVER, AGGREGATOR = "client_opt", "server_opt", "aggregator"

# With more noise on the count of a bin, as a share of the clients, the votes say too little.
_MOST_NOISE = 0.2

_REVEALED = (
    "each client's vote tells the server the norm of its update, within a factor of 1.4 near the "
    "bound; the server sees the clipped update, too",
    "the votes of a secure sum of few clients nearly reveal the norms of their updates: set "
    "learning_rate = 0 if these must not be known",
)


def update_problems(setting: Setting) -> Iterator[Found]:
    """Yield problems and notes about the clipping of round updates."""
    plugins, aggregator = setting.plugins, setting.aggregator
    client = [p for p in plugins.get(CLIENT, ()) if isinstance(p, UpdateClipClient)]
    server = [p for p in plugins.get(SERVER, ()) if isinstance(p, UpdateClipServer)]
    for side in (CLIENT, SERVER):
        exchanging = [p for p in plugins.get(side, ()) if getattr(p, "aux_name", None) == AUX_NAME]
        if len(exchanging) > 1:
            text = (
                f"{len(exchanging)} modules exchange {AUX_NAME!r}, and only the last would receive "
                "messages"
            )
            yield "problem", side, f"{text}; keep one"
    if not isinstance(aggregator, ClippedAveraging):
        for other in (*client[:1], *server[:1]):
            text = (
                f"{other.name} needs aggregator = 'clipped-averaging', and the file has "
                f"{getattr(aggregator, 'name', 'averaging')!r}, which clips nothing"
            )
            yield "problem", AGGREGATOR, text
        return
    if why := aggregator.unfit(bool(client or server)):
        yield "problem", AGGREGATOR, why
    elif aggregator.max_norm is None and isinstance(aggregator.scope, Mapping):
        length = math.hypot(*aggregator.scope.values())
        parts = (f"{name!r} {part / length:.3g} C" for name, part in aggregator.scope.items())
        text = f"the scope table splits the bound C of the update: {', '.join(parts)}"
        yield "note", AGGREGATOR, f"{text}; noise is scaled to C"
    if setting.fairness:
        text = (
            "declearn's fairness replaces clipped-averaging by another aggregator: remove fairness"
        )
        yield "problem", AGGREGATOR, text
    module = server[0] if server else None
    noise = module is not None and module.budget is not None
    if module is not None and noise:
        # Regularizers come before modules.
        if plugins[SERVER][0] is not module:
            text = "with noise, update-clip-server must be the first module, without regularizers"
            yield "problem", SERVER, f"{text}: others would change the update after its clip"
        yield from _noise(aggregator, module, setting)
    elif module is not None and module.follows:
        yield "note", SERVER, _REVEALED[setting.secagg is not None]
    yield from _weights(aggregator.shares, noise, setting)
    yield from _combining(aggregator, module, setting)
    limit = module.max_norm if module else aggregator.max_norm
    if (module and module.site) or any(clip.site for clip in client):
        yield from _sites(module, client, setting)
    elif limit:
        for text in _range_problems(aggregator.secagg_range, limit, setting.secagg):
            yield "problem", AGGREGATOR, text


def _table(noise: Mapping[str, float]) -> str:
    """Return a table of numbers as TOML, to be copied."""
    return "{" + ", ".join(f"{name} = {value}" for name, value in noise.items()) + "}"


def _sites(
    module: UpdateClipServer | None, client: Sequence[UpdateClipClient], setting: Setting
) -> Iterator[Found]:
    """Check that server and clients agree on the clients' noise, and say whom it protects."""
    site = None if module is None else module.site
    expected_table = None if site is None else site.get_config()
    if module is None or site is None or any(plugin.noise != expected_table for plugin in client):
        here = next((_table(plugin.noise) for plugin in client if plugin.noise), "none")
        expected = "none: remove the table, or set noise_at = 'clients'"
        if expected_table is not None:
            expected = f"{_table(expected_table)}: write the same table"
        yield (
            "problem",
            CLIENT,
            f"the table noise is {here}, and update-clip-server expects {expected}",
        )
        return
    count = setting.rounds or 1
    rounds = "one round costs" if count == 1 else f"{count} rounds cost"

    def cost(silent: int) -> str:
        release = Release(site.multiplier(silent), count)
        return f"{epsilon([release], module.delta, module.relation):.4g}"

    secagg = setting.secagg
    masked = secagg is not None and secagg.get("secagg_type", "masking") == "masking"
    least = site.expected_clients if masked else site.sure
    if setting.clients and setting.clients < least:
        text = (
            f"a round has at most {setting.clients} clients, and needs the noise of at least "
            f"{least}: raise max_clients, or lower expected_clients"
        )
        yield "problem", SERVER, text
    if secagg is None:
        text = (
            "noise_at = 'clients' needs secure aggregation, or clients refuse to share: add "
            "[secagg]. Without it the server sees each update with one client's noise, where "
            f"{rounds} epsilon = {cost(site.expected_clients - 1)}"
        )
        yield "problem" if setting.quickrun else "note", SERVER, text
    elif why := site.unsafe(secagg, {}):
        yield "problem", SERVER, why
    most = site.expected_clients - site.sure
    text = (
        f"if all {site.expected_clients} clients add noise, {rounds} epsilon = {cost(0)}. If "
        f"{most} of them add none, or reveal theirs to the server, epsilon = {cost(most)}"
    )
    yield "note", SERVER, text
    if secagg is not None:
        yield "note", SERVER, UNSURE_MASKS if masked else UNSURE_PEERS


def _weights(shares: Shares, noise: bool, setting: Setting) -> Iterator[Found]:
    """Check weights, and say what they reveal and how far one client moves the average."""
    if shares.kind == "equal":
        return
    secure = setting.secagg is not None
    if noise:
        yield "problem", AGGREGATOR, WITH_NOISE
    if why := shares.unfit(secure):
        yield "problem", AGGREGATOR, why
    if shares.table:
        if setting.clients and setting.clients > len(shares.table):
            text = (
                f"a round may have {setting.clients} clients, and weights names "
                f"{len(shares.table)}: the run"
            )
            text += " ends if other clients register; name all clients in weights"
            yield "problem", AGGREGATOR, text
        if not setting.named:
            where = "clients their names" if secure else "the server who sends which reply"
            text = f"a table of weights needs protocol = 'fedclip-websockets', which tells {where}"
            text += ", or client_sampler = {'strategy': 'named-clients'}" * (not secure)
            yield "note", AGGREGATOR, text
        most = shares_of(list(shares.table.values()), shares.max_share)
        name, share = max(zip(shares.table, most, strict=True), key=lambda pair: pair[1])
        text = (
            "every client receives the whole table of weights, and learns the record counts in it. "
            "A name belongs to the first client that registers with it"
        )
        yield "note", AGGREGATOR, text
        text = (
            f"{name!r} has the largest weight: it moves the average by at most {share:.3g} of the "
        )
        yield "note", AGGREGATOR, f"{text}bound in a round of all clients"
    else:
        if shares.max_share is not None:
            lies = f"moves the average by at most {shares.max_share:g} of the bound"
        elif shares.max_steps is not None:
            part = f"{shares.max_steps} / ({shares.max_steps} + the steps of the others)"
            lies = f"moves the average by at most {part} of the bound"
        else:
            lies = "controls nearly the whole average: set max_steps or max_share"
        text = "a client's weight is the number of steps that it reports"
        yield "note", AGGREGATOR, f"{text}. A client that reports too many {lies}"
    if secure:
        text = (
            "a malicious client moves the average by up to 3 times the bound, whatever its weight"
        )
        yield "note", AGGREGATOR, f"secure aggregation hides single updates: {text}"


def _combining(
    aggregator: ClippedAveraging, module: UpdateClipServer | None, setting: Setting
) -> Iterator[Found]:
    """Check a robust mean, and say how far one client moves it."""
    combining, clients = aggregator.combining, setting.clients
    if combining.kind == "mean":
        return
    noise = module is not None and module.budget is not None
    why = combining.unfit(noise=noise, secure=setting.secagg is not None)
    if why := why or (combining.too_few(clients) if clients else ""):
        yield "problem", AGGREGATOR, why
        return
    moves = "with n replies in a round, one client moves the average by at most"
    text = f"{moves} {combining.pull} of the bound; with a plain mean by 1 / n"
    if combining.kind == "arc":
        text += (
            ". The guarantee of ARC's paper is for robust means, not for the plain mean used here"
        )
        # Never more than half of them, however many there are.
        share = num_shortened(clients, combining.n_hostile) / clients if clients else 0.5
        if module is not None and share <= 1 - module.quantile:
            text += (
                f". About {1 - module.quantile:.0%} of the updates reach the adaptive bound, so "
                "ARC changes nothing: raise quantile, or set max_norm"
            )
    yield "note", AGGREGATOR, text


def _noise(
    aggregator: ClippedAveraging, module: UpdateClipServer, setting: Setting
) -> Iterator[Found]:
    """Check noise, and say what it costs."""
    budget, clients, rounds = module.budget, setting.clients, setting.rounds
    assert budget is not None
    if aggregator.exclude:
        yield "problem", AGGREGATOR, aggregator.aggregation.unfit_for_noise()
    if aggregator.on_nonfinite == "raise":
        # A server is trusted with its own noise, and so with errors.
        yield "problem" if module.site else "leak", AGGREGATOR, RAISES
    noise = budget.noise_of_bins / budget.clients
    if module.follows and noise > _MOST_NOISE:
        text = (
            f"the noise on each count of votes is {noise:.2g} of the clients, which hides where "
            "their norms are: fix the bound with start_norm and learning_rate = 0, or raise "
            "expected_clients"
        )
        yield "note", SERVER, text
    if module.ledger is None:
        text = (
            "update-clip-server has no ledger: the spent budget is forgotten when the process "
            "ends, and no server can resume; set ledger to a file that is kept for these clients"
        )
        yield "note", SERVER, text
    if module.separation > 1:
        yield from _turns(module, setting)
    elif clients and 2 * clients < budget.clients:
        text = (
            f"a round has at most {clients} clients, and their sum is divided by expected_clients="
            f"{budget.clients}: the update shrinks to {clients} / {budget.clients}. Lower "
            "expected_clients, which raises the noise on each value"
        )
        yield "note", SERVER, text
    elif clients and clients > budget.clients:
        text = (
            f"a round may have {clients} clients, more than expected_clients={budget.clients}, for "
            "which noise is sized: raise expected_clients, or lower max_clients"
        )
        yield "problem", SERVER, text
    if rounds and (affordable := module.rounds_left(rounds)) < rounds:
        text = (
            f"max_epsilon={module.max_epsilon:g} allows {affordable} of {rounds} planned rounds: "
            "training would end with an error; raise max_epsilon or noise_multiplier"
        )
        yield "problem", SERVER, text
    elif rounds:
        cost = budget.cost(rounds)
        text = f"{rounds} rounds cost epsilon = {cost:.4g} at delta = {module.delta:g}"
        yield "note", SERVER, text


def _turns(module: UpdateClipServer, setting: Setting) -> Iterator[Found]:
    """Check that the schedule matches the separation that noise is accounted for."""
    assert module.expected_clients is not None
    if setting.clients:
        due = Participation.of(setting.clients, module.expected_clients)
        if why := due.refusal(module.separation, module.expected_clients):
            yield "problem", SERVER, why
        elif due.separation > module.separation:
            text = (
                f"each of {setting.clients} clients takes part once in {due.separation} rounds, "
                f"and pays for once in {module.separation}: raise separation"
            )
            yield "note", SERVER, text
    if module.rounds is not None and setting.rounds not in (None, module.rounds):
        text = (
            f"correlated noise is planned for rounds={module.rounds}, and the run has "
            f"{setting.rounds}"
        )
        yield "note", SERVER, f"{text}: set both to the same number for the least noise"


def _range_problems(
    stated: float | None, limit: float, secagg: Mapping[str, Any] | None
) -> Iterator[str]:
    actual = stated if secagg is None else secagg.get("clipval", DECLEARN_RANGE)
    if actual is None:
        return
    if stated is not None and actual != stated:
        yield f"secagg_range={stated:g} differs from clipval={actual:g}: set both to one number"
    elif limit > actual:
        yield (
            f"updates have norms up to {limit:g}, above the range ±{actual:g} of secure "
            "aggregation: lower max_norm, or raise clipval and secagg_range"
        )
    elif stated is None and actual < DECLEARN_RANGE:
        yield f"clipped-averaging needs secagg_range={actual:g}, the same as clipval: add it"
