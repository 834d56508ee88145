# SPDX-License-Identifier: Apache-2.0
"""Describes in sentences what a federation's configuration clips, where, and what that guarantees.

==========  ===============  ============================================================
place       section          what is clipped
==========  ===============  ============================================================
step        ``client_opt``   the gradient of one batch, at each local step
update      ``aggregator``   one client's update of a round, before it is shared
aggregate   ``server_opt``   the average of the clients' updates, once a round
==========  ===============  ============================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from declearn.optimizer.regularizers import Regularizer

from fedclip.engines.declearn.pipeline import analyse
from fedclip.privacy.guarantees import Plugin
from fedclip.privacy.norm_conversions import COARSEST, number
from fedclip.privacy.sensitivity import Analysis

__all__ = ["before_noise", "in_words", "warnings"]


def in_words(
    client: Sequence[object],
    server: Sequence[object],
    aggregator: object = None,
    *,
    optim: Mapping[str, object] = MappingProxyType({}),
    steps: object = None,
    privacy: Mapping[str, object] | None = None,
    unit: str = "record",
) -> list[str]:
    """Return one line for each place: what is clipped there.

    The plug-ins are in the order in which they act, and the aggregator is given if it is fedclip's.
    The section `optim` of the client, a fixed number of local `steps` and the section [run.privacy]
    are as in the configuration; `unit` is what DP-SGD protects.
    """
    return [
        f"step: {_noised(client, privacy, unit) if privacy else _step(client, optim, steps)}",
        f"update: {_update(aggregator, server)}",
        f"aggregate: {_aggregate(server)}",
    ]


def _noised(client: Sequence[Plugin], privacy: Mapping[str, object], unit: str) -> str:
    """Return what DP-SGD does to a batch, and what the plug-ins before and after its noise do."""
    limit = privacy.get("sclip_norm")
    shown = number(limit) if isinstance(limit, (int, float)) else "sclip_norm"
    # Regularizers, which get the weights: declearn's come first, fedclip's client has them last.
    weighted = [p for p in client if isinstance(p, Regularizer)]
    modules = [p for p in client if not isinstance(p, Regularizer)]
    names = [p.name for p in modules]
    if "sample-clip" in names:
        place = names.index("sample-clip")
        said = str(modules[place].in_words(shown, unit))
        if place:
            said += f" Before that, each {unit} goes through {', '.join(names[:place])}."
        after = [*weighted, *modules[place + 1 :]]
    else:
        after = modules
        said = (
            f"declearn clips each tensor of each sample to {shown}, a sample of k tensors to "
            f"{shown}·√k, and adds noise of z·{shown} to the mean of the batch, which has no "
            "bound then."
        )
        if weighted:
            found = analyse(weighted, finite=True)
            said += f" Before the noise, {found.name}: {found.aggregate_in_words}"
    if after:
        found = analyse(after)
        said += (
            f" After the noise, {found.bound_in_words} It acts on noise, which [run.privacy] adds "
            "first: it bounds no sensitivity."
        )
    return said


def _step(client: Sequence[object], optim: Mapping[str, object], steps: object) -> str:
    if not client:
        return "nothing is clipped."
    rates = optim.get("lrate"), optim.get("w_decay", 0.0)
    lrate, w_decay = (rate if isinstance(rate, float) else None for rate in rates)
    found = replace(analyse(client), lrate=lrate, w_decay=w_decay)
    said = found.bound_in_words
    if found.noised:
        said += f" {found.record_in_words}"
    elif found.formula:
        said += " That is the gradient of a batch: it bounds no single sample."
    return f"{said} {_round(found, steps)}".rstrip()


def _round(found: Analysis, steps: object) -> str:
    """Return the largest distance that a round moves the model."""
    if not found.formula:
        return ""
    if found.w_decay != 0.0:
        return "A round's update has no bound: weight decay adds a multiple of the weights."
    known = None
    if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
        known = steps
    rate = "the learning rate" if found.lrate is None else number(found.lrate)
    if known is None or found.lrate is None or found.l2_bound is None:
        count = "the number of steps" if known is None else str(known)
        return f"A round's update is at most {rate} times {count} times that."
    total = found.round_bound(known)
    shown = "" if total is None else number(total)
    return f"A round's update is at most {rate} times {steps} steps times that, {shown}."


def _update(aggregator: Plugin, server: Sequence[Plugin]) -> str:
    if aggregator is None or aggregator.name != "clipped-averaging":
        return "nothing is clipped before a client shares its update."
    adaptive = next((p for p in server if p.name == "update-clip-server"), None)
    limit, scope = aggregator.max_norm, aggregator.scope
    if adaptive is not None:
        # The server's bound is on the whole update, whatever the groups are.
        limit, scope = adaptive.max_norm, "global"
    spec = {"max_norm": limit, "scope": scope, "exclude": aggregator.exclude}
    found = analyse(["norm-clip", spec])
    said = found.bound_in_words.replace("norm-clip", str(aggregator.name), 1)
    if not found.formula:
        return said
    bound = "that bound" if found.l2_bound is None else number(found.l2_bound)
    if adaptive is not None:
        said = (
            f"{aggregator.name}: the L2 norm is at most the bound C that update-clip-server sends "
            f"in the round, never above {bound}."
        )
        bound = "C"
    if aggregator.shares.kind != "equal":
        return f"{said} Weighed, no client moves the average by more than its share of that."
    if aggregator.combining.kind != "mean":
        pull = f"{aggregator.combining.pull} of that, with n replies"
        return f"{said} Combined by {aggregator.combine!r}, no client moves it by more than {pull}."
    return (
        f"{said} With equal weights, the sensitivity of the sum is {bound} if a client is added or "
        "removed, and twice that if one is replaced."
    )


def _aggregate(server: Sequence[object]) -> str:
    if not server:
        return "nothing is clipped."
    found = analyse(server)
    if found.noised and not found.before_noise.guarantees:
        return f"{found.bound_in_words} What follows noise is free, and bounds no sensitivity."
    return f"{found.bound_in_words} {found.aggregate_in_words}"


def warnings(plugins: Sequence[Plugin]) -> list[str]:
    """Return warnings about plug-ins of an optimizer that may not do what the user expects."""
    plugins = _after_records(plugins)
    said = []
    for i, map_ in enumerate(analyse(plugins).guarantees):
        before = analyse(plugins[:i], finite=True)
        if not map_.noise and before.formula and map_.growth > 1.0 + COARSEST:
            clip = next(m.name for m in reversed(before.guarantees) if m.formula)
            why = map_.expands or map_.unbounded
            said.append(
                f"{map_.name} comes after {clip} and lets its bound be exceeded ({why}): put "
                "the clipper last if what comes out shall be bounded"
            )
    said += [
        f"l2-clipping limits each tensor by itself, all k together to {number(p.max_norm)}·√k: "
        "if one limit on the whole gradient is meant, use norm-clip"
        for p in plugins
        if p.name == "l2-clipping"
    ]
    return said


def before_noise(plugins: Sequence[Plugin]) -> list[str]:
    """Return why noise among the plug-ins of an optimizer gives no guarantee."""
    plugins = _after_records(plugins)
    said = []
    for i, map_ in enumerate(analyse(plugins).guarantees):
        if map_.noise:
            said += _unsized(analyse(plugins[:i], finite=True), map_.name)
    return said


def _after_records(plugins: Sequence[Plugin]) -> Sequence[Plugin]:
    """Return the plug-ins that do not stand before `sample-clip`, where records are clipped."""
    names = [plugin.name for plugin in plugins]
    return plugins[names.index("sample-clip") + 1 :] if "sample-clip" in names else plugins


def _unsized(before: Analysis, noise: str) -> list[str]:
    if not before.guarantees or before.noised:
        return []
    if not before.formula:
        return [f"nothing bounds what {noise} is added to: no amount of it gives a guarantee"]
    said = [
        f"{m.name} is an adaptive rule before {noise} ({m.shared}): it bounds no sensitivity per "
        "record; use a fixed limit"
        for m in before.guarantees
        if m.shared and m.lipschitz > 1.0 and m.formula
    ]
    if before.l2_bound is None and "√k" in before.formula:
        said.append(
            f"{noise} must be sized on {before.formula}, not on the limit of one of them: if one "
            "limit was meant, use scope = 'global'"
        )
    return said
