# SPDX-License-Identifier: Apache-2.0
"""Where `sample-clip` stands in an optimizer, and what stands before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from declearn.model.api import Vector
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import OptiModule

from fedclip.dpsgd.sample_clip import SampleClip, unfit
from fedclip.privacy.maps import Shapes
from fedclip.scopes import Groups

__all__ = ["Place", "place_of"]

Modules = Sequence[OptiModule[Any]]


@dataclass(frozen=True)
class Place:
    """What is done to records, and what to their noisy sum.

    Attributes
    ----------
    settings
        The optimizer's own `sample-clip`, or a new one if it has none.
    before, after
        The modules for each record, and those for the update.
    groups
        Which tensors share a norm.
    """

    settings: SampleClip
    before: Modules
    after: list[OptiModule[Any]]
    groups: Groups

    def each(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Apply what stands before `sample-clip` to the gradient of one record."""
        gradient: Vector[Any] = NumpyVector(dict(arrays))
        for module in self.before:
            gradient = module.run(gradient)
        return gradient.coefs


def place_of(modules: Modules, shapes: Shapes, max_norm: float) -> Place:
    """Find `sample-clip`, and refuse what can not stand before it, or another bound.

    Raises
    ------
    ValueError
        If there are two, or what stands before is not safe for single records, or its max_norm
        is another one.
    """
    found = [i for i, module in enumerate(modules) if isinstance(module, SampleClip)]
    if len(found) > 1:
        raise ValueError("sample-clip stands in client_opt more than once: leave one")
    place = found[0] if found else -1
    marker = modules[place] if found else None
    settings = marker if isinstance(marker, SampleClip) else SampleClip()
    if settings.max_norm not in (None, max_norm):
        raise ValueError(
            f"sample-clip has max_norm {settings.max_norm!r}, and the server's sclip_norm is "
            f"{max_norm!r}: write the same, or leave max_norm out"
        )
    groups = settings.clipping.groups([*shapes])
    before = modules[: max(place, 0)]
    if why := unfit(before, shapes):
        raise ValueError(why)
    return Place(settings, before, [*modules[place + 1 :]], groups)
