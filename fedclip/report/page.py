# SPDX-License-Identifier: Apache-2.0
"""The report as one page for a browser, which needs no network.

Jinja2 fills the template and escapes all text. Vega draws the charts, from numbers that are
embedded as JSON; vl-convert brings Vega along. Of many clients, bands and a table of totals are
shown, and one client's rounds if it is chosen.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fedclip.records import RoundRecord
from fedclip.report.curves import Curve
from fedclip.report.experiment import Report
from fedclip.report.rows import grouped, known, number, pooled, printable
from fedclip.report.table import SETTERS
from fedclip.report.words import Finding

__all__ = ["Run", "page_of"]

# With more rounds than this, of all clients, none can be chosen, as the page would be too large.
_MOST_ROUNDS = 40_000
_MOST_METRICS = 6


class Run(NamedTuple):
    """One experiment of a page: a federation, or several seeds of one."""

    name: str
    report: Report
    spent: Sequence[tuple[str, Sequence[str]]] = ()
    """What was spent of a privacy budget: where, and in words."""
    together: bool = False
    """Whether the federations of the report are shown as one, such as several seeds."""


def page_of(runs: Sequence[Run], title: str, tables: Sequence[Mapping[str, object]] = ()) -> str:
    """Return the page.

    `tables` come first on it, each with a caption, heads and rows of text.

    Raises
    ------
    ModuleNotFoundError
        Without the extra ``fedclip[html]``.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = printable
    template = environment.from_string(_file("page.html"))
    found = [exp for run in runs for exp in _experiments(run)]
    metrics = dict.fromkeys(metric for exp in found for metric in exp["metrics"])
    # Loss first: it is there without any metric being asked for.
    chosen = sorted(metrics, key=lambda name: name != "loss")[:_MOST_METRICS]
    return template.render(
        title=title,
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        experiments=found,
        metrics=chosen,
        tables=tables,
        data={"experiments": [_numbers(exp) for exp in found], "metrics": chosen},
        css=_file("page.css"),
        script=_file("page.js"),
        vega=_vega(),
    )


@cache
def _vega() -> str:
    """Return the code that draws the charts; in a page, only one text could end it early."""
    import vl_convert

    code: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return code.replace("</script", r"<\/script")


def _file(name: str) -> str:
    return (files("fedclip.report") / name).read_text(encoding="utf-8")


def _numbers(experiment: Mapping[str, object]) -> dict[str, object]:
    """Return the part of an experiment that the charts need."""
    return {key: experiment[key] for key in ("name", "metrics", "clippers")}


def _experiments(run: Run) -> list[dict[str, Any]]:
    """Return each federation of a report, as the template needs it."""
    report, together = run.report, run.together
    parts = {"": report} if together else {e: report.only([e]) for e in report.experiments}
    return [
        {
            "name": printable(_path(run.name, experiment) or report.folder.resolve().name),
            "findings": [_said(finding, together) for finding in part.findings()],
            "clippers": _clippers(part, together),
            "metrics": _metrics(part.curves, part.servers),
            "clients": _nodes(part, together),
            "spent": [
                printable(line)
                for where, lines in run.spent
                if len(parts) == 1 or where.startswith(f"{experiment}/")
                for line in lines
            ],
            "skipped": len(report.skipped),
        }
        for experiment, part in parts.items()
    ]


def _path(*names: str) -> str:
    return "/".join(filter(None, names))


def _said(finding: Finding, together: bool) -> str:
    where = f"{finding.experiment}, " if together and finding.experiment else ""
    return printable(where + ": ".join(filter(None, (finding.clipper, finding.text))))


def _metrics(curves: Iterable[Curve], servers: frozenset[str]) -> dict[str, object]:
    """Return for each metric the servers' mean by round, and a band of several servers or clients.

    Without a server's file, as on a client's machine, the clients' mean stands for it. A round in
    which any of them is NaN has no mean.
    """
    found: dict[str, tuple[dict[int, list[float]], dict[int, list[float]]]] = {}
    for curve in curves:
        kind = found.setdefault(curve.metric, ({}, {}))[curve.node not in servers]
        for round_, value in (*curve.points, *((r, math.nan) for r in curve.nonfinite)):
            kind.setdefault(round_, []).append(value)
    result: dict[str, object] = {}
    for metric, (server, clients) in found.items():
        seeds = any(len(values) > 1 for values in server.values())
        band = server if seeds else clients
        result[metric] = {
            "server": [
                [r, _short(sum(v) / len(v))] for r, v in sorted((server or clients).items())
            ],
            "band": [[r, *map(_short, _ends(v))] for r, v in sorted(band.items()) if v[1:]],
            "of": "runs" if seeds else "clients",
        }
    return result


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest; no number if any of them is none."""
    return (math.nan, math.nan) if math.isnan(sum(values)) else (min(values), max(values))


def _name(node: str, together: bool) -> str:
    return node if together else node.rpartition("/")[2]


def _clippers(report: Report, together: bool) -> list[dict[str, object]]:
    """Return the rounds of each clipper, over all clients, and of each client if not too many."""
    limits = report.limits()
    runs = grouped(
        report.whole, lambda row: row.module + " on the server" * (row.node in report.servers)
    )
    result = []
    for name, chosen in runs.items():
        nodes = grouped(chosen, lambda row: _name(row.node, together))
        rounds = grouped(chosen, lambda row: row.record.round)
        everybody = [
            _point(round_, pooled(row.record for row in some), known(some, limits))
            for round_, some in sorted(rounds.items())
        ]
        shown = nodes if len(nodes) > 1 and len(chosen) <= _MOST_ROUNDS else {}
        single = [
            (printable(n), [_point(r.record.round, r.record, known([r], limits)) for r in some])
            for n, some in shown.items()
        ]
        result.append(
            {"name": printable(name), "all": everybody, "nodes": single, "count": len(nodes)}
        )
    return result


def _point(round_: int, record: RoundRecord, limits: Sequence[float]) -> list[float | None]:
    """Return round, least, 5 %, median, 95 % and largest norm, lowest and highest limit, share."""
    return [
        round_,
        *map(_short, (record.norm_min, record.norm_quantile(0.05), record.norm_median)),
        *map(_short, (record.norm_quantile(0.95), record.norm_max)),
        _short(min(limits, default=None)),
        _short(max(limits, default=None)),
        _short(record.clipped_share),
    ]


def _nodes(report: Report, together: bool) -> list[dict[str, object]]:
    """Return a line for each clipper of each node, with its last loss."""
    limits = report.limits()
    last = {(c.node, c.metric): c.last[1] for c in report.curves}
    runs = grouped(report.whole, lambda row: (row.node, row.module))
    return [
        {
            "node": printable(_name(node, together)),
            "server": node in report.servers,
            "clipper": printable(module),
            "cells": _cells(pooled(r.record for r in some), known(some[-1:], limits)),
            "loss": number(last.get((node, "loss"))),
        }
        for (node, module), some in runs.items()
    ]


def _cells(record: RoundRecord, limits: Sequence[float]) -> list[str]:
    """Return steps, clipped share, median, 95 % and largest norm, limit, and what set it."""
    return [
        f"{record.steps:,}",
        f"{record.clipped_share:.1%}" if record.steps else "-",
        number(record.norm_median),
        number(record.norm_quantile(0.95)),
        number(record.norm_max),
        number(min(limits, default=None)),
        SETTERS[record.limited_by],
    ]


def _short(value: float | None) -> float | None:
    """Return a number with four digits, which is as much as a chart can show."""
    return None if value is None or math.isnan(value) else float(f"{value:.4g}")
