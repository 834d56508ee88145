# SPDX-License-Identifier: Apache-2.0
"""Find settings of declearn that void a privacy guarantee, before a run.

What voids the guarantee of central noise on every engine is listed in
`fedclip.updates.claims`; this adds what only declearn has. For a configuration without
noise, the only finding is that secure aggregation is too coarse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from declearn.optimizer.regularizers import Regularizer

from fedclip.cli.check.claims import Claim, too_large_delta, too_large_epsilon, voids_of
from fedclip.cli.check.findings import (
    Found,
    Plugins,
    Section,
    Setting,
    as_count,
    innermost,
    part_of,
    registered,
)
from fedclip.cli.check.plugins import is_shared
from fedclip.engines.declearn.evaluation import noise_problems
from fedclip.engines.declearn.messages import DECLEARN_RANGE
from fedclip.engines.declearn.sample_clip import SampleClip, problems_before
from fedclip.engines.declearn.secagg import plan
from fedclip.engines.declearn.stages import analyse
from fedclip.privacy.accounting import Release, epsilon
from fedclip.privacy.guarantees import Context, Plugin, number
from fedclip.privacy.sensitivity import look_up

CLIENT, SERVER = "client_opt", "server_opt"

# The section of each part of the list in `fedclip.updates.claims`.
_SECTIONS = {
    "noise": SERVER,
    "sampler": "client_sampler",
    "evaluate": "run.evaluate",
    "early_stop": "run.early_stop",
}
# Above this epsilon, one step alone guarantees nothing.
_ABSURD = 10.0

_WEIGHTS = (
    "agc sets its limit by the norms of the weights, which depend on private data after the first "
    "local step: it bounds no sensitivity"
)
_UNITS = (
    "agc expects outputs on axis 0 in torch and scikit-learn, and on the last axis elsewhere: "
    "exclude transposed convolutions and torch's embeddings, or set unit = 'tensor'"
)
_NOISED = (
    "noise on evaluations takes {share:g} of {whole}; losses are clipped to {bound:g}. This covers "
    "loss, accuracy, best weights and early stopping, for each {unit}. It does not cover what "
    "declearn asks about the {data} before the run (classes, shape, dtype), and {numbers}"
)
_OF_RECORDS = {
    "whole": "epsilon",
    "unit": "validation record (or person)",
    "data": "validation data",
    "numbers": "the number of training records (or persons)",
}
_OF_CLIENTS = {
    "whole": "mu (the root of the sum of noise_multiplier⁻² over all rounds)",
    "unit": "client, against all but the server",
    "data": "data",
    "numbers": "the numbers of samples and steps, which the server knows",
}
_NOT_WATCHED = (
    "evaluation_share needs protocol = 'fedclip-websockets' on the server, which adds noise to "
    "evaluations before they are summed and saved. Without it, the run ends before round 1"
)
_NO_EVALUATION = (
    "separation > 1 draws some clients a round, and declearn's secure aggregation fails when an "
    "evaluation asks all of them: set frequency above the number of rounds, and no checkpoint"
)


def exposures(setting: Setting) -> Iterator[Found]:
    """Yield the settings that void a guarantee of the configuration."""
    plugins, run, aggregator = setting.plugins, setting.run, setting.aggregator
    server = plugins.get(SERVER, ())
    central = next((p for p in server if getattr(p, "noise_multiplier", 0.0)), None)
    privacy, per_record = part_of(run, "privacy"), isinstance(run.get("privacy"), Mapping)
    if central is not None:
        yield from _unnoised(central, server)
        if central.separation > 1 and setting.secagg is not None:
            frequency, rounds = part_of(run, "evaluate").get("frequency", 1), run.get("rounds")
            known = type(frequency) is int and type(rounds) is int
            fails = known and frequency <= rounds
            yield "problem" if fails else "note", "secagg", _NO_EVALUATION
    if any(isinstance(p, SampleClip) for side in plugins.values() for p in side):
        yield from _records_clipped(plugins, run, setting.fairness)
    elif per_record:
        yield from _declearns(privacy, run)
    if per_record:
        yield from _budget(privacy, run, setting.protected)
    for side, chosen in plugins.items():
        if any(p.name == "agc" and p.asks_layers for p in chosen):
            yield "note", side, _UNITS
    averaged = getattr(aggregator, "name", None) == "clipped-averaging"
    for side, chosen in plugins.items():
        for text in _own_noise(side, chosen, per_record if side == CLIENT else averaged):
            yield "leak", side, text
    noise_module = any(look_up(p, Context()).noise for side in plugins.values() for p in side)
    if central is not None or per_record or noise_module:
        if not per_record and any(p.name == "agc" for p in plugins.get(CLIENT, ())):
            yield "note", CLIENT, _WEIGHTS
        markers = [p for p in plugins.get(CLIENT, ()) if isinstance(p, SampleClip)]
        # Noise for records is none for clients.
        noised = markers[0] if per_record and central is None and markers else central
        covered = noised is not None and bool(noised.evaluation_share)
        every, rounds = part_of(run, "evaluate").get("frequency", 1), as_count(run.get("rounds"))
        rare = rounds is not None and type(every) is int and every > rounds
        claim = Claim(
            "declearn",
            central,
            rounds=rounds,
            population=setting.population,
            evaluates=not covered and (setting.checkpoints or not rare),
            stops_early=run.get("early_stop") is not None,
            chooses_clients=_chooses(setting.sampler),
            by_turns=innermost(setting.sampler).get("strategy", "round-robin") == "round-robin",
        )
        for severity, part, text in voids_of(claim):
            yield severity, _SECTIONS[part], text
        if covered:
            yield from _evaluated(noised, setting)
    adaptive = next((p for p in server if p.name == "update-clip-server"), None)
    limit = getattr(aggregator, "max_norm", None) if adaptive is None else adaptive.bound
    yield from _resolution(setting.secagg, limit, run)


# -- noise on the average ---------------------------------------------------------------------
def _unnoised(module: Plugin, server: Sequence[Plugin]) -> Iterator[Found]:
    """Check which statistics are sent in addition to the noised average."""
    for plugin in server:
        if plugin is module or not _tells(plugin):
            continue
        if plugin.name in (module.unnoised or ()):
            text = (
                f"{plugin.name} is sent without noise, as unnoised allows: epsilon does not cover "
                "it"
            )
            yield "leak", SERVER, text
        else:
            yield "problem", SERVER, module.refusal_of(plugin.name)
    for name in module.unnoised or ():
        if name not in [p.name for p in server]:
            yield "note", SERVER, f"unnoised names {name!r}, which is not in server_opt"


def _chooses(sampler: object) -> bool:
    """Whether a client sampler, or one inside it, selects by data of the clients."""
    match sampler:
        case {"strategy": "criterion"}:
            return True
        case {"sampler": inner}:
            return _chooses(inner)
        case {"samplers": [*inner]}:
            return any(map(_chooses, inner))
    return False


def _tells(plugin: Plugin) -> bool:
    """Whether a module of the server sends statistics of the clients back to them."""
    return bool(getattr(plugin, "aux_name", None)) and plugin.name != "update-clip-server"


# -- noise on the gradient of a batch ---------------------------------------------------------
def _records_clipped(plugins: Plugins, run: Section, fairness: bool) -> Iterator[Found]:
    """Check fedclip's DP-SGD, which `sample-clip` asks for."""
    modules = [p for p in plugins.get(CLIENT, ()) if not isinstance(p, Regularizer)]
    places = [i for i, p in enumerate(modules) if isinstance(p, SampleClip)]
    if any(isinstance(p, SampleClip) for p in plugins.get(SERVER, ())):
        text = "sample-clip clips the records of a client: move it to client_opt"
        yield "problem", SERVER, text
    if len(places) != 1:
        if places:
            yield "problem", CLIENT, "sample-clip is listed more than once: keep one"
        return
    marker = modules[places[0]]
    for problem in problems_before(modules[: places[0]]):
        yield "problem", CLIENT, problem.text
    if fairness:
        text = "fairness rounds add no noise, so private clients refuse them: remove fairness"
        yield "problem", CLIENT, text
    privacy = run.get("privacy")
    if not isinstance(privacy, Mapping):
        text = "sample-clip needs [run.privacy] on the server, with budget and sclip_norm"
        yield ("problem" if run else "note"), CLIENT, text
        return
    if marker.max_norm not in (None, privacy.get("sclip_norm")):
        second = f"sample-clip has max_norm = {marker.max_norm!r}: remove max_norm"
        text = f"sclip_norm = {privacy.get('sclip_norm')!r}, and {second}"
        yield "problem", "run.privacy", text
    training = part_of(run, "training")
    if training.get("n_epoch", 1) is None and training.get("n_steps") is None:
        text = "noise for a budget needs a number of steps: set n_epoch or n_steps"
        yield "problem", "run.training", text
    elif training.get("timeout") is not None:
        text = (
            "with timeout, the number of steps depends on the records, so clients refuse: remove "
            "timeout"
        )
        yield "problem", "run.training", text
    text = (
        "this budget is what the server asks for. To enforce a client's own limit, start it as "
        "PrivateFederatedClient(max_budget=(epsilon, delta)); `fedclip quickrun` sets none"
    )
    yield "note", "run.privacy", text


