"""Whether the first proposal of `fedclip suggest` is right: ``python -m benchmarks.advice``.

Federations on data of scikit-learn, with and without sites unlike the others. Each is run without
clipping; `fedclip suggest` is asked about that run; then it is run again over several splits of the
records, with its first proposal and without, and the accuracy of the sites that are as they should
be is compared split by split. With ``--all`` every proposal is tried, best first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from sklearn import datasets

from fedclip.cli.reporting import NONE, Ranking
from fedclip.cli.suggest import advised, rewritten
from fedclip.engines.local.simulate import run
from fedclip.report import read_report
from fedclip.report.findings import Advice
from fedclip.report.results import Result, result_of

_DATA = {
    "cancer": (datasets.load_breast_cancer, 0.1, 8),
    "digits": (datasets.load_digits, 0.5, 16),
    "wine": (datasets.load_wine, 0.1, 8),
}
"""The records, and the learning rate and batch size for them."""


@dataclass(frozen=True)
class Federation:
    """The records of some sites, and what is wrong with those of the last.

    Attributes
    ----------
    data, sites, rounds
        Whose records these are, over how many sites, and how long they train.
    odd, factor, columns
        So many sites have this share of the columns multiplied by the factor.
    flipped
        Whether they have the sign of all columns the wrong way round.
    corrupt
        Share of their records that are so; the others are right.
    small
        Records of the first site; 0: as many as the others.
    skew
        Parameter of the Dirichlet distribution of labels over sites; 0: all alike.
    noise
        Share of wrong labels everywhere; features have heavy tails then, too.
    burst
        What gradients of a single site in a single round are multiplied by.
    swapped
        Whether the odd sites have other labels: each class is called by the name of the next.
    single
        So many of the last sites have records of one class only.
    """

    data: str = "cancer"
    sites: int = 3
    rounds: int = 10
    odd: int = 0
    factor: float = 1.0
    columns: float = 1.0
    flipped: bool = False
    corrupt: float = 1.0
    small: int = 0
    skew: float = 0.0
    noise: float = 0.0
    burst: float = 1.0
    swapped: bool = False
    single: int = 0


FEDERATIONS: Mapping[str, Federation] = {
    "one of three in other units, × 100": Federation(odd=1, factor=100.0),
    "one of three, × 2.54": Federation(odd=1, factor=2.54),
    "one of three, a third of the columns × 10": Federation("wine", odd=1, factor=10, columns=0.3),
    "one of three, the sign wrong": Federation(odd=1, flipped=True),
    "two of ten, × 50": Federation("digits", 10, odd=2, factor=50.0, columns=0.5),
    "two of ten, × 50, labels unlike": Federation(
        "digits", 10, odd=2, factor=50.0, columns=0.5, skew=0.3
    ),
    "none odd": Federation("digits", 5),
    "none odd, labels unlike": Federation("digits", 10, skew=0.3),
    "one very small site": Federation("digits", 5, small=10),
    "a spike in one round, × 1000": Federation("digits", burst=1000.0),
    "one record in thirty × 1000, at one site": Federation(odd=1, factor=1000.0, corrupt=1 / 30),
    "all noisy": Federation("wine", noise=0.3),
    "one of three, saturated, × 10,000": Federation(odd=1, factor=10_000.0),
    "two of five, saturated, × 25": Federation("wine", 5, odd=2, factor=25.0),
    "one column of one of three × 1000": Federation(odd=1, factor=1000.0, columns=1 / 30),
    "one of two, × 100": Federation(sites=2, odd=1, factor=100.0),
    "labels of one of four swapped": Federation("wine", 4, odd=1, swapped=True),
    "labels of one of three swapped": Federation(odd=1, swapped=True),
    "one class at one site": Federation("digits", 5, single=1),
    "one class at one of three": Federation(single=1),
    "one class at each site": Federation("digits", 10, single=10),
    "a spike, labels unlike": Federation("digits", 5, burst=3000.0, skew=0.3),
    "tiny sites": Federation("wine", 8),
    "tiny sites, one × 50": Federation("wine", 8, odd=1, factor=50.0),
    "five small columns × 5": Federation("wine", 3, odd=1, factor=5.0, columns=0.4),
}

_MODEL = """\
import torch
from declearn.model.torch import TorchModel

