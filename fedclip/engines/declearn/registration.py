# SPDX-License-Identifier: Apache-2.0
"""Registers the plug-ins with declearn, whichever of the two packages is imported first.

The plug-ins of a server and of DP-SGD are made of declearn's classes, and register when they are
imported. Clippers do without declearn (see `fedclip.core.plugins`): here their bases become
virtual subclasses of declearn's.

If declearn has been imported, ``import fedclip`` registers the plug-ins at once. Otherwise it
waits: as soon as ``import declearn`` has run, and before anybody can use it, it registers them.
It does not do so while a module of fedclip is still being imported, because a plug-in may need
that module; registration then follows when that import ends.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fedclip.core.messages import Message
from fedclip.core.plugins import PLUGINS, OptiModule, Plugin, Regularizer, register_with


def _enter(cls: type[Plugin]) -> None:
    """Register a class with declearn, and how it writes messages, unless it is registered."""
    utils: Any = import_module("declearn.utils")
    if utils.access_types_mapping(cls.group).get(cls.name) is cls:
        return
    utils.register_type(cls, cls.name, cls.group)
    if not issubclass(cls, Message):
        return
    name = f"AuxVar>{cls.name}"
    if hasattr(utils, "add_json_support"):  # declearn 2.8 has one format
        utils.add_json_support(cls, cls.to_dict, cls.from_dict, name=name)
        return
    add: Any = import_module("declearn.utils.serialize").add_serialization_support
    for fmt in ("msgpack", "json"):
        add(cls, fmt=fmt, encode=cls.to_dict, decode=cls.from_dict, name=name)


def enter() -> None:
    """Register with declearn what waits for it, and from now on each class when it is defined."""
    register_with(_enter)
    optimizer: Any = import_module("declearn.optimizer")
    optimizer.modules.OptiModule.register(OptiModule)
    optimizer.regularizers.Regularizer.register(Regularizer)
    optimizer.modules.AuxVar.register(Message)
    for cls in list(PLUGINS.values()):
        try:
            _enter(cls)
        except KeyError as error:
            # Not an error: it would keep declearn from being imported.
            text = f"{cls.__qualname__} is not registered with declearn: {error.args[0]}"
            warnings.warn(f"{text} Give it another name", RuntimeWarning, stacklevel=2)


def register_when_possible(register: Callable[[], None]) -> None:
    """Call `register` now if declearn has been imported, and otherwise as soon as it has."""
    if sys.modules.get("declearn") is not None:
        import declearn  # noqa: F401  (waits, where another thread is importing it)
    if _imported("declearn"):
        register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(register))


def _imported(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _Watch:
    """A finder that finds nothing itself: it adds a step to the import of declearn and fedclip."""

    def __init__(self, register: Callable[[], None]) -> None:
        self.register = register
        self.under_way: set[str] = set()
        """Modules of fedclip that are being imported, in any thread."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the next finder finds, whose loader calls `run` when the module has run."""
        finders = list(sys.meta_path)
        # Another thread may have registered in the meantime.
        if self not in finders or (name != "declearn" and name.partition(".")[0] != "fedclip"):
            return None
        for finder in finders[finders.index(self) + 1 :]:
            if (spec := finder.find_spec(name, path, target)) is not None:
                loader: Any = spec.loader
                if loader is not None:
                    loader.exec_module = partial(self.run, loader)
                return spec
        return None

    def run(self, loader: Any, module: ModuleType) -> None:
        """Run a module; then register, if declearn is imported and no other import is under way."""
        name = module.__name__
        del loader.exec_module  # the real one is that of its class
        if name != "declearn":
            self.under_way.add(name)
        try:
            loader.exec_module(module)
        finally:
            self.under_way.discard(name)
        ready = name == "declearn" or _imported("declearn")
        # If it is not in the list, another call has registered, or is doing so.
        if not ready or self.under_way or self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        try:
            self.register()
        except (ImportError, RuntimeError):
            # Another thread may be importing a module of fedclip, and wait for declearn, which
            # this thread holds. It goes on when this one returns, and registers at its end.
            if not self.under_way:
                raise
            sys.meta_path.insert(0, self)