def _evaluated(plugin: Plugin, setting: Setting) -> Iterator[Found]:
    """Describe evaluations with noise, and check the requested metrics."""
    run, of_records = setting.run, isinstance(plugin, SampleClip)
    values = {"share": plugin.evaluation_share, "bound": plugin.loss_bound}
    values |= _OF_RECORDS if of_records else _OF_CLIENTS
    yield "note", "run.evaluate", _NOISED.format(**values)
    names = [m[0] if isinstance(m, list) and m else m for m in setting.metrics]
    if problems := noise_problems(map(str, names)):
        yield "problem", "experiment", str(problems[0])
    elif not of_records:
        clients = registered(run) or 0
        secure = setting.secagg is not None
        for problem in noise_problems([], secure, clients, plugin.expected_clients):
            yield "problem", SERVER, str(problem)
        if not setting.watched:
            yield "problem" if run else "note", SERVER, _NOT_WATCHED
    if (frequency := part_of(run, "evaluate").get("frequency", 1)) != 1:
        text = (
            f"frequency = {frequency!r} saves no budget, as noise is planned for each round: "
            "remove it"
        )
        yield "note", "run.evaluate", text


def _declearns(privacy: Section, run: Section) -> Iterator[Found]:
    where = "run.privacy"
    limit = privacy.get("sclip_norm")
    shown = number(limit) if isinstance(limit, (int, float)) else "sclip_norm"
    text = (
        "declearn clips each tensor of a sample separately: with k tensors, a sample's gradient "
        f"has norm up to {shown}·√k, and noise of z·{shown} is too small for that. To clip the "
        "whole record, add sample-clip to client_opt and use fedclip.PrivateFederatedClient"
    )
    yield "note", where, text
    if not privacy.get("use_csprng"):
        text = "noise comes from a predictable random generator"
        if privacy.get("seed") is not None:
            text += ", and the server knows its seed and can subtract the noise"
        yield "problem", where, f"{text}: set use_csprng = true"
    if part_of(run, "training").get("poisson") is False:
        text = "poisson = false, but epsilon is computed for Poisson sampling: remove poisson"
        yield "problem", "run.training", text


