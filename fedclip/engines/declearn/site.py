# SPDX-License-Identifier: Apache-2.0
"""The policy of a site in declearn: it passes on what the policy allows of a client's messages.

::

    TrainReply          its update, through the gate; votes; numbers that the policy names, else 0
    EvaluationReply     loss and steps, and means, if the policy names them; else a loss of NaN
    MetadataReply       if the policy names each field, and it is of numbers, or a dtype
    InitReply,
    PrivacyReply        they are empty
    anything else       one error, always the same; the site's log has the reason
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
from declearn import messaging
from declearn.aggregator import AveragingAggregator, ModelUpdates
from declearn.communication.api import NetworkClient
from declearn.metrics._mean import MeanState

from fedclip.engines.declearn.aggregator import ClippedAveraging
from fedclip.engines.declearn.messages import AUX_NAME, ClippedUpdates, UpdateClipVotes
from fedclip.site.gate import REFUSED, Gate, Refused, plain

_AVERAGING = 'aggregator = {name = "averaging", steps_weighted = false}'


class GatedNetwork(NetworkClient, register=False):
    """The network client of a declearn client, behind the gate of its site.

    Parameters
    ----------
    inner
        The network client that it sends with.
    gate
        The gate that lets updates, numbers and votes out, or refuses them.
    """

    def __init__(self, inner: NetworkClient, gate: Gate) -> None:
        super().__init__(inner.server_uri, inner.name)
        self._inner, self._gate = inner, gate
        self._run = uuid4().hex
        self._known: dict[type[messaging.Message], Callable[[Any], messaging.Message]] = {
            messaging.TrainReply: self._training,
            messaging.EvaluationReply: self._evaluation,
            messaging.MetadataReply: self._metadata,
            messaging.InitReply: lambda message: messaging.InitReply(),
            messaging.PrivacyReply: lambda message: messaging.PrivacyReply(),
        }

    # The inner network client has a context of SSL.
    _setup_ssl_context: Any = staticmethod(lambda certificate: None)
    start: Any = property(attrgetter("_inner.start"))
    stop: Any = property(attrgetter("_inner.stop"))
    register: Any = property(attrgetter("_inner.register"))

    async def recv_message(self, timeout: float | None = None) -> messaging.SerializedMessage[Any]:
        """Return the next message of the server; the gate counts it, as it may be replied to.

        Raises
        ------
        Refused
            If the policy allows no more replies; the client then leaves the run.
        """
        message = await self._inner.recv_message(timeout)
        if not issubclass(message.message_cls, (messaging.StopTraining, messaging.CancelTraining)):
            self._gate.admit(self._run)
        return message

    async def _send_message(self, bin_msg: bytes) -> NoReturn:
        raise Refused("a client behind a gate sends messages, and no bytes")

    async def send_message(self, message: messaging.Message) -> None:
        """Send what may leave of a message, or the error that this site refuses."""
        kind = type(message)
        try:
            if kind not in self._known:
                raise Refused(f"{getattr(message, 'message', 'no policy lets it out')!s:.500}")
            sent = self._known[kind](message)
        except Exception as exc:  # its text may hold data
            self.logger.error("%s is not sent: %s", kind.__name__, exc)
            sent = messaging.Error(REFUSED)
        await self._inner.send_message(sent)

    def check(self, aggregator: object, modules: Iterable[Any]) -> None:
        """Refuse what the server has set up, if its updates could not leave.

        Raises
        ------
        Refused
            With a sentence for the site's log.
        """
        why, by_steps = "", "this site's updates have no weights by steps"
        if type(aggregator) is AveragingAggregator:
            why = by_steps if aggregator.steps_weighted else ""
        elif type(aggregator) is not ClippedAveraging:
            why = f"a site's policy knows averages, not {type(aggregator).__name__}"
        elif self._gate.policy.noise_multiplier:
            why = "this site's noise takes updates beyond the bound of clipped-averaging"
        elif aggregator.shares.kind == "steps":
            why = by_steps
        if why:
            raise Refused(f"{why}: set {_AVERAGING}")
        for module in modules:
            if module.aux_name not in (None, AUX_NAME):
                raise Refused(f"a site's policy does not know what {module.name!r} shares")
            if getattr(module, "site", None) is not None:
                raise Refused("a site's policy would clip the noise that update-clip-client adds")

    def _training(self, reply: messaging.TrainReply) -> messaging.TrainReply:
        shared, votes = reply.updates, reply.aux_var.get(AUX_NAME)
        if reply.aux_var.keys() - {AUX_NAME} or type(votes) not in (type(None), UpdateClipVotes):
            raise Refused("a site's policy knows no auxiliary variables but votes on a bound")
        if type(shared) not in (ModelUpdates, ClippedUpdates) or shared.weights != 1:
            raise Refused("a site's policy knows no updates but those of a mean, all of weight 1")
        sent: Any = shared.updates
        # In a new vector, which has nothing but these arrays.
        sent = type(sent)(dict(self._gate.update(sent.coefs)))
        parts = {"votes": votes, "within": votes, "clipped": shared, "zeroed": shared}
        bits = self._gate.votes({n: getattr(part, f"n_{n}", 0) for n, part in parts.items()})
        updates = ModelUpdates(sent, 1)
        if type(shared) is ClippedUpdates:
            updates = ClippedUpdates(sent, 1, 1, bits["clipped"], bits["zeroed"])
        vote = UpdateClipVotes(1, bits["votes"], bits["within"])
        aux: dict[str, Any] = {} if votes is None else {AUX_NAME: vote}
        numbers = self._numbers(reply, "n_epoch", "n_steps", "t_spent")
        return messaging.TrainReply(**numbers, updates=updates, aux_var=aux)

    def _evaluation(self, reply: messaging.EvaluationReply) -> messaging.EvaluationReply:
        named = self._gate.policy.allow_metrics
        if not {"loss", "n_steps"} <= {*named} or plain(reply.loss) is None:
            # A mean with NaN is NaN; fedclip's server leaves this evaluation out.
            return messaging.EvaluationReply(math.nan, 1, 0.0)
        means: dict[str, Any] = {n: _mean(s) for n, s in reply.metrics.items() if n in named}
        # A server takes all of them, or no metric.
        complete = len(means) == len(reply.metrics) and None not in means.values()
        numbers = self._numbers(reply, "loss", "n_steps", "t_spent")
        return messaging.EvaluationReply(**numbers, metrics=means if complete else {})

    def _metadata(self, reply: messaging.MetadataReply) -> messaging.MetadataReply:
        if others := reply.data_info.keys() - {*self._gate.policy.allow_metrics}:
            raise Refused(f"the server asks for {sorted(others)}, which its policy does not name")
        return messaging.MetadataReply({n: _described(x) for n, x in reply.data_info.items()})

    def _numbers(self, reply: messaging.Message, *names: str) -> dict[str, Any]:
        """Return those fields of a reply that the policy names, and 0 for the others."""
        numbers = self._gate.metrics({name: getattr(reply, name) for name in names})
        return {name: numbers.get(name, 0) for name in names}


def _mean(state: object) -> MeanState | None:
    """Return the state of a metric that is a mean of numbers; None for another one."""
    if type(state) is not MeanState:
        return None
    total, divisor = plain(state.num_sum), plain(state.divisor)
    return None if total is None or divisor is None else MeanState(total, divisor)


def _described(value: Any) -> Any:
    """Return a field of a data set's description: a number, several, or the name of a dtype."""
    if isinstance(value, str):
        return np.dtype(value).name
    if isinstance(value, (list, tuple, set)):
        return type(value)(None if item is None else _described(item) for item in value)
    if (number := plain(value)) is None:
        raise Refused("the description of a site's data holds numbers and dtypes only")
    return number
