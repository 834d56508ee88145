# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in a configuration of update clipping, before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedclip.cli.catalogue import is_ours
from fedclip.cli.check.findings import AGGREGATOR, CLIENT, SERVER, Finding, leak, note, problem
from fedclip.cli.check.plugins import is_shared
from fedclip.cli.check.settings import Setting, as_count, part_of, registered
from fedclip.core.toml import toml_value
from fedclip.engines.declearn.aggregator import RAISES, ClippedAveraging
from fedclip.engines.declearn.members import quorum_problems
from fedclip.engines.declearn.messages import DECLEARN_RANGE
from fedclip.engines.declearn.update_modules import UpdateClipClient, UpdateClipServer
from fedclip.privacy.accounting import Release, epsilon
from fedclip.updates.aggregation import Combining, num_shortened
from fedclip.updates.client_noise import UNSURE_MASKS, UNSURE_PEERS
from fedclip.updates.protocol import Participation
from fedclip.updates.weights import WITH_NOISE, Shares, shares_of

# With more noise on the count of a bin, as a share of the clients, the votes say too little.
_MOST_NOISE = 0.2


def update_problems(setting: Setting) -> Iterator[Finding]:
    """Yield problems and notes about the clipping of round updates."""
    aggregator = setting.aggregator
    client = [p for p in setting.client if isinstance(p, UpdateClipClient)]
    server = [p for p in setting.server if isinstance(p, UpdateClipServer)]
    if not isinstance(aggregator, ClippedAveraging):
        name = getattr(aggregator, "name", "averaging")
        for other in (*client[:1], *server[:1]):
            text = f"{other.name} needs aggregator = 'clipped-averaging', not {name!r}"
            yield problem(AGGREGATOR, f"{text}, which clips nothing")
        return
    module = server[0] if server else None
    noise = module is not None and module.budget is not None
    secure, shares, combining = setting.secagg is not None, aggregator.shares, aggregator.combining
    reasons = (
        aggregator.unfit(bool(client or server)),
        "fairness replaces clipped-averaging: remove fairness" * ("fairness" in setting.optim),
        aggregator.aggregation.unfit_for_noise() if noise and aggregator.exclude else "",
        WITH_NOISE if noise and shares.kind != "equal" else "",
        shares.unfit(secure),
        combining.unfit(noise=noise, secure=secure),
        combining.too_few(setting.clients) if setting.clients else "",
    )
    yield from (problem(AGGREGATOR, why) for why in reasons if why)
    if module is not None and noise:
        yield from _noise(aggregator, module, setting)
    elif module is not None and module.follows:
        text = "each client's vote tells the server the norm of its update, within a factor of 1.4"
        if secure:
            text = "the votes of a secure sum of few clients nearly reveal the norms of updates"
        yield note(SERVER, f"{text}: set learning_rate = 0 if it must not know")
    if shares.kind != "equal":
        yield from _weights(shares, setting)
    if combining.kind != "mean":
        yield note(AGGREGATOR, _reach(combining, module, setting.clients))
    if (module and module.site) or any(clip.site for clip in client):
        yield from _sites(module, client, setting)
    elif limit := module.max_norm if module else aggregator.max_norm:
        yield from _range_problems(aggregator.secagg_range, limit, setting)


