"""Prefills that outlive their clients: a client that gives up on a slow prompt finds it processed when it asks again.

A client that leaves during prefill does not cancel it where `finish_prefill` says so; at the prompt's end the engine is
stopped, and the slot keeps the prompt. The same request of the same tenant joins the job that its client has left, in
its prefill or shortly after it, when its first events are buffered. Identical requests whose clients are both there are
two requests. A client that leaves during generation cancels it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import structlog

from llamacpp.reports import Progress
from proxy.api.read import ModelRequest
from proxy.errors import SlotkeeperError
from proxy.relay import Out
from proxy.settle import Record

if TYPE_CHECKING:
    from proxy.api.door import AsgiOut
    from proxy.engine import Engine
    from proxy.service import Service

log = structlog.get_logger(__name__)

HALF = 0.5
"""Share of a prefill's work beyond which `--finish-prefill half` always ends it."""
UNREAD_EVENTS, UNREAD_BYTES, UNREAD_SECONDS = 32, 64 * 1024, 5.0
"""What a model may say while nobody is there, from its first token on: agents ask again within 0.2 to 4 s (agents.md,
"Reaction to errors"). Not a moment when somebody waits for a slot."""
OPENING_BYTES = 256 * 1024
"""Signs of life of one prefill that are said again to who joins; the Responses dialect numbers its own, and repeats the
request's tools in each (50 KB of Codex). Beyond them numbers are left out."""
LEAVING_SECONDS = 0.05
"""How long a request waits that equals one whose client seems to be there: the end of a connection and the beginning of
the next may be read in either order."""


class Desk:
    """proxy.relay.Out of a job: its client's connection, or nobody's; says what was missed to whoever joins.

    Everything is sent by the job's own task, so what is missed comes before what is new.
    """

    def __init__(self, client: Out) -> None:
        self._client: Out | None = client
        self.started = False
        self.is_prefill = True
        self._head: tuple[int, Mapping[str, str]] = (200, {})
        self._missed: list[bytes] = []
        self._is_behind = False
        self._more: dict[str, str] = {}

    @property
    def n_missed(self) -> int:
        """Bytes that a client who joins will be told first."""
        return sum(map(len, self._missed))

    def leave(self) -> None:
        """Nobody is there."""
        self._client = None

    def join(self, client: Out, headers: Mapping[str, str]) -> None:
        """From now on this client is told; `headers` are added to the answer's."""
        self._client, self._is_behind = client, self.started
        self._more = dict(headers)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of the answer."""
        self.started, self._head = True, (status, headers)
        if self._client is not None:
            await self._client.start(status, {**headers, **self._more})

    async def write(self, data: bytes) -> None:
        """A piece of the body; of whole events."""
        client = self._client
        if client is not None and self._is_behind:
            await self._catch_up(client)
        self._note(data)
        if client is not None:
            await client.write(data)

    async def end(self) -> None:
        """The body is complete."""
        if (client := self._client) is None:
            return
        if self._is_behind:
            await self._catch_up(client)
        await client.end()

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """An error: with its own status for a client that was told nothing yet, whatever an earlier one was told."""
        if self._client is not None:
            await self._client.fail(error, {**headers, **self._more})

    async def _catch_up(self, client: Out) -> None:
        self._is_behind = False
        status, headers = self._head
        await client.start(status, {**headers, **self._more})
        await client.write(b"".join(self._missed))

    def _note(self, data: bytes) -> None:
        """Keeps what a client who joins has to know: all that is said while nobody is there and, of a prefill, what
        opens the stream and the signs of life that follow, those alike once."""
        if self._client is not None and not self.is_prefill:
            self._missed.clear()
        elif not self.is_prefill or (data not in self._missed[-1:] and self.n_missed < OPENING_BYTES):
            self._missed.append(data)


class Job:
    """One model request whose work may go on without its client."""

    def __init__(self, service: Service, request: ModelRequest, client: AsgiOut, record: Record) -> None:
        self._service, self.request, self.record = service, request, record
        self.desk = Desk(client)
        self.task: asyncio.Task[None]
        """What processes it; set at once by whoever starts it."""
        self.has_left = False
        self.engine: Engine | None = None
        self.done = self._work = self._base = self._n_unread = 0
        """`done`: prompt tokens processed for it, of about `_work`."""

    # --- told by the exchange ----------------------------------------------------------------------------------------

    def begin(self, engine: Engine, n_prompt: int) -> None:
        """The prompt of about `n_prompt` tokens is about to be processed."""
        self.engine, self._work = engine, max(1, n_prompt)
        self._service.jobs.add(self)

    def primed(self, progress: Progress) -> None:
        """The engine processes the prompt's base ahead of the rest."""
        self.done = self._base = max(0, progress.processed - progress.cache)
        self._look()

    def progressed(self, progress: Progress) -> None:
        """The engine processes the prompt."""
        self.done = self._base + progress.processed - progress.cache
        self._work = max(1, self._base + progress.total - progress.cache)
        self._look()

    def bore(self, n_events: int) -> None:
        """Tokens have come: the prefill is over."""
        if self.desk.is_prefill:
            self.desk.is_prefill = False
            if not self.has_left:
                self._service.jobs.discard(self)
            else:
                asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._end_unread)
        if self.has_left:
            self._n_unread += n_events
            if self._n_unread > UNREAD_EVENTS or self.desk.n_missed > UNREAD_BYTES or self._is_in_the_way():
                self.task.cancel()

    # --- told by the door --------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """The client has gone. Returns whether the work goes on without it."""
        if self.task.done() or self.engine is None or not self.desk.is_prefill or not self._may_go_on():
            return False
        self.has_left = True
        self.desk.leave()
        self._service.jobs.keep(self)
        log.info("client_left_prefill", request=self.record.id, done=self.done, of=self._work)
        return True

    def join(self, client: AsgiOut) -> None:
        """The same request has come again."""
        self.has_left, self._n_unread = False, 0
        self.record.joined += 1
        if self.request.writer is not None:
            client.error_event = self.request.writer.error
        self._service.metrics.request(self.request.dialect, self.record.kind, "client_left")
        self.desk.join(client, {"x-slotkeeper-joined": str(self.record.joined)})
        if not self.desk.is_prefill:
            self._service.jobs.discard(self)
        log.info("client_joined", request=self.record.id, done=self.done, of=self._work)

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self.has_left and not self._may_go_on():
            self.task.cancel()

    def _may_go_on(self) -> bool:
        wanted = self._service.settings.finish_prefill
        if self._service.stopping or wanted == "never":
            return False
        return wanted == "always" or self.done > HALF * self._work or not self._has_others()

    def _has_others(self) -> bool:
        """The engine has something to do for somebody who is there."""
        engine = self.engine
        left = sum(j.engine is engine for j in self._service.jobs if j.has_left and j is not self)
        return engine is not None and engine.n_requests - left > 1

    def _is_in_the_way(self) -> bool:
        return self.engine is not None and self.engine.table.n_waiting > 0

    def _end_unread(self) -> None:
        if self.has_left and not self.task.done():
            self.task.cancel()


