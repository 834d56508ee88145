# SPDX-License-Identifier: Apache-2.0
"""The docstrings of clippers, put together when they are first read.

A parameter's entry comes from its declaration, its meaning from the docstring below that.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

from fedclip.core.parameters import Configured, Parameter, choice


class Documented(Configured):
    """Base of plug-ins whose docstrings are completed."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Complete the docstring of a class with a name, when it is first read."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "name") and (text := cls.__dict__.get("__doc__")):
            cls.__doc__ = Docstring(text)  # type: ignore[assignment]


class Docstring:
    """In the place of a class's docstring: makes it from the text that is written there."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get__(self, instance: object, cls: object) -> str:
        """Return the whole docstring."""
        cls.__doc__ = docstring_of(cls, self.text)
        return str(cls.__doc__)


def docstring_of(cls: Any, text: str) -> str:
    """Return a clipper's docstring, with its parameters after what comes before other sections.

    A clipper without additional parameters has the sections of its base.
    """
    text = inspect.cleandoc(text)
    if not cls.parameters:
        return text
    (head, sections), base = _sections(text), cls.__base__
    if cls.parameters == base.parameters and hasattr(base, "name"):
        sections = {**_sections(base.__doc__)[1], **sections}
    else:
        words = meanings(cls)
        entries = [_entry(name, p, words.get(name, "")) for name, p in cls.parameters.items()]
        sections = {"Parameters": "\n".join(["Parameters\n----------", *entries]), **sections}
    return "\n\n".join([head, *sections.values()]).replace("{name}", cls.name)


def meanings(cls: type) -> dict[str, str]:
    """Return what the docstrings below the declarations of a class and its bases say."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= _written(base)
    return texts


@cache
def _written(cls: type) -> dict[str, str]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # typed in, or without its source
        return {}
    pairs = pairwise(getattr(tree, "body", ()))
    return {
        ast.unparse(field.target if isinstance(field, ast.AnnAssign) else field.targets[0]): (
            " ".join(str(below.value.value).split())
        )
        for field, below in pairs
        if isinstance(field, (ast.AnnAssign, ast.Assign))
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _entry(name: str, parameter: Parameter, meaning: str) -> str:
    """Return the lines of a numpydoc docstring."""
    default = parameter.default
    shown = f'"{default}"' if isinstance(default, str) else repr(default)
    shown_default = "" if default is inspect.Parameter.empty else f", default={shown}"
    lines = textwrap.wrap(meaning, 92, break_on_hyphens=False)
    return "\n    ".join([f"{name} : {kind_of(parameter)}{shown_default}", *lines])


def kind_of(parameter: Parameter) -> str:
    """Return the type of a parameter in words."""
    if parameter.kind:
        return parameter.kind
    if parameter.check is choice:
        return "{" + ", ".join(f'"{word}"' for word in parameter.allowed[0]) + "}"
    return parameter.annotation.replace(" | ", " or ")


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Return what comes before the first heading, and the sections by heading."""
    head, *sections = re.split(r"\n\n(?=\w[\w ]*\n-{3,}\n)", text)
    return head, {section.partition("\n")[0]: section for section in sections}
