# SPDX-License-Identifier: Apache-2.0
"""Finds mistakes in a configuration of update clipping, before it runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedclip.federation.update.aggregator import RAISES, ClippedAveraging
from fedclip.federation.update.arc import brought
from fedclip.federation.update.bound import rounds_to_find
from fedclip.federation.update.client import UpdateClipClient
from fedclip.federation.update.combining import Combining
from fedclip.federation.update.messages import DECLEARN_RANGE
from fedclip.federation.update.server import UpdateClipServer
from fedclip.federation.update.shares import WITH_NOISE, Shares, shares_of
from fedclip.federation.update.site_noise import UNSURE_MASKS, UNSURE_PEERS
from fedclip.federation.update.turns import Due
from fedclip.privacy.accounting import Release, epsilon

CLIENT, SERVER, AGGREGATOR = "client_opt", "server_opt", "aggregator"

# Up to this noise on the share of votes, a search takes 10 rounds.
_EASY = 0.1

_MODULES = (UpdateClipClient, UpdateClipServer)

Problem = tuple[Literal["problem", "leak", "note"], str, str]
"""Severity, section, message."""


class Known(NamedTuple):
    """What is known of a run, beside its optimizers."""

    rounds: object = None
    """The largest number."""
    clients: object = None
    """The largest number in a round."""
    secagg: Mapping[str, Any] | None = None
    whole: bool = True
    """Whether secure aggregation would be in this file, if there is any."""
    named: bool = True
    """Whether the server knows who sends which reply, and clients their names."""


def update_problems(
    plugins: Mapping[str, Iterable[object]],
    aggregator: object,
    optim: Mapping[str, object],
    known: Known,
) -> list[Problem]:
    """Return problems and notes about the clipping of round updates.

    The `plugins` are those of the sections client_opt and server_opt. The `aggregator` is a name if
    it is not fedclip's, and None for declearn's default. `optim` is the section of the optimizers.
    """
    found: list[Problem] = []
    client = [p for p in plugins.get(CLIENT, ()) if isinstance(p, UpdateClipClient)]
    server = [p for p in plugins.get(SERVER, ()) if isinstance(p, UpdateClipServer)]
    for side in (CLIENT, SERVER):
        ours = (p for p in plugins.get(side, ()) if isinstance(p, _MODULES))
        names = Counter(p.aux_name for p in ours)
        for name, times in names.items():
            if times > 1:
                text = f"{times} modules exchange {name!r}: only the last would be heard; keep one"
                found.append(("problem", side, text))
    if not isinstance(aggregator, ClippedAveraging):
        for module in (*client[:1], *server[:1]):
            text = (
                f"{module.name} goes with the aggregator 'clipped-averaging', and this is "
                f"{aggregator or 'averaging'!r}, which clips nothing and may weight updates by "
                "their number of steps, so that no bound holds"
            )
            found.append(("problem", AGGREGATOR, text))
        return found
    found += _bounds(aggregator, client, server)
    if "fairness" in optim:
        text = "declearn's fairness puts an aggregator of its own in the place of clipped-averaging"
        found.append(("problem", AGGREGATOR, text))
    for module in server[:1]:
        section = optim.get(SERVER)
        changed = next(iter(plugins[SERVER])) is not module or (
            isinstance(section, Mapping) and bool(section.get("regularizers"))
        )
        found += _noise(aggregator, module, changed, known.rounds, known.clients)
    noise = any(module.budget is not None for module in server)
    found += _weights(
        aggregator.shares, noise, known.clients, known.secagg is not None, known.named
    )
    follows = server[0].quantile if server else None
    secure = known.secagg is not None
    found += _combining(aggregator.combining, noise, known.clients, secure, follows)
    limit = server[0].max_norm if server else aggregator.max_norm
    sites = [module for module in server if module.site is not None]
    if sites or any(module.site is not None for module in client):
        return found + _sites(server[:1], client[:1], known)
    return found + _range(aggregator, limit, known.secagg)


def _table(noise: Mapping[str, float]) -> str:
    """Return a table of numbers as TOML, to be copied."""
    return "{" + ", ".join(f"{name} = {value}" for name, value in noise.items()) + "}"


def _sites(
    server: Sequence[UpdateClipServer], client: Sequence[UpdateClipClient], known: Known
) -> list[Problem]:
    """Say whether server and clients agree on the clients' noise, and against whom it protects."""
    module = next(iter(server), None)
    site = None if module is None else module.site
    wanted = None if site is None else site.get_config()
    if module is None or site is None or any(one.noise != wanted for one in client):
        here = next((_table(one.noise) for one in client if one.noise), "none")
        expected = "none: leave the table out, or set noise_at = 'clients'"
        if wanted is not None:
            expected = f"{_table(wanted)}: write the same table"
        text = f"the table noise is {here}, and update-clip-server expects {expected}"
        return [("problem", CLIENT, text)]
    count = known.rounds if type(known.rounds) is int and known.rounds > 0 else 1
    rounds = "one round costs" if count == 1 else f"{count} rounds cost"

    def cost(silent: int) -> str:
        release = Release(site.multiplier(silent), count)
        return f"{epsilon([release], module.delta, module.relation):.4g}"

    most = site.expected_clients - site.sure
    notes = [
        f"up to {most} of {site.expected_clients} clients may add no noise, or tell the server "
        f"theirs: {rounds} epsilon = {cost(most)} then, and {cost(0)} if all add theirs"
    ]
    found: list[Problem] = []
    masked = known.secagg is not None and known.secagg.get("secagg_type", "masking") == "masking"
    least = site.expected_clients if masked else site.sure
    if type(known.clients) is int and known.clients < least:
        text = (
            f"at most {known.clients} clients take part in a round, and a sum needs the noise of "
            f"{least}: raise max_clients, or lower expected_clients"
        )
        found.append(("problem", SERVER, text))
    if known.secagg is None:
        text = (
            "the clients' noise is for a secure sum, and nothing here sets up secure aggregation: "
            "clients refuse to share, as the server would see each update with the noise of its "
            f"client alone, where {rounds} epsilon = {cost(site.expected_clients - 1)}; write "
            "[secagg], or set noise_at = 'server'"
        )
        found.append(("problem" if known.whole else "note", SERVER, text))
    else:
        if why := site.unsafe(known.secagg, {}):
            found.append(("problem", SERVER, why))
        notes.append(UNSURE_MASKS if masked else UNSURE_PEERS)
    return [*found, *(("note", SERVER, text) for text in notes)]


def _bounds(
    aggregator: ClippedAveraging, client: Sequence[object], server: Sequence[object]
) -> list[Problem]:
    if aggregator.max_norm is None and not client and not server:
        text = (
            "clipped-averaging has no bound: give it max_norm, or put update-clip-client into "
            "client_opt and update-clip-server into server_opt"
        )
        return [("problem", AGGREGATOR, text)]
    if aggregator.max_norm is not None and (client or server):
        text = (
            f"clipped-averaging has max_norm={aggregator.max_norm!r}, and update-clip-server sends "
            "another bound: leave max_norm out, or the modules"
        )
        return [("problem", AGGREGATOR, text)]
    if aggregator.max_norm is None and isinstance(aggregator.scope, Mapping):
        length = math.sqrt(sum(part**2 for part in aggregator.scope.values()))
        parts = (f"{name!r} {part / length:.3g} C" for name, part in aggregator.scope.items())
        text = f"a bound C of the whole update is split by the table: {', '.join(parts)}"
        return [("note", AGGREGATOR, f"{text}; noise, if there is any, is scaled to C")]
    return []


def _weights(
    shares: Shares, noise: bool, clients: object, secure: bool, named: bool
) -> list[Problem]:
    """Say what weights can not go with, what they reveal, and what one site may do."""
    if shares.kind == "equal":
        return []
    wrong = [WITH_NOISE] if noise else []
    wrong += [why] if (why := shares.unfit(secure)) else []
    notes = []
    if shares.table:
        if type(clients) is int and clients > len(shares.table):
            text = f"{clients} clients may take part in a round, and weights names"
            wrong.append(f"{text} {len(shares.table)}: the run ends if others register")
        if not named:
            where = "clients their names" if secure else "the server who sends which reply"
            notes.append(
                f"a table of weights needs the protocol 'fedclip-websockets', which tells {where}"
                + ", or client_sampler = {'strategy': 'named-clients'}" * (not secure)
            )
        most = shares_of(list(shares.table.values()), shares.max_share)
        name, share = max(zip(shares.table, most, strict=True), key=lambda pair: pair[1])
        notes.append(
            "every client gets the whole table of weights: numbers of records in it tell each site "
            "how many the others have. A name belongs to whoever registers with it first"
        )
        moves = f"with all clients, {name!r} has the largest share: one site moves the average by "
        notes.append(f"{moves}{share:.3g} of the bound at most")
    elif shares.max_share is not None:
        notes.append(
            "a site's weight is the number of steps that it claims: one that lies moves the "
            f"average by {shares.max_share:g} of the bound at most"
        )
    elif shares.max_steps is not None:
        notes.append(
            "a site's weight is the number of steps that it claims, at most "
            f"{shares.max_steps}: one that lies moves the average by {shares.max_steps} / "
            f"({shares.max_steps} + the steps of the others) of the bound at most"
        )
    else:
        notes.append(
            "a site's weight is the number of steps that it claims: one that claims a million has "
            "nearly the whole average; give max_steps or max_share"
        )
    if secure:
        notes.append(
            "nobody sees a single update: a site that breaks the protocol moves the average by up "
            "to 3 times the bound, whatever its weight"
        )
    found: list[Problem] = [("problem", AGGREGATOR, text) for text in wrong]
    return found + [("note", AGGREGATOR, text) for text in notes]