class Jobs:
    """The jobs whose prompt is being processed, and those that were left."""

    def __init__(self) -> None:
        self._open: set[Job] = set()

    def __iter__(self) -> Iterator[Job]:
        return iter(self._open)

    def add(self, job: Job) -> None:
        """Its prefill begins."""
        self._open.add(job)
        job.task.add_done_callback(lambda _: self._open.discard(job))

    def discard(self, job: Job) -> None:
        """It can no longer be joined."""
        self._open.discard(job)

    def keep(self, job: Job) -> None:
        """Its client has gone; nobody else waits for its task."""
        self._open.add(job)
        job.task.add_done_callback(_told)

    def end_left(self) -> None:
        """Ends what nobody waits for."""
        for job in tuple(self._open):
            if job.has_left:
                job.task.cancel()

    async def find(self, request: ModelRequest) -> Job | None:
        """The job of the same request whose client has left."""
        same = [job for job in self._open if is_same(job.request, request)]
        if same and not any(job.has_left for job in same):
            await asyncio.sleep(LEAVING_SECONDS)
        # One that is being ended has no answer for anybody.
        return next((j for j in same if j.has_left and not j.task.done() and not j.task.cancelling()), None)


def is_same(a: ModelRequest, b: ModelRequest) -> bool:
    """Whether two requests ask for the same of the same engine, for the same tenant, session and agent. Messages and
    tools are compared as the client spelled them, since their spelling decides the prompt."""
    return (
        a.prompt == b.prompt
        and (a.who, a.path, a.dialect, a.mode, a.fresh) == (b.who, b.path, b.dialect, b.mode, b.fresh)
        and a.compacts == b.compacts
        and (a.n_answers, a.raws) == (b.n_answers, b.raws)
        and a.body == b.body
    )


def _told(task: asyncio.Task[None]) -> None:
    """Its failure, if any, was told in the request's record."""
    if not task.cancelled():
        task.exception()
