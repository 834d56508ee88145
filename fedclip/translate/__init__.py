# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers, translated into ours.

`peers.toml` has a row for each class of another package: its parameters and defaults, which
clipper and parameters give the same numbers, and what differs. If the class has a defect, the
translation is the corrected clipper, and `notes` says so. What another package has and we do not
have is there too, with the reason. The translation treats NaN and infinity as `on_nonfinite` says,
whatever the class does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.errors import Unchecked, shown
from fedclip.translate import values
from fedclip.translate.values import checked, parsed, signature, unknown

__all__ = ["PRESETS", "known", "notes", "translate"]


class Row(NamedTuple):
    """A class of another package: its parameters with defaults, and how to read them."""

    parameters: Config
    let: Mapping[str, str]
    gives: list[Unchecked]
    notes: list[Unchecked]


def _row(row: Config, tables: Config) -> Row:
    """Return a row of the file, with what it has from another row."""
    while "like" in row:
        package, _, cls = row["like"].partition(".")
        above = tables[package][cls]
        changed = row.get("let", {})
        # What a row defines comes first, as the other row's values follow from it.
        let = {**changed, **above.get("let", {}), **changed}
        row = {**above, **{k: v for k, v in row.items() if k != "like"}, "let": let}
    gives = [row["gives"]] if isinstance(row["gives"], str) else row["gives"]
    return Row(signature(row["takes"]), row.get("let", {}), gives, row.get("notes", []))


with Path(__file__).with_name("peers.toml").open("rb") as _file:
    _TABLES: Config = tomllib.load(_file)
_TEXTS, _PRESETS = _TABLES.pop("texts"), _TABLES.pop("presets")

PEERS: dict[str, dict[str, Row | str]] = {
    package: {
        cls: row if isinstance(row, str) else _row(row, _TABLES)
        for names, row in classes.items()
        for cls in names.split(", ")
    }
    for package, classes in _TABLES.items()
}
"""The classes of other packages, by package; a text says why one has no translation."""


def _preset(text: str) -> tuple[str, str, Config]:
    package, _, call = text.partition(" ")
    cls, arguments = parsed("a preset", call)
    return package, cls, dict(arguments)


PRESETS = {
    clipper: {name: _preset(text) for name, text in rows.items()}
    for clipper, rows in _PRESETS.items()
}
"""Published defaults, by clipper and name, as arguments of `translate`."""


def translate(package: str, cls: str, config: Mapping[str, object]) -> tuple[str, str, Config]:
    """Return the clipper of fedclip that does the same as another package's.

    Parameters
    ----------
    package : str
        Name of the package, e.g. "torchzero".
    cls : str
        Name of its class or function, e.g. "ClipNorm".
    config : mapping
        The parameters that it was given; the others have their defaults there.

    Returns
    -------
    kind : str
        "module" or "regularizer", where declearn's `Optimizer` takes it, "aggregator", or
        "policy" for the section ``[update]`` of a site's policy.
    name : str
        Registered name of our clipper.
    config : dict
        Its parameters.

    Raises
    ------
    TypeError
        If the parameters are not given by name.
    ValueError
        If the package, class, parameter or a word given for a parameter is unknown, or a value has
        a wrong type. If a parameter without a default is missing, or fedclip has no equivalent.

    Examples
    --------
    >>> translate("optax", "clip_by_global_norm", {"max_norm": 0.5})
    ('module', 'norm-clip', {'max_norm': 0.5})
    >>> translate("torchzero", "ClipNrm", {})
    Traceback (most recent call last):
    ...
    ValueError: torchzero has no clipper 'ClipNrm'; did you mean 'ClipNorm'?
    """
    return _translation(package, cls, config)[0]


def notes(package: str, cls: str, config: Mapping[str, object]) -> list[str]:
    """Return how the translation differs from the original: one sentence for each difference.

    It takes the same arguments as `translate`, and raises the same errors.

    Examples
    --------
    >>> notes("optax", "clip_by_global_norm", {"max_norm": 0.5})
    []
    >>> for note in notes("torchzero", "ClipNorm", {"max_norm": 1, "ord": "var"}):
    ...     print(note.partition(":")[0])
    dim=None
    ord='var'
    """
    return _translation(package, cls, config)[1]


def known() -> dict[str, list[str]]:
    """Return the classes that can be translated, by package.

    Examples
    --------
    >>> known()["timm"]
    ['adaptive_clip_grad']
    """
    return {p: [n for n, row in rows.items() if isinstance(row, Row)] for p, rows in PEERS.items()}


_KINDS = {"agc": "regularizer", "clipped-averaging": "aggregator", "site-policy": "policy"}


def _translation(
    package: str, cls: str, config: Mapping[str, object]
) -> tuple[tuple[str, str, Config], list[str]]:
    """Return a clipper, as `translate` does, and how it differs."""
    if package not in PEERS:
        raise ValueError(unknown("there is no translation from", package, PEERS))
    if cls not in PEERS[package]:
        raise ValueError(unknown(f"{package} has no clipper", cls, PEERS[package]))
    row = PEERS[package][cls]
    if isinstance(row, str):
        raise ValueError(f"{cls} of {package} is no clipper that can be translated: {row}")
    if not isinstance(config, Mapping):
        raise TypeError(f"parameters must be given by name, as {{'x': 1}}, got {shown(config)}")
    names = {
        **vars(parameters),
        **vars(values),
        "classes": {n: r.parameters for n, r in PEERS[package].items() if isinstance(r, Row)},
        **checked(f"{cls} of {package}", row.parameters, config),
    }
    try:
        for name, text in row.let.items():
            names[name] = eval(text, names)
        call, *_ = _chosen(row.gives, names)
        name, _, arguments = call.partition("(")
        result = _KINDS.get(name, "module"), name, eval(f"dict({arguments}", names)
        return result, [text.format_map(names) for text in _chosen(row.notes, names)]
    except (TypeError, ArithmeticError) as exc:
        raise ValueError(f"{cls} of {package} takes no such value: {exc}") from exc


def _chosen(entries: list[Unchecked], names: Config) -> Iterator[str]:
    """Yield the texts of the entries that apply, those of ``[texts]`` by their names."""
    for entry in entries:
        when, text = entry if isinstance(entry, list) else ("True", entry)
        if text.startswith("@"):
            named = _TEXTS[text[1:]]
            when, text = named if isinstance(named, list) else (when, named)
        if eval(when, names):
            yield text
