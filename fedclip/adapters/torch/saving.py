# SPDX-License-Identifier: Apache-2.0
"""More in the state of an optimizer, and of those that hold it, than they know of.

::

    state_dict()        the optimizer's own, and what is ours unless it is inside
    load_state_dict()   the optimizer's own, with the rest; in the end of the outermost one, ours

Torch's hooks would not do: a class may save or load without them, and what holds an optimizer may
give it only what it knows of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fedclip.states import Fields

__all__ = ["MARK", "Saving", "is_in"]

MARK = "fedclip"
"""In the first group of parameters of a state: there were statistics of a clipper."""


class Saving:
    """Saves and loads states by key with optimizers, whose methods are replaced, not the class's.

    Parameters
    ----------
    save
        Returns the states, by key.
    load
        Takes the states that were there, of all keys that it asks for.
    """

    def __init__(
        self, save: Callable[[], dict[str, Fields]], load: Callable[[Mapping[str, Fields]], None]
    ) -> None:
        self._save, self._load = save, load
        self._loaded: dict[str, Fields] | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Save and load with an optimizer too."""
        own = weakref.ref(optimizer)
        self._optimizers.append(own)
        vars(optimizer)["state_dict"] = partial(self._saved, own)
        vars(optimizer)["load_state_dict"] = partial(self._loads, own)

    def end(self) -> None:
        """Leave the optimizers as they were."""
        for own in self._optimizers:
            if (optimizer := own()) is not None:
                vars(optimizer).pop("state_dict", None)
                vars(optimizer).pop("load_state_dict", None)

    def _saved(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        found, ours = type(own()).state_dict(own(), *args, **kwargs), self._save()
        # What loads this and does not know of clippers keeps the parameters of groups.
        for group in found.get("param_groups", [])[:1] if ours else ():
            group[MARK] = True
        return found if is_in(found, ours) else {**found, **ours}

    def _loads(self, own: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        outermost, rest = self._loaded is None, dict(state_dict)
        loaded = self._loaded = {} if self._loaded is None else self._loaded
        loaded |= {key: rest.pop(key) for key in state_dict if str(key).startswith("fedclip:")}
        try:
            found = type(own()).load_state_dict(own(), rest, *args, **kwargs)
        finally:
            if outermost:
                self._loaded = None
        for group in own().param_groups:
            group.pop(MARK, None)
        if outermost:
            self._load(loaded)
        return found


def is_in(saved: object, keys: Iterable[str]) -> bool:
    """Return whether all these keys are somewhere in a nested dict."""
    return isinstance(saved, Mapping) and all(
        key in saved or any(is_in(value, [key]) for value in saved.values()) for key in keys
    )
