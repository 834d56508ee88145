"""Make this site's data from its CSV file, as columns.toml says; run it at each site.

    python prepare.py records.csv --site north    writes data/north/
    python prepare.py --example                   does this for three sites of invented records

Each row is read independently: other rows change neither its numbers nor whether it trains
or validates. Keep it so if you edit this file: with privacy, the guarantee rests on it.
"""

import argparse
import csv
import hmac
import io
import random
import re
import secrets
import sys
import tomllib
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
# Decides, with the identifiers, who validates. It is made at the first run. Keep it secret, and
# keep it as long as the data: with another key, other records validate.
KEY = HERE / "split.key"
NUMBER = ("unit", "centre", "scale", "fill")


@dataclass(frozen=True)
class Columns:
    """The content of columns.toml, and how this site's file is written."""

    encoding: str
    separator: str
    decimal: str
    missing: list[str]
    missing_in: dict[str, list[str]]
    identifier: str
    unit: str
    validation: float
    ignore: list[str]
    target: str
    number: dict[str, dict[str, Any]]
    text: dict[str, dict[str, list[str]]]
    classes: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        """Return the names of all columns, the target last."""
        return [self.identifier, *self.ignore, *self.number, *self.text, self.target]

    def is_missing(self, name: str, cell: str) -> bool:
        """Return whether a cell stands for a missing value."""
        return cell in self.missing or cell in self.missing_in.get(name, ())


def read_columns(encoding: str = "utf-8", separator: str = ",", decimal: str = ".") -> Columns:
    """Return the content of columns.toml, or stop at what is wrong in it."""
    file = HERE / "columns.toml"
    try:
        columns = Columns(encoding, separator, decimal, **tomllib.loads(file.read_text("utf-8")))
        if not columns.identifier:
            raise ValueError("`identifier` names no column, and row numbers are not identifiers")
        if twice := [name for name in columns.names if columns.names.count(name) > 1]:
            raise ValueError(f"column {twice[0]!r} is declared twice")
        if columns.unit not in ("record", "person") or not 0 < columns.validation < 1:
            raise ValueError('`unit` is "record" or "person", `validation` is between 0 and 1')
        for name, about in columns.number.items():
            known = {*about} == {*NUMBER} and all(abs(about[key]) < 1e30 for key in NUMBER[1:])
            if not known or about["scale"] <= 0:
                raise ValueError(f"{name} has unit, centre, scale (above 0) and fill")
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{file}: {error}.")
    return columns


def read_cells(file: Path, columns: Columns) -> list[list[str]]:
    """Return the cells of a file, its header first."""
    raw, mark = file.read_bytes(), columns.separator.replace("\\t", "\t")
    try:
        text = unicodedata.normalize("NFC", raw.decode(columns.encoding)).removeprefix("\ufeff")
        rows = [*csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)]
    except UnicodeDecodeError as error:
        header, *lines = raw[: error.start].decode("latin-1").split("\n")
        name = header.split(mark)[: (lines or [header])[-1].count(mark) + 1][-1]
        sys.exit(f"{file}, row {len(lines) + 1}, column {name!r}: write --encoding latin-1.")
    except (csv.Error, LookupError, TypeError) as error:
        sys.exit(f"{file}: {error}. Is each quotation mark closed, each option right?")
    table = [[cell.strip() for cell in row] for row in rows] or [[]]
    if len(table[0]) == 1 and (other := max(",;\t|", key=table[0][0].count)) in table[0][0]:
        sys.exit(f"{file}, row 1, column {table[0][0]!r}: write --separator {other!r}.")
    return table


def encode(name: str, cell: str, columns: Columns) -> list[float]:
    """Return the numbers that stand for a cell, or raise an error that says what to write."""
    missing = columns.is_missing(name, cell)
    if name == columns.identifier and missing:
        raise ValueError("the identifier is missing. Fill it in, or remove the row")
    if name in columns.number:
        about, digits = columns.number[name], rf"\d*{re.escape(columns.decimal)}?\d+"
        if not missing and not re.fullmatch(rf"[-+]?{digits}(e[-+]?\d+)?", cell, re.A | re.I):
            raise ValueError(f"{cell!r} is no number. Correct it, --decimal, or `missing`")
        value = float(about["fill"] if missing else cell.replace(columns.decimal, "."))
        if abs(value) > 1e30:
            raise ValueError(f"{cell!r} is too large. Correct it")
        return [(value - about["centre"]) / about["scale"]]
    texts = {**columns.text, columns.target: columns.classes}.get(name, {})
    matches = [cell in (text, *spellings) for text, spellings in texts.items()]
    if texts and not missing and sum(matches) != 1:
        raise ValueError(f"{cell!r} is not in {[*texts]}. Correct it, or add it to columns.toml")
    place = matches.index(True) if any(matches) else -1
    return [*map(float, [place] if name == columns.target else matches)]


