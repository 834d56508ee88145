# SPDX-License-Identifier: Apache-2.0
"""What is advised after a run: plain facts, which commands print and pages draw.

They are worked out elsewhere; nothing here knows a clipper or reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Lines: TypeAlias = Mapping[str, tuple[str, Mapping[str, object]]]
"""Name and parameters by section: of modules, or (section "aggregator") of the aggregator."""


@dataclass(frozen=True)
class Proposal:
    """Lines of configuration, and what they would have done to each client.

    Attributes
    ----------
    name
        Place and kind, as in "step.fixed".
    plugins
        Its lines.
    shares
        For each client, the share of its norms of this run, in [0, 1], that would have been
        clipped; empty if that is not known.
    limit
        The limit to draw, in the unit of the norms; None if it follows the norms or is not known.
    module
        The module whose norms it would have clipped, and beside which it is drawn.
    what, why, reveals
        What it does, why it stands at its place in the ranking, and what it reveals of the data.
    toml, clipped
        Its lines as TOML, and its shares in words.
    """

    name: str
    plugins: Lines
    shares: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    module: str = ""
    what: str = ""
    why: str = ""
    reveals: str = ""
    toml: Sequence[str] = ()
    clipped: str = ""


@dataclass(frozen=True)
class Advice:
    """The answer to "which limit, and why?" for one federation.

    Attributes
    ----------
    answer
        One sentence: where to start and why, or that clipping will not help.
    findings
        What was found in the norms that the answer rests on, in sentences; the weightiest first.
    proposals
        The best first. Where clipping will not help, they are there to be compared with.
    start
        The name of the proposal to start with; "" if clipping will not help.
    odd
        The clients whose norms are far above the others'.
    """

    answer: str
    findings: Sequence[str] = ()
    proposals: Sequence[Proposal] = ()
    start: str = ""
    odd: Sequence[str] = ()
