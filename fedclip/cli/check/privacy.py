# SPDX-License-Identifier: Apache-2.0
"""Find settings of declearn that void a privacy guarantee, before a run.

What voids the guarantee of central noise on every engine is listed in `fedclip.cli.check.claims`;
this adds what only declearn has. For a configuration without noise, the only finding is that secure
aggregation is too coarse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from declearn.optimizer.regularizers import Regularizer

from fedclip.cli.check.claims import MOST, Claim, voids_of, weak_delta, weak_epsilon
from fedclip.cli.check.findings import CLIENT, SERVER, Finding, leak, note, problem
from fedclip.cli.check.plugins import is_shared
from fedclip.cli.check.settings import Setting, as_count, part_of
from fedclip.engines.declearn.evaluation import noise_problems
from fedclip.engines.declearn.messages import DECLEARN_RANGE
from fedclip.engines.declearn.sample_clip import SampleClip, problems_before
from fedclip.engines.declearn.secagg import plan
from fedclip.engines.declearn.stages import analyse, before_noise, warnings
from fedclip.privacy.accounting import Release, epsilon
from fedclip.privacy.guarantees import Context, Plugin, number
from fedclip.privacy.sensitivity import look_up

_PLACES = {"noise": SERVER, "sampler": "[client_sampler]"}
_PLACES |= {part: f"[run.{part}]" for part in ("evaluate", "early_stop")}
"""The section of each part of the list in `fedclip.cli.check.claims`."""


def exposures(setting: Setting) -> Iterator[Finding]:
    """Yield the settings that void a guarantee of the configuration."""
    for check in _CHECKS:
        yield from check(setting)


def _is_noise(plugin: Plugin) -> bool:
    return look_up(plugin, Context()).noise


def _stages(setting: Setting) -> Iterator[Finding]:
    for where, chosen in setting.sides.items():
        yield from (note(where, text) for text in warnings(chosen))
        yield from (leak(where, text) for text in before_noise(chosen))
        if any(p.name == "agc" and p.asks_layers for p in chosen):
            text = "agc expects outputs on axis 0 in torch and scikit-learn, else on the last axis:"
            yield note(where, f"{text} exclude other layers, or set unit = 'tensor'")


def _released(setting: Setting) -> Iterator[Finding]:
    """Yield what leaves without noise, and what noise on evaluations covers."""
    central, markers = setting.central, [p for p in setting.client if isinstance(p, SampleClip)]
    if setting.privacy is None and not any(map(_is_noise, (*setting.client, *setting.server))):
        return
    # Noise for records is none for clients.
    noised = markers[0] if setting.privacy and central is None and markers else central
    covered = noised is not None and bool(noised.evaluation_share)
    every = part_of(setting.run, "evaluate").get("frequency", 1)
    rare = setting.rounds is not None and type(every) is int and every > setting.rounds
    claim = Claim(
        "declearn",
        central,
        rounds=setting.rounds,
        population=setting.population,
        evaluates=not covered and (setting.quickrun or not rare),
        stops_early=setting.run.get("early_stop") is not None,
        chooses_clients=_chooses(part_of(setting.config, "client_sampler")),
        by_turns=setting.sampler.get("strategy", "round-robin") == "round-robin",
    )
    yield from voids_of(claim, _PLACES)
    if covered:
        yield from _evaluated(noised, every, setting)


def _chooses(sampler: object) -> bool:
    """Whether a client sampler, or one inside it, selects by data of the clients."""
    if not isinstance(sampler, dict):
        return False
    several = sampler.get("samplers")
    inner = [sampler.get("sampler"), *(several if isinstance(several, list) else ())]
    return sampler.get("strategy") == "criterion" or any(map(_chooses, inner))


def _evaluated(plugin: Plugin, every: object, setting: Setting) -> Iterator[Finding]:
    """Describe evaluations with noise, and check the requested metrics."""
    of_records, where = isinstance(plugin, SampleClip), "[run.evaluate]"
    budget, unit = "mu", "client, against all but the server"
    if of_records:
        budget, unit = "epsilon", "validation record (or person)"
    text = f"noise on evaluations takes {plugin.evaluation_share:g} of {budget}; losses are clipped"
    text += f" to {plugin.loss_bound:g}. It covers loss, accuracy and what follows from them, for"
    yield note(where, f"{text} each {unit}; not shapes, classes and numbers of examples")
    metrics = part_of(setting.config, "experiment").get("metrics")
    listed = metrics if isinstance(metrics, list) else []
    named = [m[0] if isinstance(m, list) and m else m for m in listed]
    if problems := noise_problems(map(str, named)):
        yield problem("[experiment]", problems[0].text)
    elif not of_records:
        secure, clients = setting.secagg is not None, setting.registered or 0
        unfit = noise_problems([], secure, clients, plugin.expected_clients)
        yield from (problem(SERVER, reason.text) for reason in unfit)
        if not setting.watched:
            text = "evaluation_share needs protocol = 'fedclip-websockets' on the server"
            yield Finding("problem" if setting.run else "note", SERVER, text)
    if every != 1:
        yield note(where, f"frequency = {every!r} saves no budget: noise is for each round")


# -- noise on the average ---------------------------------------------------------------------
def _unnoised(setting: Setting) -> Iterator[Finding]:
    """Check which statistics are sent in addition to the noised average, and who is evaluated."""
    module = setting.central
    if module is None:
        return
    allowed, names = module.unnoised or (), [p.name for p in setting.server]
    for name in [p.name for p in setting.server if p is not module and _tells(p)]:
        if name in allowed:
            yield leak(SERVER, f"{name} is sent without noise, as unnoised allows")
        else:
            yield problem(SERVER, module.refusal_of(name))
    for name in (name for name in allowed if name not in names):
        yield note(SERVER, f"unnoised names {name!r}, which is not in server_opt")
    if module.separation > 1 and setting.secagg is not None:
        every, rounds = part_of(setting.run, "evaluate").get("frequency", 1), setting.rounds
        fails = rounds is not None and type(every) is int and every <= rounds
        text = "with separation > 1 and secure aggregation, evaluations fail: set frequency above"
        text += " the number of rounds, and no checkpoint"
        yield Finding("problem" if fails else "note", "[secagg]", text)


def _tells(plugin: Plugin) -> bool:
    """Whether a module of the server sends statistics of the clients back to them."""
    return bool(getattr(plugin, "aux_name", None)) and plugin.name != "update-clip-server"


# -- noise on the gradient of a batch ---------------------------------------------------------
def _records_clipped(setting: Setting) -> Iterator[Finding]:
    """Check fedclip's DP-SGD, which `sample-clip` asks for."""
    modules = [p for p in setting.client if not isinstance(p, Regularizer)]
    positions = [i for i, p in enumerate(modules) if isinstance(p, SampleClip)]
    if any(isinstance(p, SampleClip) for p in setting.server):
        yield problem(SERVER, "sample-clip clips the records of a client: move it to client_opt")
    if len(positions) > 1:
        yield problem(CLIENT, "sample-clip is listed more than once: keep one")
    if len(positions) != 1:
        return
    yield from (problem(CLIENT, reason.text) for reason in problems_before(modules[: positions[0]]))
    if "fairness" in setting.optim:
        yield problem(CLIENT, "private clients refuse rounds of fairness: remove fairness")
    if setting.privacy is None:
        text = "sample-clip needs [run.privacy] on the server, with budget and sclip_norm"
        yield Finding("problem" if setting.run else "note", CLIENT, text)
        return
    limit, second = setting.privacy.get("sclip_norm"), modules[positions[0]].max_norm
    if second not in (None, limit):
        text = f"sclip_norm = {limit!r}, and sample-clip has max_norm = {second!r}: remove max_norm"
        yield problem("[run.privacy]", text)
    training = part_of(setting.run, "training")
    if training.get("n_epoch", 1) is None and training.get("n_steps") is None:
        yield problem("[run.training]", "noise needs a number of steps: set n_epoch or n_steps")
    elif training.get("timeout") is not None:
        yield problem("[run.training]", "private clients refuse timeout: remove it")
    text = "the server asks for this budget; to enforce a client's limit, start it as"
    yield note("[run.privacy]", f"{text} PrivateFederatedClient(max_budget=(epsilon, delta))")