def read_records(file: Path, names: list[str], columns: Columns) -> tuple[list[Any], NDArray[Any]]:
    """Return cells and their numbers, row by row, or stop and show what is wrong."""
    header, *rows = read_cells(file, columns)
    twice = [head for head in header if header.count(head) > 1]
    wrong = {f"column {head!r}: it is there twice": [1] for head in twice}
    for name in sorted({*names} - {*header}):
        wrong[f"column {name!r}: it is missing. Add it"] = [1]
    for name in sorted({*header} - {*columns.names}):
        wrong[f"column {name!r}: it is not declared. Declare it, or add it to `ignore`"] = [1]
    places = [] if wrong else [header.index(name) for name in names]
    cells, values = list[list[str]](), list[list[float]]()
    for number, row in enumerate(rows if places else [], start=2):
        if row and len(row) != len(header):
            wrong.setdefault(f"{len(row)} cells for {len(header)} columns", []).append(number)
        elif any(row):
            cells.append([row[place] for place in places])
            values.append([])
            for name, cell in zip(names, cells[-1], strict=True):
                try:
                    values[-1] += encode(name, cell, columns)
                except ValueError as error:
                    wrong.setdefault(f"column {name!r}: {error}", []).append(number)
    for text, numbers in [*wrong.items()][:12]:
        print(f"{file}, row {numbers[0]}, {text}. ({len(numbers)} rows)", file=sys.stderr)
    if wrong or not cells:
        sys.exit(f"{file}: {len(wrong)} problems in {len(cells)} records. Nothing is written.")
    return cells, np.array(values)


def validates(identifier: str, key: bytes, share: float) -> bool:
    """Return whether a record validates: a keyed hash of its identifier decides."""
    return int.from_bytes(hmac.digest(key, identifier.encode(), "sha256")) < share * 2**256


def write_site(file: Path, site: str, columns: Columns) -> None:
    """Write a site's data into data/SITE, and print a table of what is in it."""
    cells, values = read_records(file, columns.names, columns)
    folder, targets = HERE / "data" / site, values[:, -1].astype(np.int64)
    if not KEY.exists():
        if folder.parent.exists():
            sys.exit(f"{KEY} is missing, and data/ was made with it. Put it back.")
        KEY.touch(mode=0o600)
        KEY.write_bytes(secrets.token_bytes(32))
    folder.mkdir(parents=True, exist_ok=True)
    key, counts = KEY.read_bytes(), list[dict[str, int]]()
    valid = np.array([validates(row[0], key, columns.validation) for row in cells])
    for part, chosen in (("train", ~valid), ("valid", valid)):
        rows = np.flatnonzero(chosen & (targets >= 0))
        here = [cells[row] for row in rows]
        np.save(folder / f"{part}_data.npy", values[rows, :-1].astype(np.float32))
        np.save(folder / f"{part}_target.npy", targets[rows])
        persons = folder / f"{part}_persons.csv"
        persons.unlink(missing_ok=True)
        if columns.unit == "person":
            quoted = ['"' + row[0].replace('"', '""') + '"\n' for row in here]
            persons.write_text("person\n" + "".join(quoted), "utf-8")
        counts.append({"records": len(here), f"{columns.unit} ids": len({row[0] for row in here})})
        for i, name in enumerate(columns.classes):
            counts[-1][f"class {name}"] = int((targets[rows] == i).sum())
        for i, name in enumerate(columns.names):
            counts[-1][f"missing {name}"] = sum(columns.is_missing(name, row[i]) for row in here)
        counts[-1]["duplicate rows"] = len(here) - len({*map(tuple, here)})
    print(f"\n{site:30}{'train':>8}{'valid':>8}")
    print(*(f"{label:30}{counts[0][label]:8}{counts[1][label]:8}" for label in counts[0]), sep="\n")
    print(f"{'left out, without target':30}{(targets < 0).sum():8}")
    if not counts[1]["records"]:
        print("No record validates: this site reports no accuracy, and no private client runs.")


def write_example(columns: Columns) -> None:
    """Invent records of three sites, and make the sites' data of them."""
    for site in ("north", "south", "east"):
        draw, rows, classes = random.Random(site), [columns.names], [*columns.classes]
        for i in range(1000):
            cells = {name: draw.choice([*texts]) for name, texts in columns.text.items()}
            cells[columns.identifier] = f"{site}-{i // 3 if columns.unit == 'person' else i}"
            score = draw.gauss(len(classes) / 2, 0.5)
            for name, about in columns.number.items():
                score += (away := draw.gauss(0, 1))
                cells[name] = f"{about['centre'] + away * about['scale']:.6g}"
            cells[columns.target] = classes[min(max(int(score), 0), len(classes) - 1)]
            rows.append([cells.get(name, "") for name in columns.names])
        file = HERE / f"example-{site}.csv"
        with file.open("w", encoding="utf-8", newline="") as lines:
            csv.writer(lines).writerows(rows)
        write_site(file, site, columns)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Make this site's data from its CSV file.")
    parser.add_argument("file", type=Path, nargs="?", help="the CSV file of this site")
    parser.add_argument("--site", default="", help="its name: letters, digits, - and _")
    parser.add_argument("--example", action="store_true", help="invent records of three sites")
    for name, usual in (("encoding", "utf-8"), ("separator", ","), ("decimal", ".")):
        parser.add_argument(f"--{name}", default=usual, help=f"of the file; usually {usual!r}")
    options = parser.parse_args()
    columns = read_columns(options.encoding, options.separator, options.decimal)
    named = re.fullmatch(r"(?!(server|clients|simulated)$)[\w-]+", options.site, re.A)
    if options.example:
        write_example(columns)
    elif options.file and named:
        write_site(options.file, options.site, columns)
    else:
        parser.error("give FILE and --site NAME, or --example")


if __name__ == "__main__":
    main()
