# SPDX-License-Identifier: Apache-2.0
"""Clippers as lines of TOML, so that one tuned in a notebook goes into a federation."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedclip.core import parameters
from fedclip.errors import needing

if TYPE_CHECKING:
    from tomlkit.items import Item


def toml_value(value: object) -> str:
    """Return a value as TOML, tables inline; None becomes nan, which declearn reads as None.

    Examples
    --------
    >>> toml_value({"enc.*": 0.5, "on": True})
    '{"enc.*" = 0.5, on = true}'
    """
    return str(toml_item(value).as_string())


def toml_item(value: object) -> Item:
    """Return a value as tomlkit has it; see `toml_value`."""
    # Imported here: a clipper needs no tomlkit.
    with needing("TOML", "tomlkit: pip install 'fedclip[cli]'"):
        import tomlkit

    if value is None:
        return tomlkit.item(float("nan"))
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({key: toml_item(entry) for key, entry in value.items()})
        return table
    if isinstance(value, (list, tuple)):
        array = tomlkit.array()
        array.extend(map(toml_item, value))
        return array
    return tomlkit.item(value)


def toml_line(kind: str, name: str, config: Mapping[str, object]) -> str:
    """Return the line that adds a plug-in to an optimizer's section; or lines of a site's policy.

    Examples
    --------
    >>> toml_line("module", "norm-clip", {"max_norm": 0.5})
    'modules = [["norm-clip", {max_norm = 0.5}]]'
    """
    if kind == "policy":
        return "\n".join(["[update]", *(f"{k} = {toml_value(v)}" for k, v in config.items())])
    if kind == "aggregator":
        return f"aggregator = {toml_value({'name': name, **config} if config else name)}"
    field = {"module": "modules", "regularizer": "regularizers"}[kind]
    return f"{field} = {toml_value([[name, config] if config else name])}"


def value_of(text: str) -> object:
    """Return a value written as in Python or TOML: None, a number, a list; or else the words.

    Examples
    --------
    >>> value_of("None"), value_of("[1, 2.5]"), value_of("true"), value_of("max")
    (None, [1, 2.5], True, 'max')
    """
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, too many digits, or nested too deeply
        return text


def to_toml(clipper: Any) -> str:
    """Return the line of TOML that makes the clipper; parameters at their defaults are left out.

    Parameters
    ----------
    clipper
        A clipper of fedclip, or any plug-in of declearn.

    Raises
    ------
    TypeError
        For anything else, such as a name or a class.

    Examples
    --------
    >>> from fedclip import ZScoreClip
    >>> print(to_toml(ZScoreClip(warmup=10, scope=["enc.*", "head.*"])))
    modules = [["zscore-clip", {warmup = 10, scope = ["enc.*", "head.*"]}]]
    """
    bases = [cls.__name__ for cls in type(clipper).__mro__]
    kind = "regularizer" if "Regularizer" in bases else "module"
    if isinstance(clipper, type) or not all(hasattr(clipper, a) for a in ("name", "get_config")):
        text = f"to_toml takes a clipper of fedclip or declearn, got {clipper!r:.80}"
        raise TypeError(f"{text}: make one first, as in to_toml(ZScoreClip(warmup=10))")
    config = parameters.changed_from_default(type(clipper), clipper.get_config())
    return toml_line(kind, clipper.name, config)
