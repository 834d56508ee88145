# SPDX-License-Identifier: Apache-2.0
"""A websockets server and client that wait for a limited time, and name the client at fault.

declearn's server waits forever for the reply of a client that has died, and for its connections
when it stops; a message that it cannot decode ends the run without a name. This server reads each
message under the name of its sender. Clients may use declearn's plain ``websockets``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from declearn import messaging
from declearn.communication.api.backend import MessagesHandler, actions, flags
from declearn.communication.websockets import WebsocketsClient, WebsocketsServer
from declearn.main.utils import aggregate_clients_data_info
from declearn.messaging import CancelTraining, Error, Message, SerializedMessage, StopTraining
from declearn.metrics import MetricSet
from declearn.secagg.api import SecaggSetupQuery
from declearn.secagg.messaging import SecaggEvaluationReply, SecaggTrainReply
from declearn.utils._register import REGISTRIES

from fedclip.core import parameters
from fedclip.engines.declearn.aggregator import ClippedAveraging
from fedclip.engines.declearn.context import LOGGER, change
from fedclip.engines.declearn.evaluation import Evaluations, counted, nothing
from fedclip.engines.declearn.members import WHO, Members, one_line, quorum_problems, summary
from fedclip.engines.declearn.samplers import note_senders
from fedclip.errors import Unchecked

if TYPE_CHECKING:
    from websockets.server import WebSocketServerProtocol

# Seconds that clients have to collect why the run ends, and then to end their connections.
_GRACE = 10.0

# Replies to a request, by secure aggregation; messages of declearn's set-up follow other rules.
_REPLIES: Mapping[type, tuple[type[Message], ...]] = {
    messaging.MetadataQuery: (messaging.MetadataReply,),
    messaging.InitRequest: (messaging.InitReply,),
    messaging.PrivacyRequest: (messaging.PrivacyReply,),
    messaging.TrainRequest: (messaging.TrainReply, SecaggTrainReply),
    messaging.EvaluationRequest: (messaging.EvaluationReply, SecaggEvaluationReply),
}


class _Received(SerializedMessage[Message]):
    """A message that is decoded already."""

    def __init__(self, message: Message) -> None:
        super().__init__(type(message), b"", 0)
        self.message = message

    def deserialize(self) -> Message:
        return self.message


class _Handler(MessagesHandler):
    """declearn's handler, which leaves out messages that the server has not asked for."""

    async def _handle_join_request(
        self, message: actions.Join, context: object
    ) -> actions.Accept | actions.Reject:
        name: Unchecked = message.name
        message.version = one_line(message.version, 60)
        valid = isinstance(name, str) and name.isprintable() and not {"/", "\\"} & set(name)
        if not valid or not 0 < len(name.encode()) <= 200:
            # The server's checkpoint has files of this name.
            LOGGER.warning("refused a client whose name no file can have: %.60r", name)
            return actions.Reject("a client's name must be printable text that a file can have")
        if self.registration_status == flags.REGISTRATION_CLOSED:
            text = "refused %r: registration is over, also for clients that have left"
            LOGGER.warning(text, name)
        reply = await super()._handle_join_request(message, context)
        if len(self.client_names) < len(self.registered_clients):
            # declearn numbers clients of one name, and may come to the name of another client.
            duplicate = self.registered_clients.pop(context)
            LOGGER.warning("refused a client %r, which would be taken for %r", name, duplicate)
            return actions.Reject("this name is taken: choose another")
        return reply

    async def _handle_drop_request(self, message: actions.Drop, context: object) -> actions.Ping:
        message.reason = one_line(message.reason or "", 300)
        return await super()._handle_drop_request(message, context)

    async def _handle_recv_request(
        self, message: actions.Recv, context: object
    ) -> actions.Send | actions.Reject:
        reply = await super()._handle_recv_request(message, context)
        name = self.registered_clients.get(context, "")
        # A message that came before the request is a duplicate, or late.
        if isinstance(reply, actions.Send) and self.incoming_messages.pop(name, None) is not None:
            text = "left out a message of client %r that the server has not asked for"
            LOGGER.warning(text, name)
        return reply