def _budget(privacy: Section, run: Section, protected: tuple[int, str] | None) -> Iterator[Found]:
    where = "run.privacy"
    if privacy.get("accountant") == "gdp":
        text = "accountant = 'gdp' gives no upper bound on epsilon: use 'prv' or 'rdp'"
        yield "problem", where, text
    size = part_of(run, "training").get("batch_size")
    least, unit = protected or (size, "record")
    of = f"{unit}s of the smallest client" if protected else "of a batch"
    match privacy.get("budget"):
        case [int() | float() as spent, int() | float() as delta]:
            if text := too_large_epsilon(spent, "each client's budget", "calibrate"):
                yield "problem", where, text
            if not 0.0 < delta < 1.0:
                text = f"budget = [epsilon, delta]: delta must be in (0, 1), got {delta:g}"
                yield "problem", where, text
            elif type(least) is int and (text := too_large_delta(delta, least, of, unit)):
                yield "problem", where, text
            elif delta >= 1e-3:
                text = f"delta = {delta:g} must be far below 1 / (number of {unit}s of a client)"
                yield "leak", where, text


# -- noise modules ----------------------------------------------------------------------------
def _own_noise(side: str, plugins: Sequence[Plugin], bounded: bool) -> Iterator[str]:
    """Check declearn's noise modules: the bound before them, and what goes out besides.

    `bounded` says whether something before the plug-ins bounds what they get.
    """
    for i, plugin in enumerate(plugins):
        std = getattr(plugin, "std", None)
        if not look_up(plugin, Context()).noise or not isinstance(std, float):
            continue
        if not getattr(plugin, "safe_mode", True):
            text = f"{plugin.name} uses a predictable random generator"
            yield f"{text}: set safe_mode = true"
        if not plugins[:i] and not bounded:
            text = (
                f"no module before {plugin.name} bounds its input, so its noise gives no guarantee"
            )
            yield f"{text}: put a clipper before it"
        before = analyse(plugins[:i], finite=True)
        least = _least_bound(plugins[:i])
        if least and before.formula:
            spent = math.inf if std <= 0 else epsilon([Release(std / least)], 1e-5)
            if spent > _ABSURD:
                yield (
                    f"{plugin.name} with standard deviation {std:g} is too small for a sensitivity "
                    f"of {before.formula}: one step costs epsilon = {spent:.4g} at delta = 1e-5"
                    + (", and more with more tensors" if before.l2_bound is None else "")
                )
        for other in plugins[:i]:
            if is_shared(other) and side == CLIENT:
                yield (
                    f"{other.name} is shared, and sends statistics taken before {plugin.name} adds "
                    "noise"
                )
        for other in plugins if side == SERVER else ():
            if _tells(other):
                yield f"{other.name} sends its statistics without the noise of {plugin.name}"


