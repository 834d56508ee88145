# SPDX-License-Identifier: Apache-2.0
"""From CSV files to the folder of a federation that runs: data by site, a model, a configuration.

Nothing is written before all of it is right, and a folder is complete or not there.
"""

from __future__ import annotations

import json
import re
import shlex
import string
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedclip.errors import nearest
from fedclip.tools.init_tables import as_numbers, joined, learnt, read_table, units
from fedclip.tools.output import ToolError

FEWEST = 10
"""Records with a target, or persons with some, that each site needs."""
HELD_OUT = 5
"""One of so many records, or persons, is kept to validate with."""
MOST_CLASSES = 10
"""Different texts or whole numbers in a target that are taken for classes."""
_SITE = r"(?i)(?<![a-z])(site|hospital|clinic|cent(er|re)|client)(?![a-z])"


class Plan(NamedTuple):
    """What to make of the files.

    Attributes
    ----------
    target
        The column that the model is to tell.
    column
        The column that says the site of each record of a single file.
    sites
        Number of sites over which else the records of a single file are spread at random.
    persons
        The column that says whose a record is; None if each is another person's.
    drop
        Columns to leave out.
    model
        "sklearn" or "torch".
    seed
        Decides which records are kept to validate with, and the spread.
    """

    target: str
    column: str | None
    sites: int
    persons: str | None
    drop: Sequence[str]
    model: str
    seed: int


class _Target(NamedTuple):
    values: pd.Series
    classes: list[str]
    """Their names, in the order of their numbers; empty for a regression."""


def prepare(folder: Path, files: Sequence[Path], plan: Plan) -> list[str]:
    """Write the folder, and return what there is to say of the data.

    Raises
    ------
    ToolError
        If the folder is not empty, the files can not be used, or torch is missing. Nothing is
        written then.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ToolError(f"{folder} is there already: give a new or empty folder")
    if plan.model == "torch" and find_spec("torch") is None:
        raise ToolError("--model torch needs torch: pip install torch")
    said: list[str] = []
    rng = np.random.default_rng(plan.seed)
    tables = [read_table(file) for file in files]
    table = joined(tables, files)
    named = (plan.target, plan.column, plan.persons, *plan.drop)
    taken = [name for name in named if name is not None]
    for name in taken:
        if name not in table:
            there = nearest(name, table) or f" (there are: {', '.join(list(table)[:20])})"
            raise ToolError(f"there is no column {name!r}{there}")
    others = table.columns.drop(taken)
    person = _persons(table, plan.persons)
    if len(files) > 1:
        stems = [file.stem for file in files]
        alike = [str(file) for file in files if stems.count(file.stem) > 1]
        if alike:
            raise ToolError(f"{', '.join(alike)}: each site needs one file, with a name of its own")
        names = np.repeat(stems, list(map(len, tables)))
    elif plan.column:
        names = table[plan.column].to_numpy()
    else:
        spread = rng.permutation(person.max() + 1)[person] % plan.sites + 1
        names = np.array([f"site-{i:0{len(str(plan.sites))}}" for i in spread])
        known = [f"; by {n!r}: --site {shlex.quote(n)}" for n in others if re.search(_SITE, n)]
        what = "persons" if plan.persons else "records"
        said.append(f"{what} are spread at random over {plan.sites} sites{''.join(known[:1])}")
    site = _sites(pd.Series(names, table.index), said)
    sites = site.unique()
    missing = table[plan.target].isna()
    if missing.any():
        said.append(f"records without {plan.target!r} are left out: {missing.sum()}")
    site, table, person = site[~missing], table[~missing], person[~missing]
    few = person.groupby(site).nunique().reindex(sites, fill_value=0)
    if few.min() < FEWEST:
        what, where = "persons" if plan.persons else "records", f"{few.idxmin()} has {few.min()}"
        raise ToolError(f"each site needs {FEWEST} {what} with {plan.target!r}, and {where}")
    target = _target(table[plan.target], site, said)
    features = as_numbers(table[others], site, said)
    valid = _held_out(target.values, site, person, rng)
    features, columns = _scaled(features, site, valid, said)
    if not target.classes:
        measured, about = _scaled(target.values.to_frame(), site, valid, said)
        columns = pd.concat([columns, about])
        target = _Target(measured[plan.target], [])
    train = site[~valid].value_counts()
    counts = ", ".join(f"{n} {train[n]} + {of.sum()}" for n, of in valid.groupby(site))
    said.append(f"records to train on + to validate with: {counts}")
    if plan.persons:
        said.append(f"no {plan.persons!r} is in both; DP-SGD protects each, with all records")
    texts = _texts(plan, target, features.shape[1], int(train.median()), len(train))
    try:
        arrays = _arrays(features, target, site, valid, plan.model)
        _write(folder, texts, columns, arrays, _owners(person, site, valid) if plan.persons else {})
    except OSError as exc:
        raise ToolError(f"can not write to {folder}: {exc.strerror}") from None
    return said


def _persons(table: pd.DataFrame, column: str | None) -> pd.Series:
    """Return the number of whose each record is; without a column each is of its own."""
    if column is None:
        return pd.Series(range(len(table)), table.index)
    # Imported here: it brings declearn, which takes seconds.
    from fedclip.dpsgd.persons import numbered

    try:
        return pd.Series(numbered(table[column].tolist(), len(table)), table.index)
    except ValueError as exc:
        raise ToolError(f"{column!r}: {exc}") from None


def _owners(person: pd.Series, site: pd.Series, valid: pd.Series) -> dict[str, pd.Series]:
    """Return the files that say whose the records of each site are."""
    from fedclip.tools.quickrun import PERSONS

    return {
        f"{name}/{PERSONS.replace('train', part)}": person[rows].rename("person")
        for name, part, rows in _parts(site, valid)
    }


def _parts(site: pd.Series, valid: pd.Series) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield site, "train" or "valid", and which records are there."""
    for name in sorted(site.unique()):
        for part, chosen in (("train", ~valid), ("valid", valid)):
            yield name, part, ((site == name) & chosen).to_numpy()


