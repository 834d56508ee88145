# SPDX-License-Identifier: Apache-2.0
"""Clippers in plain PyTorch loops, on one process or on many.

Clip once for each optimizer step: after ``backward()`` (the last one, if you accumulate
gradients), after ``scaler.unscale_(optimizer)`` under AMP, and before ``optimizer.step()``.
`attach` clips at the right moment automatically.
"""

from fedclip.errors import needing, public_names

with needing(__name__, "PyTorch: pip install torch"):
    import torch as torch

from fedclip.loops.torch.clip import Parameters, clip_, clip_grad_norm_
from fedclip.loops.torch.handle import (
    ClipHandle,
    UpdateHandle,
    attach,
    attach_update,
    get_state,
    handles,
    set_state,
)
from fedclip.loops.torch.pure import PureClipping, private_gradients

__all__ = [
    "ClipHandle",
    "Parameters",
    "PureClipping",
    "UpdateHandle",
    "attach",
    "attach_update",
    "clip_",
    "clip_grad_norm_",
    "get_state",
    "handles",
    "private_gradients",
    "set_state",
]

__dir__ = public_names(__name__)
