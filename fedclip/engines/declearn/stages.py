# SPDX-License-Identifier: Apache-2.0
"""The guarantees of a declearn pipeline, and what a whole configuration clips at each stage.

==========  ===============  ============================================================
stage       section          what is clipped
==========  ===============  ============================================================
step        ``client_opt``   the gradient of one batch, at each local step
update      ``aggregator``   one client's update of a round, before it is shared
aggregate   ``server_opt``   the average of the clients' updates, once a round
==========  ===============  ============================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from declearn.optimizer import Optimizer, list_optim_modules, list_optim_regularizers
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer

from fedclip.errors import Unchecked, nearest
from fedclip.privacy.guarantees import COARSEST, Plugin, Shapes, number
from fedclip.privacy.sensitivity import Analysis, analyse_plugins


def analyse(pipeline: Unchecked, shapes: Shapes | None = None, *, finite: bool = False) -> Analysis:
    """Return what a clipper, a list of them, or an optimizer guarantees.

    Parameters
    ----------
    pipeline
        A module or regularizer; its registered name; its name and configuration; a list of
        these, in the order in which they act; a declearn `Optimizer`, or its configuration.
    shapes : dict of tuples or None, default=None
        Shape of each tensor, by name. Without shapes, the result has formulas, and only the
        bounds that do not depend on them.
    finite : bool, default=False
        Assume that gradients hold no NaN and no infinity. declearn's own clippers, and those
        with ``on_nonfinite="propagate"``, bound nothing else.

    Raises
    ------
    TypeError, ValueError
        If `pipeline` or `shapes` is not as above, or a pattern of a scope matches no tensor.

    Examples
    --------
    >>> from fedclip import NormClip
    >>> shapes = {"w": (4, 3), "b": (4,)}
    >>> result = analyse(NormClip(max_norm=0.5), shapes)
    >>> result.l2_bound, result.per_record_safe, result.non_expansive
    (0.5, True, True)
    >>> result.sensitivity("replace-one"), result.sensitivity("add-remove", "aggregate", 0.01)
    (1.0, 0.01)
    >>> print(analyse(["norm-clip", "yogi"], shapes).reasons[0])
    yogi: no bound is known of it
    """
    if isinstance(pipeline, Mapping):
        pipeline = Optimizer(**pipeline)
    if isinstance(pipeline, Optimizer):
        config = pipeline.get_config()
        lrate, w_decay = _numbers(config["lrate"], config["w_decay"])
        plugins = [*pipeline.regularizers, *pipeline.modules]
        return replace(analyse(plugins, shapes, finite=finite), lrate=lrate, w_decay=w_decay)
    if isinstance(pipeline, str) or not isinstance(pipeline, Sequence) or _is_spec(pipeline):
        pipeline = [pipeline]
    return analyse_plugins([*map(_plugin, pipeline)], shapes, finite=finite)


def _numbers(*rates: object) -> list[float | None]:
    return [rate if isinstance(rate, float) else None for rate in rates]


def _is_spec(value: Unchecked) -> bool:
    kinds = [str, Mapping] if isinstance(value, (list, tuple)) and len(value) == 2 else []
    return bool(kinds) and all(map(isinstance, value, kinds))


def _plugin(value: Unchecked) -> Plugin:
    if isinstance(value, (OptiModule, Regularizer)):
        return value
    spec = (value, {}) if isinstance(value, str) else value
    if not _is_spec(spec):
        text = "a pipeline is a plug-in, its name, [name, {parameter = value}], or a list of these"
        raise TypeError(f"{text}; got {value!r}")
    name, config = spec
    known: dict[str, Plugin] = {**list_optim_regularizers(), **list_optim_modules()}
    if name not in known:
        raise ValueError(f"no module or regularizer is called {name!r}{nearest(name, known)}")
    return known[name].from_config(dict(config))


def in_words(
    client: Sequence[object],
    server: Sequence[object],
    aggregator: object,
    *,
    optim: Mapping[str, object],
    steps: object,
    privacy: Mapping[str, object],
    unit: str,
) -> list[str]:
    """Return one line for each stage: what is clipped there.

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
    after, text = modules, ""
    if "sample-clip" in names:
        place = names.index("sample-clip")
        after = [*weighted, *modules[place + 1 :]]
        text = str(modules[place].in_words(shown, unit))
        if place:
            text += f" Before that, each {unit} goes through {', '.join(names[:place])}."
    else:
        each = f"declearn clips each tensor of each sample to {shown}, a sample of k tensors to"
        text = f"{each} {shown}·√k, and adds noise of z·{shown} to the mean of the batch."
        if weighted:
            analysis = analyse(weighted, finite=True)
            text += f" Before the noise, {analysis.name}: {analysis.aggregate_in_words}"
    if after:
        text += f" After the noise, {analyse(after).bound_in_words} It acts on noise, which"
        text += " [run.privacy] adds first: it bounds no sensitivity."
    return text


