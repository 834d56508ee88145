# SPDX-License-Identifier: Apache-2.0
"""What a clipper knows, as plain values and tensors for checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fedclip import states
from fedclip.adapters.owner import fitting
from fedclip.errors import FedclipWarning
from fedclip.modules.agc import AGC
from fedclip.modules.base import Clipper
from fedclip.states import Fields

__all__ = ["get_state", "set_state"]


def get_state(clipper: Clipper | AGC) -> Fields:
    """Return the statistics and records: numbers, strings, lists and tensors.

    ``torch.load(weights_only=True)`` reads them. `AGC` has none: its limits follow from the
    weights.
    """
    if isinstance(clipper, AGC):
        return {}
    found = clipper.get_state()
    found["arrays"] = states.each(found["arrays"], torch.from_numpy)
    return found


def set_state(
    clipper: Clipper | AGC,
    state: Mapping[str, Any] | None,
    owner: Mapping[str, str] | None = None,
) -> None:
    """Take over what `get_state` returned; None, from before there was a clipper, starts anew.

    Parameters
    ----------
    owner
        Of a clipper that is attached: the model, optimizer and configuration that the state has
        to be of (see `fedclip.adapters.owner`).

    Raises
    ------
    StateError
        If the state is another clipper's or model's, or damaged. The clipper then keeps its old
        state.
    """
    if isinstance(clipper, AGC):
        return
    if state is None:
        warnings.warn(
            f"the checkpoint holds nothing for {clipper.name}, which starts anew",
            FedclipWarning,
            stacklevel=3,
        )
        clipper.reset()
        return
    if isinstance(state, Mapping) and isinstance(state.get("arrays"), Mapping):
        state = {**state, "arrays": states.each(state["arrays"], _array)}
    if owner is not None and fitting(clipper, state, dict(owner)) is None:
        clipper.reset()
        return
    clipper.set_state(dict(state))


def _array(value: object) -> object:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
