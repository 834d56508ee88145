# SPDX-License-Identifier: Apache-2.0
"""What could be clipped in each place: lines of configuration, and what they would have clipped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fedclip import MadClip, ZScoreClip
from fedclip.core.toml import toml_line
from fedclip.report.advice import Lines, Proposal
from fedclip.report.place import Norms, rounded

# Clients whose numbers of steps in a round differ by less than this factor have the same weight.
_ALIKE = 1.2
# Up to so many clients are named; of more, the extremes and the one in the middle.
_NAMED = 8
_CHOSEN = (
    "The number comes from the norms of this run, and tells something about them; no privacy "
    "budget covers that. From then on it is fixed, and bounds a sensitivity."
)
_TEXTS = {
    "step.fixed": (
        "one fixed limit, by the norms of the median client",
        "Cuts whatever is longer than what is usual for most clients.",
        _CHOSEN,
    ),
    "step.learnt": (
        "a limit that follows the norms of each client",
        "Cuts spikes. Each client goes by its own norms: one that is wrong stays so.",
        "Each node learns from its own norms, which it keeps to itself. The limit is not known in "
        "advance, so it bounds no sensitivity.",
    ),
    "step.shared": (
        "one limit for all clients, which follows their norms",
        "Cuts a client unlike the others, but not in the first rounds.",
        "In each round every client sends how many of its norms were of which size, in cleartext "
        "unless secure aggregation is on. The limit bounds no sensitivity.",
    ),
    "update.fixed": (
        "one fixed bound for updates, by those of the median client",
        "Bounds what a client does to the model, by the same number when norms fall.",
        _CHOSEN,
    ),
    "update.adaptive": (
        "a bound that follows the median of the updates, and starts at that of round 1",
        "Bounds what a client does to the model, whatever its steps were.",
        "Where it starts tells something about the norms of this run. In each round every client "
        "sends one bit: whether its update was within the bound. Set noise_multiplier to cover it "
        "by a privacy budget (`fedclip privacy plan`), beside which all clients weigh the same.",
    ),
}
"""What each proposal does, where it helps, and what it reveals of the data."""


def proposals(norms: Norms, early: bool = False, cut: Collection[str] = ()) -> Iterator[Proposal]:
    """Yield the proposals for one place.

    Fixed limits are above about 95 % of the norms of the median client; or, if the norms of later
    rounds are of no use (`early`), above half of those of the first. Where that would clip another
    client more than those to be clipped (`cut`), they are above what is usual for all others.
    """
    if norms.lacking or not (limit := norms.middle(0.5 if early else 0.95, early)):
        return
    if cut and not early:
        limit = _spared(norms, limit, cut)
    limit, order = rounded(limit), norms.order
    shares, sections = norms.above(limit), ("client_opt", "server_opt")
    if norms.place == "step":
        fixed = ("norm-clip", {"max_norm": limit, **order})
        mad, server = (MadClip.name, {"shared": True, **order}), (f"{MadClip.name}-server", order)
        yield _proposal(norms, "fixed", {"client_opt": fixed}, shares, limit)
        yield _proposal(norms, "learnt", {"client_opt": (ZScoreClip.name, order)})
        yield _proposal(norms, "shared", dict(zip(sections, (mad, server), strict=True)))
        return
    counts = norms.effort.values()
    # With equal weights, a few records would count as much as many.
    weights = {"weights": "steps"} if counts and max(counts) > _ALIKE * min(counts) else {}
    fixed = ("clipped-averaging", {"max_norm": limit, **weights})
    yield _proposal(norms, "fixed", {"aggregator": fixed}, shares, limit)
    # In 20 rounds this rate was 0 to 1 point of accuracy better than the default.
    follows = {"start_norm": rounded(norms.middle(0.5, first=True) or limit), "learning_rate": 0.5}
    lines: Lines = {
        "aggregator": ("clipped-averaging", weights),
        "client_opt": ("update-clip-client", {}),
        "server_opt": ("update-clip-server", follows),
    }
    yield _proposal(norms, "adaptive", lines, norms.above_the_median())


def _spared(norms: Norms, limit: float, cut: Collection[str]) -> float:
    """Return a limit that clips no other client more than those in `cut`, if there is one."""
    others = [record for name, record in norms.clients.items() if name not in cut]
    tails = max((record.norm_quantile(0.95) or 0.0 for record in others), default=limit)
    usual = max((norms.usual(name) for name in norms.clients if name not in cut), default=limit)
    for higher in (limit, tails, usual, *(norms.usual(name) for name in cut if len(cut) == 1)):
        shares = norms.above(rounded(higher)) if higher > 0 else {}
        least = min((shares[name] for name in cut if name in shares), default=0.0)
        if higher >= limit and 0 < least >= max(s for n, s in shares.items() if n not in cut):
            return higher
    return limit


def _proposal(
    norms: Norms,
    kind: str,
    lines: Lines,
    shares: Mapping[str, float] | None = None,
    limit: float | None = None,
) -> Proposal:
    name, shares, module = f"{norms.place}.{kind}", shares or {}, norms.rows[0].module
    toml, clipped = [*_toml(lines)], _in_words(shares)
    return Proposal(name, lines, shares, limit, module, *_TEXTS[name], toml, clipped)


def _toml(plugins: Lines) -> Iterator[str]:
    """Yield the lines of TOML of some plug-ins, section by section."""
    for section, (name, config) in plugins.items():
        if section == "aggregator":
            yield "[optim]"
            yield toml_line("aggregator", name, config)
        else:
            yield f"[optim.{section}]"
            yield toml_line("module", name, config)


def _in_words(shares: Mapping[str, float]) -> str:
    """Return the share of each client, or those of the lowest, the middle and the highest.

    Examples
    --------
    >>> _in_words({"a": 0.051, "b": 1.0})
    '5.1 % of a, 100 % of b'
    """
    shown = [*shares.items()]
    if len(shown) > _NAMED:
        order = sorted(shown, key=lambda item: item[1])
        shown = [order[0], order[len(order) // 2], order[-1]]
    said = ", ".join(f"{100 * share:.3g} % of {name}" for name, share in shown)
    return said if len(shares) <= _NAMED else f"{said} (least, middle and most of {len(shares)})"