layer = torch.nn.Linear({features}, {classes})
torch.nn.init.zeros_(layer.weight)
torch.nn.init.zeros_(layer.bias)


class Bursting(TorchModel, register=False):
    calls = 0

    def compute_batch_gradients(self, batch, max_norm=None):
        Bursting.calls += 1
        gradients = super().compute_batch_gradients(batch, max_norm)
        return gradients * {burst} if {begin} < Bursting.calls <= {end} else gradients


model = Bursting(layer, torch.nn.CrossEntropyLoss())
"""

_CONFIG = """\
[data]

[optim]
aggregator = "averaging"

[optim.client_opt]
lrate = {lrate}
modules = ["no-op"]

[optim.server_opt]
lrate = 1.0

[run]
rounds = {rounds}

[run.training]
batch_size = {batch}
shuffle = true
n_epoch = 1
drop_remainder = false

[experiment]
metrics = [["multi-classif", {{ labels = {labels} }}]]
checkpoint = {result}
"""


def split(of: Federation, seed: int) -> tuple[dict[str, list[np.ndarray]], list[str]]:
    """Return the four arrays of each site, and the names of the odd ones."""
    source, rng = _DATA[of.data][0](), np.random.default_rng(seed)
    order = rng.permutation(len(source.target))
    data, target = source.data[order], source.target[order].astype(np.int64)
    # Digits keep their zeros; the others are scaled by a table that all sites have.
    center, scale = (0.0, 16.0) if of.data == "digits" else (data.mean(0), data.std(0))
    names = [f"site-{i:02}" for i in range(1, of.sites + 1)]
    odd = names[of.sites - of.odd :]
    valid, train = np.split(np.arange(len(target)), [len(target) * 3 // 10])
    parts = np.array_split(train, of.sites)
    if of.small:
        parts = [train[: of.small], *np.array_split(train[of.small :], of.sites - 1)]
    elif of.skew:
        parts = [rows[:8] for rows in parts]
        for label in np.unique(target):
            mix = np.cumsum(rng.dirichlet([of.skew] * of.sites))[:-1]
            rows = train[target[train] == label]
            pieces = np.split(rows, (mix * len(rows)).astype(int))
            parts = [np.concatenate(pair) for pair in zip(parts, pieces, strict=True)]
    for i in range(of.single):
        own = parts[of.sites - 1 - i]
        parts[of.sites - 1 - i] = train[target[train] == i % (target.max() + 1)][: len(own)]
    columns = rng.permutation(data.shape[1])[: max(1, round(of.columns * data.shape[1]))]
    found = {}
    # A site of one class validates with that one, too.
    held_out = np.array_split(valid, of.sites)
    for i in range(of.single):
        held_out[of.sites - 1 - i] = valid[target[valid] == i % (target.max() + 1)][:30]
    for name, *rows in zip(names, parts, held_out, strict=True):
        arrays = []
        for part, chosen in zip(("train", "valid"), rows, strict=True):
            own, labels = data[chosen].copy(), target[chosen].copy()
            if name in odd:
                wrong = np.flatnonzero(rng.random(len(own)) < of.corrupt)
                own[np.ix_(wrong, columns)] *= of.factor
            own = (own - center) / scale * (-1 if of.flipped and name in odd else 1)
            if of.swapped and name in odd:
                labels = (labels + 1) % (target.max() + 1)
            if of.noise and part == "train":
                own *= np.abs(rng.standard_t(1.5, (len(own), 1)))
                wrong = rng.random(len(own)) < of.noise
                labels[wrong] = rng.choice(target, wrong.sum())
            arrays += [own.astype(np.float32), labels]
        found[name] = arrays
    return found, odd


def write(folder: Path, of: Federation, seed: int) -> tuple[Path, list[str]]:
    """Write data, model and configuration; return the file and the odd sites."""
    sites, odd = split(of, seed)
    _, lrate, batch = _DATA[of.data]
    for name, arrays in sites.items():
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        files = ("train_data", "train_target", "valid_data", "valid_target")
        for file, array in zip(files, arrays, strict=True):
            np.save(folder / "data" / name / f"{file}.npy", array)
    first = next(iter(sites.values()))
    classes = int(max(arrays[1].max() for arrays in sites.values())) + 1
    steps = [-(-len(arrays[1]) // batch) for arrays in sites.values()]
    # Clients train one after the other: the last one's batches in the middle of the run.
    end = sum(steps) * (of.rounds // 2)
    texts = {
        "model.py": _MODEL.format(
            features=first[0].shape[1],
            classes=classes,
            burst=of.burst,
            begin=end - steps[-1],
            end=end,
        ),
        "config.toml": _CONFIG.format(
            lrate=lrate,
            batch=batch,
            rounds=of.rounds,
            labels=list(range(classes)),
            result=json.dumps(str(folder / "result")),
        ),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder / "config.toml", odd


def trained(config: Path, seed: int) -> tuple[Result, Advice]:
    """Run a federation; return what came of it, and the advice."""
    done = run(config, seed)
    report = read_report(Path(done.results))
    experiment = min(report.experiments)
    return result_of(report, experiment), advised(report, experiment)


def tried(of: Federation, splits: int, every: bool) -> tuple[Advice, list[str], Ranking]:
    """Return the advice on the first split, the odd sites, and a ranking over the splits."""
    found: dict[str, dict[str, Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(splits):
            config, odd = write(Path(folder, str(seed)), of, seed)
            bare, own = trained(config, seed)
            text = config.read_text(encoding="utf-8")
            if not seed:
                advice = own
                chosen = [p for p in advice.proposals if every or p.name == advice.start]
            found.setdefault(NONE, {})[str(seed)] = bare
            for proposal in chosen:
                shutil.rmtree(config.parent / "result")
                config.write_text(rewritten(text, proposal), encoding="utf-8")
                found.setdefault(proposal.name, {})[str(seed)] = trained(config, seed)[0]
    return advice, odd, Ranking(found, NONE)


def verdict(difference: float, half: float) -> str:
    """Return whether a proposal was right, in a word."""
    if difference > half:
        return "better"
    return "as good" if difference >= -half else "WORSE"


def main() -> None:
    """Print a table of all federations, or of those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only federations with such a word in their name")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="try every proposal, as tune does")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "PyTorch JSON")
    chosen = {
        name: of
        for name, of in FEDERATIONS.items()
        if not given.words or any(word in name for word in given.words)
    }
    print("| federation | outliers named | `suggest` | no clipping | points | so | `tune` |")
    print("|---|---|---|---|---|---|---|")
    for name, of in track(chosen.items(), console=Console(stderr=True), description="advice"):
        advice, odd, ranking = tried(of, given.splits, given.all)
        named = "all of them" if sorted(advice.odd) == odd else ", ".join(advice.odd) or "none"
        named = named if odd or advice.odd else "none"
        right = [site for site in ranking.sites if site not in odd]
        bare = f"{100 * ranking.mean(NONE, *right)[0]:.1f}"
        first = advice.start or ("(only tune)" if "can tell" in advice.answer else "(no help)")
        points = "|"
        if advice.start:
            mean, half = (100 * (x or 0.0) for x in ranking.gain(advice.start, NONE, *right))
            points = f"{mean:+.1f} ± {half:.1f} | {verdict(mean, half)}"
        winner = (ranking.winner or "none") if given.all else ""
        if given.all and ranking.winner:
            mean, half = (100 * (x or 0.0) for x in ranking.gain(winner, NONE, *right))
            winner += f", {mean:+.1f} ± {half:.1f}"
        print(f"| {name} | {named} | {first} | {bare} | {points} | {winner} |", flush=True)


if __name__ == "__main__":
    main()
