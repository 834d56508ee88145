# SPDX-License-Identifier: Apache-2.0
"""The report as one page for a browser, which needs no network.

Jinja2 fills the template and escapes all text. Vega draws the charts, from numbers that are
embedded as JSON; vl-convert brings Vega along. Advice and findings come first. A
few clients have a line each; of many, a band is shown, whose extremes have names. One client's
rounds are shown if it is chosen.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedclip.report.findings import Advice
from fedclip.report.results import result_of
from fedclip.report.rows import Row, cells, grouped, limits, number, pooled, printable, site_of
from fedclip.report.text import Report

# With more rounds than this, of all clients, none can be chosen, as the page would be too large.
_MOST_ROUNDS = 40_000
_MOST_METRICS = 6
# The part of an experiment that the charts need.
_DRAWN = ("name", "metrics", "clippers")
# The columns of the table of nodes.
_HEADS = ("steps", "clipped", "median\nnorm", "95 %", "max\nnorm", "limit", "by")
# So many clients have a line each.
_NAMED = 8


def page_of(
    report: Report, spent: Mapping[str, Sequence[str]], advice: Advice | None = None
) -> str:
    """Return the page.

    Parameters
    ----------
    report
        One federation, or several.
    spent
        The privacy budget that each ledger or server has spent, in lines of text.
    advice
        What to do after the run of one federation; see `fedclip suggest`.

    Raises
    ------
    ModuleNotFoundError
        Without the extra ``fedclip[html]``.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = printable
    experiments = [*_experiments(report, spent, advice)]
    metrics = dict.fromkeys(metric for exp in experiments for metric in exp["metrics"])
    # Loss first: it is there without any metric being asked for.
    chosen = sorted(metrics, key=lambda name: name != "loss")[:_MOST_METRICS]
    return environment.from_string(_file("page.html")).render(
        title=f"Clipping in {report.folder.resolve().name}",
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        experiments=experiments,
        metrics=chosen,
        measured=any(exp["clippers"] for exp in experiments),
        advised=advice is not None,
        data={
            "experiments": [{key: exp[key] for key in _DRAWN} for exp in experiments],
            "metrics": chosen,
            # Without records, nothing says in which round an evaluation was.
            "rounds": bool(report.rows),
        },
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
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _experiments(
    report: Report, spent: Mapping[str, Sequence[str]], advice: Advice | None
) -> Iterator[dict[str, Any]]:
    """Yield each federation of a report, as the template needs it."""
    single = len(report.experiments) == 1
    for experiment in report.experiments:
        part, advised = report.only([experiment]), advice if single else None
        findings = [*advised.findings] if advised else []
        lines = [s for where, s in spent.items() if single or where.startswith(f"{experiment}/")]
        yield {
            "name": printable(experiment or report.folder.resolve().name),
            "advice": advised,
            "end": result_of(part, experiment).in_words(),
            "findings": [*findings, *(t for t in part.in_words() if t not in findings)],
            "clippers": [*_clippers(part, advised)],
            "metrics": _metrics(part),
            "clients": _nodes(part),
            "spent": [line for some in lines for line in some],
            "skipped": len(report.skipped),
        }


def _series(points: Mapping[str, Sequence[Sequence[float | None]]]) -> dict[str, object]:
    """Return a line for each of a few nodes; of many a band, the highest and the lowest.

    A point is a round, a value, and maybe more; the median of its values says how high a node is.
    The band leaves out the same number of nodes at each end, in each round.
    """
    known = {n: [(p[0], p[1]) for p in some if p[1] is not None] for n, some in points.items()}
    level = {n: statistics.median(v for _, v in some) for n, some in known.items() if some}
    if len(level) <= _NAMED:
        return {"lines": [[printable(n), points[n]] for n in level], "band": [], "cut": 0}
    cut = max(1, len(level) // 20)
    rounds = grouped((p for some in known.values() for p in some), lambda point: point[0])
    sizes = {r: sorted(value for _, value in some) for r, some in rounds.items()}
    band = [[r, v[cut], v[-1 - cut]] for r, v in sorted(sizes.items()) if len(v) > 2 * cut]
    order = sorted(level, key=level.__getitem__)
    ends = ("highest", order[-1]), ("lowest", order[0])
    lines = [[f"{end}: {printable(node)}", points[node]] for end, node in ends]
    return {"lines": lines, "band": band, "cut": cut}


def _metrics(report: Report) -> dict[str, object]:
    """Return the server's points and the series of the clients for each metric with a number.

    A point is a round and a value; None where it was NaN or infinite.
    """
    result: dict[str, object] = {}
    for metric in dict.fromkeys(curve.metric for curve in report.curves if curve.points):
        points: dict[str, list[list[float | None]]] = {}
        for curve in (curve for curve in report.curves if curve.metric == metric):
            values = {**dict(curve.points), **dict.fromkeys(curve.nonfinite)}
            name = "" if curve.node in report.servers else site_of(curve.node)
            points[name] = [[round_, _short(value)] for round_, value in sorted(values.items())]
        result[metric] = {"server": points.pop("", []), "clients": _series(points)}
    return result


def _clippers(report: Report, advice: Advice | None) -> Iterator[dict[str, object]]:
    """Yield the rounds of each clipper, over all clients, and of each client if not too many.

    Its rules are limits that were proposed: name, limit, and whether it is the one to start with.
    """
    servers = report.servers
    ordered = sorted(report.whole, key=lambda row: row.node in servers)
    runs = grouped(ordered, lambda row: row.module + " on the server" * (row.node in servers))
    for name, chosen in runs.items():
        nodes = grouped(chosen, lambda row: site_of(row.node))
        everybody = [*_by_round(chosen)]
        single = {n: [*_by_round(some)] for n, some in nodes.items()}
        shown = single if len(nodes) > 1 and len(chosen) <= _MOST_ROUNDS else {}
        lines = {n: [[p[0], p[3], p[8]] for p in points] for n, points in single.items()}
        yield {
            "name": printable(name),
            "all": everybody,
            "rows": [[str(p[0]), *map(number, p[1:8]), f"{p[8] or 0:.1%}"] for p in everybody],
            "nodes": [(printable(n), points) for n, points in shown.items()],
            "count": len(nodes),
            **_series(lines if len(nodes) > 1 else {}),
            "rules": [
                (p.name, p.limit, p.name == advice.start)
                for p in (advice.proposals if advice else ())
                if advice and p.module == name and p.limit is not None
            ],
        }


def _by_round(rows: Iterable[Row]) -> Iterator[list[float | None]]:
    """Yield for each round its least, 5 %, median, 95 % and largest norm, limits and share."""
    for round_, some in sorted(grouped(rows, lambda row: row.record.round).items()):
        record, ends = pooled(row.record for row in some), limits(some)
        norms = [record.norm_min, *map(record.norm_quantile, (0.05, 0.5, 0.95)), record.norm_max]
        last = min(ends, default=None), max(ends, default=None), record.clipped_share
        yield [round_, *map(_short, (*norms, *last))]


def _nodes(report: Report) -> list[list[str]]:
    """Return a line for each clipper of each node, with its last loss."""
    last = {curve.node: curve.last[1] for curve in report.curves if curve.metric == "loss"}
    runs = grouped(report.whole, lambda row: (row.node, row.module))
    return [
        [
            printable(site_of(node)) + " (server)" * (node in report.servers and node != "server"),
            printable(module),
            *[shown[head] for head in _HEADS],
            number(last.get(node)),
        ]
        for (node, module), some in runs.items()
        for shown in [cells(pooled(r.record for r in some), some[-1].limit)]
    ]


def _short(value: float | None) -> float | None:
    """Return a number with four digits, which is as much as a chart can show."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