def _run_privacy(setting: Setting) -> Iterator[Finding]:
    """Check [run.privacy], and declearn's DP-SGD without `sample-clip`."""
    privacy, where, training = setting.privacy, "[run.privacy]", part_of(setting.run, "training")
    if privacy is None:
        return
    if not any(isinstance(p, SampleClip) for p in (*setting.client, *setting.server)):
        limit = privacy.get("sclip_norm")
        shown = number(limit) if isinstance(limit, (int, float)) else "sclip_norm"
        text = "declearn clips each tensor of a sample separately: with k tensors, a sample's"
        text += f" gradient has norm up to {shown}·√k, and the noise is too small for that. Add"
        yield note(where, f"{text} sample-clip to client_opt, and use PrivateFederatedClient")
        if not privacy.get("use_csprng"):
            seed = "" if privacy.get("seed") is None else ", and the server knows its seed"
            yield problem(where, f"noise is predictable{seed}: set use_csprng = true")
        if training.get("poisson") is False:
            text = "epsilon is for Poisson sampling: remove poisson = false"
            yield problem("[run.training]", text)
    if privacy.get("accountant") == "gdp":
        yield problem(where, "accountant = 'gdp' gives no upper bound on epsilon: use 'prv'")
    least, unit = setting.protected or (as_count(training.get("batch_size")) or 0, "record")
    of = f"{unit}s of the smallest client" if setting.protected else "of a batch"
    match privacy.get("budget"):
        case [int() | float() as spent, int() | float() as delta]:
            yield from weak_epsilon(where, spent, "each client's budget", "calibrate")
            if 0.0 < delta < 1.0:
                yield from weak_delta(where, delta, least, unit, of, known=False)
            else:
                yield problem(where, f"delta in budget must be in (0, 1), got {delta:g}")


