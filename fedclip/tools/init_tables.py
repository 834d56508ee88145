# SPDX-License-Identifier: Apache-2.0
"""CSV files as one table of numbers, and what there is to say of them: missing values, units.

What must be learnt from the records, as means, is learnt from those that are trained on.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedclip.errors import nearest, shown

__all__ = ["InitError", "as_numbers", "joined", "learnt", "read_table", "units"]

MOST_TEXTS = 20
"""Different texts that a column may hold; more are names, dates or remarks."""
FAR = 5.0
"""How many times longer or shorter makes a site's values unlike those of the others."""
_ODD = (-9, -99, -999, -9999, 999, 9999)  # what is often written where a number is missing
_COMMA = r"\s*[-+]?\d*,\d+\s*"


class InitError(ValueError):
    """The files can not be used; the message says why, and what to do."""


def read_table(file: Path) -> pd.DataFrame:
    """Return a CSV file as texts; each record is named by its place.

    The separator is the one of ``, ; | tab`` that makes the most columns of the first line. Where
    it is no comma, numbers may have a decimal comma.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig").lstrip("\r\n")
    except UnicodeDecodeError as exc:
        raise InitError(f"{file} is not UTF-8 (see byte {exc.start}): save it as UTF-8") from None
    except OSError as exc:
        raise InitError(f"{file} can not be read: {exc.strerror}") from None
    if not text.strip():
        raise InitError(f"{file} is empty")
    if "\0" in text:
        raise InitError(f"{file} is no text; save it as CSV")
    mark = max(",;\t|", key=lambda m: len(next(csv.reader(io.StringIO(text), delimiter=m))))
    names = [name.strip() for name in next(csv.reader(io.StringIO(text), delimiter=mark))]
    _check_header(file, names)
    try:
        with warnings.catch_warnings():
            # Else pandas drops what stands beyond the last name.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                io.StringIO(text),
                sep=mark,
                header=0,
                names=names,
                index_col=False,
                dtype=str,
                skipinitialspace=True,
                na_values=["?"],
            )
    except (pd.errors.ParserError, pd.errors.ParserWarning) as exc:
        why = str(exc).strip().rpartition("error: ")[2]
        raise InitError(f"{file} is no table: {why}") from None
    if not len(table):
        raise InitError(f"{file} holds no record, only names of columns")
    table = table.apply(lambda column: column.str.strip())
    if mark != ",":
        table = table.apply(
            lambda c: c.where(~c.str.fullmatch(_COMMA, na=False), c.str.replace(",", "."))
        )
    table.index = pd.Index([f"record {i} of {file.name}" for i in range(1, len(table) + 1)])
    return table


def _check_header(file: Path, names: Sequence[str]) -> None:
    if all(_is_number(name) for name in names):
        raise InitError(f"the first line of {file} holds numbers: write the columns' names there")
    for place, name in enumerate(names, start=1):
        if not name:
            raise InitError(
                f"column {place} of {file} has no name: name it, or leave it out "
                "(in pandas, to_csv(..., index=False))"
            )
        if name in names[: place - 1]:
            raise InitError(f"{file} has two columns {name!r}: give each a name of its own")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def joined(tables: Sequence[pd.DataFrame], files: Sequence[Path]) -> pd.DataFrame:
    """Return the records of all files in one table, whose columns are those of each."""
    first = tables[0]
    for table, file in zip(tables, files, strict=True):
        for some, others, more in ((first, table, "lacks"), (table, first, "alone has")):
            for name in some.columns.difference(others.columns):
                hint = nearest(name, others.columns.difference(some.columns))
                raise InitError(
                    f"{file} {more} the column {name!r}{hint}; all files need the columns of "
                    f"{files[0]}"
                )
    return pd.concat([table[first.columns] for table in tables])


def as_numbers(table: pd.DataFrame, site: pd.Series, said: list[str]) -> pd.DataFrame:
    """Return columns of numbers, one for each text of a column of texts; say what is left out."""
    found: dict[str, pd.Series] = {}
    for name, column in table.items():
        numbers = pd.to_numeric(column, errors="coerce").astype(float)
        texts = column[column.notna() & numbers.isna()]
        missing, count = int(column.isna().sum()), int(column.notna().sum())
        if np.isinf(numbers).any() or 0 < len(texts) < count / 2:
            odd = texts if len(texts) else column[np.isinf(numbers)]
            raise InitError(
                f"{name!r} is {shown(odd.iloc[0])} in {odd.index[0]}, where most are numbers: "
                f"correct it, empty the cell if it is missing, or leave the column out (--drop)"
            )
        if not len(texts):
            found[str(name)] = numbers
            said.extend(_odd_numbers(numbers, site))
            continue
        known = sorted(texts.unique())
        if len(known) > MOST_TEXTS:
            said.append(f"{name!r} holds {len(known)} different texts: left out")
            continue
        # Of two texts, one column tells all.
        for text in known[1:] if len(known) == 2 else known:
            found[f"{name}={text}"] = (column == text).astype(float)
        left = f"; missing in {missing} records, which are none of them" if missing else ""
        said.append(
            f"{name!r} is one of {len(known)} texts, told by a column of 0 and 1 each{left}"
        )
    return pd.DataFrame(found, index=table.index)


def _odd_numbers(numbers: pd.Series, site: pd.Series) -> list[str]:
    """Say which values may stand for something else than a measurement."""
    name, values = numbers.name, numbers.dropna()
    rest = values[~values.isin(_ODD)].abs().max()
    said = [
        f"{name!r} is {value} in {times} records: if that means missing, empty these cells"
        for value in _ODD
        if (times := int((values == value).sum())) > 1 and abs(value) > 2 * rest
    ]
    # Each hospital may count its patients from 1 on.
    alike = values.groupby(site).agg(lambda x: x.duplicated().any()).any()
    if len(values) >= 50 and not alike and not (values % 1).any():
        said.append(f"{name!r} differs in each record: if it is a number of a patient, --drop it")
    return said


class Learnt(NamedTuple):
    """What the records that are trained on say of each column."""

    fill: pd.DataFrame
    """What takes the place of a missing value, by site: the median there."""
    center: pd.Series
    scale: pd.Series
    """One for all sites: the median over the sites of their standard deviations."""


def learnt(train: pd.DataFrame, site: pd.Series) -> Learnt:
    """Return medians of each site, and a common centre and scale that no single site decides."""
    fill = train.groupby(site).median()
    for name, where in fill.isna().items():
        if where.any():
            raise InitError(
                f"{where.idxmax()} has no value of {name!r} to train on: give it some, or leave "
                f"the column out (--drop {name})"
            )
    by_site = train.fillna(fill.loc[site].set_index(train.index)).groupby(site)
    spread = by_site.std(ddof=0).where(by_site.max() > by_site.min()).median()
    # What is 0 or 1 stays so: divided by their deviation, rare ones would be far out.
    flags = (by_site.min().isin((0, 1)) & by_site.max().isin((0, 1))).all()
    flags &= train.isin((0, 1)).mask(train.isna(), True).all()
    center = by_site.mean().median().where(~flags, 0.0)
    return Learnt(fill, center, spread.where(~flags | spread.isna(), 1.0))


def units(train: pd.DataFrame, site: pd.Series) -> list[str]:
    """Say at which sites values are of another size than at most, by the median of each column."""
    sizes = train.abs().replace(0, np.nan).groupby(site).median()
    # Of two sites, nobody knows which is right.
    times = sizes / (sizes.median() if len(sizes) > 2 else sizes.min())
    told: dict[tuple[str, str], list[str]] = {}
    for (where, name), ratio in times.stack().items():
        if not 1 / FAR <= ratio <= FAR:
            about = f"{_round(ratio)} times" if ratio > 1 else f"1/{_round(1 / ratio)} of"
            told.setdefault((where, about), []).append(repr(name))
    others = "most sites" if len(sizes) > 2 else "the other site"
    return [
        f"{where}: {', '.join(names)} about {about} what it is at {others}: look at the units"
        for (where, about), names in told.items()
    ]


def _round(number: float) -> str:
    return f"{float(f'{number:.1g}'):,.0f}"
