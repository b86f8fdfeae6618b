"""Upstream events to the client, unchanged and at once; what only we asked for is kept back; an answer that was wanted
whole is assembled. Tells when the engine's own figures have come, before the client can know that it is done."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from llamacpp.errors import EngineBroken
from llamacpp.reports import Progress, Timings, error_of
from llamacpp.sse import EventSplitter, data_of
from llamacpp.wire import Asked, Decoder, Json, Kind, is_unasked
from policies.placeholders import Resolver
from proxy.keep_alive import KeepAlive, silent
from proxy.ledger import MOST_REPLY_BYTES
from proxy.runner import Runner

if TYPE_CHECKING:
    from proxy.api.dialect import Writer
    from proxy.errors import SlotkeeperError
    from proxy.jobs import Job
    from proxy.settle import Record

_MARK = re.compile(rb'"(?:prompt_progress|timings|usage|error)"')
"""An event without these is content and is not parsed. Content that quotes them is parsed, which costs little."""
_OPENING = re.compile(rb'\[\[|\["')
"""Content in which a placeholder begins, or may begin at its end."""
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


class Out(Protocol):
    """The client's side of one answer. `started`: the status line is on its way."""

    started: bool

    async def start(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None: ...


class Relay:
    """One answer. `settle` is called once, with the engine's timings, before the answer's end is passed on. With a
    `writer` the answer is said in another dialect, without one the engine's events pass unchanged."""

    def __init__(
        self,
        kind: Kind,
        asked: Asked,
        out: Out,
        headers: Mapping[str, str],
        settle: Callable[[Timings], None],
        writer: Writer | None = None,
    ) -> None:
        self._asked, self._out, self._headers, self._settle, self._writer = asked, out, headers, settle, writer
        self._decoder = Decoder(kind)
        self._settled = False
        self.keeps = False
        """The answer's events are wanted afterwards, as `kept`."""
        self.kept: list[bytes] = []
        self.message: Json | None = None
        """The assistant message of an answer that came whole."""
        self.resolver: Resolver | None = None
        """Puts values in place of placeholders that the model repeats; None where the prompt has none."""
        self.alive: KeepAlive | None = None
        """When the client is to be told that its prompt is still being processed."""
        self.job: Job | None = None
        """Told how the prompt proceeds."""
        self._n_kept = 0
        self._n_borne = 0
        """Events of this chunk that bear something, whatever the client is shown of them: a ping, a sign of life or a
        report during prefill is no token; what a writer holds back, or a client wants whole, is."""
        self.first_event = 0.0
        """When the first event came that bears something, by time.perf_counter; 0.0 before."""

    @property
    def progress(self) -> Progress | None:
        """What the engine said last of the prompt; None before it did."""
        return self._decoder.progress

    async def events(self, chunks: AsyncIterable[bytes], runner: Runner | None) -> None:
        """Relays or assembles a streamed answer. Raises EngineRefused for the engine's error event, EngineBroken
        for an answer that is not whole."""
        splitter = EventSplitter()
        async for chunk in chunks:
            self._keep(chunk)
            shown: list[bytes] = []
            look = self._look if self._writer is None else self._translated
            try:
                for event in splitter.feed(chunk):
                    if (seen := look(event)) is not None:
                        shown.append(seen)
            finally:
                # Also before an error is told: what the engine said until then is the client's.
                await self._show(shown, runner)
        if not self._asked.stream:
            found = self._with_values(self._decoder.whole(self._asked))
            whole = orjson.dumps(found if self._writer is None else self._writer.whole(found))
            self._close()
            await self._answer(whole)
            return
        if rest := splitter.rest():
            raise EngineBroken(
                f"llama-server's stream ended inside an event ({len(rest)} bytes); send the request again."
            )
        self._close()
        if not self._settled:
            raise EngineBroken("llama-server's stream ended before the answer was complete; send the request again.")
        await self._pass_on(b"" if self._writer is None else self._writer.end())
        await self._out.end()

    def _keep(self, chunk: bytes) -> None:
        self._n_kept += len(chunk)
        if self.keeps and self._n_kept <= MOST_REPLY_BYTES:
            self.kept.append(chunk)

    async def _show(self, shown: list[bytes], runner: Runner | None) -> None:
        n_borne, self._n_borne = self._n_borne, 0
        if n_borne and not self.first_event:
            self.first_event = time.perf_counter()
        if runner is not None and self.progress is not None:
            runner.told(self.progress.total)
        if n_borne and runner is not None:
            runner.n_decoded += n_borne
            runner.first_token = runner.first_token or self.first_event
            runner.grew()
        if n_borne and self.job is not None:
            self.job.bore(n_borne)
        if shown and self._asked.stream:
            await self._pass_on(b"".join(shown))

    async def whole(self, body: bytes) -> None:
        """Passes on an answer that had to be asked for whole."""
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise EngineBroken("llama-server's answer is not JSON; send the request again.") from None
        self.first_event = time.perf_counter()
        parts = [part for part in (found if isinstance(found, list) else [found]) if isinstance(part, dict)]
        timings = next((t for t in (Timings.from_json(p.get("timings")) for p in parts) if t is not None), None)
        if timings is not None:
            self._done(timings)
        if self.keeps and isinstance(found, dict) and isinstance(choices := found.get("choices"), list) and choices:
            self.message = choices[0].get("message") if isinstance(choices[0], dict) else None
        whole = self._with_values(found)
        if self._writer is not None:
            await self._answer(orjson.dumps(self._writer.whole(whole)))
        else:
            await self._answer(body if whole is found else orjson.dumps(whole))

    def _with_values(self, found: Any) -> Any:
        choices = found.get("choices") if isinstance(found, dict) else None
        if self.resolver is None or not isinstance(choices, list):
            return found
        new = [
            {**c, "message": self.resolver.message(c["message"])} if isinstance(c.get("message"), dict) else c
            for c in choices
        ]
        return found if new == choices else {**found, "choices": new}

    def _look(self, event: bytes) -> bytes | None:
        """The event if the client is to see it; everything that we want to know of it is read here."""
        wanted_whole = not self._asked.stream
        if self.resolver is not None and not wanted_whole and self._may_name(event):
            event = self._valued(event)
        if not wanted_whole and _MARK.search(event) is None:
            self._n_borne += not event.startswith(b":")
            return event
        data = data_of(event)
        if data is None or data == b"[DONE]":
            return None if wanted_whole else event
        found = _parsed(data)
        if not isinstance(found, dict):
            return event
        is_wanted = self._read(found)
        if "prompt_progress" in found:
            return self._alive(found) if not is_wanted else event
        self._n_borne += is_wanted
        return event if is_wanted else None

    def _alive(self, found: Json) -> bytes | None:
        """A sign of life in place of a report that nobody asked for, if one is due."""
        if not self._asked.stream or self.alive is None or not self.alive.is_due():
            return None
        return silent(found) if self._writer is None else self._writer.alive(found)

    def _may_name(self, event: bytes) -> bool:
        return self.resolver is not None and (self.resolver.is_holding or _OPENING.search(event) is not None)

    def _valued(self, event: bytes) -> bytes:
        data = data_of(event)
        if self.resolver is None or data is None or data == b"[DONE]":
            return event
        found = _parsed(data)
        if not isinstance(found, dict):
            return event
        return b"data: " + orjson.dumps(self.resolver.chunk(found)) + b"\n\n"

    def _translated(self, event: bytes) -> bytes | None:
        """What the client is to see of an event in its own dialect; pings stay as they are."""
        data = data_of(event)
        if data is None or data == b"[DONE]":
            return event if data is None and self._asked.stream else None
        found = _parsed(data)
        if not isinstance(found, dict) or self._writer is None:
            return None
        self._read(found)
        if "prompt_progress" in found:
            tell = getattr(self._writer, "progress", None)
            if tell is not None and self._decoder.progress is not None:
                tell(self._decoder.progress.total, self._decoder.progress.cache)
            if is_unasked(found, self._asked):
                return self._alive(found)
        else:
            self._n_borne += 1
        if not self._asked.stream:
            return None
        if self.resolver is not None:
            found = self.resolver.chunk(found)
        return self._writer.feed(found) or None

    def _read(self, found: Json) -> bool:
        if (refused := error_of(found)) is not None:
            raise refused
        if not self._asked.stream or any(name in found for name in ("prompt_progress", "timings", "usage")):
            self._decoder.feed(found)
        if self.job is not None and "prompt_progress" in found and (progress := self._decoder.progress) is not None:
            self.job.progressed(progress)
        if self._decoder.timings is not None and _is_last(found):
            self._done(self._decoder.timings)
        return not is_unasked(found, self._asked)

    def _close(self) -> None:
        """The stream has ended: timings that came in no closing event are taken as they are."""
        if self._decoder.timings is not None and not self._settled:
            self._done(self._decoder.timings)

    def _done(self, timings: Timings) -> None:
        if not self._settled:
            self._settled = True
            self._settle(timings)

    async def _pass_on(self, data: bytes) -> None:
        if not self._out.started:
            await self._out.start(200, {**SSE_HEADERS, **self._headers})
        if data:
            await self._out.write(data)

    async def _answer(self, body: bytes) -> None:
        await self._out.start(200, {"content-type": "application/json; charset=utf-8", **self._headers})
        await self._out.write(body)
        await self._out.end()


async def say_early(out: Out, record: Record, writer: Writer | None) -> None:
    """A sign of life of a chat that the engine has not been sent yet, since it processes its base first, or sums up
    what comes before. Its id, model and time are those that an answer in another dialect keeps."""
    chunk: Json = {"id": f"chatcmpl-{record.id}", "object": "chat.completion.chunk", "model": record.model}
    chunk["created"] = int(time.time())
    if not out.started:
        await out.start(200, {**SSE_HEADERS, **record.headers()})
    await out.write(silent(chunk) if writer is None else writer.alive(chunk))


def _parsed(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        raise EngineBroken("llama-server sent an event that is not JSON; send the request again.") from None


def _is_last(found: Json) -> bool:
    """The event that bears the figures of the whole answer (`timings_per_token` puts figures into others, too)."""
    if "timings" not in found:
        return False
    choices = found.get("choices")
    if choices is None:
        return found.get("stop") is True
    return not choices or choices[0].get("finish_reason") is not None