def _combining(
    combining: Combining, noise: bool, clients: object, secure: bool, quantile: float | None
) -> list[Problem]:
    """Say what a mean that resists can not go with, and what one site may do.

    The bound follows a quantile of the norms, if that is not None.
    """
    if combining.kind == "mean":
        return []
    why = combining.unfit(noise=noise, secure=secure)
    why = why or (combining.too_few(clients) if type(clients) is int else "")
    if why:
        return [("problem", AGGREGATOR, why)]
    moves = "with n replies in a round, one site moves the average by"
    text = f"{moves} {combining.pull} of the bound at most; a plain mean has 1 / n"
    if combining.kind == "arc":
        text += ". Before a plain mean, as here, the guarantee of ARC's paper does not hold"
        number = clients if type(clients) is int else 0
        # Never more than half of them, however many there are.
        share = brought(number, combining.n_hostile) / number if number else 0.5
        if quantile is not None and share <= 1 - quantile:
            text += (
                f". About {1 - quantile:.0%} of the updates are as long as the bound that follows "
                "them, so that ARC changes nothing: raise quantile, or take a max_norm that few "
                "updates reach"
            )
    return [("note", AGGREGATOR, text)]


def _noise(
    aggregator: ClippedAveraging,
    module: UpdateClipServer,
    changed: bool,
    rounds: object,
    clients: object,
) -> list[Problem]:
    if module.budget is None:
        return []
    found: list[Problem] = []
    if changed:
        text = (
            "with noise, update-clip-server has to come first, before other modules and without "
            "regularizers: what changes the average before it changes what the noise is sized on"
        )
        found.append(("problem", SERVER, text))
    if aggregator.exclude:
        text = f"noise can not be sized on what exclude={aggregator.exclude} leaves without a bound"
        found.append(("problem", AGGREGATOR, text))
    if aggregator.on_nonfinite == "raise":
        # A server is trusted with its own noise, and so with errors.
        found.append(("problem" if module.site else "leak", AGGREGATOR, RAISES))
    found += _search(module)
    if module.ledger is None:
        text = (
            "update-clip-server has no ledger: what was spent ends with the process, and no server "
            "goes on from a checkpoint. Set ledger to a file that belongs to these clients; "
            "`fedclip quickrun` keeps one in their data folder"
        )
        found.append(("note", SERVER, text))
    if module.separation > 1:
        found += _turns(module, rounds, clients)
        clients = None
    if type(clients) is int and 2 * clients < module.budget.clients:
        text = (
            f"at most {clients} clients take part in a round, and their sum is divided by "
            f"expected_clients={module.expected_clients}: the average is {clients} / "
            f"{module.expected_clients} of theirs; lower expected_clients, which takes more noise "
            "on each value"
        )
        found.append(("note", SERVER, text))
    if type(clients) is int and clients > module.budget.clients:
        text = (
            f"{clients} clients may take part in a round, more than expected_clients="
            f"{module.expected_clients}, which the average is divided by and the noise sized on: "
            "raise expected_clients, or lower max_clients"
        )
        found.append(("problem", SERVER, text))
    if type(rounds) is int and rounds > 0:
        left = module.rounds_left(rounds)
        if left < rounds:
            text = (
                f"max_epsilon={module.max_epsilon:g} allows {left} rounds, and {rounds} are "
                "planned: training ends with an error after them"
            )
            found.append(("problem", SERVER, text))
        else:
            cost = module.budget.cost(rounds)
            text = f"{rounds} rounds cost epsilon = {cost:.4g} at delta = {module.delta:g}"
            found.append(("note", SERVER, text))
    return found


