# SPDX-License-Identifier: Apache-2.0
"""The command ``fedclip suggest``: what to clip first, by the norms of a run.

docs/suggest.md has the rules.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer

from fedclip.cli.output import JsonFlag, Results, commands, fail, read, say, typed, write
from fedclip.core.parameters import Config
from fedclip.core.toml import toml_item, toml_line
from fedclip.errors import nearest
from fedclip.report import Report, Row, number, printable
from fedclip.report.findings import Advice, Lines, Proposal
from fedclip.report.norms import (
    BY_NORM,
    Norms,
    Unusual,
    client_findings,
    norms_by_stage,
    rounded,
    unusual_norms,
)
from fedclip.report.results import Result, result_of
from fedclip.report.rows import listed

app = commands()

# Clients whose numbers of steps in a round differ by less than this factor have the same weight.
_ALIKE = 1.2
# The number of proposals that are shown in full.
_FULL = 3
_CHOSEN = "The limit depends on the norms of this run, which no privacy budget covers."
_FIXED = f"{_CHOSEN} Afterwards it is fixed, and bounds the sensitivity."
_TEXTS = {
    "step.fixed": (
        "one fixed limit, from the norms of the median client",
        "Clips norms that are larger than usual for most clients.",
        _FIXED,
    ),
    "step.learnt": (
        "an adaptive limit for each client",
        "Clips spikes. Each client uses only its norms, so an outlier is not clipped.",
        "Nothing: norms stay at the client. The limit changes, so it bounds no sensitivity.",
    ),
    "step.shared": (
        "one adaptive limit for all clients",
        "Clips outliers, but not in the first rounds.",
        "Every client sends a histogram of its norms in each round, in cleartext without secure "
        "aggregation. The limit bounds no sensitivity.",
    ),
    "update.fixed": (
        "one fixed bound for updates, from the norms of the median client",
        "Limits the influence of each client. The bound stays the same when norms fall.",
        _FIXED,
    ),
    "update.adaptive": (
        "an adaptive bound at the median norm of the updates, starting at that of round 1",
        "Limits the influence of each client, whatever its steps were.",
        f"{_CHOSEN} In each round every client sends how far its update is from the bound. To "
        "cover this vote, set noise_multiplier (`fedclip privacy plan`): weights are then equal.",
    ),
}
"""What each proposal does, where it helps, and what it reveals about the data."""

_ORDERS = {
    "update": ("update.adaptive", "step.fixed", "step.shared", "update.fixed", "step.learnt"),
    "step": ("step.fixed", "update.adaptive", "step.shared", "update.fixed", "step.learnt"),
    "": ("step.fixed", "step.learnt", "update.adaptive", "step.shared", "update.fixed"),
}
"""The order of the proposals, if clients are outliers at that stage, and otherwise."""
_FAR = "The norms of the {2}s of {0} the median client's: limit the influence of each by {1}."
_ANSWERS = {
    "step": _FAR,
    "update": _FAR,
    "two": "The norms of {} those of the other. Either of two clients may be the outlier: try {}.",
    "diverged": "The model has diverged. Start with {1}, chosen by the norms of the first round.",
    "spikes": "Some single norms are far above the usual, on {}: clip them with {}.",
    "tune": "To see whether a limit helps, run `fedclip tune`: {}.",
    "private": "The run adds noise and records no norms: plan the limit with `fedclip privacy`.",
    "none": "This run has no norms to choose a limit by.",
    "": "Clipping is unlikely to help here: no client and no single norm is far above the others. "
    "Norms do not show label noise at all sites: to test for it, run `fedclip tune`.",
}
SERVERS = {f"{name}-server" for name in BY_NORM}
"""The server modules of clippers by norm."""
_DECIDED = ("step", "update", "two", "diverged", "spikes")
"""The answers that name a proposal."""


@app.command()
def suggest(
    folder: Results = None,
    write: Annotated[Path | None, typer.Option(metavar="CONFIG", help="Write it there.")] = None,
    use: Annotated[str, typer.Option(metavar="NAME", help="Not the first proposal.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Propose what to clip first, by the norms of a run, and say why.

    The first proposals come with their TOML, the share of each client's norms that they would have
    clipped, and what they reveal about the data. `--use NAME` shows another proposal in full.
    """
    from fedclip.cli.check.configuration import find_config

    report = read(folder)
    folder, runs = report.folder, report.experiments
    if len(runs) > 1:
        names = listed([str(folder / name) for name in runs])
        fail(f"{folder} holds {len(runs)} experiments: give one of them ({names})")
    try:
        advice = advised(report, min(runs))
    except (TypeError, ValueError) as exc:
        fail(exc)
    proposals = {proposal.name: proposal for proposal in advice.proposals}
    if use and use not in proposals:
        fail(f"there is no proposal {use!r}{nearest(use, proposals)}: {listed([*proposals])}")
    chosen = use or advice.start
    if as_json:
        facts = {"schema": "fedclip-suggest/2", "folder": str(folder), **dataclasses.asdict(advice)}
        print(json.dumps(facts))
    if write is not None:
        if not chosen:
            fail(f"{advice.answer} To write a proposal anyway, name it: --use NAME")
        file = find_config(write)
        try:
            text = rewritten(file.read_bytes().decode(), proposals[chosen])
        except (OSError, ValueError, TypeError) as exc:
            fail(f"{file} cannot be changed: {exc}")
        save(file, chosen, text)
    elif not as_json:
        say(*in_words(advice, use))
        if chosen:
            named = f" --use {use}" if use else ""
            typer.echo()
            say(f"To write it:  fedclip suggest {typed(folder)}{named} --write config.toml")


