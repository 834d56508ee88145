# SPDX-License-Identifier: Apache-2.0
"""What several adapters do with a clipper: take it, hold it, call it, and tell what it did."""

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
"""An object of the trainer that calls, as it has it."""

Spec: TypeAlias = Clipper | AGC | float | str | tuple[str, Mapping[str, object]]
"""A clipper, a fixed limit of the norm, or a name or (name, config) as in a configuration."""


def clipper_of(spec: Spec) -> Clipper | AGC:
    """Return a clipper, made of its limit, or name and configuration, if it is not one yet."""
    if isinstance(spec, int | float):
        return NormClip(spec)
    match (spec, {}) if isinstance(spec, str) else spec:
        case (str(name), Mapping() as config):
            known = by_name()
            if name not in known:
                raise ValueError(f"no clipper is called {name!r}{nearest(name, known)}")
            return check_clipper(known[name](**config))
    return check_clipper(spec)


def check_clipper(given: object) -> Clipper | AGC:
    """Return a clipper; raise a TypeError for what is none."""
    if isinstance(given, (Clipper, AGC)):
        return given
    raise TypeError(
        f"{given!r:.80} is not a clipper of fedclip: give one, such as NormClip(1.0), made once, "
        "before the first step"
    )


def clipped(
    clipper: Clipper | AGC,
    gradients: Mapping[str, Array],
    weights: Callable[[], Mapping[str, Array]],
    backend: Backend | None = None,
    outputs: Outputs | None = None,
) -> Mapping[str, Array]:
    """Return the gradients, clipped in eager code.

    Only `agc` asks for the weights, and for the axes of the outputs of layers.
    """
    if isinstance(clipper, AGC):
        return clipper.clip(gradients, weights(), backend=backend, outputs=outputs)
    return clipper.clip(gradients, backend=backend)


def skips(clipper: Clipper | AGC) -> bool:
    """Whether a clipper may skip steps, not finite ones or spikes."""
    return clipper.on_nonfinite == "skip" or getattr(clipper, "on_spike", "clip") == "skip"


def skipped(
    clipper: Clipper | AGC, record: StepRecord, shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return the names of the tensors whose step a clipper has skipped; the host waits for it."""
    if clipper.on_nonfinite == "skip" and not record.is_finite:
        return list(shapes)
    if getattr(clipper, "on_spike", "clip") != "skip" or not any(over := record.clipped):
        return []
    groups = clipper.groups(shapes)
    return [n for n, g in zip(groups.names, groups.owners, strict=True) if over[g]]


def skip_of_all(clipper: Clipper | AGC, what: str) -> bool:
    """Return whether spikes are skipped; `what` skips a step for all variables, or none.

    Raises
    ------
    NotImplementedError
        If each group has spikes of its own.
    """
    spikes = getattr(clipper, "on_spike", "clip") == "skip"
    if spikes and getattr(clipper, "scope", "global") != "global":
        raise NotImplementedError(
            f"{clipper.name} with on_spike='skip' and scope={clipper.scope!r} would skip the step "
            f"of some variables, and {what} skips that of all or none: use scope='global'"
        )
    return spikes


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, all different: those that come again are numbered.

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