def _step(client: Sequence[object], optim: Mapping[str, object], steps: object) -> str:
    if not client:
        return "nothing is clipped."
    lrate, w_decay = _numbers(optim.get("lrate"), optim.get("w_decay", 0.0))
    analysis = replace(analyse(client), lrate=lrate, w_decay=w_decay)
    text = analysis.bound_in_words
    if analysis.noised:
        text += f" {analysis.record_in_words}"
    elif analysis.formula:
        text += " This limits the gradient of a batch, not that of a sample."
    return f"{text} {_round(analysis, steps)}".rstrip()


def _round(analysis: Analysis, steps: object) -> str:
    """Return the largest distance that a round moves the model."""
    if not analysis.formula:
        return ""
    if analysis.w_decay != 0.0:
        return "A round's update has no bound: weight decay adds a multiple of the weights."
    rate = "the learning rate" if analysis.lrate is None else number(analysis.lrate)
    if type(steps) is not int or steps < 1:
        return f"A round's update is at most {rate} times the number of steps times this limit."
    total = None if analysis.lrate is None else analysis.round_bound(steps)
    known = "" if total is None else f": {number(total)}"
    return f"A round's update is at most {rate} times {steps} steps times this limit{known}."


def _update(aggregator: Plugin, server: Sequence[Plugin]) -> str:
    if aggregator is None or aggregator.name != "clipped-averaging":
        return "nothing is clipped before a client shares its update."
    adaptive = next((p for p in server if p.name == "update-clip-server"), None)
    limit, scope = aggregator.max_norm, aggregator.scope
    if adaptive is not None:
        # The server's bound is on the whole update, whatever the groups are.
        limit, scope = adaptive.max_norm, "global"
    spec = {"max_norm": limit, "scope": scope, "exclude": aggregator.exclude}
    analysis = analyse(["norm-clip", spec])
    text = analysis.bound_in_words.replace("norm-clip", str(aggregator.name), 1)
    if not analysis.formula:
        return text
    bound = "that bound" if analysis.l2_bound is None else number(analysis.l2_bound)
    if adaptive is not None:
        sent = f"that update-clip-server sends in the round, never above {bound}."
        text, bound = f"{aggregator.name}: the L2 norm is at most the bound C {sent}", "C"
    if aggregator.shares.kind != "equal":
        return f"{text} Weighed, no client moves the average by more than its share of that."
    if aggregator.combining.kind != "mean":
        pull = f"{aggregator.combining.pull} of that, with n replies"
        return f"{text} Combined by {aggregator.combine!r}, no client moves it by more than {pull}."
    text += f" With equal weights, the sensitivity of the sum is {bound} if a client is added"
    return f"{text} or removed, and twice that if one is replaced."


def _aggregate(server: Sequence[object]) -> str:
    if not server:
        return "nothing is clipped."
    analysis = analyse(server)
    if analysis.noised and not analysis.before_noise.guarantees:
        return f"{analysis.bound_in_words} What follows noise is free, and bounds no sensitivity."
    return f"{analysis.bound_in_words} {analysis.aggregate_in_words}"


def warnings(plugins: Sequence[Plugin]) -> list[str]:
    """Return warnings about plug-ins of an optimizer that may not do what the user expects."""
    plugins = _after_records(plugins)
    texts = []
    for i, map_ in enumerate(analyse(plugins).guarantees):
        before = analyse(plugins[:i], finite=True)
        if not map_.noise and before.formula and map_.growth > 1.0 + COARSEST:
            clip = next(m.name for m in reversed(before.guarantees) if m.formula)
            text = f"{map_.name} comes after {clip} and can exceed its bound"
            advice = "put the clipper last if you need a bound on the result"
            texts.append(f"{text} ({map_.expands or map_.unbounded}): {advice}")
    text = "l2-clipping limits each tensor separately, all k together to {}·√k: take norm-clip"
    return texts + [text.format(number(p.max_norm)) for p in plugins if p.name == "l2-clipping"]


def before_noise(plugins: Sequence[Plugin]) -> list[str]:
    """Return why noise among the plug-ins of an optimizer gives no guarantee."""
    plugins = _after_records(plugins)
    noises = [(i, m.name) for i, m in enumerate(analyse(plugins).guarantees) if m.noise]
    return [why for i, m in noises for why in _unsized(analyse(plugins[:i], finite=True), m)]


def _after_records(plugins: Sequence[Plugin]) -> Sequence[Plugin]:
    """Return the plug-ins that do not stand before `sample-clip`, where records are clipped."""
    names = [plugin.name for plugin in plugins]
    return plugins[names.index("sample-clip") + 1 :] if "sample-clip" in names else plugins


def _unsized(before: Analysis, noise: str) -> list[str]:
    if not before.guarantees or before.noised:
        return []
    if not before.formula:
        return [f"nothing bounds what {noise} is added to: no amount of it gives a guarantee"]
    learnt = [m for m in before.guarantees if m.shared and m.lipschitz > 1.0 and m.formula]
    why = f"is an adaptive rule before {noise}"
    texts = [f"{m.name} {why} ({m.shared}): use a fixed limit, to bound a record" for m in learnt]
    if before.l2_bound is None and "√k" in before.formula:
        text = f"{noise} must be sized on {before.formula}, not on the limit of one of them"
        texts.append(f"{text}: for one limit, use scope = 'global'")
    return texts
