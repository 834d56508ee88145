# SPDX-License-Identifier: Apache-2.0
"""Update clipping in Flower: a mod of `ClientApp`, and a strategy around any of Flower's own.

::

    configure   messages of the inner strategy; those of whose turn it is; with the bound in each
    mod         take the bound out of the message
                reply  = what the app and the other mods reply
                update = the model received - the model in the reply
                send the clipped update instead of the model, and a vote
    aggregate   add each clipped update, in the order of the nodes, and forget it
                average = `UpdateServer.close`
                the inner strategy gets the model - average as each reply, and makes the next model
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Self

import flwr.app
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import OTHER_TENSORS, signature
from fedclip.updates.protocol import Reply, Schedule, bound_from, bound_to, reply_from, reply_to
from fedclip.updates.store import PersistentServer, client_of, server_of, settings_in

# The name of fedclip's own record in a message: the bound in one, the votes in the other.
RECORD = "fedclip"

Record = Mapping[str, Any]

OLDER_API = (
    "NumPyClient, client_fn and SecAgg+ are of Flower's older API: write a function with "
    "@app.train(), and leave secaggplus_mod out"
)
NO_BOUND = "put UpdateClipStrategy around the strategy, and UpdateClipMod once into the mods"


class UpdateClipMod:
    """Clips what a client sends after its training, to the bound of `UpdateClipStrategy`.

    It must be the first of the mods, and so the last to touch a reply: whatever another mod does to
    it later, such as Flower's `LocalDpMod`, is not clipped, and the server refuses it.

    Parameters
    ----------
    client : UpdateClient or None, default=None
        How updates are clipped. None: as ``[tool.flwr.app.config.update-clip]`` says.

    Notes
    -----
    Apps of Flower's older API (``client_fn``, `NumPyClient`) and SecAgg+, which is a part of it,
    get an error that says so: their messages hold other records.

    Only messages of training are touched. Tensors of whole numbers, which count something, do not
    leave the client; the server keeps its own.

    An update that cannot be clipped is not sent: without a bound, with several `ArrayRecord`, or
    with other tensors than those received, the reply is an error with the reason.

    A mod is a part of the app, which can remove it. A limit that no app can undo is the policy of
    a site, `fedclip site supernode`.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[UpdateClipMod()])
    """

    def __init__(self, client: UpdateClient | None = None) -> None:
        self.client = client

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Handle a message."""
        if not message.metadata.message_type.startswith("train"):
            return call_next(message, context)
        try:
            client = self.client or client_of(settings_in(context.run_config))
            content = message.content
            if RECORD not in content:
                older = _is_older([*content])
                raise ValueError(OLDER_API if older else f"the message has no bound: {NO_BOUND}")
            clip = partial(client.clip, sent=bound_from(content[RECORD]))
            # The app may empty the record.
            received = dict(one_record(content, "the message")[1])
            # Other messages may share the content: replace it.
            message.content = RecordDict({k: v for k, v in content.items() if k != RECORD})
        except (TypeError, ValueError) as exc:
            return _refused(message, exc)
        try:
            reply = call_next(message, context)
        except KeyError as exc:
            # Of its own records, which Flower looks for in this message.
            if not _is_older(exc):
                raise
            return _refused(message, OLDER_API)
        if not reply.has_error():
            try:
                _clip(reply, received, clip)
            except (TypeError, ValueError, RuntimeError) as exc:
                return _refused(message, exc)
        return reply


def _is_older(text: object) -> bool:
    return any(word in str(text) for word in ("fitins", "secagg"))


def _refused(message: Message, why: object) -> Message:
    error = flwr.app.Error(ErrorCode.MOD_FAILED_PRECONDITION, f"UpdateClipMod: {why}")
    return Message(error, reply_to=message)


def _clip(reply: Message, received: Record, clip: Callable[[Record], Reply]) -> None:
    """Put the clipped update and the vote into a reply."""
    name, trained = one_record(reply.content, "the reply")
    before = floats_of(received)
    after = {k: trained[k].numpy() for k in before if k in trained}
    if signature(after) != signature(before) or received.keys() != trained.keys():
        raise ValueError(OTHER_TENSORS)
    with np.errstate(over="ignore", invalid="ignore"):
        update = {k: before[k] - after[k] for k in before}
    clipped = clip(update)
    reply.content[name] = record_of(clipped.arrays)
    reply.content[RECORD] = MetricRecord(reply_to(clipped))


def one_record(content: RecordDict, who: str) -> tuple[str, Record]:
    """Return the one record of arrays, and its name; raise a ValueError if there are others."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise ValueError(f"{who} holds {len(records)} ArrayRecords: it must hold one, the model")
    return str(records[0][0]), records[0][1]


def floats_of(record: Record) -> dict[str, Any]:
    """Return the tensors that are clipped: those of real numbers. Whole numbers are counters.

    Raises
    ------
    TypeError
        If there are other tensors, such as complex ones.
    """
    for name, array in record.items():
        if np.dtype(array.dtype).kind not in "fiub":
            raise TypeError(f"the tensor {name!r} is of {array.dtype}: no real numbers")
    return {k: array.numpy() for k, array in record.items() if np.dtype(array.dtype).kind == "f"}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return a record of NumPy arrays."""
    return ArrayRecord({name: flwr.app.Array(np.asarray(x)) for name, x in arrays.items()})


# Flower's own whose next model follows from the average of the replies.
_AVERAGES = {
    *("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedOpt", "FedProx", "FedYogi", "QFedAvg"),
}

# Why the others are refused, by how their names begin.
_WHY_NOT = {
    "FedXgb": "trees have no norm",
    "DifferentialPrivacy": "it clips and adds noise itself: set noise_multiplier here instead",
    "UpdateClip": "once is enough",
    "QFedAvg": "it weighs by the clients' losses, which the noise on the average does not cover",
    "": 'it looks at each reply, and all are one average: set combine = "trimmed" or "arc"',
}


def _check_inner(inner: object, private: bool) -> None:
    """Refuse a strategy of another API, and one that is or holds none of _AVERAGES."""
    if not isinstance(inner, Strategy):
        got = f"{type(inner).__module__}.{type(inner).__name__}, of Flower's older API"
        raise TypeError(f"got {got}: take a strategy of flwr.serverapp.strategy")
    known = _AVERAGES - ({"QFedAvg"} if private else set())
    for cls in type(inner).__mro__:
        of_an_app = not cls.__module__.startswith(("flwr.", "fedclip."))
        if not of_an_app and cls is not Strategy and cls.__name__ not in known:
            why = next(why for start, why in _WHY_NOT.items() if cls.__name__.startswith(start))
            raise ValueError(f"UpdateClipStrategy does not go around {cls.__name__}: {why}")
        if of_an_app and "aggregate_train" in vars(cls):
            text = "gets the averaged model as each reply: for medians, set combine"
            log(WARNING, "%s.aggregate_train %s", cls.__name__, text)
    for held in vars(inner).values():
        if isinstance(held, Strategy):
            _check_inner(held, private)


class UpdateClipStrategy(Strategy):
    """Update clipping around a strategy of Flower; clients need `UpdateClipMod`.

    Parameters
    ----------
    inner : Strategy
        The strategy that chooses nodes, evaluates, and makes the next model of the average: any
        for arrays. It gets the averaged model as each reply, whose weights change nothing. A
        strategy that looks at each reply, such as Krum or a median, is refused, also within
        another strategy; the setting ``combine`` resists malicious clients.
    settings
        The parameters of `update-clip-server` and `clipped-averaging`, in one table.
        ``weights = "steps"`` weighs by the number that `inner` weighs by, ``num-examples``, up to
        ``max_steps``. A table of weights names nodes by their numbers.
    folder
        Absolute path of the folder for state and records of the rounds, for ``fedclip report`` and
        ``fedclip privacy spent``. It goes on from a state in there. None: neither outlasts the
        process; with noise, you get a warning.

    Raises
    ------
    TypeError, ValueError
        At construction, if a setting is unknown, or does not go with another one or with `inner`.
        Before messages are sent: with noise, if the model holds running statistics.
    RuntimeError
        Before messages are sent: with noise, if they are not for as many nodes as
        ``expected_clients``; or if all nodes whose turn it is have left. After the first round:
        with noise, if it has no valid reply.

    Notes
    -----
    With noise, a round of training publishes the noised average and the bound only, without the
    clients' metrics. Epsilon does not cover the evaluations of the app.

    A round that is withheld changes neither model nor `inner`; Flower keeps the model. So does each
    round after the budget is spent.

    Tensors of whole numbers keep the server's values.

    C / m bounds the average. An adaptive `inner`, such as FedAdam, scales it to steps of another
    length.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> UpdateClipStrategy(FedAvg(), {"start_norm": 1.0}).server.bound.bound
    1.0
    """

    def __init__(
        self, inner: Strategy, settings: Mapping[str, Any], *, folder: str | Path | None = None
    ) -> None:
        bound = server_of(settings).bound
        self._private = bound.budget is not None
        self._key = str(getattr(inner, "weighted_by_key", "num-examples"))
        _check_inner(inner, self._private)
        if bound.separation > 1 and getattr(inner, "fraction_train", 1.0) != 1.0:
            turns = f"with separation={bound.separation} nodes take turns"
            raise ValueError(f"{turns}: leave fraction_train=1.0; min_available_nodes is for all")
        self.inner, self.served = inner, PersistentServer(settings, folder)
        self.server = self.served.server
        self._schedule: Schedule | None = None
        self._rounds = 0
        self._model: Mapping[str, Any] = {}
        self._asked: dict[int, Message] = {}

    @classmethod
    def from_run_config(
        cls, inner: Strategy, run_config: Mapping[str, Any], *, folder: str | Path | None = None
    ) -> Self:
        """Return a strategy with the settings of ``[tool.flwr.app.config.update-clip]``.

        Raises
        ------
        TypeError, ValueError
            As at construction; and if there is no setting, or an unknown one.
        """
        if settings := settings_in(run_config):
            return cls(inner, settings, folder=folder)
        raise ValueError("the run configuration has no update-clip.… setting: give at least one")

    def initialize_parameters(self, client_manager: object) -> None:
        """Refuse Flower's older API, which calls this: it cannot run update clipping."""
        start = "call strategy.start(grid, …) in a function with @app.main()"
        raise RuntimeError(f"server_fn and SecAgg+ are of Flower's older API: {start}")

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Update clipping: bound %.4g", self.server.bound.bound)
        self.inner.summary()

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds; the result has the first model if no round has changed it."""
        result = super().start(grid, initial_arrays, *args, **kwargs)
        result.arrays = result.arrays or initial_arrays
        return result

    # -- a round --------------------------------------------------------------------------------
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round; none if the training is over."""
        self._asked = {}
        if self._private:
            self.server.check_model({name: array.numpy() for name, array in arrays.items()})
        floats_of(arrays)
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        if not messages:
            return []
        messages = self._chosen(messages)
        for message in messages:
            one_record(message.content, "the message of the server's strategy")
        sent = self.served.open(self._schedule.at(self._rounds) if self._schedule else None)
        if sent.stop:
            return []
        self._model = dict(arrays)
        for message in messages:
            # FedAvg has one content for all.
            message.content = RecordDict({**message.content, RECORD: ConfigRecord(bound_to(sent))})
        self._asked = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def _chosen(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages to the nodes whose turn it is; with noise, refuse another number."""
        bound, nodes = self.server.bound, {str(m.metadata.dst_node_id): m for m in messages}
        if bound.budget is None:
            return list(messages)
        if bound.separation > 1:
            self._schedule = self._schedule or Schedule(nodes, bound.budget.clients)
            return [nodes[name] for name in self._schedule.present(self._rounds, nodes)]
        if len(nodes) != bound.budget.clients:
            noise = f"noise is for expected_clients={bound.budget.clients}"
            hint = "set min_train_nodes and fraction_train to ask that many"
            raise RuntimeError(f"{len(nodes)} nodes would be asked, and {noise}: {hint}")
        return list(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model, None if it stays, and the metrics of the round."""
        if not self._asked:
            return None, None
        came, like = self._came(replies), floats_of(self._model)
        for message in came.values():
            self.served.add(self._read(message), like)
            # What was added needs no more memory.
            for name in list(message.content.array_records):
                message.content[name] = ArrayRecord()
        closed = self.served.close(like=like)
        self._rounds += 1
        if any(closed.faults):
            text = "UpdateClipMod must be the first of the mods, before any such as LocalDpMod"
            log(WARNING, "replies count as zero: %s", text)
        added = {f"update-clip-{name}": closed.record[name] for name in ("bound", "epsilon")}
        if closed.withheld:
            return None, MetricRecord(added)
        valid = [m for m, fault in zip(came.values(), closed.faults, strict=True) if not fault]
        handed = self._handed(valid, {k: like[k] - closed.average[k] for k in like})
        arrays, metrics = self.inner.aggregate_train(server_round, handed)
        metrics = MetricRecord({**(metrics or {}), **added})
        if arrays is None:
            return None, metrics
        # In the dtypes of the model: FedAvg makes float64 of whole numbers.
        model = {k: arrays[k].numpy().astype(like[k].dtype) for k in like}
        return ArrayRecord({**self._model, **record_of(model)}), metrics

    def _came(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return one reply of each node that was asked, in the order of the nodes."""
        came: dict[int, Message] = {}
        for message in sorted(replies, key=_node):
            if message.has_error():
                why = "" if self._private else f": {message.error.reason}"
                log(WARNING, "node %d could not train%s", _node(message), why)
            elif _node(message) in self._asked:
                came.setdefault(_node(message), message)
        return came

    def _read(self, message: Message) -> Reply:
        """Return a client's reply; with a fault if it cannot be read."""
        node, content = str(_node(message)), message.content
        if RECORD not in content.metric_records:
            return Reply({}, sender=node, fault="its app has no UpdateClipMod as its first mod")
        try:
            arrays = floats_of(one_record(content, "the reply")[1])
            reply = reply_from(arrays, dict(content.metric_records[RECORD]), node)
            if self.server.aggregation.shares.kind == "steps":
                counted = [r[self._key] for r in content.metric_records.values() if self._key in r]
                reply = replace(reply, steps=int(counted[0]) if len(counted) == 1 else None)
        except Exception as exc:  # whatever a client sends
            return Reply({}, sender=node, fault=f"it cannot be read ({exc!r:.200})")
        return reply

    def _handed(self, valid: Sequence[Message], model: Mapping[str, Any]) -> list[Message]:
        """Return the averaged model as each reply, for the inner strategy.

        In float64, so a strategy that adds up equal models rounds once, in the end; and a record
        for each, as some strategies empty it. With noise it is the reply of each node that was
        asked, and holds nothing else.
        """
        full = {k: model[k] if k in model else a.numpy() for k, a in self._model.items()}
        record = record_of({k: np.asarray(x, np.float64) for k, x in full.items()})
        name = one_record(next(iter(self._asked.values())).content, "")[0]
        if self._private:
            others = {node: {"metrics": MetricRecord({self._key: 1})} for node in self._asked}
        else:
            others = {_node(m): _without_arrays(m.content) for m in self._alike(valid)}
        return [
            Message(RecordDict({**more, name: ArrayRecord(dict(record))}), reply_to=self._asked[n])
            for n, more in others.items()
        ]

    def _alike(self, valid: Sequence[Message]) -> list[Message]:
        """Return the replies whose metrics can be averaged: the most frequent ones, and finite.

        Flower ends the run if one reply has other metrics than the others.
        """
        forms: dict[int, frozenset[object]] = {}
        for message in valid:
            records = {n: r for n, r in message.content.metric_records.items() if n != RECORD}
            numbers = {
                (n, k): np.asarray(v, float) for n, r in records.items() for k, v in r.items()
            }
            weights = [x for (_, key), x in numbers.items() if key == self._key]
            is_finite = all(np.isfinite(x).all() for x in numbers.values())
            if is_finite and all(x.ndim == 0 and x > 0 for x in weights):
                forms[_node(message)] = frozenset((n, x.shape) for n, x in numbers.items())
        most = Counter(forms.values()).most_common(1)
        fit = [m for m in valid if not most or forms.get(_node(m)) == most[0][0]]
        if len(fit) < len(valid):
            log(WARNING, "the metrics of %d replies are left out", len(valid) - len(fit))
        return fit

    # -- evaluation is the inner strategy's -----------------------------------------------------
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the inner strategy; none if the training is over."""
        if (sent := self.server.bound.sent) and sent.stop:
            return []
        return list(self.inner.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of the inner strategy."""
        metrics: MetricRecord | None = self.inner.aggregate_evaluate(server_round, replies)
        return metrics


def _node(message: Message) -> int:
    return int(message.metadata.src_node_id)


def _without_arrays(content: RecordDict) -> dict[str, Any]:
    replaced = {RECORD, *content.array_records}
    return {name: record for name, record in content.items() if name not in replaced}
