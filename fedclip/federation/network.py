# SPDX-License-Identifier: Apache-2.0
"""A server over websockets that ends, with a message, when a client is gone or does not answer.

declearn's server waits for ever for the reply of a client that has died, and for its connections
when it stops. This server unregisters a client whose connection has ended, waits for a limited
time, and closes its connections when it stops. Clients may use declearn's plain ``websockets``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, ClassVar

from declearn.communication.websockets import WebsocketsClient, WebsocketsServer
from declearn.messaging import CancelTraining, Message, SerializedMessage

from fedclip import parameters

_GRACE = 10.0
"""Seconds that clients have to end their connections themselves when the server stops."""


class WatchfulWebsocketsServer(WebsocketsServer):
    """declearn's websockets server, with limited waiting.

    It is registered as the protocol ``fedclip-websockets``; clients may use that or ``websockets``.

    Parameters
    ----------
    patience : float, default=3600.0
        Seconds that a client may take to answer, a round of training included, > 0.
    **settings
        The parameters of declearn's `WebsocketsServer`.

    Raises
    ------
    RuntimeError
        While a run goes on: when the connection of a client has ended, or it takes longer than
        `patience`. It names the client. The others are told, and end as well.
    """

    protocol: ClassVar[str] = "fedclip-websockets"

    def __init__(self, *args: Any, patience: float = 3600.0, **settings: Any) -> None:
        self.patience = parameters.positive(patience=patience)
        super().__init__(*args, **settings)
        self._handlers: set[asyncio.Task[None]] = set()
        self._members: set[str] = set()

    async def _handle_connection(self, socket: Any) -> None:
        """Serve a connection until it ends, also while the client is waiting for a message."""
        serving = asyncio.create_task(super()._handle_connection(socket))
        self._handlers.add(serving)
        ended = asyncio.create_task(socket.wait_closed())
        try:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (serving, ended):
                task.cancel()
            self._handlers.discard(serving)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await serving
            self.handler.registered_clients.pop(socket, None)
            for name in self._lost:
                # This client is gone, and will not collect its message.
                self.handler.outgoing_messages.pop(name, None)

    @property
    def _lost(self) -> set[str]:
        return self._members - self.client_names

    async def wait_for_clients(self, *args: Any, **settings: Any) -> None:
        """Wait for clients to register; none may leave afterwards."""
        await super().wait_for_clients(*args, **settings)
        self._members = self.client_names

    async def stop(self) -> None:
        """Stop serving; close connections that the clients do not end in time."""
        if self._handlers:
            await asyncio.wait(set(self._handlers), timeout=_GRACE)
        for serving in self._handlers:
            serving.cancel()
        await super().stop()

    async def __aexit__(self, exc_type: Any, exc_value: Any, exc_tb: Any) -> None:
        """Stop; if the run has failed, tell the clients why first."""
        if exc_value is not None:
            why = str(exc_value)[:500] or type(exc_value).__name__
            reason = CancelTraining(f"the server has ended: {why}").serialize()
            for client in self.client_names:
                # A client that has not collected its last message has a reason already.
                self.handler.outgoing_messages.setdefault(client, reason)
        await self.stop()

    async def send_message(
        self, message: Message, client: str, timeout: float | None = None
    ) -> None:
        """Send a message, and wait until it is collected: `patience` seconds by default."""
        if self._lost and not isinstance(message, CancelTraining):
            raise RuntimeError(self._gone())
        try:
            await super().send_message(message, client, timeout or self.patience)
        except TimeoutError:
            if timeout:
                raise
            raise RuntimeError(self._silent({client})) from None

    async def wait_for_messages(
        self, clients: set[str] | None = None
    ) -> dict[str, SerializedMessage[Any]]:
        """Return a message of each client, or raise if one will not come."""
        awaited = self.client_names if clients is None else clients
        found: dict[str, bytes] = {}
        end = time.monotonic() + self.patience
        while True:
            # Read messages before checking connections: the last message may say why one ended.
            incoming = self.handler.incoming_messages
            found |= {name: incoming.pop(name) for name in awaited & incoming.keys()}
            missing = awaited - found.keys()
            if not missing:
                break
            if self._lost - found.keys():
                raise RuntimeError(self._gone())
            if time.monotonic() > end:
                raise RuntimeError(self._silent(missing))
            await asyncio.sleep(self.handler.heartbeat)
        return {name: SerializedMessage.from_bin_message(found[name]) for name in awaited}

    def _gone(self) -> str:
        names = ", ".join(map(repr, sorted(self._lost)))
        return (
            f"the connection of {names} has ended, and the run can not go on without it: its log "
            "says why; a client that does not import fedclip ends at the start"
        )

    def _silent(self, clients: set[str]) -> str:
        return (
            f"no answer from {', '.join(map(repr, sorted(clients)))} in {self.patience:g} s; if "
            "rounds take longer, raise patience in [network.kwargs]"
        )


class WatchfulWebsocketsClient(WebsocketsClient):
    """declearn's websockets client, under the protocol name of its server."""

    protocol: ClassVar[str] = "fedclip-websockets"
