# SPDX-License-Identifier: Apache-2.0
"""Clippers as pure functions of tensors, for compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedclip.adapters.shared import Spec, check_compilable, clipper_of, start
from fedclip.arrays.torch import TorchBackend
from fedclip.modules import AGC
from fedclip.scopes import Groups
from fedclip.transforms import carried, clip_on_device

_PLAIN = TorchBackend()


class PureClipping:
    """A clipper as two pure functions of tensors, for ``torch.compile`` and `torch.func`.

    ::

        pure = PureClipping(clipper)
        state = pure.init(gradients)
        gradients, state = torch.compile(pure.update, fullgraph=True)(gradients, state)

    The state holds tensors: a few numbers for each group, and for clippers that keep the past of
    each element as much as the model; save it with the model. It starts from the clipper's
    statistics, and never changes the clipper.

    Parameters
    ----------
    clipper
        A clipper with ``on_nonfinite`` "skip" or "propagate". Of DTensors, one by norms or
        values: others need the whole arrays, which `clip_` gathers. `AGC` also needs the weights:
        ``update(gradients, state, weights)``.
    """

    def __init__(self, clipper: Spec) -> None:
        self.clipper = clipper_of(clipper)
        check_compilable(self.clipper)
        # torch.compile can look into a table, and not follow the matching of patterns.
        self._known: dict[tuple[str, ...], Groups] = {}

    def init(self, gradients: Mapping[str, torch.Tensor]) -> Any:
        """Return the state before the first step, on the device of the gradients."""
        groups = self._known[tuple(gradients)] = self._groups(gradients)
        if isinstance(self.clipper, AGC):
            return ()
        first, kept = start(self.clipper, groups), self.clipper.get_state()["arrays"]
        return carried(self.clipper.transform(groups), gradients, groups, _PLAIN, first, kept)

    def update(
        self,
        gradients: Mapping[str, torch.Tensor],
        state: Any,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return the clipped gradients, by name, and the state after the step."""
        groups = self._known.get(tuple(gradients)) or self._groups(gradients)
        backend, clipper = _backend(gradients), self.clipper
        if not isinstance(clipper, AGC):
            transform = clipper.transform(groups)
        elif weights is None:
            raise TypeError("agc needs the weights: update(gradients, state, weights)")
        else:
            own = [weights[name].detach() for name in groups.names]
            transform = clipper.device_transform(own, groups, backend)
        if backend.partial and not transform.runs_on_parts:
            raise NotImplementedError(
                f"{clipper.name} needs whole arrays, and a DTensor is in parts: use clip_, which "
                "gathers them, or a clipper by norms or by values"
            )
        clipped, step = clip_on_device(
            transform, gradients, groups, backend, state, clipper.on_nonfinite
        )
        return clipped, step.state

    def _groups(self, gradients: Mapping[str, torch.Tensor]) -> Groups:
        # A state knows no names: its groups are in one order, whatever that of the gradients.
        return self.clipper.groups({name: gradients[name].shape for name in sorted(gradients)})


def _backend(gradients: Mapping[str, torch.Tensor]) -> TorchBackend:
    if all(type(gradient).__name__ != "DTensor" for gradient in gradients.values()):
        return _PLAIN
    from fedclip.arrays.sharded import ShardedBackend

    return ShardedBackend(gradients.values())
