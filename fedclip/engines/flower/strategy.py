# SPDX-License-Identifier: Apache-2.0
"""A server's part of update clipping, as a strategy around any of Flower's own.

::

    configure   messages of the inner strategy; those of whose turn it is; with the bound in each
    aggregate   clipped updates, in the order of the nodes
                average = `UpdateServer.close`
                the inner strategy gets the model - average from everybody, and does the rest
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import Result, Strategy

from fedclip.engines.flower.mod import RECORD, floats_of, one_record, record_of
from fedclip.updates.protocol import Closed, Reply
from fedclip.updates.schedule import Schedule
from fedclip.updates.store import Served
from fedclip.updates.tables import bound_to, reply_from, server_of, settings_in

_AVERAGES = {
    *("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedOpt", "FedProx", "FedYogi", "QFedAvg"),
}
"""Flower's own whose next model follows from the average of the replies."""

_NOT_AROUND = {
    "FedXgbBagging": "trees have no norm",
    "FedXgbCyclic": "trees have no norm",
    **dict.fromkeys(
        (name for name in strategy.__all__ if name.startswith("DifferentialPrivacy")),
        "it clips and adds noise itself: set noise_multiplier here in its place",
    ),
    **dict.fromkeys(
        ("Bulyan", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum"),
        "it looks at each reply, and here all of them are one average: take FedAvg, and set "
        'combine = "trimmed" or "arc" with n_hostile',
    ),
    "UpdateClipStrategy": "once is enough",
}


def _check_inner(inner: object) -> None:
    """Refuse what is no strategy of this API, or is or holds one that this can not go around."""
    if not isinstance(inner, Strategy):
        raise TypeError(
            f"got {type(inner).__module__}.{type(inner).__name__}: take a strategy of "
            "flwr.serverapp.strategy; those of flwr.server.strategy are of Flower's older API"
        )
    for cls in type(inner).__mro__:
        if why := _NOT_AROUND.get(cls.__name__):
            raise ValueError(f"UpdateClipStrategy does not go around {cls.__name__}: {why}")
    owner = next(cls for cls in type(inner).__mro__ if "aggregate_train" in vars(cls))
    if not (owner.__module__.startswith("flwr.") and owner.__name__ in _AVERAGES):
        text = "%s.aggregate_train gets the averaged model as each reply: for medians, set combine"
        log(WARNING, text, owner.__name__)
    for held in vars(inner).values():
        if isinstance(held, Strategy):
            _check_inner(held)


class UpdateClipStrategy(Strategy):
    """Update clipping around a strategy of Flower; clients need `UpdateClipMod`.

    Parameters
    ----------
    inner : Strategy
        What chooses nodes, evaluates, and makes the next model of the average: any strategy for
        arrays. It sees the averaged model as everybody's reply, whose weights change nothing. One
        that looks at each reply, such as Krum or a median, is refused, and so is one that holds
        such a strategy; ``combine`` is the setting that resists.
    settings
        The parameters of `update-clip-server` and `clipped-averaging`, in one table.
        ``weights = "steps"`` weighs by the number that `inner` weighs by, ``num-examples``, up to
        ``max_steps``. A table of weights names nodes by their numbers.
    folder
        Where state and records of the rounds are kept, for ``fedclip report`` and ``fedclip privacy
        spent``: an absolute path. A state that is there is taken over. None: neither outlasts the
        process, and with noise a warning says so.

    Raises
    ------
    TypeError, ValueError
        At construction, if a setting is none or does not go with another one or with `inner`.
        Before messages are sent: with noise, if the model holds running statistics.
    RuntimeError
        Before messages are sent: with noise, if they are not for as many nodes as
        ``expected_clients``; or if everybody whose turn it is has left. After the first round: with
        noise, if none of its replies can be used.

    Notes
    -----
    With noise, nothing but the noised average and the bound becomes known of a round of training:
    the clients' own metrics are left out. Evaluations are the app's own, and epsilon does not cover
    them.

    A round that is withheld leaves model and `inner` as they are; Flower keeps the model. So does
    each round after the budget is spent.

    Tensors of whole numbers stay as the server has them.

    C / m bounds the average. An adaptive `inner`, such as FedAdam, makes steps of its own length
    of it.

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
        _check_inner(inner)
        if folder is not None and not Path(folder).is_absolute():
            raise ValueError(
                f"folder must be an absolute path on the server, got {str(folder)!r}: another one "
                "would be a new budget in each folder that a server is started in"
            )
        if self._private and folder is None:
            log(WARNING, "noise without a folder: a restart spends the budget again; give folder")
        if self._private and isinstance(inner, strategy.QFedAvg):
            raise ValueError(
                "QFedAvg weighs by the clients' losses, which noise on the average does not cover: "
                "take another strategy"
            )
        if bound.separation > 1 and getattr(inner, "fraction_train", 1.0) != 1.0:
            raise ValueError(
                f"with separation={bound.separation} nodes take turns by a schedule: leave "
                "fraction_train=1.0, and give min_available_nodes the number of all nodes"
            )
        self.inner, self.served = inner, Served(settings, folder)
        self.server = self.served.server
        self._schedule: Schedule | None = None
        self._rounds = 0
        self._model: Mapping[str, Any] = {}
        self._asked: dict[int, Message] = {}
        self._over = False

    @classmethod
    def from_run_config(
        cls, inner: Strategy, run_config: Mapping[str, Any], *, folder: str | Path | None = None
    ) -> Self:
        """Return a strategy with the settings of ``[tool.flwr.app.config.update-clip]``.

        Raises
        ------
        TypeError, ValueError
            As at construction; and if there is no setting, or one that nobody would read.
        """
        settings = settings_in(run_config)
        if not settings:
            raise ValueError(
                "the run configuration has no update-clip.… setting: give one at least in "
                "[tool.flwr.app.config.update-clip] of pyproject.toml"
            )
        return cls(inner, settings, folder=folder)

    def initialize_parameters(self, client_manager: object) -> None:
        """Say why Flower's older API, which calls this, can not run update clipping."""
        raise RuntimeError(
            "server_fn, workflows and SecAgg+ are of Flower's older API: call "
            "strategy.start(grid, …) in a function with @app.main()"
        )

    def summary(self) -> None:
        """Log the settings."""
        bound = self.server.bound
        log(INFO, "\t├──> Update clipping: bound %.4g, epsilon %.4g", bound.bound, bound.epsilon)
        self.inner.summary()

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds; what comes out has the first model if no round has changed it."""
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
            self._over = True
            return []
        self._model = dict(arrays)
        for message in messages:
            # FedAvg has one content for all.
            told = {RECORD: ConfigRecord(bound_to(sent))}
            message.content = RecordDict({**message.content, **told})
        self._asked = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def _chosen(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of those whose turn it is, if they are as many as noise asks for."""
        bound = self.server.bound
        nodes = {str(message.metadata.dst_node_id): message for message in messages}
        if self._private and bound.separation > 1 and bound.expected_clients:
            self._schedule = self._schedule or Schedule(nodes, bound.expected_clients)
            due = self._schedule.due(self._rounds)
            if found := [nodes[name] for name in due if name in nodes]:
                return found
            raise RuntimeError(
                f"all nodes whose turn it is have left ({', '.join(due[:5])}), and nobody may take "
                "their place: start again with those that are there"
            )
        if self._private and len(nodes) != bound.expected_clients:
            raise RuntimeError(
                f"{len(nodes)} nodes would be asked, and noise is sized on "
                f"expected_clients={bound.expected_clients}: give the strategy that many "
                "min_train_nodes, for which it waits, and a fraction_train that asks no more"
            )
        return list(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model, and the metrics of the round; no model if it stays."""
        if not self._asked:
            return None, None
        came = self._came(replies)
        like = floats_of(self._model)
        told = [self._read(message) for message in came.values()]
        closed = self.served.close(told, like=like)
        self._rounds += 1
        self._explain(told, closed)
        metrics = MetricRecord(
            {f"update-clip-{name}": closed.record[name] for name in ("bound", "epsilon")}
        )
        if closed.withheld:
            return None, metrics
        sound = [m for m, fault in zip(came.values(), closed.faults, strict=True) if not fault]
        handed = self._handed(sound, {k: like[k] - closed.average[k] for k in like})
        arrays, inner_metrics = self.inner.aggregate_train(server_round, handed)
        metrics = MetricRecord({**(inner_metrics or {}), **metrics})
        if arrays is None:
            return None, metrics
        # In the dtypes of the model: FedAvg makes float64 of whole numbers.
        model = {k: arrays[k].numpy().astype(like[k].dtype) for k in like}
        return ArrayRecord({**self._model, **record_of(model)}), metrics

    def _came(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return one reply of each node that was asked, in the order of the nodes."""
        came: dict[int, Message] = {}
        for message in sorted(replies, key=lambda m: int(m.metadata.src_node_id)):
            node = message.metadata.src_node_id
            if message.has_error():
                why = "" if self._private else f": {message.error.reason}"
                log(WARNING, "node %d could not train%s", node, why)
            elif node in self._asked:
                came.setdefault(node, message)
        return came

    def _read(self, message: Message) -> Reply:
        """Return a client's reply; with a fault if it is none."""
        node, content = str(message.metadata.src_node_id), message.content
        if RECORD not in content.metric_records:
            return Reply({}, sender=node, fault="its app has no UpdateClipMod as its first mod")
        try:
            arrays = floats_of(one_record(content, "the reply")[1])
            reply = reply_from(arrays, dict(content.metric_records[RECORD]), node)
            if self.server.closing.shares.kind == "steps":
                counted = [r[self._key] for r in content.metric_records.values() if self._key in r]
                reply = replace(reply, steps=int(counted[0]) if len(counted) == 1 else None)
        except Exception as exc:  # whatever a client sends
            return Reply({}, sender=node, fault=f"it can not be read ({exc!r:.200})")
        return reply

    def _explain(self, told: Sequence[Reply], closed: Closed) -> None:
        changed = [r.sender for r, f in zip(told, closed.faults, strict=True) if f and not r.fault]
        if changed and not self.server.closing.combining.too_few(len(told)):
            log(
                WARNING,
                "what UpdateClipMod has clipped came otherwise from %s: it must be the first of "
                "the mods, with none such as LocalDpMod before it",
                ", ".join(changed[:5]),
            )

    def _handed(self, sound: Sequence[Message], model: Mapping[str, Any]) -> list[Message]:
        """Return the averaged model as everybody's reply, for the inner strategy.

        In float64, so that a strategy that adds up so many equal models rounds only once, in the
        end; and a record for each, as some strategies empty it. With noise it is the reply of all
        that were asked, and nothing else is in it.
        """
        whole = {k: model[k] if k in model else a.numpy() for k, a in self._model.items()}
        record = record_of({k: np.asarray(x, np.float64) for k, x in whole.items()})
        name = one_record(next(iter(self._asked.values())).content, "")[0]
        if self._private:
            equal = MetricRecord({self._key: 1})
            return [
                Message(RecordDict({name: ArrayRecord(dict(record)), "metrics": equal}), reply_to=m)
                for m in self._asked.values()
            ]
        alike = self._alike(sound)
        for message in alike:
            ours = {RECORD, *message.content.array_records}
            rest = {k: v for k, v in message.content.items() if k not in ours}
            message.content = RecordDict({**rest, name: ArrayRecord(dict(record))})
        return alike

    def _alike(self, sound: Sequence[Message]) -> list[Message]:
        """Return the replies whose metrics can be averaged: what most have, and finite.

        Flower ends the run if one reply has other metrics than the others.
        """
        kinds = {}
        for message in sound:
            pairs = [
                (name, key, value)
                for name, record in message.content.metric_records.items()
                for key, value in record.items()
                if name != RECORD
            ]
            numbers = [x for *_, v in pairs for x in (v if isinstance(v, list) else [v])]
            weights = [v for _, key, v in pairs if key == self._key]
            positive = all(not isinstance(w, list) and w > 0 for w in weights)
            if positive and all(map(math.isfinite, numbers)):
                form = [(n, k, len(v) if isinstance(v, list) else -1) for n, k, v in pairs]
                kinds[message.metadata.src_node_id] = tuple(sorted(form))
        if not kinds:
            return list(sound)
        most = Counter(kinds.values()).most_common(1)[0][0]
        fit = [m for m in sound if kinds.get(m.metadata.src_node_id) == most]
        if len(fit) < len(sound):
            log(WARNING, "the metrics of %d replies are left out", len(sound) - len(fit))
        return fit

    # -- evaluation is the inner strategy's -----------------------------------------------------
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the inner strategy; none if the training is over."""
        if self._over:
            return []
        return list(self.inner.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of the inner strategy."""
        found: MetricRecord | None = self.inner.aggregate_evaluate(server_round, replies)
        return found
