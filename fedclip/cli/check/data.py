# SPDX-License-Identifier: Apache-2.0
"""Check the files of a quickrun configuration: the clients' data, the model, the results.

A file `train_persons.csv` next to a client's training data says whose each record is; DP-SGD then
protects persons. Without that file, repeated values in a column named like an identifier are noted.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from declearn.dataset.utils import load_data_array
from declearn.quickrun import DataSourceConfig, parse_data_folder

from fedclip.cli.check.findings import Check, Level, Section, brief, part_of, text_of
from fedclip.dpsgd.persons import numbered
from fedclip.engines.declearn.quickrun import PERSONS
from fedclip.engines.declearn.trained import trained

_NAMED = re.compile(
    r"(^|[\W_])(id|uid|pid|mrn|ssn|patient|person|subject|participant|user|member|customer|student)"
    r"s?([\W_]*(id|no|nr|num|number|code|key|name))?\W*$",
    re.IGNORECASE,
)
"""Names of columns that may identify a person."""


def units(files: Mapping[str, str], of: str = "train") -> tuple[int, str]:
    """Return the number of training records of a client, or of persons if a file names them.

    With `of` = "valid", how many it evaluates on.

    Raises
    ------
    OSError, TypeError, ValueError
        If a file cannot be read, or the persons do not fit the records.
    """
    records = len(load_data_array(files[f"{of}_target"]))
    named = _named(files, of)
    if not named.exists():
        return records, "record"
    return int(numbered(named, records).max()) + 1, "person"


def _named(files: Mapping[str, str], of: str = "train") -> Path:
    return Path(files[f"{of}_data"]).with_name(PERSONS.replace("train", of))


def unnamed(sites: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the files that evaluations with noise need if DP-SGD protects persons."""
    for site, files in sites.items():
        if _named(files).exists() and not (missing := _named(files, "valid")).exists():
            yield (
                f"{site}: evaluation_share needs the person of each validation record: write them "
                f"into {missing.name}, next to {PERSONS}"
            )


def asked_for(sites: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Level, str]]:
    """Yield level and text of findings about persons, for private clients."""
    columns: dict[str, list[str]] = {}
    for site, files in sites.items():
        data, named = Path(files["train_data"]), _named(files)
        if named.exists():
            try:
                many, _ = units(files)
                yield "ok", f"{site}: DP-SGD protects {many:,} persons, each with all their records"
                named = _named(files, "valid")
                if named.exists():
                    units(files, "valid")
            except (OSError, TypeError, ValueError) as exc:
                yield "problem", f"{named}: {exc}"
        elif data.suffix == ".csv":
            for column in _identifiers(data):
                columns.setdefault(column, []).append(site)
    known = {site for site, files in sites.items() if _named(files).exists()}
    if known and (unnamed_sites := [site for site in sites if site not in known]):
        yield (
            "note",
            f"{', '.join(unnamed_sites)}: there is no {PERSONS}, so DP-SGD protects each record "
            "separately, unlike at other sites: write one, unless each person has one record",
        )
    for column, where in columns.items():
        yield (
            "note",
            f"column {column!r} ({', '.join(where[:3])}{', …' * (len(where) > 3)}) is named like "
            "an identifier and has repeated values, but DP-SGD protects single records. To protect "
            f"persons, move the column into {PERSONS}, next to the training data",
        )


def _identifiers(file: Path) -> Iterator[str]:
    """Yield the columns named like an identifier that have repeated values."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        heads, *rows = csv.reader(lines)
    for place, name in enumerate(heads):
        values = [row[place] for row in rows if len(row) > place]
        if _NAMED.search(name.strip()) and len({*values}) < len(values):
            yield name.strip()


def check_data(check: Check, data: Section, run: Section) -> None:
    """Look for the clients' files, if they exist already, and check their number."""
    try:
        # Parse again, to count the clients only: errors here are reported elsewhere.
        files = _files(check, data)
    except (OSError, ValueError, RuntimeError) as exc:
        check.problem("[data]", text_of(exc))
        return
    if files is None:
        return
    if "privacy" in run:
        for level, text in asked_for(files):
            check.add(level, "[data]", text)
    _check_batches(check, files, run)
    count = len(files)
    register = run.get("register")
    low = high = register
    if isinstance(register, dict):
        low, high = register.get("min_clients", 1), register.get("max_clients")
    if isinstance(low, int) and count < low:
        check.problem(
            "[data]",
            f"the server waits for {low} clients, but the data folder has {count}: lower "
            "min_clients",
        )
    elif isinstance(high, int) and count > high:
        check.problem(
            "[data]",
            f"the server admits {high} clients, but the data folder has {count}: raise max_clients",
        )


def _check_batches(check: Check, files: Mapping[str, Mapping[str, str]], run: Section) -> None:
    """Find sites with fewer records than a batch has."""
    # DP-SGD draws batches by itself.
    parts = () if "privacy" in run else (("training", "train", True), ("evaluate", "valid", False))
    for section, of, default in parts:
        effort = part_of(run, section)
        size = effort.get("batch_size", 128)
        if not effort.get("drop_remainder", default) or not isinstance(size, int):
            continue
        for site, paths in files.items():
            try:
                count = len(load_data_array(paths[f"{of}_target"]))
            except Exception:  # whatever a file makes declearn raise, which is reported elsewhere
                continue
            if count < size:
                check.problem(
                    f"[run.{section}]",
                    f"{site} has {count} records in {of}_target, fewer than batch_size = {size}, "
                    f"and would get no batch: set drop_remainder = false, or batch_size = {count}",
                )


def _files(check: Check, data: Section) -> dict[str, dict[str, str]] | None:
    """Return the files of each client; None if the data is on another machine, or comes later."""
    folder = check.path.resolve().parent
    if data.get("data_folder") is None and not any(folder.glob("data*")):
        return None
    return parse_data_folder(DataSourceConfig.from_params(**data), str(folder))


def known_files(check: Check) -> dict[str, dict[str, str]]:
    """Return the files of each client, as far as they can be found."""
    try:
        return _files(check, part_of(check.config, "data")) or {}
    except Exception:  # whatever declearn raises, which is reported elsewhere
        return {}


def protected(check: Check) -> tuple[int, str] | None:
    """Return how many records, or persons, the smallest client has; None if it is not known."""
    if "privacy" not in part_of(check.config, "run"):
        return None
    try:
        return min(map(units, known_files(check).values()))
    except Exception:  # whatever a file makes declearn raise, which is reported elsewhere
        return None


def check_folder(check: Check, folder: str) -> None:
    """Report a checkpoint folder that cannot be created."""
    try:
        os.lstat(os.path.join(folder, "server"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as exc:
        text = f"cannot write to the folder {brief(folder)}: {getattr(exc, 'strerror', exc)}"
        check.problem("[experiment]", f"checkpoint: {text}")


def check_model(check: Check, model: Section) -> None:
    """Report values that the model does not train, and problems with running statistics."""
    file = Path(model.get("model_file") or check.path.resolve().parent / "model.py")
    if not file.is_file():
        return
    try:
        counts = trained(file, model.get("model_name") or "model")
    except Exception:  # the file may need what is on another machine, or shapes from the data
        return
    if counts.shared < counts.values:
        check.note("[model]", str(counts))
    if counts.wrong:
        check.note("[model]", counts.wrong)
    if counts.lacking:
        check.problem("[model]", counts.lacking)
