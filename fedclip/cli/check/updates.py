# SPDX-License-Identifier: Apache-2.0
"""Finds mistakes in a configuration of update clipping, before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedclip.engines.declearn.aggregator import RAISES, ClippedAveraging
from fedclip.engines.declearn.messages import AUX_NAME, DECLEARN_RANGE
from fedclip.engines.declearn.update_client import UpdateClipClient
from fedclip.engines.declearn.update_server import UpdateClipServer
from fedclip.privacy.accounting import Release, epsilon
from fedclip.updates.arc import brought
from fedclip.updates.client_noise import UNSURE_MASKS, UNSURE_PEERS
from fedclip.updates.schedule import Due
from fedclip.updates.weights import WITH_NOISE, Shares, shares_of

CLIENT, SERVER, AGGREGATOR = "client_opt", "server_opt", "aggregator"

# Up to this noise on the share of votes, 95 % of searches take 10 rounds.
_EASY = 0.1

Problem = tuple[Literal["problem", "leak", "note"], str, str]
"""Severity, section, message."""


class Known(NamedTuple):
    """What is known of a run, beside its optimizers.

    Attributes
    ----------
    rounds, clients
        The largest number of rounds, and of clients in a round.
    secagg
        The section of secure aggregation, if there is any.
    whole
        Whether that would be in this file.
    named
        Whether the server knows who sends which reply, and clients their names.
    """

    rounds: int | None = None
    clients: int | None = None
    secagg: Mapping[str, Any] | None = None
    whole: bool = True
    named: bool = True


def update_problems(
    plugins: Mapping[str, Iterable[object]],
    aggregator: object,
    optim: Mapping[str, object],
    known: Known,
) -> Iterator[Problem]:
    """Yield problems and notes about the clipping of round updates.

    The `plugins` are those of the sections client_opt and server_opt. The `aggregator` is a name if
    it is not fedclip's, and None for declearn's default. `optim` is the section of the optimizers.
    """
    client = [p for p in plugins.get(CLIENT, ()) if isinstance(p, UpdateClipClient)]
    server = [p for p in plugins.get(SERVER, ()) if isinstance(p, UpdateClipServer)]
    for side in (CLIENT, SERVER):
        ours = [p for p in plugins.get(side, ()) if getattr(p, "aux_name", None) == AUX_NAME]
        if len(ours) > 1:
            text = f"{len(ours)} modules exchange {AUX_NAME!r}: only the last would be heard"
            yield "problem", side, f"{text}; keep one"
    if not isinstance(aggregator, ClippedAveraging):
        for other in (*client[:1], *server[:1]):
            text = (
                f"{other.name} goes with the aggregator 'clipped-averaging', and this is "
                f"{aggregator or 'averaging'!r}, which clips nothing, so that no bound holds"
            )
            yield "problem", AGGREGATOR, text
        return
    if why := aggregator.unfit(bool(client or server)):
        yield "problem", AGGREGATOR, why
    elif aggregator.max_norm is None and isinstance(aggregator.scope, Mapping):
        length = math.hypot(*aggregator.scope.values())
        parts = (f"{name!r} {part / length:.3g} C" for name, part in aggregator.scope.items())
        text = f"a bound C of the whole update is split by the table: {', '.join(parts)}"
        yield "note", AGGREGATOR, f"{text}; noise, if there is any, is scaled to C"
    if "fairness" in optim:
        text = "declearn's fairness puts an aggregator of its own in the place of clipped-averaging"
        yield "problem", AGGREGATOR, text
    module = server[0] if server else None
    noise = module is not None and module.budget is not None
    if module is not None and noise:
        section = optim.get(SERVER)
        regularized = isinstance(section, Mapping) and section.get("regularizers")
        if next(iter(plugins[SERVER])) is not module or regularized:
            text = "with noise, update-clip-server has to come first, and without regularizers"
            yield "problem", SERVER, f"{text}: others would change what the noise is sized on"
        yield from _noise(aggregator, module, known)
    yield from _weights(aggregator.shares, noise, known)
    yield from _combining(aggregator, module, known)
    limit = module.max_norm if module else aggregator.max_norm
    if (module and module.site) or any(one.site for one in client):
        yield from _sites(module, client, known)
    elif limit and (text := _range(aggregator.secagg_range, limit, known.secagg)):
        yield "problem", AGGREGATOR, text


def _table(noise: Mapping[str, float]) -> str:
    """Return a table of numbers as TOML, to be copied."""
    return "{" + ", ".join(f"{name} = {value}" for name, value in noise.items()) + "}"


def _sites(
    module: UpdateClipServer | None, client: Sequence[UpdateClipClient], known: Known
) -> Iterator[Problem]:
    """Say whether server and clients agree on the clients' noise, and against whom it protects."""
    site = None if module is None else module.site
    wanted = None if site is None else site.get_config()
    if module is None or site is None or any(one.noise != wanted for one in client):
        here = next((_table(one.noise) for one in client if one.noise), "none")
        expected = "none: leave the table out, or set noise_at = 'clients'"
        if wanted is not None:
            expected = f"{_table(wanted)}: write the same table"
        yield (
            "problem",
            CLIENT,
            f"the table noise is {here}, and update-clip-server expects {expected}",
        )
        return
    count = known.rounds or 1
    rounds = "one round costs" if count == 1 else f"{count} rounds cost"

    def cost(silent: int) -> str:
        release = Release(site.multiplier(silent), count)
        return f"{epsilon([release], module.delta, module.relation):.4g}"

    secagg = known.secagg
    masked = secagg is not None and secagg.get("secagg_type", "masking") == "masking"
    least = site.expected_clients if masked else site.sure
    if known.clients and known.clients < least:
        text = (
            f"at most {known.clients} clients take part in a round, and a sum needs the noise of "
            f"{least}: raise max_clients, or lower expected_clients"
        )
        yield "problem", SERVER, text
    if secagg is None:
        text = (
            "nothing here sets up secure aggregation: clients refuse to share, as the server would "
            "see each update with the noise of its client alone, where "
            f"{rounds} epsilon = {cost(site.expected_clients - 1)}; write [secagg]"
        )
        yield "problem" if known.whole else "note", SERVER, text
    elif why := site.unsafe(secagg, {}):
        yield "problem", SERVER, why
    most = site.expected_clients - site.sure
    text = (
        f"up to {most} of {site.expected_clients} clients may add no noise, or tell the server "
        f"theirs: {rounds} epsilon = {cost(most)} then, and {cost(0)} if all add theirs"
    )
    yield "note", SERVER, text
    if secagg is not None:
        yield "note", SERVER, UNSURE_MASKS if masked else UNSURE_PEERS


