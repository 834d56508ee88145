# SPDX-License-Identifier: Apache-2.0
"""What fedclip raises and warns with: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeAlias

__all__ = [
    "FedclipWarning",
    "NonFiniteError",
    "Problem",
    "StateError",
    "ToolError",
    "Unchecked",
    "nearest",
]

Unchecked: TypeAlias = Any
"""What was given, or came from a file or over a wire: anything, until it has been looked at."""


@dataclass(frozen=True)
class Problem:
    """One reason why something does not work; a check returns a list of them, empty if all is well.

    Parameters
    ----------
    text : str
        What was given, what is allowed, what to do.
    where : str
        The place, such as a TOML section; empty if there is only one.

    Examples
    --------
    >>> str(Problem("lrate must be > 0, got -1.0", where="[optim]"))
    '[optim] lrate must be > 0, got -1.0'
    """

    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where} {self.text}".lstrip()


class FedclipWarning(UserWarning):
    """Something that the user should act on, said at most once a round."""


class NonFiniteError(ValueError, RuntimeError):
    """A gradient holds NaN or infinity and ``on_nonfinite="raise"``; names the tensors.

    It is a `RuntimeError` too, as loops around torch's `clip_grad_norm_` catch one.
    """


class ToolError(RuntimeError):
    """A command cannot do what was asked for; the message says why.

    Parameters
    ----------
    message : object
        What was given, what is allowed, what to do.
    code : int
        The exit code of the command.
    """

    def __init__(self, message: object, code: int = 1) -> None:
        super().__init__(str(message))
        self.code = code


class StateError(KeyError, ValueError):
    """A state that a clipper cannot load; the clipper keeps the state that it had.

    It is a `KeyError` so that declearn's `Optimizer.set_state` restores the other modules
    too, and a `ValueError` because that is what most of its causes are.
    """

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would put quotes round a sentence.
        return str(self.args[0]) if self.args else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, else nothing.

    >>> nearest("norm", ["normalize", "ema-norm-clip", "norm-clip"])
    "; did you mean 'norm-clip'?"
    """
    name, names = str(name), sorted(known, key=len)
    words = _words(name)
    match = (
        difflib.get_close_matches(name, names, n=1, cutoff=0.8)
        or [n for n in names if words <= _words(n) or _words(n) <= words]
        or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    )
    return f"; did you mean {match[0]!r}?" if match else ""


def _words(name: str) -> set[str]:
    return set(name.lower().replace("_", "-").split("-"))


def shown(value: object) -> str:
    """Return the repr of a value, shortened; Python refuses to write an int of 5,000 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."


@contextmanager
def needing(module: str, what: str) -> Iterator[None]:
    """Say what a module of fedclip needs, and how to install it, where its imports fail."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{module} needs {what}", name=error.name) from error


OF_CLI = ("typer", "click", "rich", "tomlkit", "websockets")
"""The packages of the extra `cli`."""

NEEDS_CLI = "needs typer, rich, tomlkit and websockets: pip install 'fedclip[cli]'"


DECLEARN = "declearn>=2.8,<3"
"""The versions with which clippers work."""

FEDERATIONS = "declearn>=2.9.1,<2.10"
"""The versions whose internals the network, the clients and the commands of fedclip use."""


def fits(needed: str) -> bool:
    """Whether the installed declearn is of the versions in `DECLEARN` or `FEDERATIONS`."""
    low, high = (_numbers(limit) for limit in re.findall(r"[\d.]+", needed))
    return low <= _numbers(version("declearn") or "") < high


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def requirement(what: str, needed: str) -> str:
    """Return the sentence that says which declearn something needs, and how to install it."""
    installed = version("declearn")
    other = f", and declearn {installed} is installed" if installed and not fits(needed) else ""
    return f"{what} needs {needed}{other}: pip install '{needed}'"


def require_federations(what: str) -> None:
    """Raise ImportError if the installed declearn has other internals than those of 2.9."""
    if not fits(FEDERATIONS):
        raise ImportError(requirement(what, FEDERATIONS), name="declearn")


LOOPS = {
    "torch": "PureClipping attach attach_update clip_ clip_grad_norm_",
    "jax": "as_optax",
    "tensorflow": "CompiledClipper clip",
    "keras": "ClipHistory ClippedOptimizer",
    "lightning": "",
    "transformers": "ClipCallback",
}
"""What people look for in the package itself, and where it is in `fedclip.loops`."""


def elsewhere(name: str, known: Sequence[str] = ()) -> str:
    """Return where a loop, or something in one, is; or the known name closest to a name."""
    ways = {loop: f"import fedclip.loops.{loop}" for loop in LOOPS}
    for loop, names in LOOPS.items():
        ways |= {n: f"from fedclip.loops.{loop} import {n}" for n in names.split()}
    if name in ways:
        return f": {ways[name]}"
    match = difflib.get_close_matches(name, [*known, *ways], n=1)
    return f"; did you mean {ways.get(match[0], match[0])!r}?" if match else ""


def public_names(module: str) -> Callable[[], list[str]]:
    """Return the `__dir__` of a module: it shows the names in its `__all__`."""
    return lambda: sorted(sys.modules[module].__all__)


def part_of(package: str, name: str, known: Sequence[str] = ()) -> ModuleType:
    """Return a module of a package, or say where what it has not can be found."""
    if not name.startswith("_"):
        try:
            if find_spec(f"{package}.{name}"):
                return import_module(f"{package}.{name}")
        except ImportError as error:
            if error.name != f"{package}.{name}":
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}{elsewhere(name, known)}")
