"""The ASGI side of one model request: read the body within bounds, watch for the client leaving, write the answer.

Plain ASGI, because a response object that buffers, or a middleware that re-streams, would delay or hide a disconnect.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from proxy import errors
from proxy.api import write_messages, write_responses
from proxy.api.read import Door, ModelRequest, Told, identity, mode_of, read, wants_compaction
from proxy.choices import run_choices
from proxy.engine_errors import whatever
from proxy.errors import ClientLeft, SlotkeeperError, TooLarge
from proxy.exchange import Exchange
from proxy.jobs import Job
from proxy.settle import Record

if TYPE_CHECKING:
    from proxy.service import Service

LARGE_BODY = 256 * 1024
"""Bytes from which a body is parsed off the event loop (design.md, "One request")."""


ERROR_BODIES: dict[errors.Dialect, Callable[[SlotkeeperError], bytes]] = {
    "messages": write_messages.error_body,
    "responses": write_responses.error_body,
}


def dialect_of(path: str) -> errors.Dialect:
    """Whose errors a path answers with."""
    if "/messages" in path:
        return "messages"
    return "responses" if path.endswith("/responses") else "chat"


STALLED_SECONDS = 60.0
"""A client whose connection takes nothing for so long (a laptop that sleeps) is taken to have left: until its answer is
read from the engine, nobody else gets the slot."""


class AsgiOut:
    """proxy.exchange.Out over one ASGI connection."""

    def __init__(self, send: Send, dialect: errors.Dialect) -> None:
        self._send = send
        self._error_body = ERROR_BODIES.get(dialect, errors.body)
        self.error_event: Callable[[SlotkeeperError], bytes] = errors.event
        """An error inside a stream that has begun; a dialect's writer knows its own."""
        self.started = False
        self.ended = False
        """The client's answer is whole: a disconnect from now on is no leaving (uvicorn reports one in any case)."""
        self._sending_since: float | None = None

    @property
    def is_stalled(self) -> bool:
        """The client has read nothing for STALLED_SECONDS."""
        since = self._sending_since
        return since is not None and time.monotonic() - since > STALLED_SECONDS

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the status line and headers."""
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._pass_on({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Sends a piece of the body."""
        await self._pass_on({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the body."""
        self.ended = True
        await self._pass_on({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, message: Message) -> None:
        self._sending_since = time.monotonic()
        await self._send(message)
        self._sending_since = None

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """The error in the client's dialect: a status and a body, or an event in a stream that has begun."""
        if self.started:
            await self.write(self.error_event(error))
        else:
            body = self._error_body(error)
            length = {"content-type": "application/json; charset=utf-8", "content-length": str(len(body))}
            await self.start(error.status, {**length, **headers, **error.headers})
            await self.write(body)
        await self.end()


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body; raises TooLarge beyond `limit` bytes, ClientLeft when it breaks off."""
    too_large = TooLarge(f"The body is larger than {limit} bytes (--max-body-bytes). Send less, or raise the limit.")
    declared = headers_of(scope).get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("The client left while it sent its request.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def headers_of(scope: Scope) -> dict[str, str]:
    """Request headers by lower-case name; of repeated ones the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def path_of(request: Request) -> str:
    """The path that was routed. `request.url` is put together from the client's Host header and query, so it may name
    another path (some versions of Starlette), or fail on a query that is not UTF-8."""
    path: str = request.scope["path"]
    return path


async def read_request(
    service: Service, door: Door | errors.Dialect, path: str, scope: Scope, receive: Receive
) -> ModelRequest:
    """The request as the engine gets it; a large body is parsed off the loop. Raises SlotkeeperError."""
    raw = await read_body(scope, receive, service.settings.max_body_bytes)
    headers = headers_of(scope)
    compaction = wants_compaction(headers, usual=service.settings.compaction)
    told = Told(headers, mode_of(headers, service.settings.mode), service.normals, compaction=compaction)
    who = identity(scope["state"]["tenant"], headers)
    if len(raw) > LARGE_BODY:
        request = await asyncio.to_thread(read, door, path, raw, who, told)
    else:
        request = read(door, path, raw, who, told)
    service.note_dropped(request.dialect, told.dropped)
    return request


class ModelDoor:
    """An endpoint for model requests of one kind; an ASGI application."""

    def __init__(self, service: Service, door: Door | errors.Dialect, path: str) -> None:
        self._service, self._door, self._path = service, door, path
        self._dialect: errors.Dialect = "native" if door == "infill" else door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; returns when the client has its answer or has left."""
        out = AsgiOut(send, self._dialect)
        tenant = scope["state"]["tenant"]
        record = Record(f"req_{secrets.token_hex(8)}", tenant, self._dialect, "other", time.time())
        # In the context of this request's task and of those it starts: every line that they log says whose it is.
        structlog.contextvars.bind_contextvars(request=record.id)
        try:
            request = await read_request(self._service, self._door, self._path, scope, receive)
        except ClientLeft:
            return
        except Exception as found:
            error = whatever(found, record.id)
            self._service.metrics.request(self._dialect, "other", error.outcome)
            await out.fail(error, {"x-slotkeeper-request-id": record.id})
            return
        record.kind, record.tenant = request.kind, request.who.tenant
        if request.writer is not None:
            out.error_event = request.writer.error
        if request.n_answers > 1:
            choices = run_choices(self._service, request, out, record)
            await until_left(asyncio.create_task(choices, name=record.id), receive, out)
            return
        job = await self._service.jobs.find(request)
        if job is not None:
            job.join(out)
        else:
            job = Job(self._service, request, out, record)
            work = Exchange(self._service, request, job.desk, record, job=job).run()
            job.task = asyncio.create_task(work, name=record.id)
        await until_left(job.task, receive, out, job.leave)


async def until_left(
    work: asyncio.Task[None], receive: Receive, out: AsgiOut, leave: Callable[[], bool] = lambda: False
) -> None:
    """Runs `work` to its end, or cancels it: at once when the client disconnects before its answer has ended, soon when
    it stops reading. `leave`: asked of a client that disconnects, whether the work goes on without it."""
    goes_on = False
    gone = asyncio.create_task(_disconnected(receive))
    try:
        # One look now and then for all: a timer around every single event is a tenth of the proxy's work.
        while not out.is_stalled:
            done, _ = await asyncio.wait(
                {work, gone}, timeout=STALLED_SECONDS / 10, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                goes_on = work not in done and not out.ended and leave()
                break
    finally:
        gone.cancel()
        if not goes_on:
            if not work.done() and not out.ended:
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
    if goes_on:
        return
    if not work.cancelled() and (error := work.exception()) is not None and not isinstance(error, OSError | ClientLeft):
        raise error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
