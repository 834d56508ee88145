"""A round of declearn without its network: the same calls, in the same order, on real messages."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from declearn.aggregator import Aggregator
from declearn.messaging import SerializedMessage, TrainReply
from declearn.model.api import Vector
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.secagg.joye_libert import JoyeLibertDecrypter, JoyeLibertEncrypter
from declearn.secagg.masking import MaskingDecrypter, MaskingEncrypter

from fedclip.engines.declearn.context import change

# A product of two Mersenne primes. It keeps no secret, and encrypts a hundred times as fast as one
# that does.
SHORT_BIPRIME = (2**127 - 1) * (2**89 - 1)


def model_of(**weights: Any) -> Any:
    """Return as much of a model as the sampler looks at."""
    return SimpleNamespace(get_weights=lambda trainable: NumpyVector(weights))


class Clients:
    """Clients that share a process, each with its own optimizer and aggregator."""

    def __init__(self, n: int, modules: Sequence[Any], aggregator: dict[str, Any]) -> None:
        self.optimizers = [Optimizer(lrate=1.0, modules=list(modules)) for _ in range(n)]
        self.aggregators = [Aggregator.from_config(aggregator) for _ in range(n)]

    def begin(self, i: int, aux: dict[str, Any], weights: Vector, encrypter: object) -> None:
        """Let client `i`, whose model has such weights, do what comes before its first step."""
        model: Any = SimpleNamespace(get_weights=lambda trainable: weights)
        change(sharing=(model, encrypter))
        try:
            self.optimizers[i].process_aux_var(aux)
        finally:
            change(sharing=None)
        self.optimizers[i].start_round()

    def round(
        self, i: int, aux: Any, update: Any, n_steps: int = 1, encrypter: object = None
    ) -> TrainReply:
        vector = update if isinstance(update, Vector) else NumpyVector({"w": update})
        self.begin(i, aux, vector, encrypter)
        updates = self.aggregators[i].prepare_for_sharing(updates=vector, n_steps=n_steps)
        return TrainReply(1, n_steps, 0.0, updates, self.optimizers[i].collect_aux_var())


class Server:
    """The server's side of a round; it records the pseudo-gradient after its modules."""

    def __init__(self, modules: Sequence[Any], aggregator: dict[str, Any]) -> None:
        self.optim = Optimizer(lrate=1.0, modules=list(modules))
        self.aggregator = Aggregator.from_config(aggregator)

    @property
    def module(self) -> Any:
        return self.optim.modules[0]

    def start(self) -> dict[str, Any]:
        return self.optim.collect_aux_var()

    def round(self, clients: Clients, updates: Sequence[Any]) -> NumpyVector:
        aux = self.start()
        return self.finish([clients.round(i, aux, update) for i, update in enumerate(updates)])

    def finish(self, replies: Sequence[TrainReply]) -> NumpyVector:
        """Do what `FederatedServer._conduct_global_update` does, short of the model."""
        aux_var: dict[str, Any] = {}
        for reply in replies:
            for key, aux in reply.aux_var.items():
                aux_var[key] = aux_var.get(key, 0) + aux
        self.optim.process_aux_var(aux_var)
        gradients = self.aggregator.finalize_updates(sum(r.updates for r in replies))
        for module in self.optim.modules:
            gradients = module.run(gradients)
        return gradients


def sent(reply: TrainReply) -> TrainReply:
    """Return the reply as it arrives: through declearn's serialisation."""
    arrived: Any = SerializedMessage.from_bin_message(reply.serialize()).deserialize()
    return arrived


def norm(vector: NumpyVector) -> float:
    squares = (np.square(v, dtype=np.float64).sum() for v in vector.coefs.values())
    return float(np.sqrt(sum(squares)))


def masked(clients: Sequence[str], **settings: Any) -> tuple[dict[str, Any], Any]:
    """Return the encrypters and the decrypter of a round, as their setup would."""
    # Of each two clients, the first adds what the second takes away.
    n = len(clients)
    pairs = [
        ([i + n * j for j in range(i + 1, n)], [j + n * i for j in range(i)]) for i in range(n)
    ]
    encrypters = {c: MaskingEncrypter(*pairs[i], **settings) for i, c in enumerate(clients)}
    return encrypters, MaskingDecrypter(n, **settings)


def joye_libert(clients: Sequence[str], **settings: Any) -> tuple[dict[str, Any], Any]:
    keys = {c: 2**400 + 7**i for i, c in enumerate(clients)}
    settings["biprime"] = SHORT_BIPRIME
    encrypters = {c: JoyeLibertEncrypter(key, **settings) for c, key in keys.items()}
    return encrypters, JoyeLibertDecrypter(-sum(keys.values()), len(clients), **settings)
