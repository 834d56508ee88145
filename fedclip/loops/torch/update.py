# SPDX-License-Identifier: Apache-2.0
"""A clipper that acts on what an optimizer does to the weights.

::

    step()           note the weights, the optimizer's own step, clip the change of the weights
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedclip.loops.clippers import Spec, clipped
from fedclip.loops.torch.handle import ClipHandle, attached
from fedclip.loops.torch.names import Parameters


class UpdateHandle(ClipHandle):
    """A clipper of updates; made by `attach_update`."""

    _before: Mapping[str, torch.Tensor] = {}

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the weights."""
        self._before = {n: p.detach().clone() for n, p in self._resolve(optimizer).items()}

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the gradients are the optimizer's."""

    def _end(self) -> None:
        """Clip the change of the weights."""
        before, self._before = self._before, {}
        with torch.no_grad():
            change = {name: self._parameters[name] - weight for name, weight in before.items()}
            outputs = clipped(self.clipper, change, lambda: before, None, self._outputs)
            for name, weight in before.items() if outputs is not change else ():
                self._parameters[name].copy_(weight + outputs[name])


def attach_update(
    optimizer: torch.optim.Optimizer,
    clipper: Spec,
    parameters: Parameters | None = None,
) -> UpdateHandle:
    """Clip the change of the weights in every ``optimizer.step()``.

    `attach` clips the gradients that enter the optimizer; this clips the resulting change. It
    includes momentum, adaptive step sizes, weight decay and the learning rate, and limits are in
    units of the weights. It copies the weights during each step. Otherwise it works like `attach`.

    Examples
    --------
    >>> import torch
    >>> from fedclip import NormClip
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.Adam(layer.parameters(), lr=10.0)
    >>> before = layer.weight.detach().clone()
    >>> with attach_update(optimizer, NormClip(0.5), layer) as handle:
    ...     layer(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> f"{float(handle.last):.2f} {float(torch.dist(layer.weight.detach(), before)):.2f}"
    '14.14 0.50'
    """
    return attached(UpdateHandle, optimizer, clipper, parameters)