def _sites(names: pd.Series, said: list[str]) -> pd.Series:
    """Return the names of sites, fit to be those of folders."""
    if names.isna().any():
        raise ToolError(f"{names.isna().idxmax()} names no site: fill the cell in")
    known = {}
    for name in names.unique():
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")
        known[name] = f"site-{plain}" if plain.isdigit() else plain
        if plain.lower() in ("", "server", "clients"):
            raise ToolError(f"a site can not have the name {name!r}: give it another")
    if len(known) < 2:
        raise ToolError(f"a federation needs two sites at least, and this is one: {names.iloc[0]}")
    if len({name.lower() for name in known.values()}) < len(known):
        raise ToolError(f"as folders, names of sites would be the same: {', '.join(known)}")
    changed = [f"{name!r} is {plain}" for name, plain in known.items() if name != plain]
    if changed:
        said.append(f"names of sites, fit for folders: {', '.join(changed)}")
    return names.map(known)


def _target(column: pd.Series, site: pd.Series, said: list[str]) -> _Target:
    """Decide what is to be learnt: classes, or a number."""
    name, known = column.name, sorted(column.unique())
    if len(known) < 2:
        raise ToolError(f"{name!r} is {known[0]!r} in all records: there is nothing to learn")
    numbers = pd.to_numeric(column, errors="coerce")
    whole = not numbers.isna().any() and not (numbers % 1).any()
    if len(known) > MOST_CLASSES or not (whole or numbers.isna().any()):
        found = as_numbers(column.to_frame(), site, said)
        if name not in found:
            raise ToolError(f"{name!r} holds {len(known)} different texts, too many for classes")
        said.append(f"{name!r} is a number, and so this is a regression")
        return _Target(found[name], [])
    known = sorted(known, key=float) if whole else known
    counts = column.value_counts()
    told = ", ".join(f"{i} is {text!r} ({counts[text]})" for i, text in enumerate(known))
    said.append(f"{name!r} has {len(known)} classes, and so this is a classification: {told}")
    return _Target(column.map({text: i for i, text in enumerate(known)}), known)


def _held_out(
    target: pd.Series, site: pd.Series, person: pd.Series, rng: np.random.Generator
) -> pd.Series:
    """Choose the records to validate with: of each site, those of every fifth person.

    The order is that of the target of each person's first record.
    """
    valid = pd.Series(False, target.index)
    for name in sorted(site.unique()):
        here = site == name
        first = target[here & ~person[here].duplicated()]
        first = first.iloc[np.lexsort((rng.random(len(first)), first))]
        kept = person[first.index[rng.integers(HELD_OUT) :: HELD_OUT]]
        valid |= here & person.isin(kept)
    return valid