def save(file: Path, name: str, text: str) -> None:
    """Write a configuration with a setting; end the command if it would not run."""
    from fedclip.cli.check.configuration import check_config

    known = check_config(file).problems
    for fresh in (f for f in check_config(file, text=text).problems if f not in known):
        why = f"{fresh.where} {fresh.message}"
        fail(f"{file} was not changed: with {name} it would not run ({why})")
    write(file, text, quiet=True)
    say(f"wrote {name} into {file}; check it with  fedclip check {typed(file)}")


def advised(report: Report, experiment: str) -> Advice:
    """Return what to clip first and why, by the norms and metrics of one federation of a report.

    Parameters
    ----------
    report
        The report of the run.
    experiment
        The folder of the federation, one of `report.experiments`.

    Raises
    ------
    ValueError
        If a node's configuration cannot be read, so that the order of its norms is unknown.
    """
    report = report.only([experiment])
    steps, updates = norms_by_stage(row for row in report.whole if row.node not in report.servers)
    order = _order(report, steps.rows[0]) if steps.rows else {}
    places = [dataclasses.replace(steps, order=order), updates]
    unusual, result = unusual_norms(places), result_of(report, experiment)
    bad = {f.kind: f.text for f in report.findings()}
    protected = _protected(report)
    findings = [bad[kind] for kind in ("diverged", "nonfinite") if kind in bad]
    findings += [*client_findings(unusual), *result.findings()]
    findings += [] if protected else _clipped(places)
    # Norms of later rounds are then of no use.
    early = "diverged" in bad
    case, who = _case(unusual, early, result)
    if not unusual:
        case = "private" if protected else "none"
    if case == "spikes":
        # A spike may spoil the model, and with it the norms of all clients from then on.
        first = min(min(rounds) for rounds in unusual["step"].spikes.values())
        places = [norms.until(first) for norms in places]
    odd = [*dict.fromkeys(name for stage in unusual.values() for name in stage.odd)]
    # A limit is to clip the outliers, or without any the clients with spikes.
    cut = odd or [*unusual.get("step", Unusual()).spikes]
    ranked = [proposal for norms in places for proposal in proposals(norms, early, cut)]
    ranked.sort(key=lambda proposal: _ORDERS.get(case, _ORDERS[""]).index(proposal.name))
    if case in _DECIDED:
        fit = [proposal for proposal in ranked if early or _least(proposal.shares, cut) is not None]
        ranked = [*fit, *(proposal for proposal in ranked if proposal not in fit)]
        if not fit:
            case, who = "tune", f"{who} the median, and each limit would clip the others more"
    start = ranked[0].name if case in _DECIDED else ""
    answer = _ANSWERS[case].format(who, start, case)
    return Advice(printable(answer), [*map(printable, findings)], ranked, start, odd)


def _least(shares: Mapping[str, float], cut: Collection[str]) -> float | None:
    """Return the lowest share clipped of the clients in `cut`; None if another client has more."""
    least = min((share for name, share in shares.items() if name in cut), default=1.0)
    return least if all(s <= least for n, s in shares.items() if n not in cut) else None


