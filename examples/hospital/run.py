"""Three hospitals, one of them in other units: the template of `fedclip init`, filled in.

    python run.py                # every command as a user types it, and what it prints
    python run.py --rounds 5     # a shorter training

The records are scikit-learn's of breast cancer. At the end it checks that `suggest` names the
third hospital, and that the limit it proposes raises the accuracy of the other two.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tables import SITES, write_tables

HERE = Path(__file__).resolve().parent


def type_in(*words: str, folder: Path) -> str:
    """Run a command in a folder, and return what it prints."""
    print(f"\n$ {' '.join(words)}", flush=True)
    module = ["-m", "fedclip"] if words[0] == "fedclip" else []
    command = [sys.executable, *module, *words[1:]]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return done.stdout


def accuracy(folder: Path, site: str) -> float:
    """Return the last accuracy at a site."""
    rounds = json.loads((folder / "simulated" / "server" / f"metrics_{site}.json").read_text())
    return float([*rounds.values()][-1]["accuracy"])


def play(
    folder: Path, rounds: int = 20, run: Callable[..., str] = type_in
) -> tuple[list[str], dict[str, list[float]]]:
    """Go from three CSV files to a limit, by commands.

    Returns
    -------
    named, accuracies
        The hospitals that the findings name, and each one's accuracy without and with the limit.
    """
    write_tables(folder)
    run("fedclip", "init", "study", "--model", "sklearn", folder=folder)
    study = folder / "study"
    shutil.copy(HERE / "columns.toml", study)
    # Without this line, each run splits the records in another way.
    (study / "split.key").write_bytes(b"hospital")
    config = study / "config.toml"
    config.write_text(re.sub(r"rounds = \d+", f"rounds = {rounds}", config.read_text("utf-8")))
    for site in SITES:
        run("python", "prepare.py", f"../{site}.csv", "--site", site, folder=study)
    for command in ("check", "simulate", "report", "suggest"):
        run("fedclip", command, folder=study)
    advice = json.loads(run("fedclip", "suggest", "--json", folder=study))
    run("fedclip", "suggest", "--write", "config.toml", folder=study)
    (study / "results").rename(study / "before")
    run("fedclip", "simulate", folder=study)
    run("fedclip", "compare", "before", "results", folder=study)
    named = [site for site in SITES if any(site in text for text in advice["findings"])]
    folders = (study / "before", study / "results")
    return named, {site: [accuracy(one, site) for one in folders] for site in SITES}


def main() -> None:
    """Play it in a folder that is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        named, found = play(Path(folder), rounds)
    print(f"named: {', '.join(named)}")
    for site, (before, after) in found.items():
        print(f"{site}: accuracy {before:.3f} without the limit, {after:.3f} with it")
    healthy = [found[site] for site in SITES[:-1]]
    sys.exit(named != [SITES[-1]] or any(after < before for before, after in healthy))


if __name__ == "__main__":
    main()
