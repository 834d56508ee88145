# SPDX-License-Identifier: Apache-2.0
"""The bases of clippers, which declearn takes for its own modules and regularizers.

Clippers do without declearn. `fedclip.engines.declearn.registration` makes these bases virtual
subclasses of declearn's and registers each clipper, as soon as declearn is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar

from fedclip.core.parameters import Configured, parameter
from fedclip.errors import nearest

# A declearn Vector, of the framework that the caller uses.
V = TypeVar("V")

# The clippers by declearn's group and by name.
PLUGINS: dict[tuple[str, str], type[Plugin]] = {}

_engines: list[Callable[[type[Plugin]], None]] = []


class Plugin:
    """A class that declearn registers; declearn need not be installed.

    Attributes
    ----------
    group : str
        The name of declearn's base class.
    """

    name: ClassVar[str]
    group: ClassVar[str]

    def __init_subclass__(cls, register: bool = True, **kwargs: object) -> None:
        """Register the class with declearn: now, or as soon as declearn is imported."""
        super().__init_subclass__(**kwargs)
        if not register:
            return
        if not getattr(cls, "name", None):
            raise TypeError(f"{cls.__name__} needs a class attribute 'name' to be registered")
        if (cls.group, cls.name) in PLUGINS:
            raise KeyError(f"Name {cls.name!r} has already been registered.")
        for register_class in _engines:
            register_class(cls)
        PLUGINS[cls.group, cls.name] = cls

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self:
        """Return the plug-in with the parameters of a dict."""
        return cls(**config)

    @classmethod
    def from_specs(cls, name: str, config: dict[str, object]) -> Plugin:
        """Return the clipper of a name, with the parameters of a dict."""
        if (cls.group, name) not in PLUGINS:
            names = [known for group, known in PLUGINS if group == cls.group]
            raise KeyError(f"no clipper is named {name!r}{nearest(name, names)}")
        return PLUGINS[cls.group, name].from_config(config)


if TYPE_CHECKING:
    # Type checkers see declearn's classes, which optimizers take.
    from declearn.optimizer.modules import OptiModule as Module
    from declearn.optimizer.regularizers import Regularizer as Regularizer

    OptiModule: TypeAlias = Module[Any]
else:

    class OptiModule(Plugin, register=False):
        """Stands for declearn's `OptiModule`."""

        group = "OptiModule"
        aux_name: ClassVar[str | None] = None
        auxvar_cls: ClassVar[type | None] = None

        def process_aux_var(self, aux_var: object) -> None:
            """Refuse a message: this module has no server module."""
            if aux_var is not None:
                raise NotImplementedError(f"{self.name} takes no message, got {aux_var!r:.80}")

    class Regularizer(Plugin, register=False):
        """Stands for declearn's `Regularizer`."""

        group = "Regularizer"


def register_with(register_class: Callable[[type[Plugin]], None]) -> None:
    """Call a function with each plug-in that is defined from now on."""
    if register_class not in _engines:
        _engines.append(register_class)


try:
    VERSION = metadata.version("fedclip")
except metadata.PackageNotFoundError:  # not installed: run from its folder
    VERSION = "unknown"


def other(theirs: object) -> str:
    """Say that something is of another fedclip than this one; "" if it is not."""
    if not isinstance(theirs, str) or theirs == VERSION:
        return ""
    return f"; it is of fedclip {theirs!s:.30}, and this is {VERSION}: install one on all nodes"


class Versioned(Configured):
    """Base of plug-ins that a server sets up for its clients, with its own version of fedclip."""

    def __new__(cls, *args: object, **config: object) -> Self:
        """Refuse unknown parameters, and say whose they may be."""
        try:
            return super().__new__(cls, *args, **config)
        except TypeError as exc:
            raise TypeError(f"{exc}{other(config.get('fedclip'))}") from None

    fedclip: str = parameter(lambda **_: VERSION, default=VERSION)
    """The version that wrote the configuration: this one."""