def proposals(norms: Norms, early: bool = False, cut: Collection[str] = ()) -> Iterator[Proposal]:
    """Yield the proposals for one stage.

    Fixed limits are above about 95 % of the norms of the median client. If norms of later rounds
    are of no use (`early`), they are above half of those of the first round. If that would clip
    another client more than those to be clipped (`cut`), they are above the usual norms of all
    others.
    """
    if norms.lacking or not (limit := norms.middle(0.5 if early else 0.95, early)):
        return
    if cut and not early:
        limit = _spared(norms, limit, cut)
    limit, order = rounded(limit), norms.order
    if norms.stage == "step":
        lines: dict[str, Lines] = {
            "fixed": {"client_opt": ("norm-clip", {"max_norm": limit, **order})},
            "learnt": {"client_opt": ("zscore-clip", order)},
            "shared": {
                "client_opt": ("mad-clip", {"shared": True, **order}),
                "server_opt": ("mad-clip-server", order),
            },
        }
    else:
        counts = norms.effort.values()
        # With equal weights, a few records would count as much as many.
        weights = {"weights": "steps"} if counts and max(counts) > _ALIKE * min(counts) else {}
        # In 20 rounds this rate was 0 to 1 point of accuracy better than the default.
        follows = {"start_norm": rounded(norms.middle(0.5, first=True) or limit)}
        lines = {
            "fixed": {"aggregator": ("clipped-averaging", {"max_norm": limit, **weights})},
            "adaptive": {
                "aggregator": ("clipped-averaging", weights),
                "client_opt": ("update-clip-client", {}),
                "server_opt": ("update-clip-server", follows),
            },
        }
    for kind, plugins in lines.items():
        name, fixed, shares = f"{norms.stage}.{kind}", kind == "fixed", dict[str, float]()
        if fixed or kind == "adaptive":
            shares = norms.above(limit) if fixed else norms.above_the_median()
        facts = shares, limit if fixed else None, norms.rows[0].module, *_TEXTS[name]
        yield Proposal(name, plugins, *facts, [*_toml(plugins)], _shares_in_words(shares))


def _spared(norms: Norms, limit: float, cut: Collection[str]) -> float:
    """Return a limit that clips no other client more than those in `cut`, if there is one."""
    others = [name for name in norms.clients if name not in cut]
    tails = [norms.clients[name].norm_quantile(0.95) or 0.0 for name in others]
    usual = [norms.usual(name) for name in others]
    highest = (max(values, default=limit) for values in (tails, usual))
    for higher in (limit, *highest, *(norms.usual(name) for name in cut if len(cut) == 1)):
        if higher >= limit and _least(norms.above(rounded(higher)), cut):
            return higher
    return limit


def _toml(plugins: Lines) -> Iterator[str]:
    """Yield the lines of TOML of some plug-ins, section by section."""
    for section, (name, config) in plugins.items():
        kind = "aggregator" if section == "aggregator" else "module"
        yield "[optim]" if kind == "aggregator" else f"[optim.{section}]"
        yield toml_line(kind, name, config)


def _shares_in_words(shares: Mapping[str, float]) -> str:
    """Return the share of each client, or the highest ones of many.

    Examples
    --------
    >>> _shares_in_words({"a": 0.051, "b": 1.0})
    '100 % of b, 5.1 % of a'
    """
    order = sorted(shares.items(), key=lambda item: -item[1])
    return listed([f"{100 * share:.3g} % of {name}" for name, share in order])


def _order(report: Report, row: Row) -> Config:
    """Return the order of the norm as a parameter, if the node's configuration has another than 2.

    Raises
    ------
    ValueError
        If the configuration cannot be read: the order of the norms is then unknown.
    """
    try:
        name, config = _modules(report, row.node)[row.index]
        order = config.get("ord", 2) if name == row.name else 2
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f"cannot read the order of the norms of {row.node}: {exc}") from exc
    return {} if order == 2 else {"ord": order}


def _protected(report: Report) -> bool:
    """Whether clients train by DP-SGD, or a server adds noise to their updates."""
    for node in report.servers:
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            if any(config.get("noise_multiplier") for _, config in _modules(report, node)):
                return True
    return bool(report.private)


def _modules(report: Report, node: str) -> Any:
    """Return name and parameters of the modules of a node, from its checkpoints."""
    folder = report.folder if node == report.folder.resolve().name else report.folder / node
    return json.loads((folder / "optimizer_config.json").read_text("utf-8"))["modules"]


def _case(unusual: Mapping[str, Unusual], early: bool, result: Result) -> tuple[str, str]:
    """Return what decides, "" where nothing is unusual, and whom it is about."""
    single = result.single()
    for place, stage in unusual.items():
        if odd := [name for name in stage.odd if place == "step" or name not in single]:
            times = f"{'up to ' * (len(odd) > 1)}{number(max(stage.odd[n] for n in odd))} times"
            return "two" if stage.two else place, f"{listed(odd)} are {times}"
    if unusual and early:
        return "diverged", ""
    steps = unusual.get("step", Unusual())
    if steps.spikes:
        return "spikes", listed([*steps.spikes])
    if odd := [name for stage in unusual.values() for name in stage.odd]:
        return "tune", f"the updates of {listed(odd)} are longer, and its data has only one class"
    if worse := result.worse():
        return "tune", f"{listed([*worse])} far worse than other clients, with usual norms"
    if steps.small:
        return "tune", f"the norms of {listed([*steps.small])} are far below those of other clients"
    return "", ""


