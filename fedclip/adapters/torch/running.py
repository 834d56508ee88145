# SPDX-License-Identifier: Apache-2.0
"""Which calls are running: seen from the inside, and also after one that has failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

__all__ = ["Steps", "is_within"]

_TORCHS_STEP = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_within(code: CodeType) -> bool:
    """Return whether this code is among the callers."""
    return any(frame.f_code is code for frame in _callers())


class Steps:
    """The steps of one optimizer that are running, of which one calls the next.

    A step that fails calls no hook at its end. It is not among the callers of later ones.
    """

    def __init__(self) -> None:
        self._running: list[FrameType] = []

    def begin(self) -> bool:
        """Return whether the step that begins is the outermost one."""
        self._forget_failed()
        outermost = not self._running
        torchs = (f for f in _callers() if f.f_code.co_filename == _TORCHS_STEP)
        self._running += [frame for frame in [next(torchs, None)] if frame is not None]
        return outermost

    def end(self) -> bool:
        """Return whether the step that ends is the outermost one."""
        if len(self._running) > 1:
            self._forget_failed()
        del self._running[-1:]
        return not self._running

    def _forget_failed(self) -> None:
        if self._running:
            callers = {*map(id, _callers())}
            self._running = [frame for frame in self._running if id(frame) in callers]