def _least_bound(plugins: Sequence[Plugin]) -> float | None:
    """Return the bound for a model of one value, which is a lower limit for all models."""
    try:
        return analyse(plugins, {"one": (1,)}, finite=True).l2_bound
    except ValueError:  # a pattern that fits none of these tensors
        return None


# -- secure aggregation ------------------------------------------------------------------------
def _resolution(secagg: Section | None, limit: float | None, run: Section) -> Iterator[Found]:
    """Check how much the integers of secure aggregation add to an update."""
    if secagg is None or not limit:
        return
    clients = part_of(run, "register").get("max_clients")
    clipval, bitsize = secagg.get("clipval", DECLEARN_RANGE), secagg.get("bitsize", 64)
    try:
        integers = plan(
            min(float(limit), float(clipval)),
            clients if type(clients) is int else 2,
            1,
            kind=str(secagg.get("secagg_type", "masking")),
            clipval=float(clipval),
            bitsize=bitsize,
            tolerance=1e300,
        )
    except (TypeError, ValueError):
        return  # declearn, or the check of the aggregator, says so
    each = integers.norm_added
    if each * 1e3 > 0.01 * limit:
        text = (
            f"clipval = {clipval:g} with bitsize = {bitsize} rounds values to multiples of "
            f"{integers.step:.3g}. For an update of norm {limit:g} with a million values this adds "
            f"up to {each * 1e3:.3g} to the norm: lower clipval, or raise bitsize"
        )
        yield ("problem" if each > limit else "note"), "secagg", text
