# SPDX-License-Identifier: Apache-2.0
"""Reads what is given for a parameter of a peer."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TypeGuard

from fedclip.errors import Unchecked, nearest, shown


def unknown(what: str, given: object, allowed: Mapping[str, object]) -> str:
    """Return a sentence about what is not allowed, with the nearest that is."""
    hint = nearest(str(given), allowed) or f"; it must be one of {', '.join(allowed) or 'none'}"
    return f"{what} {given!r}{hint}"


def word(parameter: str, given: object, words: Mapping[str, object] | str) -> object:
    """Return our value for a word of the peer, or the word itself if we have the same `words`."""
    if isinstance(words, str):
        words = {word: word for word in words.split()}
    if not isinstance(given, str) or given not in words:
        raise ValueError(unknown(f"{parameter} can not be", given, words))
    return words[given]


def order(value: object) -> float | str:
    """Return our `ord` for 2, 2.0, "2", "2.0", "l2", "inf", "linf", "mad", ..."""
    if not isinstance(value, str):
        if not is_number(value):
            raise ValueError(f"ord must be a number or a word, got {shown(value)}")
        return "inf" if value == float("inf") else value
    try:
        number = float(value.removeprefix("l"))
    except ValueError:
        return str(word("ord", value, "mad std var sum l0 l1 l2 l3 l4 linf inf"))
    if number == float("inf"):
        return "inf"
    return int(number) if number.is_integer() else number


def dims(parameter: str, value: object) -> list[int] | None:
    """Return dimensions, given as an int or as ints, as a list; None for None."""
    values = [value] if isinstance(value, int) else value
    if value is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(type(d) is int for d in values):
        raise ValueError(f"{parameter} must be an int, a list of ints or None, got {shown(value)}")
    return list(values)


def at_least(low: int, **values: object) -> None:
    """Raise an error for a value that is no whole number from `low` on."""
    for name, value in values.items():
        if type(value) is not int or value < low:
            raise ValueError(f"{name} must be a whole number >= {low}, got {shown(value)}")


def made(
    parameter: str, value: object, classes: Mapping[str, Mapping[str, object]], hint: str
) -> tuple[str, dict[str, object]]:
    """Return the class, and what it was given, of an object that is the value of a parameter.

    It may be the object, its class, or how either is written: ``"GradNormClipper(5)"``. The `hint`
    follows the error if there is no such class.
    """
    if isinstance(value, str):
        name, pairs = parsed(parameter, value)
    else:
        name = (value if isinstance(value, type) else type(value)).__name__
        pairs = [(k, getattr(value, k)) for k in classes.get(name, ()) if hasattr(value, k)]
    if name not in classes:
        raise ValueError(unknown(f"{parameter} can not be", name, classes) + hint)
    names = dict(enumerate(classes[name]))
    given = {str(names.get(key, key)): value for key, value in pairs}
    if len(given) < len(pairs):
        raise ValueError(f"{parameter} gives a parameter twice: {shown(value)}")
    return name, given


def parsed(parameter: str, text: str) -> tuple[str, list[tuple[Unchecked, Unchecked]]]:
    """Return the name of a call, or a name alone, and arguments by number or by name."""
    try:
        found = ast.parse(text.strip(), mode="eval").body
        call = found if isinstance(found, ast.Call) else ast.Call(found, [], [])
        name = ast.unparse(call.func).rpartition(".")[2]
        pairs = [*enumerate(call.args), *((k.arg, k.value) for k in call.keywords)]
        return name, [(key, _plain(node)) for key, node in pairs]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(
            f"{parameter} must be a name, or a call such as Name(0.9, x=2), got {shown(text)}"
        ) from None


def _plain(node: ast.expr) -> object:
    """Return the value of an expression, or its text if it is not plain; of a name the last."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        return text.rpartition(".")[2] if isinstance(node, ast.Attribute) else text


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
