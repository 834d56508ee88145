# SPDX-License-Identifier: Apache-2.0
"""Whose the training records of a quickrun file are: what DP-SGD protects, and what it may have to.

A file `train_persons.csv` beside a client's training data says it. Without one, a column that is
named like an identifier, and in which values come back, says that it may be wanted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from declearn.dataset.utils import load_data_array

from fedclip.cli.check.findings import Level
from fedclip.cli.quickrun import PERSONS
from fedclip.dpsgd.persons import numbered

_NAMED = re.compile(
    r"(^|[\W_])(id|uid|pid|mrn|ssn|patient|person|subject|participant|user|member|customer|student)"
    r"s?([\W_]*(id|no|nr|num|number|code|key|name))?\W*$",
    re.IGNORECASE,
)
"""Names of columns that may say whose a record is."""


def units(files: Mapping[str, str], of: str = "train") -> tuple[int, str]:
    """Return how many records, or persons if a file names them, a client trains on, and which.

    With `of` = "valid", how many it evaluates on.

    Raises
    ------
    OSError, TypeError, ValueError
        If a file can not be read, or the persons do not fit the records.
    """
    records = len(load_data_array(files[f"{of}_target"]))
    named = _named(files, of)
    if not named.exists():
        return records, "record"
    return int(numbered(named, records).max()) + 1, "person"


def _named(files: Mapping[str, str], of: str = "train") -> Path:
    return Path(files[f"{of}_data"]).with_name(PERSONS.replace("train", of))


def unnamed(sites: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield what evaluations with noise lack where persons are protected."""
    for site, files in sites.items():
        if _named(files).exists() and not (missing := _named(files, "valid")).exists():
            yield (
                f"{site}: persons are protected, and evaluation_share needs to know whose the "
                f"validation records are: write them into {missing.name} beside {PERSONS}"
            )


def asked_for(sites: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Level, str]]:
    """Yield level and text of what there is to say of persons, for private clients."""
    found: dict[str, list[str]] = {}
    for site, files in sites.items():
        data, named = Path(files["train_data"]), _named(files)
        if named.exists():
            try:
                many, _ = units(files)
                yield "ok", f"{site}: {many:,} persons are protected, each with all records"
                named = _named(files, "valid")
                if named.exists():
                    units(files, "valid")
            except (OSError, TypeError, ValueError) as exc:
                yield "problem", f"{named}: {exc}"
        elif data.suffix == ".csv":
            for column in _identifiers(data):
                found.setdefault(column, []).append(site)
    known = {site for site, files in sites.items() if _named(files).exists()}
    if known and (alone := [site for site in sites if site not in known]):
        yield (
            "note",
            f"{', '.join(alone)}: there is no {PERSONS}, and each record is protected alone, "
            "unlike at other sites: write one, unless each record is another person's",
        )
    for column, where in found.items():
        yield (
            "note",
            f"column {column!r} ({', '.join(where[:3])}{', …' * (len(where) > 3)}) is named like "
            "an identifier, and its values come back, but each record is protected alone: move the "
            f"column into {PERSONS} beside the training data, to protect persons with all records",
        )


def _identifiers(file: Path) -> Iterator[str]:
    """Yield the columns named like an identifier, in which some value comes back."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        heads, *rows = csv.reader(lines)
    for place, name in enumerate(heads):
        values = [row[place] for row in rows if len(row) > place]
        if _NAMED.search(name.strip()) and len({*values}) < len(values):
            yield name.strip()
