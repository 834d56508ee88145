# SPDX-License-Identifier: Apache-2.0
"""Advice in lines of text, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from fedclip.report.advice import Advice, Proposal
from fedclip.toml import toml_line

__all__ = ["in_words", "lines_of", "shares_of"]

# Up to so many clients are named; of more, the extremes and the one in the middle.
_NAMED = 8
# So many proposals are shown in full.
_FULL = 3


def in_words(advice: Advice, use: str = "") -> Iterator[str]:
    """Yield the answer, what it rests on, and the first proposals in full, line by line.

    With the name of a proposal to `use`, yield that one.
    """
    if not use:
        yield from _wrapped(advice.answer, 0)
        for text in advice.findings:
            yield from _wrapped(f"- {text}", 2)
        yield "What each of these was worth in trials, by trouble: docs/study.md"
    for place, proposal in enumerate(advice.proposals):
        mark = " (start here)" if proposal.name == advice.start else ""
        if use in ("", proposal.name):
            yield ""
            yield from _wrapped(f"{proposal.name}{mark}: {proposal.what}", 0)
            yield from _wrapped(proposal.why, 2)
        if use == proposal.name or (not use and place < _FULL):
            yield from _rest(proposal)
        elif not use:
            yield f"  In full:  --use {proposal.name}"


def _rest(proposal: Proposal) -> Iterator[str]:
    if proposal.shares:
        yield from _wrapped(f"It would have clipped {shares_of(proposal.shares)}.", 2)
    yield from _wrapped(f"What it reveals: {proposal.reveals}", 2)
    for line in lines_of(proposal):
        yield f"    {line}"


def lines_of(proposal: Proposal) -> Iterator[str]:
    """Yield the lines of TOML of a proposal, section by section."""
    for section, (name, config) in proposal.plugins.items():
        if section == "aggregator":
            yield "[optim]"
            yield toml_line("aggregator", name, config)
        else:
            yield f"[optim.{section}]"
            yield toml_line("module", name, config)


def shares_of(shares: Mapping[str, float]) -> str:
    """Return the share of each client, or those of the lowest, the middle and the highest.

    Examples
    --------
    >>> shares_of({"a": 0.051, "b": 1.0})
    '5.1 % of a, 100 % of b'
    """
    shown = [*shares.items()]
    if len(shown) > _NAMED:
        order = sorted(shown, key=lambda item: item[1])
        shown = [order[0], order[len(order) // 2], order[-1]]
    said = ", ".join(f"{100 * share:.3g} % of {name}" for name, share in shown)
    return said if len(shares) <= _NAMED else f"{said} (least, middle and most of {len(shares)})"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )
