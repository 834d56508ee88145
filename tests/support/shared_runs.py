# SPDX-License-Identifier: Apache-2.0
"""Server and clients that share statistics, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize

from fedclip.engines.declearn.statistics_server import SharedServer
from fedclip.statistics.counts import FedclipSharedCounts

Steps = Sequence[float | Mapping[str, float]]


# Limits that move from early on, so that a few rounds see everything; and all norms are learnt,
# so that what is merged is known. What protects the first norms has tests of its own below.
LEARNS_ALL = {"warmup": 20, "warmup_factor": None, "warmup_norm": 1.0}


CONFIGS: dict[str, dict[str, Any]] = {
    "zscore-clip": {**LEARNS_ALL, "action": "reciprocal", "max_norm": 1.0, "min_std": 0.0},
    "ema-clip": {**LEARNS_ALL, "ratio": 1.05, "estimator": "adagc"},
    "auto-clip": {**LEARNS_ALL, "median": "p2", "decay": None, "min_std": 1e-3},
    "percentile-norm-clip": {**LEARNS_ALL, "percentile": 80.0, "window": 60},
    "mad-clip": {**LEARNS_ALL, "window": 60},
    "adaptive-clip": {"start_norm": 1.0},
}


class Federation:
    """Server and clients in one process, in declearn's order of calls, over its own wire."""

    def __init__(
        self, name: str, clients: int = 3, *, secagg: Any = None, server: Any = None, **config: Any
    ) -> None:
        self.config: dict[str, Any] = {**CONFIGS[name], **config}
        (cls,) = [c for c in SharedServer.__subclasses__() if c.name == f"{name}-server"]
        known = {k: v for k, v in self.config.items() if k in cls.clipper._shared_settings()}
        self.name = name
        self.server = Optimizer(1.0, modules=[(cls.name, {**known, **(server or {})})])
        self.clients: dict[str, Optimizer] = {}
        for i in range(clients):
            self.join(f"client_{i}")
        self.secagg = secagg
        self.tamper: dict[str, Callable[[FedclipSharedCounts], Any]] = {}
        self.names: tuple[str, ...] = ("w",)

    def join(self, name: str) -> None:
        self.clients[name] = Optimizer(0.1, modules=[(self.name, {**self.config, "shared": True})])

    def clipper(self, client: str) -> Any:
        return self.clients[client].modules[0]

    @property
    def counterpart(self) -> SharedServer:
        return next(m for m in self.server.modules if isinstance(m, SharedServer))

    def group(self, label: str = "all") -> dict[str, Any]:
        """Return the shared state of a group."""
        return dict(self.counterpart.get_state()["groups"][label])

    def round(self, steps: Mapping[str, Steps]) -> dict[str, list[float]]:
        """Run a round with these clients, and return the limits that each has clipped to."""
        sent = msgpack_serialize(self.server.collect_aux_var())
        limits: dict[str, list[float]] = {}
        replies: dict[str, dict[str, Any]] = {}
        for client, norms in steps.items():
            optimizer = self.clients[client]
            optimizer.process_aux_var(msgpack_deserialize(sent))
            optimizer.start_round()
            limits[client] = self.steps(client, norms)
            forge = self.tamper.get(client, lambda message: message)
            sent_back: dict[str, Any] = optimizer.collect_aux_var()
            replies[client] = {key: forge(aux) for key, aux in sent_back.items()}
        total: dict[str, Any] = {}
        if self.secagg is None:
            for reply in replies.values():
                for key, aux in msgpack_deserialize(msgpack_serialize(reply)).items():
                    total[key] = total.get(key, 0) + aux
        else:
            encrypters, decrypter = self.secagg(list(steps))
            for client, reply in replies.items():
                for key, aux in reply.items():
                    secure = encrypters[client].encrypt_aggregate(aux)
                    total[key] = total[key] + secure if key in total else secure
            total = {key: decrypter.decrypt_aggregate(aux) for key, aux in total.items()}
        self.server.process_aux_var(total)
        step = NumpyVector({name: np.array([0.01]) for name in self.names})
        for module in self.server.modules:
            step = module.run(step)
        return limits

    def steps(self, client: str, norms: Steps) -> list[float]:
        clipper, limits = self.clipper(client), []
        for norm in norms:
            given = norm if isinstance(norm, Mapping) else {"w": norm}
            clipper.run(NumpyVector({n: np.array([x]) for n, x in given.items()}))
            limits.append(clipper.last.limit[0])
        return limits


def rule_of(fed: Federation) -> Any:
    """Return the rule that clients judge by."""
    return fed.clipper("client_0")._sharing.rule.rule


def draw(rng: np.random.Generator, size: int, scale: float = 1.0) -> list[float]:
    values: list[float] = (scale * rng.lognormal(0.0, 0.5, size)).tolist()
    return values
