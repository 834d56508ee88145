# SPDX-License-Identifier: Apache-2.0
"""Check the files of a quickrun configuration: the clients' data, the model, the results.

A file `train_persons.csv` next to a client's training data says whose each record is; DP-SGD then
protects persons. Without that file, repeated values in a column named like an identifier are noted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from declearn.dataset.utils import load_data_array
from declearn.quickrun import DataSourceConfig, parse_data_folder

from fedclip.cli.check.findings import Check, Finding, Section, note, problem, text_of
from fedclip.cli.check.settings import part_of, registered
from fedclip.dpsgd.persons import numbered
from fedclip.engines.declearn.personal import trained
from fedclip.engines.declearn.quickrun import PERSONS
from fedclip.errors import shown
from fedclip.report.rows import listed

Files: TypeAlias = Mapping[str, Mapping[str, str]]
"""The files of each client, by what is in them."""


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


def site_files(check: Check) -> tuple[Files, list[Finding]]:
    """Return the files of each client, as far as they can be found, and what is wrong with them."""
    folder, data = check.path.resolve().parent, part_of(check.config, "data")
    if data.get("data_folder") is None and not any(folder.glob("data*")):
        return {}, []  # the data is on another machine, or comes later
    try:
        return parse_data_folder(DataSourceConfig.from_params(**data), str(folder)), []
    except Exception as exc:  # whatever declearn raises
        return {}, [problem("[data]", text_of(exc))]


def person_findings(files: Files, *, evaluated: bool = False) -> Iterator[Finding]:
    """Yield findings about the persons of private clients.

    With `evaluated`, evaluations have noise, which needs the person of each validation record.
    """
    where, persons = "[data]", {site: _named(paths) for site, paths in files.items()}
    for site in (site for site, named in persons.items() if named.exists()):
        file, valid = persons[site], _named(files[site], "valid")
        try:
            count, _ = units(files[site])
            text = f"{site}: DP-SGD protects {count:,} persons, each with all records"
            yield Finding("ok", where, text)
            file = valid
            if valid.exists():
                units(files[site], "valid")
            elif evaluated:
                text = f"{site}: evaluation_share needs the person of each validation record"
                yield problem(where, f"{text}: write them into {valid.name}")
        except (OSError, TypeError, ValueError) as exc:
            yield problem(where, f"{file}: {exc}")
    missing = [site for site, named in persons.items() if not named.exists()]
    if 0 < len(missing) < len(files):
        text = f"{listed(missing)}: there is no {PERSONS}, so DP-SGD protects each record, unlike"
        yield note(where, f"{text} at other sites: write one, unless each person has one record")


def data_findings(files: Files, run: Section) -> Iterator[Finding]:
    """Yield what does not fit between the clients' files, if they exist already, and [run]."""
    (low, high), count, where = registered(run), len(files), "[data]"
    if low and 0 < count < low:
        yield problem(where, f"the folder has {count} clients, fewer than min_clients = {low}")
    elif high and count > high:
        yield problem(where, f"the folder has {count} clients, more than max_clients = {high}")
    # DP-SGD draws batches by itself.
    parts = () if "privacy" in run else (("training", "train", True), ("evaluate", "valid", False))
    for section, of, default in parts:
        effort = part_of(run, section)
        size = effort.get("batch_size", 128)
        drops = effort.get("drop_remainder", default) and isinstance(size, int)
        for site, paths in files.items() if drops else ():
            try:
                count = len(load_data_array(paths[f"{of}_target"]))
            except Exception:  # whatever a file makes declearn raise, which is reported elsewhere
                continue
            if count < size:
                text = f"{site} has {count} records in {of}_target, fewer than batch_size = {size}"
                yield problem(f"[run.{section}]", f"{text}: set drop_remainder = false")


def protected(files: Files) -> tuple[int, str] | None:
    """Return how many records, or persons, the smallest client has; None if it is not known."""
    try:
        return min(map(units, files.values()))
    except Exception:  # whatever a file makes declearn raise, which is reported elsewhere
        return None


def path_findings(folder: Path, config: Section) -> Iterator[Finding]:
    """Yield problems with the checkpoint folder and the model, and values that are not trained."""
    model, checkpoint = part_of(config, "model"), part_of(config, "experiment").get("checkpoint")
    if isinstance(checkpoint, str):
        try:
            os.lstat(folder / checkpoint / "server")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:
            why = f"{shown(checkpoint)}: {getattr(exc, 'strerror', exc)}"
            yield problem("[experiment]", f"checkpoint: cannot write to the folder {why}")
    file = model.get("model_file") or str(folder / "model.py")
    if "model_file" in model and isinstance(file, str) and not os.path.isfile(file):
        yield problem("[model]", f"there is no model file {shown(file)}")
    try:
        counts = trained(Path(file), model.get("model_name") or "model")
    except Exception:  # no file, or it needs what is on another machine, or shapes from the data
        return
    if counts.shared < counts.values:
        yield note("[model]", str(counts))
    if counts.wrong:
        yield note("[model]", counts.wrong)
    if counts.lacking:
        yield problem("[model]", counts.lacking)
