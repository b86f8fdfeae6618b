"""A small HTTP/1.1 server over asyncio that notices at once when its client leaves. For fakes only."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Error", 503: "Unavailable"}


@dataclass
class Request:
    """What a client sent. `left` is set when its connection is gone."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    content: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the body; empty when there is none."""
        return json.loads(self.content) if self.content else {}


class Broken(Exception):
    """Raised by a handler to cut the connection without another byte."""


class Answer:
    """One response in the making."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.chunked = False
        self.more_headers: tuple[str, ...] = ()

    async def whole(self, status: int, body: bytes, content_type: str = "application/json; charset=utf-8") -> None:
        """Everything at once."""
        self._head(status, f"content-type: {content_type}", f"content-length: {len(body)}")
        self._writer.write(body)
        await self._writer.drain()

    async def json(self, value: object, status: int = 200) -> None:
        """A JSON answer."""
        await self.whole(status, json.dumps(value).encode())

    async def begin_events(self) -> None:
        """The head of an event stream; then `send` pieces, then return."""
        self.chunked = True
        self._head(200, "content-type: text/event-stream", "transfer-encoding: chunked")
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        """One chunk of a stream."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def end(self) -> None:
        """The last chunk, where there are chunks."""
        if self.chunked:
            self._writer.write(b"0\r\n\r\n")
            await self._writer.drain()

    def _head(self, status: int, *lines: str) -> None:
        first = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", "server: llama.cpp"]
        head = [*first, *self.more_headers, *lines, "", ""]
        self._writer.write("\r\n".join(head).encode())


Handler = Callable[[Request, Answer], Awaitable[None]]


class _Protocol(asyncio.StreamReaderProtocol):
    """Tells its connection that the peer is gone while a handler is busy."""

    def __init__(self, serve: Callable[..., Awaitable[None]], loop: asyncio.AbstractEventLoop) -> None:
        self.gone = asyncio.Event()
        reader = asyncio.StreamReader(limit=2**20, loop=loop)
        super().__init__(reader, lambda r, w: serve(r, w, self.gone), loop=loop)

    def eof_received(self) -> bool:
        self.gone.set()
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


class Server:
    """Serves one handler on a free loopback port, or on the one given."""

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler = handler
        self.port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Protocol(self._serve, loop), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.drop_connections()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_connections(self) -> None:
        """Cut every connection at once, as a killed process does."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while (request := await _read(reader, gone)) is not None:
                answer = Answer(writer)
                await self._handler(request, answer)
                await answer.end()
        except (Broken, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled only by `__aexit__`; the stream protocol would log it
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            with contextlib.suppress(Exception):
                writer.transport.abort()


async def _read(reader: asyncio.StreamReader, gone: asyncio.Event) -> Request | None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ", 2)
    headers = {k.strip().lower(): v.strip() for k, v in (line.split(":", 1) for line in head[1:] if line)}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    return Request(method, url.path, query, headers, content, gone)
