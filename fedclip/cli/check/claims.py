# SPDX-License-Identifier: Apache-2.0
"""What voids the guarantee of central noise: one list for every engine.

Below it are the checks of Flower's apps and of exported jobs of NVFlare, which have little else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from fedclip.cli.check.findings import Finding, Section, leak, note, problem, text_of
from fedclip.cli.check.settings import as_count, part_of
from fedclip.core.parameters import Config
from fedclip.errors import nearest
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import Participation
from fedclip.updates.store import server_of, settings_in

# Above this epsilon, a guarantee is one in name only. Ponomareva et al. (2023, "How to DP-fy ML")
# draw the line there: even odds may then become 99.995 % certainty.
MOST = 10.0

_EVALUATED = {
    "declearn": "set evaluation_share and loss_bound; numbers of steps leave, too",
    "flower": "set fraction-evaluate = 0.0 here and in the strategy",
    "nvflare": "give the recipe key_metric = '', and let the script return no metrics",
}
"""What to do about evaluations, by engine."""


class Claim(NamedTuple):
    """The settings of a federation whose averages, or records, have noise.

    Attributes
    ----------
    bound
        The bound whose noise makes the claim; None if records are protected, not clients.
    rounds
        How many are planned, if known.
    population
        The number of all clients, not of those in a round, if known.
    evaluates
        Whether clients send losses or metrics without noise.
    keeps_best, stops_early
        Whether the weights that are kept, and the number of rounds, are chosen by them.
    chooses_clients
        Whether clients are sampled by what they have sent.
    by_turns
        Whether the sampler, if the engine has one, gives clients turns.
    """

    engine: Literal["declearn", "flower", "nvflare"]
    bound: AdaptiveBound | None
    rounds: int | None = None
    population: int | None = None
    evaluates: bool = True
    keeps_best: bool = True
    stops_early: bool = False
    chooses_clients: bool = False
    by_turns: bool = True


def voids_of(claim: Claim, places: Mapping[str, str]) -> Iterator[Finding]:
    """Yield all that voids a guarantee, in the order in which it is reported.

    Parameters
    ----------
    claim
        The settings.
    places
        Where the file has the "noise", the client "sampler", "evaluate" and "early_stop".

    Examples
    --------
    >>> bound = AdaptiveBound(noise_multiplier=5.0, expected_clients=10, generator="insecure")
    >>> claim = Claim("flower", bound, rounds=3, evaluates=False, keeps_best=False)
    >>> [(void.level, void.where) for void in voids_of(claim, {"noise": "[update-clip]"})]
    [('problem', '[update-clip]')]
    """
    if claim.bound is not None:
        yield from _of_noise(claim, claim.bound, places)
    if claim.evaluates:
        where = places["evaluate"]
        text = "each client sends its evaluation loss and metrics without noise"
        yield leak(where, f"{text}: {_EVALUATED[claim.engine]}")
        if claim.keeps_best:
            yield leak(where, "the best weights are chosen by losses or metrics without noise")
        if claim.stops_early:
            yield leak(places["early_stop"], "losses without noise decide when training stops")


def _of_noise(claim: Claim, bound: AdaptiveBound, places: Mapping[str, str]) -> Iterator[Finding]:
    per_round, separation, where = bound.expected_clients or 1, bound.separation, places["noise"]
    if bound.generator == "insecure":
        yield problem(where, "noise is from a generator that can be predicted: remove generator")
    least = max((separation - 1) * per_round + 1, per_round, claim.population or 0)
    planned, most = claim.rounds or 1, bound.max_epsilon
    spent = 0.0 if bound.budget is None else bound.budget.cost(planned)
    what = f"{planned} round{'s' * (planned > 1)}"
    if bound.budget is not None and most is not None and (spent > most or claim.rounds is None):
        spent, what = most, "max_epsilon"
    yield from weak_epsilon(where, spent, what, "plan")
    yield from weak_delta(where, bound.delta, least, "client", "clients", bool(claim.population))
    if claim.population is not None:
        due = Participation.of(claim.population, per_round)
        if text := due.refusal(separation, per_round):
            yield problem(where, text)
    if claim.chooses_clients:
        text = "a criterion chooses clients by what they sent without noise: take another strategy"
        yield problem(places["sampler"], text)
    if separation > 1 and not claim.by_turns:
        text = "separation needs turns, which only the strategy 'round-robin' gives"
        yield problem(places["sampler"], f"{text}, alone or within 'named-clients'")


def weak_epsilon(where: str, spent: float, what: str, command: str) -> Iterator[Finding]:
    """Yield a problem if an epsilon is a guarantee in name only."""
    if spent > MOST:
        text = f"epsilon = {spent:.4g} for {what} is a guarantee in name only: stay below {MOST:g}"
        yield problem(where, f"{text} with `fedclip privacy {command}`")


def weak_delta(
    where: str, delta: float, least: int, unit: str, of: str, known: bool
) -> Iterator[Finding]:
    """Yield a problem if a delta lets one of at least `least` units be published, or may do so."""
    if delta * least >= 1.0:
        text = f"delta = {delta:g} is not below 1 / {least:,} {of}: a mechanism that publishes one"
        yield problem(where, f"{text} {unit} would pass")
    elif delta >= 1e-3 and not known:
        yield leak(where, f"delta = {delta:g} must be far below 1 / (number of all {unit}s)")


def app_findings(config: Section) -> Iterator[Finding]:
    """Yield findings about an app of Flower, whose settings are as its run configuration."""
    app = part_of(config, "tool", "flwr", "app", "config")
    table, where = part_of(app, "update-clip"), "[tool.flwr.app.config.update-clip]"
    lists = [key for key, value in table.items() if isinstance(value, list)]
    if not table:
        yield problem(where, f"this section is missing{nearest('update-clip', app)}")
    elif lists:
        yield problem(where, f"{lists[0]} is a list, which Flower refuses: write one pattern")
    else:
        rounds = as_count(app.get("num-server-rounds"))
        evaluates = app.get("fraction-evaluate") != 0
        claim = Claim("flower", None, rounds, evaluates=evaluates, keeps_best=False)
        places = {"noise": where, "evaluate": "[tool.flwr.app.config]"}
        yield from _settings_findings(lambda: settings_in(dict(_flat(app))), claim, places)


def job_findings(config: Section) -> Iterator[Finding]:
    """Yield findings about a job of NVFlare, as a recipe has exported it."""
    workflows = [part_of(section, "args") for section in _sections(config, "workflows")]
    pairs = [(part_of(args, "aggregator"), args.get("num_rounds")) for args in workflows]
    clipping = [pair for pair in pairs if str(pair[0].get("path")).startswith("fedclip.")]
    if len(clipping) != 1:
        yield problem("[workflows]", "the job clips nothing: call add_update_clipping(recipe)")
        return
    ((aggregator, rounds),) = clipping
    components = _sections(config, "components")
    selects = any("ModelSelector" in str(section.get("path")) for section in components)
    claim = Claim("nvflare", None, as_count(rounds), evaluates=selects, keeps_best=selects)
    places = {"noise": "[workflows.aggregator]", "evaluate": "[components]"}
    yield from _settings_findings(lambda: part_of(aggregator, "args", "settings"), claim, places)


def _settings_findings(
    settings: Callable[[], Section], claim: Claim, places: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield problems of a flat table of settings, and what voids the guarantee of its noise."""
    try:
        bound = server_of(settings()).bound
    except (TypeError, ValueError) as exc:
        yield problem(places["noise"], text_of(exc))
        return
    if bound.budget is None:
        return
    yield from voids_of(claim._replace(bound=bound), places)
    if claim.rounds:
        rounds = min(claim.rounds, bound.rounds_left())
        text = f"epsilon = {bound.budget.cost(rounds):.4g} after {rounds} of {claim.rounds} planned"
        yield note(places["noise"], f"{text} rounds")


def _flat(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield settings and their names as Flower hands them to an app."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _sections(config: Section, name: str) -> list[Config]:
    """Return the sections in a list of a file; none if there is no list."""
    value = config.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
