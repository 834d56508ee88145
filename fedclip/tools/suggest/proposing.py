# SPDX-License-Identifier: Apache-2.0
"""What could be clipped in each place: lines of configuration, and what they would have clipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedclip.privacy.maps import Plugin
from fedclip.report.advice import Lines, Proposal
from fedclip.tools.catalogue import build
from fedclip.tools.suggest import playing
from fedclip.tools.suggest.norms import Norms, rounded

__all__ = ["proposals"]

_SECTIONS = {"step": "client_opt", "aggregate": "server_opt"}
_CHOSEN = (
    "The number comes from the norms of this run, and tells something about them; no privacy "
    "budget covers that. From then on it is fixed, and bounds a sensitivity."
)
_VOTES = (
    "In each round every client sends one bit: whether its update was within the bound. Set "
    "noise_multiplier to cover it by a privacy budget (`fedclip privacy plan`)."
)
_TEXTS = {
    "fixed": ("one fixed limit, above about 95 % of the norms of the median client", _CHOSEN),
    "learnt": (
        "a limit that follows the norms of each node and cuts spikes",
        "Each node learns from its own norms, which it keeps to itself. The limit is not known in "
        "advance, so it bounds no sensitivity.",
    ),
    "shared": (
        "one limit for all clients, which follows their norms and cuts a client unlike them",
        "In each round every client sends how many of its norms were of which size, in cleartext "
        "unless secure aggregation is on. The limit bounds no sensitivity.",
    ),
    "update": (
        "one fixed bound for the update of a client, above about 95 % of the median client's",
        _CHOSEN,
    ),
    "median": ("a bound that follows the median of the updates, and starts there", _VOTES),
    "search": (
        "a bound that follows the median of the updates; it is searched for in the first rounds",
        _VOTES,
    ),
}
"""What kinds of proposals do, and what they reveal of the data."""


def proposals(norms: Norms) -> Iterator[Proposal]:
    """Yield the proposals for one place; each can be built."""
    if norms.place == "update":
        yield from _for_updates(norms)
    elif not norms.lacking:
        yield from _for_modules(norms)


def _for_modules(norms: Norms) -> Iterator[Proposal]:
    section, order, limit = _SECTIONS[norms.place], norms.order, norms.limit()
    yield _proposal(
        f"{norms.place}.fixed",
        {section: ("norm-clip", {"max_norm": limit, **order})},
        playing.above(norms, limit),
        limit,
    )
    lines: Lines = {section: ("zscore-clip", dict(order))}
    yield _proposal(f"{norms.place}.learnt", lines, playing.learnt(_first(lines), norms))
    if norms.place == "step":
        clients = ("mad-clip", {"shared": True, **order})
        lines = {section: clients, "server_opt": ("mad-clip-server", dict(order))}
        yield _proposal(f"{norms.place}.shared", lines, playing.shared(_first(lines), norms))


def _for_updates(norms: Norms) -> Iterator[Proposal]:
    if norms.lacking:
        yield _adaptive({}, "search", {})
        return
    limit = norms.limit()
    lines: Lines = {"aggregator": ("clipped-averaging", {"max_norm": limit})}
    yield _proposal("update.fixed", lines, playing.above(norms, limit), limit, "update")
    start = {"start_norm": rounded(norms.median(0.5))}
    yield _adaptive(start, "median", playing.above_the_median(norms))


def _adaptive(server: Mapping[str, object], kind: str, shares: Mapping[str, float]) -> Proposal:
    lines: Lines = {
        "aggregator": ("clipped-averaging", {}),
        "client_opt": ("update-clip-client", {}),
        "server_opt": ("update-clip-server", server),
    }
    return _proposal("update.adaptive", lines, shares, kind=kind)


def _proposal(
    name: str,
    lines: Lines,
    shares: Mapping[str, float],
    limit: float | None = None,
    kind: str = "",
) -> Proposal:
    # Built, so that no line is proposed that would be refused.
    for section, (plugin, config) in lines.items():
        build("aggregator" if section == "aggregator" else "module", plugin, config)
    what, reveals = _TEXTS[kind or name.partition(".")[2]]
    return Proposal(name, lines, shares, limit, what, reveals=reveals)


def _first(lines: Lines) -> Plugin:
    name, config = next(iter(lines.values()))
    return build("module", name, config)
