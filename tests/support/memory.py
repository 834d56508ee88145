"""Connections without sockets: what `websockets` serves and connects to meets in this process.

Both ends run declearn's and fedclip's own code on serialized bytes, chunks included.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import websockets
from websockets.exceptions import ConnectionClosedOK


class End:
    """One end of a connection; what the other end sends comes in order."""

    remote_address = ("memory", 0)

    def __init__(self, peer: Any = None) -> None:
        self.arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.peer = peer or End(self)
        # Of a process that is frozen, nothing is sent.
        self.transport = SimpleNamespace(abort=self.end)

    @property
    def closed(self) -> bool:
        return self.ended.is_set()

    def end(self) -> None:
        for one in (self, self.peer):
            one.ended.set()
            one.arrived.put_nowait(None)

    async def send(self, data: Any) -> None:
        if self.closed:
            raise ConnectionClosedOK(None, None)
        self.peer.arrived.put_nowait(bytes(data))
        await asyncio.sleep(0)

    async def recv(self) -> bytes:
        data = await self.arrived.get()
        if data is None:
            self.arrived.put_nowait(None)
            raise ConnectionClosedOK(None, None)
        return data

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except ConnectionClosedOK:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        self.end()

    async def wait_closed(self) -> None:
        await self.ended.wait()


@contextlib.contextmanager
def without_sockets() -> Iterator[None]:
    """Let servers and clients of this process meet in memory, each server by its port."""
    serving: dict[str, Any] = {}

    async def serve(handler: Any, host: str, port: int, **_: Any) -> Any:
        where, context = f"{host}:{port}", contextvars.copy_context()
        tasks: dict[End, asyncio.Task[None]] = {}

        def accept(end: End) -> None:
            tasks[end] = asyncio.create_task(handler(end), context=context.copy())

        def close() -> None:
            del serving[where]
            for end in tasks:
                end.end()

        async def wait_closed() -> None:
            await asyncio.gather(*tasks.values(), return_exceptions=True)

        serving[where] = accept
        return SimpleNamespace(close=close, wait_closed=wait_closed)

    async def connect(uri: str, **_: Any) -> End:
        while (accept := serving.get(uri.removeprefix("ws://"))) is None:
            await asyncio.sleep(0.01)
        end = End()
        accept(end.peer)
        return end

    with mock.patch.multiple(websockets, serve=serve, connect=connect):
        yield
