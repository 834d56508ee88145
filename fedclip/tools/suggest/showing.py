# SPDX-License-Identifier: Apache-2.0
"""Advice in lines of text, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fedclip.report.advice import Advice, Proposal

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
    if proposal.clipped:
        yield from _wrapped(f"It would have clipped {proposal.clipped}.", 2)
    yield from _wrapped(f"What it reveals: {proposal.reveals}", 2)
    for line in proposal.toml:
        yield f"    {line}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )
