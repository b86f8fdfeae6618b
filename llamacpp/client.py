"""The HTTP API of one llama-server. Shapes: tools/server/README.md of llama.cpp; checked live in the tests."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import lru_cache
from itertools import repeat
from typing import Any

import httpx
import orjson

from llamacpp.errors import EngineBroken, EngineRefused, EngineStarting, EngineUnreachable, is_refused
from llamacpp.packed import pack, unpack
from llamacpp.sse import EventSplitter, data_of
from llamacpp.wire import Progress, Props, SlotFileReport, SlotReport, Timings, error_of

CONNECT_SECONDS = 5.0
ASK_SECONDS = 10.0
"""health, props, slots, metrics: answered from the engine's queue between two batches."""
SLOT_FILE_SECONDS = 600.0
"""A 60k-token file of an 8B model is 8.8 GB and takes 7-26 s (measured); slow disks take longer."""
MOST_METRICS_BYTES = 1024 * 1024
"""Of GET /metrics, which has 3 KB: it is read again and again, from whatever listens at the address by now."""
KEEP_ALIVE_SECONDS = 2.0
"""llama-server drops an idle connection after 5 s (cpp-httplib's default). We drop it first: a request must not meet a
closing socket."""
KEEP_ALIVE_CONNECTIONS = 8
"""An idle connection holds one of llama-server's HTTP threads (slots + 4 of them, then extra ones made on demand)."""

LOOKS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.2)
"""Seconds between the first looks at a slot whose stream was closed: an engine that generates, or works in short
batches, has noticed by then."""
SILENCE_SECONDS = 1.2
"""Between the later ones. In a batch llama-server looks for a closed stream once it has had no result for 1 s
(HTTP_POLLING_SECONDS, tools/server/server-context.cpp), and an answer to GET /slots is one, too: asked every 0.2 s it
went on for a second batch in two of four prefills (2,048 tokens, up to 8 s on a busy machine)."""

_JSON = {"content-type": "application/json"}
_STREAM_TIMEOUT = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}


def pauses_between_looks() -> Iterator[float]:
    """Seconds to wait after each look at whether a slot has become idle; without end."""
    yield from LOOKS
    yield from repeat(SILENCE_SECONDS)


class LlamaClient:
    """One engine. Every method raises EngineUnreachable when there is no connection or it breaks, EngineStarting while
    the model loads, EngineRefused for any other HTTP error, EngineBroken for an answer that no llama-server sends.

    `base_url` without a path or with the engine's `--api-prefix`; `api_key` is sent as `Authorization: Bearer`;
    `connections` is the most sockets at a time. Proxies named in the environment are not used, redirects not followed.
    """

    is_free_to_ask = True
    """GET /props neither wakes a model nor keeps it loaded, however often it is asked."""

    def __init__(self, base_url: str, api_key: str | None = None, *, connections: int = 256) -> None:
        self.base_url = base_url.rstrip("/")
        self.identity = self.base_url
        """Tells it from every other engine."""
        self.served = 0.0
        """When it last did what it was asked to, by time.monotonic."""
        self._headers = {"accept": "*/*", "accept-encoding": "identity", "connection": "keep-alive"}
        self._headers["user-agent"] = "slotkeeper"
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        # Transports, not clients: httpx.AsyncClient looks for cookies, redirects and logins, of which llama-server has
        # none, for 0.1 ms a request.
        self._kept = _http(self.base_url, connections, kept=min(connections, KEEP_ALIVE_CONNECTIONS))
        self._fresh = _http(self.base_url, connections, kept=0)
        self._is_closed = False

    async def aclose(self) -> None:
        """Closes every connection, running streams included."""
        self._is_closed = True
        await self._kept.aclose()
        await self._fresh.aclose()

    # --- requests of clients, passed on ---------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Sends a model request, yields the answer with its headers read and its body not (`chunks_of`).

        The status is the caller's to check. No read timeout: a prefill may take minutes. Leaving the context before the
        body's end closes the socket at once, which is how llama-server learns that nobody listens.
        Raises EngineUnreachable, also for a break while the caller reads inside the context.
        """
        request = httpx.Request(
            method,
            _url(self.base_url, path),
            content=content,
            headers={**self._headers, **_JSON, **(headers or {})},
            extensions={"timeout": _STREAM_TIMEOUT},
        )
        try:
            response = await self._send(request, httpx.AsyncHTTPTransport.handle_async_request)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> httpx.Response:
        """One request and its whole answer, whatever its status. `seconds`: read timeout, None for none."""
        content, params = await self._addressed(content, params)
        request = httpx.Request(
            method,
            _url(self.base_url, path),
            content=content,
            params=params,
            headers={**self._headers, **(headers or {})},
            extensions={"timeout": httpx.Timeout(seconds, connect=CONNECT_SECONDS).as_dict()},
        )
        try:
            return await self._send(request, _whole)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    # --- questions ------------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """True when the engine serves (200), False while it loads, refuses, or cannot be reached. Raises nothing."""
        with suppress(EngineUnreachable):
            return (await self.request("GET", "/health", seconds=ASK_SECONDS)).status_code == httpx.codes.OK
        return False

    async def is_gone(self) -> bool:
        """Whether nobody listens, or who does will not serve: one that works hard does neither. Raises nothing."""
        try:
            return (await self.request("GET", "/health", seconds=ASK_SECONDS)).status_code != httpx.codes.OK
        except EngineUnreachable as error:
            return is_refused(error)

    async def props(self) -> Props:
        """GET /props; answered during sleep too, without waking the engine."""
        return Props.from_json(await self._json("GET", "/props"))

    async def slots(self) -> list[SlotReport]:
        """GET /slots. EngineRefused(501) when the engine runs with `--no-slots`. Wakes a sleeping engine."""
        found = await self._json("GET", "/slots")
        if not isinstance(found, list):
            raise _broken("GET /slots", found)
        return [SlotReport.from_json(entry) for entry in found]

    async def metrics(self) -> str:
        """GET /metrics, Prometheus text, at most MOST_METRICS_BYTES of it. EngineRefused(501) without `--metrics`."""
        found = bytearray()
        try:
            async with asyncio.timeout(ASK_SECONDS), self._own_stream("GET", "/metrics", b"") as response:
                async for chunk in chunks_of(response):
                    found += chunk
                    if len(found) > MOST_METRICS_BYTES:
                        break
        except TimeoutError:
            raise EngineUnreachable(
                f"llama-server at {self.base_url} did not answer GET /metrics within {ASK_SECONDS:g} s."
            ) from None
        _check(response.status_code, bytes(found))
        return found[:MOST_METRICS_BYTES].decode(errors="replace")

    async def apply_template(self, body: bytes) -> str:
        """POST /apply-template with a chat body (JSON): the prompt that a chat request would use."""
        found = await self._json("POST", "/apply-template", body, seconds=None)
        prompt = found.get("prompt") if isinstance(found, dict) else None
        if not isinstance(prompt, str):
            raise _broken("POST /apply-template", found)
        return prompt

    async def tokenize(self, text: str, *, add_special: bool = False) -> bytes:
        """POST /tokenize with `parse_special`: packed tokens (little-endian int32, 4 bytes a token)."""
        body = orjson.dumps({"content": text, "add_special": add_special, "parse_special": True})
        found = await self._json("POST", "/tokenize", body, seconds=None)
        try:
            return pack(found["tokens"])
        except (TypeError, KeyError, OverflowError) as error:
            raise _broken("POST /tokenize", found) from error

    async def detokenize(self, tokens: bytes) -> str:
        """POST /detokenize: the text of packed tokens; bytes that are no whole character come as U+FFFD."""
        found = await self._json("POST", "/detokenize", orjson.dumps({"tokens": unpack(tokens)}))
        text = found.get("content") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise _broken("POST /detokenize", found)
        return text

    # --- slots ----------------------------------------------------------------------------------------------------

    async def save_slot(self, slot: int, filename: str) -> SlotFileReport:
        """Writes slot `slot` to `filename`, a bare name inside `--slot-save-path`. Every stream stops meanwhile."""
        found = await self._slot_action(slot, "save", {"filename": filename})
        return SlotFileReport.from_json(found)

    async def restore_slot(self, slot: int, filename: str) -> SlotFileReport:
        """Reads `filename` into slot `slot`. A failed restore (EngineRefused 400) leaves the slot empty."""
        found = await self._slot_action(slot, "restore", {"filename": filename})
        return SlotFileReport.from_json(found)

    async def erase_slot(self, slot: int) -> int:
        """Empties slot `slot`; returns how many tokens it held."""
        found = await self._slot_action(slot, "erase", {})
        return int(found.get("n_erased", 0))

    async def prime(
        self, slot: int, tokens: bytes, tell: Callable[[Progress], Awaitable[None]] | None = None
    ) -> Timings:
        """Processes exactly the packed `tokens` in slot `slot`, generates nothing, leaves the slot at their end.
        `tell` is awaited with the engine's reports on the way.

        Streamed with progress, so that leaving (cancelling the task) stops the engine within a second.
        """
        asked = {"prompt": unpack(tokens), "n_predict": 0, "cache_prompt": True, "id_slot": slot}
        body = orjson.dumps(asked | {"stream": True, "return_progress": True})
        splitter, timings = EventSplitter(), None
        async with self._own_stream("POST", "/completion", body) as response:
            if response.status_code != httpx.codes.OK:
                _check(response.status_code, await response.aread())
            async for chunk in chunks_of(response):
                for event in splitter.feed(chunk):
                    timings = _timings_in(event) or timings
                    if tell is not None and (progress := _progress_in(event)) is not None:
                        await tell(progress)
        if timings is None:
            raise EngineBroken(f"llama-server at {self.base_url} ended POST /completion without timings; try again.")
        return timings

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _addressed(
        self, content: bytes | None, params: Mapping[str, str] | None
    ) -> tuple[bytes | None, Mapping[str, str] | None]:
        """Body and query of a `request`, as the server that stands there wants them."""
        return content, params

    def _own_stream(self, method: str, path: str, content: bytes) -> AbstractAsyncContextManager[httpx.Response]:
        """`stream`, for work that no client asked for."""
        return self.stream(method, path, content)

    async def _send(self, request: httpx.Request, read: _Read) -> httpx.Response:
        """llama-server closes kept connections without a word (after 100 requests, after an error in a stream), so a
        request may meet a closing one: then nothing was answered, and it goes out once more on a connection of its own.
        When the engine died instead, that one is refused at once. A client that was closed meanwhile (its engine ended)
        fails like one whose engine cannot be reached."""
        if self._is_closed:
            raise self._given_up()
        try:
            try:
                response = await read(self._kept, request)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if self._is_closed:
                    raise
                response = await read(self._fresh, request)
        except RuntimeError as error:
            if not self._is_closed:
                raise
            raise self._given_up() from error
        if response.is_success:
            self.served = time.monotonic()
        return response

    async def _slot_action(self, slot: int, action: str, body: dict[str, str]) -> dict[str, Any]:
        path = f"/slots/{slot}"
        response = await self.request(
            "POST",
            path,
            content=orjson.dumps(body),
            params={"action": action},
            headers=_JSON,
            seconds=SLOT_FILE_SECONDS,
        )
        found = _checked_json(f"POST {path}?action={action}", response)
        if not isinstance(found, dict):
            raise _broken(f"POST {path}?action={action}", found)
        return found

    async def _json(
        self, method: str, path: str, body: bytes | None = None, seconds: float | None = ASK_SECONDS
    ) -> Any:
        headers = _JSON if body is not None else None
        response = await self.request(method, path, content=body, headers=headers, seconds=seconds)
        return _checked_json(f"{method} {path}", response)

    def _given_up(self) -> EngineUnreachable:
        return EngineUnreachable(f"llama-server at {self.base_url} was given up meanwhile.")

    def _unreachable(self, error: httpx.TransportError) -> EngineUnreachable:
        why = str(error) or type(error).__name__
        return EngineUnreachable(f"No answer from llama-server at {self.base_url}: {why}. Is it running?")


_Read = Callable[[httpx.AsyncHTTPTransport, httpx.Request], Awaitable[httpx.Response]]


async def _whole(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
    response = await transport.handle_async_request(request)
    try:
        await response.aread()
    finally:
        await response.aclose()
    return response


def chunks_of(response: httpx.Response) -> AsyncIterable[bytes]:
    """The body of an answer of `LlamaClient.stream`, as it arrives, once; `aiter_raw` is another layer."""
    if not isinstance(response.stream, httpx.AsyncByteStream):  # pragma: no cover (httpx's types allow it)
        raise TypeError("this answer came from no asynchronous transport")
    return response.stream


@lru_cache(maxsize=256)
def _url(base_url: str, path: str) -> httpx.URL:
    """Parsing one takes longer than all else that a request is built of."""
    return httpx.URL(f"{base_url}/{path.lstrip('/')}")


def _http(base_url: str, connections: int, *, kept: int) -> httpx.AsyncHTTPTransport:
    return httpx.AsyncHTTPTransport(
        trust_env=False,
        # The system's certificates; loading any costs start-up time and memory that plain HTTP does not need.
        verify=ssl.create_default_context() if base_url.startswith("https:") else False,
        limits=httpx.Limits(
            max_connections=connections, max_keepalive_connections=kept, keepalive_expiry=KEEP_ALIVE_SECONDS
        ),
    )


def _timings_in(event: bytes) -> Timings | None:
    """The timings of a stream's last event; raises EngineRefused when the event is the engine's error."""
    data = data_of(event)
    if data is None or (b'"timings"' not in data and b'"error"' not in data):
        return None
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _broken("POST /completion", data) from error
    if refused := error_of(found):
        raise refused
    if not isinstance(found, dict):
        raise _broken("POST /completion", found)
    return Timings.from_json(found.get("timings"))


def _progress_in(event: bytes) -> Progress | None:
    data = data_of(event)
    if data is None or b'"prompt_progress"' not in data:
        return None
    found = orjson.loads(data)
    return Progress.from_json(found.get("prompt_progress")) if isinstance(found, dict) else None


def _checked_json(what: str, response: httpx.Response) -> Any:
    _check(response.status_code, response.content)
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError as error:
        raise _broken(what, response.content) from error


def _check(status: int, body: bytes) -> None:
    if status == httpx.codes.OK:
        return
    message = _message_in(body) or f"llama-server answered with HTTP status {status}"
    if status == httpx.codes.SERVICE_UNAVAILABLE:
        raise EngineStarting(f"llama-server is not ready: {message}. Try again in a few seconds.")
    raise EngineRefused(status, body, message)


def _message_in(body: bytes) -> str | None:
    try:
        refused = error_of(orjson.loads(body))
    except orjson.JSONDecodeError:
        return None
    return refused.message if refused else None


def _broken(what: str, answer: object) -> EngineBroken:
    quoted = f", {str(answer)[:80]!r}..." if what.startswith("GET ") else ""  # others may answer with prompt text
    return EngineBroken(
        f"The answer to {what} is not what llama-server sends ({type(answer).__name__}{quoted}). "
        "Check that the upstream URL leads to a llama-server of a supported version."
    )
