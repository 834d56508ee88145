# SPDX-License-Identifier: Apache-2.0
"""CSV files as one table of numbers, and what there is to say of them: missing values, units.

What must be learnt from the records, as means, is learnt from those that are trained on.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedclip.errors import nearest, shown
from fedclip.tools.output import ToolError

MOST_TEXTS = 20
"""Different texts that a column may hold; more are names, dates or remarks."""
FAR = 5.0
"""How many times longer or shorter makes a site's values unlike those of the others."""
_ODD = (-9, -99, -999, -9999, 999, 9999)  # what is often written where a number is missing
_COMMA = r"^([-+]?\d*),(\d+)$"

NAMED = re.compile(
    r"(^|[\W_])(id|uid|pid|mrn|ssn|patient|person|subject|participant|user|member|customer|student)"
    r"s?([\W_]*(id|no|nr|num|number|code|key|name))?\W*$",
    re.IGNORECASE,
)
"""Names of columns that may say whose a record is."""


def read_table(file: Path) -> pd.DataFrame:
    """Return a CSV file as texts; each record is named by its place.

    The separator is the one of ``, ; | tab`` that makes the most columns of the first line. Where
    it is no comma, numbers may have a decimal comma.
    """
    try:
        text = file.read_text(encoding="utf-8-sig").lstrip("\n")
    except UnicodeDecodeError as exc:
        raise ToolError(f"{file} is not UTF-8 (see byte {exc.start}): save it as UTF-8") from None
    except OSError as exc:
        raise ToolError(f"{file} can not be read: {exc.strerror}") from None
    if not text.strip():
        raise ToolError(f"{file} is empty")
    if "\0" in text:
        raise ToolError(f"{file} is no text; save it as CSV")
    mark = max(",;\t|", key=lambda m: len(next(csv.reader(io.StringIO(text), delimiter=m))))
    lines = csv.reader(io.StringIO(text), delimiter=mark, skipinitialspace=True)
    try:
        names = [name.strip() for name in next(lines)]
        _check_header(file, names)
        for line in lines:  # pandas fills up what is too short, and drops what is beyond
            if line not in ([], [""]) and len(line) != len(names):
                raise ToolError(
                    f"{file} is no table: cells in line {lines.line_num}: {len(line)}, "
                    f"names in the first: {len(names)}"
                )
        table = pd.read_csv(
            io.StringIO(text), sep=mark, dtype=str, skipinitialspace=True, na_values=["?"]
        )
        table.columns = pd.Index(names)
    except (csv.Error, pd.errors.ParserError) as exc:
        why = str(exc).strip().rpartition("error: ")[2]
        raise ToolError(f"{file} is no table: {why}") from None
    if not len(table):
        raise ToolError(f"{file} holds no record, only names of columns")
    table = table.apply(lambda column: column.str.strip())
    if mark != ",":
        table = table.replace(_COMMA, r"\1.\2", regex=True)
    table.index = pd.Index([f"record {i} of {file.name}" for i in range(1, len(table) + 1)])
    return table


def _check_header(file: Path, names: Sequence[str]) -> None:
    if pd.to_numeric(pd.Series(names), errors="coerce").notna().all():
        raise ToolError(f"the first line of {file} holds numbers: write the columns' names there")
    for place, name in enumerate(names, start=1):
        if not name or name in names[: place - 1]:
            raise ToolError(
                f"column {place} of {file}, {name!r}, needs a name of its own, or is to be left "
                "out (the numbers of pandas' rows: to_csv(..., index=False))"
            )


def joined(tables: Sequence[pd.DataFrame], files: Sequence[Path]) -> pd.DataFrame:
    """Return the records of all files in one table, whose columns are those of each.

    What is equal as a number is the same text: pandas writes 0.0 where a cell of the column is
    empty, and else 0.
    """
    whole = pd.concat(tables)
    odd = [name for name in whole if not all(name in table for table in tables)]
    if odd:
        have = [odd[0] in table for table in tables]
        most = 2 * sum(have) >= len(have)
        at = have.index(not most)
        hint = nearest(odd[0], [name for name in odd if (name in tables[at]) == most])
        raise ToolError(
            f"{files[at]} {'lacks' if most else 'has'} the column {odd[0]!r}{hint}; it is in "
            f"{sum(have)} of {len(have)} files, and all need the same"
        )
    numbers = whole.apply(pd.to_numeric, errors="coerce")
    same = whole.apply(lambda column: column.groupby(numbers[column.name]).transform("first"))
    return same.fillna(whole)


def as_numbers(table: pd.DataFrame, site: pd.Series, said: list[str]) -> pd.DataFrame:
    """Return columns of numbers, one for each text of a column of texts; say what is left out."""
    found: dict[str, pd.Series] = {}
    for name, column in table.items():
        numbers = pd.to_numeric(column, errors="coerce").astype(float)
        texts = column[column.notna() & numbers.isna()]
        missing, count = int(column.isna().sum()), int(column.notna().sum())
        again = count - int(column.groupby(site).nunique().sum())
        if again and NAMED.search(str(name)):
            said.append(
                f"{name!r} comes back in {again} records of a site: if it says whose they are, "
                f"give it by --persons {shlex.quote(str(name))}"
            )
        if np.isinf(numbers).any() or 0 < len(texts) < count / 2:
            odd = texts if len(texts) else column[np.isinf(numbers)]
            raise ToolError(
                f"{name!r} is {shown(odd.iloc[0])} in {odd.index[0]}, where most are numbers: "
                f"correct it, empty the cell if it is missing, or leave the column out (--drop)"
            )
        if not len(texts):
            found[str(name)] = numbers
            said.extend(_odd_numbers(numbers, site))
            continue
        known = sorted(column.dropna().unique())
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
    rest = values[~values.isin(_ODD)]
    odd = values[values.isin(_ODD) & ~values.between(rest.min(), rest.max())].value_counts()
    said = [
        f"{name!r} is {value:g} in {times} of {len(values)} records: if that means missing, "
        "empty these cells"
        for value, times in odd.items()
    ]
    # Each hospital may count its patients from 1 on.
    alike = values.groupby(site).agg(lambda x: x.duplicated().any()).any()
    if len(values) >= 50 and not alike and not (values % 1).any():
        said.append(f"{name!r} differs in each record: if it only numbers them, --drop it")
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
            raise ToolError(
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
