# SPDX-License-Identifier: Apache-2.0
"""Where `sample-clip` stands in an optimizer, and what stands before and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from declearn.model.sklearn import NumpyVector

from fedclip.dpsgd.persample import Arrays
from fedclip.dpsgd.sample_clip import SampleClip, unfit
from fedclip.federation.generics import AnyModule, AnyVector
from fedclip.privacy.maps import Shapes
from fedclip.scopes import Groups

__all__ = ["Place", "place_of"]

Modules = Sequence[AnyModule]


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
    after: list[AnyModule]
    groups: Groups

    def each(self) -> Callable[[Arrays], Arrays] | None:
        """Return what stands before `sample-clip`, for single records; None if nothing does.

        What runs is a copy that nobody else has: the optimizer's own modules, whose state is
        written to checkpoints, never see a record, nor what was recorded of it.
        """
        if not self.before:
            return None
        modules = copy.deepcopy(self.before)

        def run(arrays: Arrays) -> Arrays:
            gradient: AnyVector = NumpyVector(dict(arrays))
            for module in modules:
                gradient = module.run(gradient)
            return gradient.coefs

        return run


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
