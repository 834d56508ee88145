# SPDX-License-Identifier: Apache-2.0
"""A model card of a run, in Markdown; and the file beside its results of what they do not hold.

The sections are those of Mitchell et al., 2019, "Model cards for model reporting",
arXiv:1810.03993, as far as a run can answer them. What is not known is said so, never guessed.
With noise, nothing is shown that it would have to cover but the metrics, and the card says so.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgpack
from declearn.dataset.utils import load_data_array
from declearn.main.utils import Checkpointer

import fedclip
from fedclip.federation.update.plain import server_of
from fedclip.federation.update.served import read
from fedclip.parameters import Config
from fedclip.privacy.ledger import FILE
from fedclip.privacy.maps import Plugin
from fedclip.records import SERVED
from fedclip.report import Report, number, pooled, printable
from fedclip.report.rows import grouped, known
from fedclip.tools.catalogue import versions
from fedclip.tools.exposure import RELEASED, exposures
from fedclip.tools.findings import Check, Setting
from fedclip.tools.output import typed
from fedclip.tools.quickrun import Experiment
from fedclip.tools.spent import NothingSpent, read_spent

__all__ = ["ABOUT", "card", "keep", "md"]

ABOUT = "about_this_run.json"
"""The file beside the results that says what was run, and by what."""
_SHOWN = 5  # rounds of each clipper, in even steps


def keep(check: Check, folder: str, command: str, seed: int | None) -> None:
    """Write beside the results of a checked file what they do not hold."""
    run, drawn = check.config["run"], f" --seed {seed}" * (seed is not None)
    # How many records are private is nothing to be shown.
    sites = {} if "privacy" in run else Experiment(check.path).files
    records = {site: len(load_data_array(own["train_target"])) for site, own in sites.items()}
    typed_ = f"fedclip {command} {typed(check.path)}{drawn}"
    facts = {"command": typed_, "rounds": run["rounds"], "records": records}
    facts |= {"places": check.places, "exposed": check.exposed, "versions": versions()}
    Path(folder, ABOUT).write_text(json.dumps(facts), encoding="utf-8")


def md(text: object) -> str:
    r"""Return other people's text so that Markdown shows it, and does nothing else with it.

    >>> print(md("<b>[x](http://y)|`"))
    &lt;b&gt;\[x\](http\://y)\|\`
    """
    inert = html.escape(printable(str(text)), quote=False)
    inert = re.sub(r"([\\`*_{}\[\]#|~$^@]|:(?=//)|(?<=www)\.)", r"\\\1", inert)
    # Where a line may begin with it, a list would.
    return re.sub(r"\A(\d*)([-+.)])(?=[\s-])", r"\1\\\2", inert)


def card(report: Report) -> str:
    """Return the model card of a report of one run.

    Raises
    ------
    ValueError
        If it is of several runs, or what is said of budgets is damaged.
    """
    from jinja2 import Environment

    if len(report.experiments) != 1:
        raise ValueError(f"a card is of one run, and these are {len(report.experiments)}: name one")
    base, spent = report.folder / report.experiments[0], list[Config]()
    with suppress(NothingSpent):
        # A run in a folder of this one is another.
        spent = [s.cost() for s in read_spent(base) if "/" not in s.where.removesuffix(f"/{FILE}")]
    about, plugins = _about(base), _plugins(base, report)
    run = {"privacy": {}} if report.private else dict[str, Any]()
    found = exposures(Setting(plugins, None, run, {}, None, False, None, None))
    exposed = about.get("exposed", [text for _, at, text in found if at != "run.privacy"])
    noised = bool(spent or report.private or RELEASED[0] in exposed)
    # What the server noises lies in the clients' folders as it was.
    own = any(getattr(p, "evaluation_share", 0.0) for p in plugins.get("client_opt", ()))
    plain = own or not noised or RELEASED[0] in exposed
    curves = [c for c in report.curves if plain or c.node in report.servers]
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    # A name that the template does not know is false, too.
    environment.finalize = lambda x: md(x) if x or x == 0 else "not known"
    environment.filters["number"] = number
    nodes = dict.fromkeys([*report.nodes, *report.private, *(c.node for c in report.curves)])
    environment.globals |= {"about": about, "base": base, "exposed": exposed, "plugins": plugins}
    environment.globals |= {"limits": [*_limits(report, noised)], "model": _model(base)}
    environment.globals |= {"nodes": nodes, "noised": noised, "report": report, "spent": spent}
    environment.globals |= {"curves": curves, "released": RELEASED[0]}
    text = (files("fedclip.tools") / "card.md").read_text(encoding="utf-8")
    return environment.from_string(text).render(version=fedclip.__version__)


def _about(base: Path) -> Config:
    """Return what `keep` has written of this run; nothing, if it is not there or of another."""
    file = base / ABOUT
    with suppress(Exception):  # a damaged file may hold anything
        facts: Config = json.loads(file.read_text(encoding="utf-8"))
        kinds = [type(facts[name]) for name in ("places", "exposed", "records", "versions")]
        states = [path.stat().st_mtime_ns for path in base.glob("*/optimizer_state_*.mpk")]
        if kinds == [list, list, dict, dict] and file.stat().st_mtime_ns >= max(states, default=0):
            return facts
    return {}


def _model(base: Path) -> str | None:
    """Return the kind of the model and its number of values, the same on all nodes."""
    with suppress(Exception):  # a damaged file may hold anything
        config = min(base.glob("*/model_config.json"))
        kind = json.loads(config.read_text(encoding="utf-8"))["typekey"]
        weights = msgpack.unpackb(config.with_name("model_state_best.mpk").read_bytes())["dump"]
        return f"{kind}, {sum(math.prod(array['dump'][2]) for array in weights.values()):,} values"
    return None


def _plugins(base: Path, report: Report) -> dict[str, list[Plugin]]:
    """Return the plug-ins that checkpoints name; of a server on another engine, its bound."""
    found: dict[str, list[Plugin]] = {}
    servers = {node.rpartition("/")[2] for node in report.servers}
    for file in sorted(base.glob("*/optimizer_config.json")):
        with suppress(Exception):
            made = Checkpointer(str(file.parent)).load_optimizer(load_state=False)
            side = "server_opt" if file.parent.name in servers else "client_opt"
            found.setdefault(side, [*made.regularizers, *made.modules])
    for file in (base / SERVED, *base.glob(f"*/{SERVED}")):
        with suppress(TypeError, ValueError):
            found["server_opt"] = [server_of(read(file).settings).bound]
    return found


def _limits(report: Report, noised: bool) -> Iterator[tuple[object, ...]]:
    """Yield limits, smallest to largest, of some rounds; with noise, none that follows norms."""
    limits = report.limits()
    clipping = (row for row in report.whole if row.name != "update-norms")
    for name, own in grouped(clipping, lambda row: row.module).items():
        rounds = sorted(grouped(own, lambda row: row.record.round).items())
        public = name.startswith("update-clip") or all(r.record.limited_by == "fixed" for r in own)
        for i in sorted({k * (len(rounds) - 1) // (_SHOWN - 1) for k in range(_SHOWN)}):
            held = sorted(known(rounds[i][1], limits))
            limit = " to ".join(dict.fromkeys(map(number, held[:1] + held[-1:]))) or "none"
            share = f"{pooled(row.record for row in rounds[i][1]).clipped_share:.0%}"
            shown = (limit, share) if not noised else (limit * public or "not shown", "not shown")
            yield name, rounds[i][0], *shown
