# SPDX-License-Identifier: Apache-2.0
"""What several loops do with a clipper: make it from a name or limit, call it, skip a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fedclip.arrays import Array, Backend
from fedclip.clippers import by_name
from fedclip.clippers.agc import AGC, Outputs
from fedclip.clippers.base import Clipper
from fedclip.clippers.norm_clip import NormClip
from fedclip.core.records import StepRecord
from fedclip.errors import nearest

Theirs: TypeAlias = Any
"""An object of the trainer that calls, which has no types."""

Spec: TypeAlias = Clipper | AGC | float | str | tuple[str, Mapping[str, object]]
"""A clipper, a fixed limit of the norm, or a name or (name, config) as in a configuration."""


def clipper_of(spec: Spec) -> Clipper | AGC:
    """Return a clipper; make it if its limit, name, or name and configuration is given."""
    if isinstance(spec, int | float):
        return NormClip(spec)
    match (spec, {}) if isinstance(spec, str) else spec:
        case (str(name), Mapping() as config):
            known = by_name()
            if name not in known:
                raise ValueError(f"no clipper is called {name!r}{nearest(name, known)}")
            return check_clipper(known[name](**config))
    return check_clipper(spec)


def check_clipper(clipper: object) -> Clipper | AGC:
    """Return a clipper; raise a TypeError if it is not one."""
    if isinstance(clipper, (Clipper, AGC)):
        return clipper
    raise TypeError(
        f"{clipper!r:.80} is not a clipper of fedclip: make one before the first step, such as "
        "NormClip(1.0), and pass it to each step"
    )


def clipped(
    clipper: Clipper | AGC,
    gradients: Mapping[str, Array],
    weights: Callable[[], Mapping[str, Array]],
    backend: Backend | None = None,
    outputs: Outputs | None = None,
) -> Mapping[str, Array]:
    """Return the clipped gradients, in eager code.

    Only `agc` needs the weights, and the axes of the outputs of layers.
    """
    if isinstance(clipper, AGC):
        return clipper.clip(gradients, weights(), backend=backend, outputs=outputs)
    return clipper.clip(gradients, backend=backend)


def skips(clipper: Clipper | AGC) -> bool:
    """Whether a clipper may skip a step: one that is not finite, or a spike."""
    return clipper.on_nonfinite == "skip" or getattr(clipper, "on_spike", "clip") == "skip"


def skipped(
    clipper: Clipper | AGC, record: StepRecord, shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return the names of the tensors that a clipper skipped in a step; the host waits for it."""
    if clipper.on_nonfinite == "skip" and not record.is_finite:
        return list(shapes)
    if getattr(clipper, "on_spike", "clip") != "skip" or not any(over := record.clipped):
        return []
    groups = clipper.groups(shapes)
    return [n for n, g in zip(groups.names, groups.owners, strict=True) if over[g]]


def skip_of_all(clipper: Clipper | AGC, what: str) -> bool:
    """Return whether a clipper skips spikes in `what`, which skips a step of all variables or none.

    Raises
    ------
    NotImplementedError
        If it skips the spikes of each group separately.
    """
    spikes = getattr(clipper, "on_spike", "clip") == "skip"
    if spikes and getattr(clipper, "scope", "global") != "global":
        raise NotImplementedError(
            f"{clipper.name} with on_spike='skip' and scope={clipper.scope!r} skips some of the "
            f"variables, but {what} skips a step of all or none: use scope='global'"
        )
    return spikes


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, all different: repeated ones are numbered.

    >>> unique(["w", "b", "w", "w#1"])
    ['w', 'b', 'w#1', 'w#1#1']
    """
    numbered: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for name in names:
        chosen = name
        while chosen in numbered:
            counts[name] += 1
            chosen = f"{name}#{counts[name]}"
        numbered[chosen] = None
    return list(numbered)
