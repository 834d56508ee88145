# SPDX-License-Identifier: Apache-2.0
"""What could be clipped in each place: lines of configuration, and what they would have clipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedclip import MadClip, ZScoreClip
from fedclip.report.advice import Lines, Proposal
from fedclip.tools.suggest import playing
from fedclip.tools.suggest.norms import Norms, rounded

__all__ = ["proposals"]

_SECTIONS = {"step": "client_opt", "aggregate": "server_opt"}
# Clients whose numbers of steps in a round differ by less than this factor have the same weight.
_ALIKE = 1.2
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
    "update.fixed": (
        "one fixed bound for the update of a client, above about 95 % of the median client's",
        _CHOSEN,
    ),
    "adaptive": (
        "a bound that follows the median of the updates, and starts at that of round 1",
        f"{_VOTES} The start comes from the norms of this run.",
    ),
}
"""What kinds of proposals do, and what they reveal of the data."""


def proposals(norms: Norms, early: bool = False) -> Iterator[Proposal]:
    """Yield the proposals for one place.

    Fixed limits are above about 95 % of the norms of the median client; or, if the norms of later
    rounds are of no use (`early`), above half of those of the first.
    """
    limit = 0.0 if norms.lacking else norms.first(0.5) if early else norms.median(0.95)
    if limit:
        yield from (_for_updates if norms.place == "update" else _for_modules)(
            norms, rounded(limit)
        )


def _for_modules(norms: Norms, limit: float) -> Iterator[Proposal]:
    section, order = _SECTIONS[norms.place], norms.order
    yield _proposal(
        f"{norms.place}.fixed",
        {section: ("norm-clip", {"max_norm": limit, **order})},
        playing.above(norms, limit),
        limit,
    )
    lines: Lines = {section: (ZScoreClip.name, order)}
    yield _proposal(f"{norms.place}.learnt", lines, playing.learnt(ZScoreClip, norms))
    if norms.place == "step":
        clients = (MadClip.name, {"shared": True, **order})
        lines = {section: clients, "server_opt": (f"{MadClip.name}-server", order)}
        yield _proposal(f"{norms.place}.shared", lines, playing.shared(MadClip, norms))


def _for_updates(norms: Norms, limit: float) -> Iterator[Proposal]:
    counts = norms.effort.values()
    # With equal weights, a few records would count as much as many.
    weights = {"weights": "steps"} if counts and max(counts) > _ALIKE * min(counts) else {}
    lines: Lines = {"aggregator": ("clipped-averaging", {"max_norm": limit, **weights})}
    yield _proposal("update.fixed", lines, playing.above(norms, limit), limit)
    # In 20 rounds this rate was 0 to 1 point of accuracy better than the default.
    server = {"start_norm": rounded(norms.first(0.5) or limit), "learning_rate": 0.5}
    lines = {
        "aggregator": ("clipped-averaging", weights),
        "client_opt": ("update-clip-client", {}),
        "server_opt": ("update-clip-server", server),
    }
    yield _proposal("update.adaptive", lines, playing.above_the_median(norms))


def _proposal(
    name: str,
    lines: Lines,
    shares: Mapping[str, float],
    limit: float | None = None,
) -> Proposal:
    what, reveals = _TEXTS.get(name) or _TEXTS[name.partition(".")[2]]
    return Proposal(name, lines, shares, limit, what, reveals=reveals)
