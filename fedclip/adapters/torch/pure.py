# SPDX-License-Identifier: Apache-2.0
"""Clippers as pure functions of tensors, for compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedclip.adapters.shared import check_compilable, start
from fedclip.arrays.torch import TorchBackend
from fedclip.modules import Clipper
from fedclip.scopes import resolve
from fedclip.transforms import clip_on_device


class PureClipping:
    """A clipper as two pure functions of tensors, for ``torch.compile`` and `torch.func`.

    ::

        pure = PureClipping(clipper)
        state = pure.init(gradients)
        gradients, state = torch.compile(pure.update, fullgraph=True)(gradients, state)

    The state is a NamedTuple of small tensors; save it with the model. It starts from the
    clipper's statistics, and never changes the clipper.

    Parameters
    ----------
    clipper
        A clipper by L2 norms or values, with ``on_nonfinite`` "skip" or "propagate".
    """

    def __init__(self, clipper: Clipper) -> None:
        check_compilable(clipper)
        self.clipper = clipper
        self._backend = TorchBackend()

    def init(self, gradients: Mapping[str, torch.Tensor]) -> Any:
        """Return the state before the first step, on the device of the gradients."""
        groups = resolve(self.clipper.scope, self.clipper.exclude, list(gradients))
        first = start(self.clipper, groups)
        like = next(iter(gradients.values()))
        columns = (self._backend.asarray(np.atleast_1d(column), like=like) for column in first)
        return type(first)(*columns)

    def update(
        self, gradients: Mapping[str, torch.Tensor], state: Any
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return the clipped gradients, by name, and the state after the step."""
        groups = resolve(self.clipper.scope, self.clipper.exclude, list(gradients))
        clipped, step = clip_on_device(
            self.clipper.transform(groups),
            gradients,
            groups,
            self._backend,
            state,
            self.clipper.on_nonfinite,
        )
        return clipped, step.state
