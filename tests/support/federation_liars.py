"""What a client may send in the place of anything: values of every kind that travel."""

import random
from typing import Any

import numpy as np
from declearn.aggregator import ModelUpdates
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector

from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipBound, UpdateClipVotes
from fedclip.statistics.counts import FedclipSharedCounts, FedclipSharedState

OURS = (ClippedUpdates, UpdateClipVotes, UpdateClipBound, FedclipSharedCounts, FedclipSharedState)
FIELDS = {
    ClippedUpdates: ("updates", "weights", "n_clients", "n_clipped", "n_zeroed"),
    UpdateClipVotes: ("n_clients", "n_votes", "n_within", "n_faults"),
    UpdateClipBound: ("bound", "adaptive", "private", "stop", "fedclip"),
    FedclipSharedCounts: ("counts",),
    FedclipSharedState: ("version", "settings", "max_steps", "labels", "state", "fedclip"),
}
DTYPES = (
    *("float64", "float32", "float16", "int64", "uint8", "bool"),
    *("complex64", "complex128", ">f8", "M8[s]", "uint64"),
)


def array(rng: random.Random, shape: tuple[int, ...]) -> Any:
    dtype = rng.choice(DTYPES)
    size = int(np.prod(shape, dtype=int))
    values = [rng.choice([0.0, 1.0, -3.0, 0.5, 7.25]) for _ in range(size)]
    made = np.array(values, dtype="f8").reshape(shape)
    if dtype == "M8[s]":
        return made.astype("i8").astype(dtype)
    made = np.asarray(np.abs(made) if dtype.startswith("uint") else made).astype(dtype)
    if made.dtype.kind == "f" and size and rng.random() < 0.4:
        made.ravel()[0] = rng.choice([np.nan, np.inf, -np.inf, 6e4])
    return made


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of any kind that declearn can send."""
    kind = rng.randrange(16 if depth < 3 else 10)
    if kind == 0:
        return None
    if kind == 1:
        return rng.choice([True, False])
    if kind == 2:
        return rng.choice([0, 1, -1, 2, 10**6, 2**31, 2**63 - 1, 2**70, -(2**70)])
    if kind == 3:
        return rng.choice([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308, 5e-324])
    if kind == 4:
        return rng.choice(["", "w", "x" * 1000, "\u0000", "[/x]", "%s %d", "update-clip"])
    if kind == 5:
        return rng.choice([b"", b"\xff\x00" * 9])
    if kind in (6, 7, 8):
        return array(rng, rng.choice([(), (0,), (1,), (2,), (2, 1), (3, 2)]))
    if kind == 9:
        return [1] * rng.choice([0, 1, 2, 45, 557])
    if kind == 10:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 11:
        return {
            rng.choice(["w", "b", "n_votes", "counts", "updates"]): anything(rng, depth + 1)
            for _ in range(rng.randrange(3))
        }
    if kind == 12:
        return vector(rng, depth + 1)
    if kind == 13:
        return ModelUpdates(vector(rng, depth + 1), rng.choice([1, 1e9, -1]))
    return message(rng, depth + 1)


def vector(rng: random.Random, depth: int = 0) -> Any:
    """Return a vector, mostly of the tensors of the model."""
    if rng.random() < 0.2:
        made = NumpyVector({})
        made.coefs = anything(rng, depth + 1)
        return made
    names: str = rng.choice(["wb", "wb", "bw", "w", "wbc", ""])
    shapes: dict[str, tuple[int, ...]] = {"w": (2,), "b": (), "c": (1,)}
    coefs = {n: array(rng, shapes[n]) if rng.random() < 0.9 else anything(rng, 3) for n in names}
    return NumpyVector(coefs)


def message(rng: random.Random, depth: int = 0) -> Any:
    """Return a message of one of fedclip's classes, with anything in its fields."""
    cls: Any = rng.choice(OURS)
    fields: Any = {name: anything(rng, depth + 1) for name in FIELDS[cls] if rng.random() < 0.9}
    if rng.random() < 0.3:
        fields["surprise"] = anything(rng, depth + 1)
    if cls is ClippedUpdates and rng.random() < 0.7:
        fields |= {"updates": vector(rng, depth), "n_clients": 1, "n_clipped": 0, "n_zeroed": 0}
    if cls is UpdateClipVotes and rng.random() < 0.5:
        fields |= {"n_clients": 1, "n_votes": 1}
    group = "ModelUpdates" if cls is ClippedUpdates else "AuxVar"
    # What declearn makes of such an object, without the object.
    content = fields if rng.random() < 0.9 else anything(rng, 3)
    return {"__type__": f"{group}>{cls.__name__}", "dump": content}


def forge(rng: random.Random, honest: TrainReply) -> bytes:
    """Return what a liar sends in the place of an honest reply: something in it is anything."""
    aux: Any = dict(honest.aux_var)
    updates: Any = honest.updates
    while True:
        what = rng.randrange(7)
        if what == 0:
            updates = rng.choice([anything, message])(rng)
        elif what == 1:
            content = {"updates": vector(rng), "n_clients": 1, "n_clipped": 0, "n_zeroed": 0}
            updates = {"__type__": "ModelUpdates>ClippedUpdates", "dump": content}
        elif what == 2:
            aux[rng.choice(sorted(aux))] = rng.choice([anything, message])(rng)
        elif what == 3:
            keys = sorted(aux)
            aux = dict(zip(keys, [aux[key] for key in reversed(keys)], strict=True))
        elif what == 4:
            del aux[rng.choice(sorted(aux))]
        elif what == 5:
            aux[rng.choice(["bogus", "scaffold", "", "zscore-clip-server"])] = anything(rng)
        else:
            aux = anything(rng)
            break
        if rng.random() < 0.7 or not aux:
            break
    reply = TrainReply(n_epoch=1, n_steps=1, t_spent=0.0, updates=updates, aux_var=aux)
    return reply.serialize()