def _in_words(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {one_line(exc, 300)}"


def _check_sums(request: messaging.InitRequest, query: SecaggSetupQuery) -> None:
    """Refuse secure sums that cannot hold the noise of the clients, before they are set up."""
    kind = "joye-libert" if "jls" in query.typekey else "masking"
    secagg, model = {"secagg_type": kind, **vars(query)}, request.model
    for module in request.optim.modules:
        site = getattr(module, "site", None)
        if site and (why := site.unsafe(secagg, model.get_weights(trainable=True).coefs)):
            raise RuntimeError(why)


class WatchfulWebsocketsServer(WebsocketsServer):
    """declearn's websockets server, with limited waiting and the names of clients at fault.

    It is registered as the protocol ``fedclip-websockets``; clients may use that or ``websockets``.

    ::

        for each reply, as it arrives:
            it cannot be decoded, or answers something else: a fault, under the client's name
            an error that the client reports: logged
            an evaluation that cannot be counted: left out
        a client leaves, is silent for `patience`, or sends no proper reply:
            min_replies is None: the run ends, and names it
            otherwise: it has left; the round goes on while min_replies others have replied

    Parameters
    ----------
    patience : float, default=3600.0
        Seconds that a client may take to answer, a round of training included, > 0.
    min_replies : int or None, default=None
        The least number of replies with which a round goes on without the clients that have left,
        >= 1. None: all clients are needed. It does not go with secure aggregation, with fairness,
        or with an aggregator that adds updates up without dividing.
    **settings
        The parameters of declearn's `WebsocketsServer`.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above.
    RuntimeError
        While a run goes on: when a client is missing that is needed; before its first step, if
        `min_replies` cannot be reached. It names the clients. The server sends the reason to all
        other clients, which end as well.

    Notes
    -----
    A client that reports an error in training is left out of that round, and takes part in the
    next. A client that left cannot come back: declearn admits no client after registration.
    Samplers that `NamedClients` wraps choose among the present clients, and never replace a client
    in its round. No evaluation ends a run, unless under secure aggregation.
    """

    protocol: ClassVar[str] = "fedclip-websockets"

    def __init__(
        self, *args: Any, patience: float = 3600.0, min_replies: int | None = None, **settings: Any
    ) -> None:
        self.patience = parameters.positive(patience=patience)
        self.min_replies = parameters.optional(parameters.integer, 1, min_replies=min_replies)
        super().__init__(*args, **settings)
        self.handler = _Handler(cast(Any, None), self.handler.heartbeat)
        self._handlers: dict[asyncio.Task[None], WebSocketServerProtocol] = {}
        self.members = Members()
        self._ending = False
        self._expelled: set[str] = set()
        self._asked: dict[str, Message] = {}
        self._evaluated = Evaluations(MetricSet([]), 0, False)
        self._begun: messaging.InitRequest | None = None

    # -- connections --------------------------------------------------------------------------
    async def _handle_connection(self, socket: WebSocketServerProtocol) -> None:
        """Serve a connection until it ends, also while the client is waiting for a message."""
        serving = asyncio.create_task(super()._handle_connection(socket))
        self._handlers[serving] = socket
        ended = asyncio.create_task(socket.wait_closed())
        try:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            ended.cancel()
            self._handlers.pop(serving, None)
            fault: BaseException | None = None
            try:
                await serving
            except (asyncio.CancelledError, Exception) as exc:
                # Cancelled while it closes the connection after an error: log the error.
                fault = exc.__context__ if isinstance(exc, asyncio.CancelledError) else exc
            name = self.handler.registered_clients.pop(socket, None)
            if fault is not None:
                sender = f"client {name!r}" if name else "a client that has not registered"
                text = "the connection of %s ends with an error: %s"
                LOGGER.error(text, sender, _in_words(fault))
            for lost in self.members.present - self.handler.client_names:
                # It will not collect its message.
                self.handler.outgoing_messages.pop(lost, None)
                self._leave(lost, f"the connection of {WHO} has ended")

    @property
    def client_names(self) -> set[str]:
        """Names of the registered clients that take part."""
        return set(self.handler.client_names - self.members.gone.keys())

    def _leave(self, name: str, why: str) -> None:
        """Go on without a client, and send it the reason if it is still connected."""
        if self.members.leave(name, why) and self.min_replies and not self._ending:
            LOGGER.warning("%s; the run goes on without it", summary({name: why}))
            if name in self.handler.client_names:
                self._expelled.add(name)
                reason = f"the server goes on without {name!r}: {summary({name: why})}"
                self.handler.outgoing_messages[name] = CancelTraining(reason).serialize()

    async def wait_for_clients(self, *args: Any, **settings: Any) -> None:
        """Wait for clients to register; those that leave afterwards cannot come back."""
        await super().wait_for_clients(*args, **settings)
        self._ending = False
        self._expelled.clear()
        self.members = Members(self.handler.client_names, self.min_replies)
        # A run that has failed, in this task, has left its round open.
        change(members=self.members, server=None)
        if (self.min_replies or 0) > len(self.members.names):
            registered = f"{len(self.members.names)} clients have registered"
            raise RuntimeError(f"min_replies = {self.min_replies}, and {registered}: lower it")

    async def stop(self) -> None:
        """Stop serving; close connections that the clients do not end in time."""
        self._ending = True
        change(members=None, evaluations=None)
        names, lost = self.handler.registered_clients, self.members.gone
        if polite := {t for t, socket in self._handlers.items() if names.get(socket) not in lost}:
            await asyncio.wait(polite, timeout=_GRACE)
        for serving, socket in self._handlers.items():
            # A process that is frozen does not take part in closing its connection.
            socket.transport.abort()
            serving.cancel()
        await super().stop()

    async def __aexit__(self, kind: object, fault: BaseException | None, tb: object) -> None:
        """Stop; if the run has failed, send the clients the reason first."""
        if fault is not None:
            cause = fault
            while cause.__cause__ is not None:
                cause = cause.__cause__
            # Of several errors that follow from one another, the first names the client.
            texts = dict.fromkeys(one_line(e, 500) or type(e).__name__ for e in (fault, cause))
            why = ": ".join(texts)
            LOGGER.error("the run has ended: %s", why)
            reason = CancelTraining(f"the server has ended: {why}").serialize()
            self.handler.incoming_messages.clear()
            for client in self.handler.client_names:
                # A client that has not collected its last message has a reason already.
                self.handler.outgoing_messages.setdefault(client, reason)
        await self.stop()

    # -- messages to clients ------------------------------------------------------------------
    async def send_messages(
        self, messages: Mapping[str, Message], timeout: float | None = None
    ) -> None:
        """Send messages, and note what each client is asked for."""
        self._asked.update(messages)
        match next(iter(messages.values()), None):
            case messaging.InitRequest() as request:
                self._begin(request)
            case SecaggSetupQuery() as query if self._begun is not None:
                _check_sums(self._begun, query)
            case StopTraining():
                self._ending = True
        await super().send_messages(messages, timeout)

    def _begin(self, request: messaging.InitRequest) -> None:
        """Note what the run is about; refuse a quorum where replies may not be missing."""
        self._begun, secure, aggregator = request, request.secagg is not None, request.aggrg
        clients = self.client_names
        self._evaluated = Evaluations(MetricSet(request.metrics), len(clients), secure)
        change(evaluations=self._evaluated)
        if self.min_replies is not None:
            for problem in quorum_problems(
                secagg=secure, fairness=request.fairness, aggregator=aggregator.name
            ):
                raise RuntimeError(problem.text)
        if isinstance(aggregator, ClippedAveraging):
            shares, combining = aggregator.shares, aggregator.combining
            why = shares.unfit(secure) or shares.strangers(clients)
            if why := why or combining.unfit(secure=secure) or combining.too_few(len(clients)):
                raise RuntimeError(why)

    async def send_message(
        self, message: Message, client: str, timeout: float | None = None
    ) -> None:
        """Send a message, and wait until it is collected: `patience` seconds by default."""
        farewell = isinstance(message, (CancelTraining, Error, StopTraining))
        if not farewell:
            # A client that has left a message has said why; it is read with those of the others.
            self._check_present(self.handler.incoming_messages)
        if client not in self.client_names:
            return
        if isinstance(aggregator := getattr(message, "aggrg", None), ClippedAveraging):
            # Its share goes by the name of its connection, not by a name in its messages.
            message = replace(cast(Any, message), aggrg=aggregator.addressed(client))
        short = isinstance(message, (CancelTraining, Error))
        limit = min(_GRACE, self.patience) if short else self.patience
        try:
            await super().send_message(message, client, timeout or limit)
        except TimeoutError:
            if farewell:
                LOGGER.warning("client %r does not collect that the run has ended", client)
                self.members.leave(client, self._silence)
            else:
                self._leave(client, self._silence)
                self._check_present()

    # -- messages from clients ----------------------------------------------------------------
    async def wait_for_messages(
        self, clients: set[str] | None = None
    ) -> dict[str, SerializedMessage[Message]]:
        """Return a message of each client, or of enough of them; raise if too few will come."""
        expected = self.client_names if clients is None else clients
        replies: dict[str, Message] = {}
        faults: dict[str, str] = {}
        incoming, patience = self.handler.incoming_messages, self.patience
        # Time in which this process is busy with other work hardly counts.
        pause = min(self.handler.heartbeat, 1.0)
        if self.min_replies is None:
            # A client that left before the server asks may have said why.
            expected = expected | (self.members.gone.keys() & incoming.keys())
        while True:
            # Read messages before checking connections: the last message may say why one ended.
            # An expelled client may still send an answer, too late.
            for name in sorted((expected & incoming.keys()) - self._expelled):
                try:
                    replies[name] = self._read(name, incoming.pop(name))
                except Exception as exc:  # anything may be in a message
                    faults[name] = f"client {WHO} sent {exc}"
                    LOGGER.error("%s", summary({name: faults[name]}))
            heard = replies.keys() | faults.keys()
            missing = expected - heard - self.members.gone.keys()
            if not missing or (self.min_replies is None and self.members.gone.keys() - heard):
                break
            if patience > 0:
                await asyncio.sleep(pause)
            else:
                for name in missing:
                    self._leave(name, self._silence)
            patience -= pause
        self._check_present(heard)
        if not self._evaluated.secure and self._is_asked(expected, messaging.EvaluationRequest):
            chosen = self._evaluations(replies)
        else:
            chosen = self._replies(expected, replies, faults)
        # In the order of the names asked for, by which declearn's key exchange knows the clients.
        chosen = {name: chosen[name] for name in (*expected, *chosen) if name in chosen}
        note_senders({n: m for n, m in chosen.items() if isinstance(m, messaging.TrainReply)})
        return {name: _Received(message) for name, message in chosen.items()}

    def _is_asked(self, clients: set[str], kind: type[Message]) -> bool:
        return any(isinstance(self._asked.get(name), kind) for name in clients)

    def _read(self, name: str, data: bytes) -> Message:
        """Return a message; if it is no proper reply, raise an error that says what it is."""
        request = self._asked.get(name)
        try:
            message: Message = SerializedMessage.from_bin_message(data).deserialize()
            if isinstance(message, messaging.MetadataReply):
                fields = set(getattr(request, "fields", ()))
                aggregate_clients_data_info({name: message.data_info}, fields)
        except Exception as exc:
            raise ValueError(f"bytes that cannot be decoded ({_in_words(exc)})") from exc
        if isinstance(message, Error):
            message.message = one_line(message.message, 1000)
            LOGGER.error("client %r reports an error: %s", name, message.message)
            return message
        kind = _REPLIES.get(type(request), (Message,))[-1 if self._evaluated.secure else 0]
        if not isinstance(message, kind):
            raise TypeError(f"{type(message).__name__} instead of {kind.__name__}")
        return message

    def _replies(
        self, expected: set[str], replies: dict[str, Message], faults: dict[str, str]
    ) -> dict[str, Message]:
        """Return the replies with which the run goes on; raise if there are too few."""
        if self.min_replies is None:
            if faults:
                raise RuntimeError(f"{summary(faults)}; the run cannot go on without it")
            # For an error that a client reports, declearn ends the run itself.
            return replies
        errors = {n: m for n, m in replies.items() if isinstance(m, Error)}
        valid = {n: m for n, m in replies.items() if n not in errors}
        for name, error in errors.items():
            faults[name] = f"client {WHO} reports an error: {error.message:.300}"
        for name, why in faults.items():
            # A round of training that has failed may succeed the next time.
            if name not in replies or not self._is_asked({name}, messaging.TrainRequest):
                self._leave(name, why)
        missing = {n: why for n, why in (self.members.gone | faults).items() if n not in valid}
        self.members.check_quorum(len(valid), len(expected), missing)
        return valid

    def _evaluations(self, replies: dict[str, Message]) -> dict[str, Message]:
        """Return the evaluations that count; no evaluation ends the run."""
        sent = {n: m for n, m in replies.items() if isinstance(m, messaging.EvaluationReply)}
        noise = self._evaluated.noise
        valid, faults = counted(sent, self._evaluated.metrics, together=noise is None)
        for name, why in faults.items():
            LOGGER.warning("left out the evaluation of client %r: %s", name, why)
        if noise is not None:
            return {"all clients": self._evaluated.mean(valid)}
        if not valid:
            LOGGER.error("no client has sent an evaluation that counts: this loss is infinite")
            return {"nobody": nothing(self._evaluated.metrics)}
        return dict(valid)

    def _check_present(self, heard: Container[str] = ()) -> None:
        """Raise if a client has left, and all are needed, unless its last message was heard."""
        lost = {n: why for n, why in self.members.gone.items() if n not in heard}
        if lost and self.min_replies is None:
            advice = "see its log; a client that does not import fedclip ends at the start"
            if self._silence in lost.values():
                advice = "if rounds take longer, raise patience in [network.kwargs]"
            raise RuntimeError(f"{summary(lost)}, and the run cannot go on without it: {advice}")

    @property
    def _silence(self) -> str:
        return f"no answer from {WHO} in {self.patience:g} s"


class WatchfulWebsocketsClient(WebsocketsClient):
    """declearn's websockets client, which waits for a frozen server for a limited time.

    It is registered as the protocol ``fedclip-websockets``; ``fedclip run`` gives it to scripts
    that name ``websockets`` too.

    Parameters
    ----------
    patience : float or None, default=10800.0
        Seconds without a message from the server after which the client ends, > 0; None to wait
        without a limit. A server waits up to its `patience`, 3600 by default, for the slowest
        client to collect a request, and as long for its answer. With three times as much, the
        server ends first, and sends the reason.
    **settings
        The parameters of declearn's `WebsocketsClient`.

    Raises
    ------
    TypeError, ValueError
        If `patience` is not as above.
    RuntimeError
        While a run goes on: when the server has been silent for too long.
    """

    protocol: ClassVar[str] = "fedclip-websockets"

    def __init__(self, *args: Any, patience: float | None = 10800.0, **settings: Any) -> None:
        self.patience = parameters.optional(parameters.positive, patience=patience)
        super().__init__(*args, **settings)

    async def recv_message(self, timeout: float | None = None) -> SerializedMessage[Message]:
        """Return the next message; log why the server cancels the run, at any moment of it."""
        received = await super().recv_message(timeout)
        if issubclass(received.message_cls, CancelTraining):
            self.logger.error("the run is cancelled: %s", received.deserialize().reason)
        return received

    async def _send_message(self, bin_msg: bytes) -> bytes:
        """Return the server's answer to a message, which may be a message for this client."""
        answer = asyncio.ensure_future(super()._send_message(bin_msg))
        patience = self.patience or math.inf
        try:
            while patience > 0:
                await asyncio.wait({answer}, timeout=min(1.0, patience))
                if answer.done():
                    return answer.result()
                patience -= 1.0
            # A frozen process does not take part in closing a connection.
            cast(Any, self._socket).transport.abort()
            self._socket = None
            text = f"no message from the server in {self.patience:g} s: it is frozen"
            raise RuntimeError(f"{text}, or rounds take longer than this client's patience")
        finally:
            answer.cancel()


def watch_plain_clients() -> None:
    """Make clients of the protocol ``websockets`` in this process wait for a limited time, too."""
    REGISTRIES["NetworkClient"].register(WatchfulWebsocketsClient, "websockets", repl=True)