# -- noise modules ----------------------------------------------------------------------------
def _noise_modules(setting: Setting) -> Iterator[Finding]:
    """Check declearn's noise modules: the bound before them, and what goes out besides."""
    averaged = getattr(setting.aggregator, "name", None) == "clipped-averaging"
    yield from _noise_in(CLIENT, setting.client, bounded=setting.privacy is not None)
    yield from _noise_in(SERVER, setting.server, bounded=averaged)


def _noise_in(where: str, plugins: Sequence[Plugin], *, bounded: bool) -> Iterator[Finding]:
    for i, plugin in enumerate(plugins):
        std, earlier = getattr(plugin, "std", None), plugins[:i]
        if not _is_noise(plugin) or not isinstance(std, float):
            continue
        if not getattr(plugin, "safe_mode", True):
            yield leak(where, f"noise of {plugin.name} is predictable: set safe_mode = true")
        if not earlier and not bounded:
            yield leak(where, f"nothing bounds the input of {plugin.name}: put a clipper first")
        before = analyse(earlier, finite=True)
        bound = before.l2_bound if before.formula else None
        spent = epsilon([Release(std / bound)], 1e-5) if bound and std > 0 else math.inf
        if bound and spent > MOST:
            text = f"std = {std:g} is too small for a sensitivity of {before.formula}"
            text = f"{text}: one step costs epsilon = {spent:.4g} at delta = 1e-5"
            yield leak(where, f"{plugin.name}: {text}")
        for other in earlier if where == CLIENT else plugins:
            if is_shared(other) if where == CLIENT else _tells(other):
                text = f"{other.name} sends statistics without the noise of {plugin.name}"
                yield leak(where, text)


# -- secure aggregation ------------------------------------------------------------------------
def _secagg(setting: Setting) -> Iterator[Finding]:
    """Check how much the integers of secure aggregation add to an update."""
    adaptive = next((p for p in setting.server if p.name == "update-clip-server"), None)
    limit = getattr(setting.aggregator, "max_norm", None) if adaptive is None else adaptive.bound
    secagg = setting.secagg
    if secagg is None or not limit:
        return
    clipval, bitsize = float(secagg.get("clipval", DECLEARN_RANGE)), secagg.get("bitsize", 64)
    kind, clients = str(secagg.get("secagg_type", "masking")), setting.registered or 2
    tolerant = {"kind": kind, "clipval": clipval, "bitsize": bitsize, "tolerance": 1e300}
    try:
        integers = plan(min(float(limit), clipval), clients, 1, **tolerant)
    except (TypeError, ValueError):
        return  # declearn, or the check of the aggregator, says so
    added = integers.norm_added * 1e3
    if added > 0.01 * limit:
        text = f"{bitsize} bits up to {clipval:g} add up to {added:.3g} to a norm of {limit:g} of a"
        text += " million values: lower clipval, or raise bitsize"
        yield Finding("problem" if integers.norm_added > limit else "note", "[secagg]", text)


_CHECKS = (_stages, _unnoised, _records_clipped, _run_privacy, _noise_modules, _released, _secagg)
