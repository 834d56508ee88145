# SPDX-License-Identifier: Apache-2.0
"""Registers the plug-ins with declearn, whichever of the two packages is imported first.

Clippers do without declearn: their bases here take the place of declearn's, which take them for
their own (as virtual subclasses) as soon as declearn is there. The other plug-ins, those of
a server and of DP-SGD, are made of declearn's own classes, and register when they are imported.

If declearn has been imported, ``import fedclip`` registers the plug-ins at once. Otherwise it
waits: as soon as ``import declearn`` has run, and before anybody can use it, it registers them.
It does not do so while a module of fedclip is still being imported, because a plug-in may need
that module; registration then follows when that import ends.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

__all__ = ["PLUGINS", "OptiModule", "Regularizer", "enter", "register_when_possible"]

PLUGINS: dict[tuple[str, str], type] = {}
"""The classes that do without declearn's bases, by declearn's group and by name."""

_entering = False


class Plugin:
    """A class that declearn takes for one of its own, and that it need not be there for."""

    name: ClassVar[str]
    group: ClassVar[str]
    """The base class of declearn's that it stands for."""

    def __init_subclass__(cls, register: bool = True, **kwargs: object) -> None:
        """Register the class with declearn: now, or as soon as declearn is imported."""
        super().__init_subclass__(**kwargs)
        if not register:
            return
        if not getattr(cls, "name", None):
            raise TypeError(
                f"{cls.__name__} must define a class attribute 'name' with a value to be "
                "auto-registered."
            )
        if (cls.group, cls.name) in PLUGINS:
            raise KeyError(f"Name {cls.name!r} has already been registered.")
        PLUGINS[cls.group, cls.name] = cls
        if _entering:
            try:
                _enter(cls)
            except KeyError:
                del PLUGINS[cls.group, cls.name]
                raise

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self:
        """Return the plug-in with the parameters of a dict."""
        return cls(**config)

    @classmethod
    def from_specs(cls, name: str, config: dict[str, object]) -> Plugin:
        """Return declearn's plug-in of a name, with the parameters of a dict."""
        made: Plugin = _base_of(cls.group).from_specs(name, config)
        return made


if TYPE_CHECKING:
    from importlib.abc import Loader

    from declearn.optimizer.modules import OptiModule as Module
    from declearn.optimizer.regularizers import Regularizer as Regularizer

    OptiModule: TypeAlias = Module[Any]
else:

    class OptiModule(Plugin, register=False):
        """Stands for declearn's `OptiModule`."""

        group = "OptiModule"
        aux_name = None
        auxvar_cls = None

        def process_aux_var(self, aux_var: object) -> None:
            """Refuse a message: this module has no counterpart."""
            if aux_var is not None:
                raise NotImplementedError(f"{self.name} takes no message, got {aux_var!r:.80}")

    class Regularizer(Plugin, register=False):
        """Stands for declearn's `Regularizer`."""

        group = "Regularizer"


def _base_of(group: str) -> Any:
    from declearn.optimizer import modules, regularizers

    return {"OptiModule": modules.OptiModule, "Regularizer": regularizers.Regularizer}[group]


def _enter(cls: type[Plugin]) -> None:
    """Register a class with declearn, if it is not."""
    from declearn.utils import access_types_mapping, register_type

    if access_types_mapping(cls.group).get(cls.name) is not cls:
        register_type(cls, cls.name, cls.group)


def enter() -> None:
    """Register with declearn what waits for it, and from now on each class when it is defined."""
    global _entering
    _entering = True
    for group, stand_in in (("OptiModule", OptiModule), ("Regularizer", Regularizer)):
        _base_of(group).register(stand_in)
    for cls in list(PLUGINS.values()):
        try:
            _enter(cls)
        except KeyError as error:
            # Not an error: it would keep declearn from being imported.
            warnings.warn(
                f"{cls.__module__}.{cls.__qualname__} is not registered with declearn: "
                f"{error.args[0]} Give it another name",
                RuntimeWarning,
                stacklevel=2,
            )


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
        """Return what the next finder finds, with a loader that tells when the module has run."""
        finders = list(sys.meta_path)
        # Another thread may have registered in the meantime.
        if self not in finders or (name != "declearn" and name.partition(".")[0] != "fedclip"):
            return None
        for finder in finders[finders.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                loader: Any = spec.loader and _Watched(spec.loader, self)
                spec.loader = loader
                return spec
        return None

    def run(self, loader: Loader, module: ModuleType) -> None:
        """Run a module; then register, if declearn is imported and no other import is under way."""
        name = module.__name__
        if name != "declearn":
            self.under_way.add(name)
        try:
            loader.exec_module(module)
        finally:
            self.under_way.discard(name)
        ready = name == "declearn" or _imported("declearn")
        if not ready or self.under_way:
            return
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another call has registered, or is doing so
            return
        try:
            self.register()
        except (ImportError, RuntimeError):
            # Another thread may be importing a module of fedclip, and wait for declearn, which
            # this thread holds. It goes on when this one returns, and registers at its end.
            if not self.under_way:
                raise
            sys.meta_path.insert(0, self)


class _Watched:
    """The loader of one module, which stands aside as soon as that module runs."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its real loader, and run it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._watch.run(self._loader, module)

    def __getattr__(self, name: str) -> object:
        # The module itself, its source, path and resources come from the real loader.
        return getattr(self._loader, name)
