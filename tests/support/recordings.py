# SPDX-License-Identifier: Apache-2.0
"""What other packages made of one stream of gradients: `tests/golden`, an archive for each."""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden"
ALL: list[dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())["files"]
# The source archive leaves the recorded numbers out.
INDEX = [record for record in ALL if (FOLDER / f"{record['peer']}.npz").exists()]


def arrays_of(record: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a record of the index, by name."""
    prefix = record["file"].removesuffix(".npz") + "/"
    with np.load(FOLDER / f"{record['peer']}.npz") as archive:
        return {key.removeprefix(prefix): archive[key] for key in archive if key.startswith(prefix)}