def _sites(
    module: UpdateClipServer | None, client: Sequence[UpdateClipClient], setting: Setting
) -> Iterator[Finding]:
    """Check that server and clients agree on the clients' noise, and say whom it protects."""
    site = module.site if module else None
    table = site.get_config() if site else None
    if module is None or site is None or any(plugin.noise != table for plugin in client):
        here = next((toml_value(plugin.noise) for plugin in client if plugin.noise), "none")
        expected = f"{toml_value(table)}: write the same table" if table else "none: remove it"
        text = f"the table noise is {here}, and update-clip-server expects {expected}"
        yield problem(CLIENT, text)
        return
    rounds, secagg, most = setting.rounds or 1, setting.secagg, site.expected_clients - site.sure
    first, second = (
        f"{epsilon([Release(site.multiplier(n), rounds)], module.delta, module.relation):.4g}"
        for n in (0, most)
    )
    masked = secagg is not None and secagg.get("secagg_type", "masking") == "masking"
    least = site.expected_clients if masked else site.sure
    if setting.clients and setting.clients < least:
        text = f"a round has at most {setting.clients} clients, and needs the noise of at least"
        yield problem(SERVER, f"{text} {least}: raise max_clients, or lower expected_clients")
    if secagg is None:
        text = "without [secagg], the server sees updates with one client's noise: add it"
        yield Finding("problem" if setting.quickrun else "note", SERVER, text)
    elif why := site.unsafe(secagg, {}):
        yield problem(SERVER, why)
    text = f"rounds = {rounds}: epsilon = {first} if all clients add noise. If {most} of them"
    yield note(SERVER, f"{text} add none, or reveal theirs to the server, epsilon = {second}")
    if secagg is not None:
        yield note(SERVER, UNSURE_MASKS if masked else UNSURE_PEERS)


def _weights(shares: Shares, setting: Setting) -> Iterator[Finding]:
    """Yield what weights reveal, and how far one client moves the average."""
    secure = setting.secagg is not None
    if shares.table:
        if setting.clients and setting.clients > len(shares.table):
            text = f"a round may have {setting.clients} clients, and weights names"
            yield problem(AGGREGATOR, f"{text} {len(shares.table)}: name all clients")
        # With secure aggregation, clients need their names; else the server needs the senders.
        if not (setting.quickrun or setting.watched or (setting.vetted and not secure)):
            where = "clients their names" if secure else "the server who sends which reply"
            text = f"a table of weights needs protocol = 'fedclip-websockets', which tells {where}"
            yield note(AGGREGATOR, text)
        most = shares_of(list(shares.table.values()), shares.max_share)
        share, name = max(zip(most, shares.table, strict=True))
        yield note(AGGREGATOR, "each client learns the record counts in the table of weights")
        text = f"{name!r} has the largest weight: it moves the average by at most {share:.3g} of"
        yield note(AGGREGATOR, f"{text} the bound in a round of all clients")
    else:
        reach = "controls nearly the whole average: set max_steps or max_share"
        if shares.max_share is not None:
            reach = f"moves the average by at most {shares.max_share:g} of the bound"
        elif steps := shares.max_steps:
            ratio = f"{steps} / ({steps} + the steps of the others)"
            reach = f"moves the average by at most {ratio} of the bound"
        yield note(AGGREGATOR, f"a client that reports too many steps as its weight {reach}")
    if secure:
        yield note(AGGREGATOR, "a malicious client moves a secure sum by up to 3 times the bound")


def _reach(combining: Combining, module: UpdateClipServer | None, clients: int | None) -> str:
    """Return how far one client moves a robust mean."""
    text = f"of n replies, one client moves the average by at most {combining.pull} of the bound"
    if combining.kind != "arc":
        return text
    text += ". The guarantee of ARC's paper is for robust means, not for this plain one"
    # Never more than half of them, however many there are.
    share = num_shortened(clients, combining.n_hostile) / clients if clients else 0.5
    if module is not None and share <= 1 - module.quantile:
        text += f". About {1 - module.quantile:.0%} of the updates reach the adaptive bound, so ARC"
        text += " changes nothing: raise quantile, or set max_norm"
    return text


