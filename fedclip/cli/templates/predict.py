"""Predict the class of new records: python predict.py new.csv [--run FOLDER] [--best].

The file has the columns of columns.toml; the target may be left out. FOLDER is a node's results:
results/server, results/NAME of a client, or results/simulated/server after a simulation.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from declearn.main.utils import Checkpointer
from model import model
from prepare import HERE, read_columns, read_records


def main() -> None:
    """Write an identifier and a class for each row of a file."""
    parser = argparse.ArgumentParser(description="Predict the class of new records.")
    parser.add_argument("file", type=Path, help="a CSV file of new records")
    parser.add_argument("--run", type=Path, default=HERE / "results" / "server")
    parser.add_argument(
        "--best", action="store_true", help="the best round's weights, not the last"
    )
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"))
    for name, usual in (("encoding", "utf-8"), ("separator", ","), ("decimal", ".")):
        parser.add_argument(f"--{name}", default=usual, help=f"of the file; usually {usual!r}")
    options = parser.parse_args()
    files = sorted(options.run.glob("model_state_*.mpk"))
    files = [file for file in files if (file.stem == "model_state_best") == options.best]
    if not files:
        parser.error(f"{options.run} holds no such weights: give --run another folder")
    columns = read_columns(options.encoding, options.separator, options.decimal)
    names = [name for name in columns.names if name != columns.target]
    cells, values = read_records(options.file, names, columns)
    label = files[-1].stem.removeprefix("model_state_")
    Checkpointer(str(options.run)).load_model(model, timestamp=label)
    batch = (values.astype(np.float32), np.zeros(len(cells), dtype=np.int64), None)
    _, scores, _ = model.compute_batch_predictions(batch)
    several = scores.ndim > 1 and scores.shape[1] > 1
    predictions = scores.argmax(axis=1) if several else (scores.reshape(-1) > 0).astype(int)
    classes = [*columns.classes]
    with options.out.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow([columns.identifier, columns.target])
        writer.writerows([row[0], classes[i]] for row, i in zip(cells, predictions, strict=True))
    print(f"{len(cells)} predictions by {files[-1]} are in {options.out}")


if __name__ == "__main__":
    main()
