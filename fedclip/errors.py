# SPDX-License-Identifier: Apache-2.0
"""What fedclip raises and warns with: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["FedclipWarning", "NonFiniteError", "StateError", "nearest"]


class FedclipWarning(UserWarning):
    """Something that the user should act on, said at most once a round."""


class NonFiniteError(ValueError, RuntimeError):
    """A gradient holds NaN or infinity and ``on_nonfinite="raise"``; names the tensors.

    It is a `RuntimeError` too, as loops around torch's `clip_grad_norm_` catch one.
    """


class StateError(KeyError, ValueError):
    """A state that a clipper can not load; the state it had stays in place.

    It is a `KeyError` so that declearn's `Optimizer.set_state` restores the other modules
    too, and a `ValueError` because that is what most of its causes are.
    """

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would put quotes round a sentence.
        return str(self.args[0]) if self.args else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, else nothing."""
    match = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def shown(value: Any) -> str:
    """Return the repr of a value, shortened; Python refuses to write an int of 5,000 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."
