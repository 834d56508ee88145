# SPDX-License-Identifier: Apache-2.0
"""One task for every engine: the clients of a quickrun file, with all records in each batch.

The file is that of the environment variable EQUAL_TASK. As a script, it is a client of NVFlare.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

Weights = dict[str, Any]


@functools.lru_cache(maxsize=1)
def crowd() -> Any:
    from fedclip.engines.local.simulate import Simulation

    return Simulation(Path(os.environ["EQUAL_TASK"]), 3).crowd


def first() -> Weights:
    coefs = crowd().model.get_weights(trainable=True).coefs
    return {name: np.array(coefs[name], dtype=float) for name in sorted(coefs)}


def train(client: int, weights: Weights) -> tuple[Weights, int]:
    """Return what a client has made of the model, and its number of steps."""
    start = crowd().model.get_weights(trainable=True)
    like = {name: weights[name].astype(x.dtype) for name, x in start.coefs.items()}
    trained, steps, _ = crowd().train(client, type(start)(like), {})
    update = trained.coefs
    return {name: weights[name] - np.asarray(update[name], float) for name in weights}, steps


def flat(weights: Weights) -> Any:
    return np.concatenate([np.ravel(weights[name]) for name in sorted(weights)])


def shaped(vector: Any) -> Weights:
    found, at = {}, 0
    for name, like in first().items():
        found[name] = np.reshape(vector[at : at + like.size], like.shape)
        at += like.size
    return found


def main() -> None:
    import nvflare.client as flare
    from nvflare.apis.fl_constant import FLMetaKey
    from nvflare.client import FLModel, ParamsType

    flare.init()
    client = int(flare.get_site_name().removeprefix("site-")) - 1
    while flare.is_running():
        weights, steps = train(client, shaped(flare.receive().params["numpy_key"]))
        flare.send(
            FLModel(
                params={"numpy_key": flat(weights)},
                params_type=ParamsType.FULL,
                meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps},
            )
        )


if __name__ == "__main__":
    main()