def _weights(shares: Shares, noise: bool, known: Known) -> Iterator[Problem]:
    """Say what weights can not go with, what they reveal, and what one site may do."""
    if shares.kind == "equal":
        return
    secure = known.secagg is not None
    if noise:
        yield "problem", AGGREGATOR, WITH_NOISE
    if why := shares.unfit(secure):
        yield "problem", AGGREGATOR, why
    if shares.table:
        if known.clients and known.clients > len(shares.table):
            text = f"{known.clients} clients may take part in a round, and weights names"
            text += f" {len(shares.table)}: the run ends if others register"
            yield "problem", AGGREGATOR, text
        if not known.named:
            where = "clients their names" if secure else "the server who sends which reply"
            text = (
                f"a table of weights needs the protocol 'fedclip-websockets', which tells {where}"
            )
            text += ", or client_sampler = {'strategy': 'named-clients'}" * (not secure)
            yield "note", AGGREGATOR, text
        most = shares_of(list(shares.table.values()), shares.max_share)
        name, share = max(zip(shares.table, most, strict=True), key=lambda pair: pair[1])
        text = (
            "every client gets the whole table of weights: numbers of records in it tell each site "
            "how many the others have. A name belongs to whoever registers with it first"
        )
        yield "note", AGGREGATOR, text
        text = f"with all clients, {name!r} has the largest share: one site moves the average by "
        yield "note", AGGREGATOR, f"{text}{share:.3g} of the bound at most"
    else:
        if shares.max_share is not None:
            lies = f"lies moves the average by {shares.max_share:g} of the bound at most"
        elif shares.max_steps is not None:
            part = f"{shares.max_steps} / ({shares.max_steps} + the steps of the others)"
            lies = f"lies moves the average by {part} of the bound at most"
        else:
            lies = "claims a million has nearly the whole average; give max_steps or max_share"
        text = "a site's weight is the number of steps that it claims"
        yield "note", AGGREGATOR, f"{text}: one that {lies}"
    if secure:
        text = "a site that breaks the protocol moves the average by up to 3 times the bound"
        yield "note", AGGREGATOR, f"nobody sees a single update: {text}, whatever its weight"