def _scaled(
    table: pd.DataFrame, site: pd.Series, valid: pd.Series, said: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Fill and scale what is measured; return it, and for each column what was done."""
    empty = [name for name in table if table[name].isna().all()]
    said.extend(f"{name!r} holds nothing: left out" for name in empty)
    table = table.drop(columns=empty)
    train = table[~valid]
    found = learnt(train, site[~valid])
    for name, gaps in table.isna().items():
        if gaps.any():
            where = ", ".join(f"{n} of {s}" for s, n in gaps.groupby(site).sum().items() if n)
            said.append(f"{name!r} is missing in {where}: filled by the median of that site")
    constant = [name for name in table if np.isnan(found.scale[name])]
    said.extend(f"{name!r} has one value at each site: left out" for name in constant)
    if len(constant) == table.shape[1]:
        raise ToolError("no column is left to learn from")
    measured = [name for name in table if name not in constant]
    said.extend(units(train[measured], site[~valid]))
    filled = table.fillna(found.fill.loc[site].set_index(table.index))[measured]
    scaled = (filled - found.center[measured]) / found.scale[measured]
    about = {"center": found.center, "scale": found.scale}
    columns = pd.DataFrame({**about, **found.fill.add_prefix("fill ", axis=0).T}).loc[measured]
    return scaled, columns


def _texts(
    plan: Plan, target: _Target, features: int, records: int, clients: int
) -> dict[str, str]:
    """Return configuration and model, whose steps fit the number of columns and records."""
    classes, torch = len(target.classes), plan.model == "torch"
    labels = f'["multi-classif", {{ labels = {list(range(classes))} }}]'
    if not classes:
        metric = '"r2"'
    elif classes == 2 and not torch:
        metric = '["binary-classif", { thresh = 0.0 }]'
    else:
        metric = labels
    batch = min(32, max(4, records // 12))  # about 12 steps a round, or more
    config = _template("config.toml").substitute(
        title=f"{clients} sites learn to tell {json.dumps(plan.target)} from {features} columns.",
        metric=metric,
        # Beyond about this, one step with that many columns goes too far.
        lrate=f"{min(0.1, 4 / features) if classes else min(0.05, 1 / features):.2g}",
        clients=clients,
        batch=batch,
        epochs=max(1, 12 * batch // records),
    )
    # Far from the target, the loss of a regression grows in a line: it does not run away.
    linear = ('kind="regressor", loss="huber", epsilon=1.35', 'kind="classifier", loss="log_loss"')
    model = _template(f"{plan.model}.txt").substitute(
        arguments=linear[bool(classes)],
        loss="CrossEntropyLoss" if classes else "HuberLoss",
        features=features,
        outputs=max(classes, 1),
        last="" if classes else "\n    torch.nn.Flatten(0),",
    )
    return {"config.toml": config, "model.py": model}


def _template(name: str) -> string.Template:
    return string.Template(Path(__file__).with_name(f"init_{name}").read_text(encoding="utf-8"))


def _arrays(
    features: pd.DataFrame, target: _Target, site: pd.Series, valid: pd.Series, model: str
) -> dict[str, np.ndarray]:
    """Return the files of each site, as declearn's quickrun reads them."""
    kind = np.float32 if model == "torch" else np.float64
    wanted = target.values.to_numpy(np.int64 if target.classes else kind)
    found = {}
    for name, part, rows in _parts(site, valid):
        found[f"{name}/{part}_data.npy"] = features.to_numpy(kind)[rows]
        found[f"{name}/{part}_target.npy"] = wanted[rows]
    return found


def _write(
    folder: Path,
    texts: dict[str, str],
    columns: pd.DataFrame,
    arrays: dict[str, np.ndarray],
    owners: dict[str, pd.Series],
) -> None:
    """Write all files, or none."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            whole = Path(unfinished)
            for name, array in arrays.items():
                file = whole / "data" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                np.save(file, array)
            for name, persons in owners.items():
                persons.to_csv(whole / "data" / name, index=False)
            columns.to_csv(whole / "columns.csv", index_label="column")
            for name, text in texts.items():
                (whole / name).write_text(text, encoding="utf-8")
            for file in list(whole.iterdir()):
                file.rename(folder / file.name)
    except BaseException:
        if made:
            folder.rmdir()
        raise
