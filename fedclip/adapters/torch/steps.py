# SPDX-License-Identifier: Apache-2.0
"""Which steps of an optimizer are running: one may call the next, and one may have failed.

Of the callers it asks only which they are. Nothing else tells of a step that has failed: it calls
no hook at its end, and is not among the callers of later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Steps", "is_within", "uncompiled"]

P = ParamSpec("P")
T = TypeVar("T")
_TORCHS_STEP = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, which stays outside of the graphs of ``torch.compile``."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Used as a decorator, it would import the compiler with this module.
            disable: Any = torch.compiler.disable
            outside: Callable[P, T] = disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _callers() -> Iterator[FrameType]:
    return (frame for frame, _ in walk_stack(None))


def is_within(code: CodeType) -> bool:
    """Return whether this code is among the callers."""
    return any(frame.f_code is code for frame in _callers())


class Steps:
    """The steps of one optimizer that are running, of which one calls the next."""

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