def _turns(module: UpdateClipServer, rounds: object, clients: object) -> list[Problem]:
    """Say whether clients take turns as far apart as noise is accounted for."""
    assert module.expected_clients is not None
    found: list[Problem] = []
    if type(clients) is int and clients > 0:
        due = Due.of(clients, module.expected_clients)
        if why := due.refusal(module.separation, module.expected_clients):
            found.append(("problem", SERVER, why))
        elif due.separation > module.separation:
            text = (
                f"{clients} clients have a turn every {due.separation} rounds, and are charged for "
                f"one every {module.separation}: raise separation, which takes less noise"
            )
            found.append(("note", SERVER, text))
    if module.rounds is not None and type(rounds) is int and rounds != module.rounds:
        text = (
            f"banded noise is made for rounds={module.rounds}, and {rounds} are planned: with the "
            "same number it is the least there can be"
        )
        found.append(("note", SERVER, text))
    return found


def _search(module: UpdateClipServer) -> list[Problem]:
    """Return a note on the length of a search, if noise makes it long."""
    if module.budget is None or module.search is None:
        return []
    noise = module.budget.bits_noise / module.budget.clients
    if noise <= _EASY:
        return []
    rounds = rounds_to_find(module.rule, noise)
    text = (
        f"noise of {noise:.2g} of the clients on the votes is too much for a quick search: 95 % of "
        "searches from 100 times too low or too high are within a factor of 2 after "
        f"{'more than 200' if rounds is None else rounds} rounds, all of which are charged; give "
        "start_norm a number near the norms of the updates, or raise expected_clients"
    )
    return [("note", SERVER, text)]


def _range(
    aggregator: ClippedAveraging, limit: float | None, secagg: Mapping[str, float] | None
) -> list[Problem]:
    """Compare the bound with the range of secure aggregation."""
    if limit is None:
        return []
    stated = aggregator.secagg_range
    actual = secagg.get("clipval", DECLEARN_RANGE) if secagg is not None else stated
    if actual is None:
        return []
    if stated is not None and actual != stated:
        text = f"secagg_range={stated:g} and the clipval of secure aggregation, {actual:g}, differ"
        return [("problem", AGGREGATOR, text)]
    if limit > actual:
        text = (
            f"updates of norm up to {limit:g} do not fit into the range ±{actual:g} of secure "
            "aggregation: lower max_norm, or raise clipval and secagg_range"
        )
        return [("problem", AGGREGATOR, text)]
    if stated is None and actual < DECLEARN_RANGE:
        text = f"give clipped-averaging secagg_range={actual:g}, which is what clipval is"
        return [("problem", AGGREGATOR, text)]
    return []