def _combining(
    aggregator: ClippedAveraging, module: UpdateClipServer | None, known: Known
) -> Iterator[Problem]:
    """Say what a mean that resists can not go with, and what one site may do."""
    combining, clients = aggregator.combining, known.clients
    if combining.kind == "mean":
        return
    noise = module is not None and module.budget is not None
    why = combining.unfit(noise=noise, secure=known.secagg is not None)
    if why := why or (combining.too_few(clients) if clients else ""):
        yield "problem", AGGREGATOR, why
        return
    moves = "with n replies in a round, one site moves the average by"
    text = f"{moves} {combining.pull} of the bound at most; a plain mean has 1 / n"
    if combining.kind == "arc":
        text += ". Before a plain mean, as here, the guarantee of ARC's paper does not hold"
        # Never more than half of them, however many there are.
        share = brought(clients, combining.n_hostile) / clients if clients else 0.5
        if module is not None and share <= 1 - module.quantile:
            text += (
                f". About {1 - module.quantile:.0%} of the updates are as long as the bound that "
                "follows them, so that ARC changes nothing: raise quantile, or set max_norm"
            )
    yield "note", AGGREGATOR, text


def _noise(
    aggregator: ClippedAveraging, module: UpdateClipServer, known: Known
) -> Iterator[Problem]:
    """Say what noise can not go with, and what it costs."""
    budget, clients, rounds = module.budget, known.clients, known.rounds
    assert budget is not None
    if aggregator.exclude:
        yield "problem", AGGREGATOR, aggregator.closing.beside_noise()
    if aggregator.on_nonfinite == "raise":
        # A server is trusted with its own noise, and so with errors.
        yield "problem" if module.site else "leak", AGGREGATOR, RAISES
    noise = budget.bits_noise / budget.clients
    if module.search is not None and noise > _EASY:
        text = (
            f"noise of {noise:.2g} of the clients on the votes is too much for a quick search: "
            "give start_norm a number near the norms of the updates, or raise expected_clients"
        )
        yield "note", SERVER, text
    if module.ledger is None:
        text = (
            "update-clip-server has no ledger: what was spent ends with the process, and no server "
            "goes on from a checkpoint; set ledger to a file that belongs to these clients"
        )
        yield "note", SERVER, text
    if module.separation > 1:
        yield from _turns(module, known)
    elif clients and 2 * clients < budget.clients:
        text = (
            f"at most {clients} clients take part in a round, and their sum is divided by "
            f"expected_clients={budget.clients}: the average is {clients} / {budget.clients} of "
            "theirs; lower expected_clients, which takes more noise on each value"
        )
        yield "note", SERVER, text
    elif clients and clients > budget.clients:
        text = (
            f"{clients} clients may take part in a round, more than expected_clients="
            f"{budget.clients}, on which noise is sized: raise that, or lower max_clients"
        )
        yield "problem", SERVER, text
    if rounds and (left := module.rounds_left(rounds)) < rounds:
        text = f"max_epsilon={module.max_epsilon:g} allows {left} rounds, and {rounds} are planned"
        yield "problem", SERVER, f"{text}: training ends with an error after them"
    elif rounds:
        cost = budget.cost(rounds)
        text = f"{rounds} rounds cost epsilon = {cost:.4g} at delta = {module.delta:g}"
        yield "note", SERVER, text


def _turns(module: UpdateClipServer, known: Known) -> Iterator[Problem]:
    """Say whether clients take turns as far apart as noise is accounted for."""
    assert module.expected_clients is not None
    if known.clients:
        due = Due.of(known.clients, module.expected_clients)
        if why := due.refusal(module.separation, module.expected_clients):
            yield "problem", SERVER, why
        elif due.separation > module.separation:
            text = (
                f"{known.clients} clients have a turn every {due.separation} rounds, and are "
                f"charged for one every {module.separation}: raise separation"
            )
            yield "note", SERVER, text
    if module.rounds is not None and known.rounds not in (None, module.rounds):
        text = f"banded noise is made for rounds={module.rounds}, and {known.rounds} are planned"
        yield "note", SERVER, f"{text}: with the same number it is the least there can be"


def _range(stated: float | None, limit: float, secagg: Mapping[str, Any] | None) -> str:
    """Return why a bound, or `secagg_range`, is not as secure aggregation has it; "" if it is."""
    actual = stated if secagg is None else secagg.get("clipval", DECLEARN_RANGE)
    if actual is None:
        return ""
    if stated is not None and actual != stated:
        return f"secagg_range={stated:g} and the clipval of secure aggregation, {actual:g}, differ"
    if limit > actual:
        return (
            f"updates of norm up to {limit:g} do not fit into the range ±{actual:g} of secure "
            "aggregation: lower max_norm, or raise clipval and secagg_range"
        )
    if stated is None and actual < DECLEARN_RANGE:
        return f"give clipped-averaging secagg_range={actual:g}, which is what clipval is"
    return ""