def _noise(
    aggregator: ClippedAveraging, module: UpdateClipServer, setting: Setting
) -> Iterator[Finding]:
    """Check noise, and say what it costs."""
    budget, clients, rounds = module.budget, setting.clients, setting.rounds
    assert budget is not None
    # Regularizers come before modules.
    if setting.server[0] is not module:
        yield problem(SERVER, "with noise, update-clip-server must be the first module")
    if aggregator.on_nonfinite == "raise":
        # A server is trusted with its own noise, and so with errors.
        yield problem(AGGREGATOR, RAISES) if module.site else leak(AGGREGATOR, RAISES)
    noise = budget.noise_of_bins / budget.clients
    if module.follows and noise > _MOST_NOISE:
        text = f"noise of {noise:.2g} of the clients on each vote hides where their norms are: fix"
        yield note(SERVER, f"{text} start_norm with learning_rate = 0, or raise expected_clients")
    if module.ledger is None:
        yield note(SERVER, "the spent budget is forgotten when the process ends: set ledger")
    if module.separation > 1:
        due = Participation.of(setting.population or 0, budget.clients)
        if due.separation > module.separation:
            text = f"each client takes part once in {due.separation} rounds, and pays for once in"
            yield note(SERVER, f"{text} {module.separation}: raise separation")
        if module.rounds is not None and rounds not in (None, module.rounds):
            text = f"correlated noise is planned for rounds={module.rounds}, and the run has"
            yield note(SERVER, f"{text} {rounds}: set both to the same number")
    elif clients and 2 * clients < budget.clients:
        text = "the sum of a round's clients is divided by expected_clients: the update shrinks to"
        yield note(SERVER, f"{text} {clients} / {budget.clients}: lower expected_clients")
    elif clients and clients > budget.clients:
        text = f"a round may have {clients} clients, and noise is for expected_clients ="
        yield problem(SERVER, f"{text} {budget.clients}: raise it, or lower max_clients")
    if rounds and (affordable := module.rounds_left(rounds)) < rounds:
        text = f"max_epsilon={module.max_epsilon:g} allows {affordable} of {rounds} planned rounds:"
        yield problem(SERVER, f"{text} raise max_epsilon or noise_multiplier")
    elif rounds:
        text = f"{rounds} rounds cost epsilon = {budget.cost(rounds):.4g} at delta ="
        yield note(SERVER, f"{text} {module.delta:g}")


def _range_problems(stated: float | None, limit: float, setting: Setting) -> Iterator[Finding]:
    secagg = setting.secagg
    actual = stated if secagg is None else secagg.get("clipval", DECLEARN_RANGE)
    if actual is None:
        return
    if stated is not None and actual != stated:
        text = f"secagg_range={stated:g} differs from clipval={actual:g}: set both to one number"
        yield problem(AGGREGATOR, text)
    elif limit > actual:
        text = f"updates have norms up to {limit:g}, above the range ±{actual:g}: lower max_norm,"
        yield problem(AGGREGATOR, f"{text} or raise clipval and secagg_range")
    elif stated is None and actual < DECLEARN_RANGE:
        yield problem(AGGREGATOR, f"add secagg_range={actual:g}, the same as clipval")


def reply_findings(setting: Setting) -> Iterator[Finding]:
    """Yield what happens to rounds with invalid or missing replies."""
    name, secure = getattr(setting.aggregator, "name", "averaging"), setting.secagg is not None
    plugins = [*setting.client, *setting.server]
    if (is_ours(type(setting.aggregator)) or any(map(is_shared, plugins))) and not setting.vetted:
        text = "replies are not checked, so one client can end the run: give FederatedServer"
        yield note("[client_sampler]", f"{text} client_sampler = {{'strategy': 'named-clients'}}")
    network, where = part_of(setting.config, "network"), "[network.kwargs]"
    least = as_count(part_of(network, "kwargs").get("min_replies"))
    if least is None:
        return
    if not setting.quickrun and network.get("protocol") == "websockets":
        # In a quickrun file, fedclip's own protocol takes its place.
        yield problem("[network]", "min_replies needs protocol = 'fedclip-websockets'")
    unfit = quorum_problems(secagg=secure, fairness="fairness" in setting.optim, aggregator=name)
    yield from (problem(where, reason.text) for reason in unfit)
    low, _ = registered(part_of(setting.config, "run"))
    if setting.clients and least > setting.clients:
        text = f"min_replies = {least}, but a round has at most {setting.clients} clients: lower it"
        yield problem(where, text)
    elif low and least > low:
        yield note(where, f"registration may end with {low} clients: raise min_clients")
    if name == "clipped-averaging" and (few := setting.aggregator.combining.too_few(least)):
        yield note(where, f"{few} with min_replies, and such a round changes nothing")