def _clipped(places: Sequence[Norms]) -> Iterator[str]:
    for norms in places:
        share, steps = norms.whole.clipped_share, f"{norms.stage.capitalize()}s"
        if norms.lacking:
            yield f"{steps}: {norms.lacking[0]}."
        elif share and norms.rows[0].name != "no-op":
            yield f"{steps}: this run clipped {share:.0%}, so later norms may be too small."


def in_words(advice: Advice, use: str = "") -> Iterator[str]:
    """Yield the answer, what it rests on, and the first proposals in full, line by line.

    With the name of a proposal to `use`, yield that one.
    """
    if not use:
        yield advice.answer
        yield from (f"  - {text}" for text in advice.findings)
        yield "How much each proposal helped in experiments: docs/study.md"
    for place, proposal in enumerate(advice.proposals):
        if use not in ("", proposal.name):
            continue
        mark = " (start here)" if proposal.name == advice.start else ""
        yield from ("", f"{proposal.name}{mark}: {proposal.what}", f"  {proposal.why}")
        if not use and place >= _FULL:
            yield f"  To see it in full:  --use {proposal.name}"
            continue
        if proposal.clipped:
            yield f"  It would have clipped {proposal.clipped}."
        yield f"  Reveals: {proposal.reveals}"
        yield from (f"    {line}" for line in proposal.toml)


# -- in a configuration ---------------------------------------------------------------------------
def modules_of(
    document: Config, sides: Sequence[str] = ("client_opt", "server_opt")
) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each module of the optimizers, and where it stands: in a list, and at."""
    for side in sides:
        section = document.get("optim", document).get(side)
        modules = section.get("modules", []) if isinstance(section, Mapping) else []
        for place, module in enumerate(modules):
            name = module if isinstance(module, str) else module[0] if module else ""
            yield str(name), modules, place


def rewritten(text: str, proposal: Proposal) -> str:
    """Return a configuration with a proposal in it; comments and layout stay.

    A proposal takes the place of the first module of its kind: a clipper by norm, a counterpart on
    the server, or a part of update clipping. Without one, it comes first, so that it sees what
    comes in; but `update-clip-client` comes last.

    Raises
    ------
    ValueError
        If the text is no configuration, a section cannot be edited, or noise
        would go with the bound that it is for.
    """
    document: Config = tomlkit.parse(text)
    optim = document.get("optim", document)
    if not hasattr(optim, "keys") or "client_opt" not in optim:
        raise ValueError("it has no client_opt to add a clipper to")
    if "noise_multiplier" in str(optim.get("server_opt")) and "aggregator" in proposal.plugins:
        text = f"its server adds noise, and {proposal.name} adds none"
        advice = "depend on the data, write it into update-clip-server as start_norm"
        raise ValueError(f"{text}. If the proposed bound may {advice}")
    for section, (name, config) in proposal.plugins.items():
        if section == "aggregator":
            optim["aggregator"] = toml_item({"name": name, **config} if config else name)
        else:
            _insert(optim, section, name, config)
    if proposal.name.startswith("step.") and "server_opt" not in proposal.plugins:
        # The clipper that made room may have been a shared one.
        entries = (f for f in modules_of(document, ["server_opt"]) if f[0] in SERVERS)
        for _, modules, place in [*entries][:1]:
            del modules[place]
    return str(tomlkit.dumps(document))


def _insert(optim: Config, section: str, name: str, config: Mapping[str, object]) -> None:
    """Put a module into the list of one side; create the list if it is missing."""
    table = optim.get(section, 1.0)
    if isinstance(table, str):
        raise ValueError(f"{section} is in another file, {table!r}: edit that file")
    if not isinstance(table, Mapping):
        rate, table = table, tomlkit.table()
        table["lrate"] = rate
        optim.pop(section, None)
        optim[section] = table
    modules = table.setdefault("modules", tomlkit.array())
    if not isinstance(modules, list):
        raise ValueError(f"modules of {section} must be a list, got {modules!r:.100}")
    item = toml_item([name, config] if config else name)
    for old, _, place in modules_of(optim, [section]):
        if old == name or {old, name} <= BY_NORM or {old, name} <= SERVERS:
            modules[place] = item
            return
    modules.insert(len(modules) if name == "update-clip-client" else 0, item)
