# SPDX-License-Identifier: Apache-2.0
"""Three hospitals, one of them in other units: from their CSV files to a limit, by commands only.

    python run.py                          # every command as a user types it, and what it prints
    python run.py --rounds 5 --seeds 3     # a smaller study

The records are scikit-learn's of breast cancer. The third hospital has lengths in millimetres and
areas in square millimetres, where the others have centimetres. No file is edited by hand. At the
end it checks that the right hospital was named, and that a proposal raises the accuracy of
the other two by more than its interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from prepare import write_tables

HOSPITALS = ("harbour", "north", "valley")


class Outcome(NamedTuple):
    """What came of it.

    Attributes
    ----------
    named, counted
        The hospitals that the findings name, and those whose accuracy counts.
    best
        The proposal that was best when it was tried.
    difference, half_width
        What it brings those that count, in accuracy, and half of its 95 % interval.
    pages
        The pages that were written.
    """

    named: list[str]
    counted: list[str]
    best: str
    difference: float
    half_width: float
    pages: list[str]

    @property
    def right(self) -> bool:
        """Whether the right hospital is named, and a proposal helps the others."""
        named = self.named == [HOSPITALS[-1]] and self.counted == [*HOSPITALS[:-1]]
        return named and self.difference > self.half_width


def fedclip(*words: str, folder: Path, quiet: bool = False) -> str:
    """Run a command in a folder, and return what it prints.

    Raises
    ------
    RuntimeError
        If it fails.
    """
    if not quiet:
        print(f"\n$ fedclip {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "fedclip", *words]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if not quiet:
        print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(f"fedclip {words[0]} ended with code {done.returncode}")
    return done.stdout


def play(folder: Path, rounds: int = 10, seeds: int = 5) -> Outcome:
    """Go from three CSV files to a page, by commands.

    Raises
    ------
    RuntimeError
        If a command fails.
    """
    files = write_tables(folder, HOSPITALS)
    fedclip("init", "study", *(f.name for f in files), "--target", "diagnosis", folder=folder)
    study, tune = folder / "study", ("tune", "--rounds", str(rounds), "--seeds", str(seeds))
    fedclip("simulate", folder=study)
    fedclip("suggest", "results", folder=study)
    advice = json.loads(fedclip("suggest", "results", "--json", folder=study, quiet=True))
    tuned = json.loads(fedclip(*tune, "--json", folder=study, quiet=True))
    # All runs are there: this only reads them.
    fedclip(*tune, "--html", "tune.html", "--write", folder=study)
    fedclip("simulate", folder=study)
    fedclip("report", "results", "--html", "report.html", folder=study)
    best = tuned["settings"][0]
    return Outcome(
        named=[name for name in HOSPITALS if any(name in text for text in advice["findings"])],
        counted=tuned["counted"],
        best=best["name"],
        difference=best["difference"],
        half_width=best["difference_half_width"],
        pages=sorted(page.name for page in study.glob("*.html")),
    )


def main() -> None:
    """Play it in a folder that is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = play(Path(folder), given.rounds, given.seeds)
    print(
        f"{', '.join(found.named)} named; {found.best}: {100 * found.difference:+.1f} ± "
        f"{100 * found.half_width:.1f} points of accuracy at {' and '.join(found.counted)}, "
        f"in {time.monotonic() - begun:.0f} s"
    )
    sys.exit(not found.right)


if __name__ == "__main__":
    main()
