"""The client's side of the wire tests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from llamacpp.sse import EventSplitter
from proxy.service import Service
from tests.servers import PATIENCE, until

CHAT = "/v1/chat/completions"


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat body with alternating roles, the first the user's; four tokens are generated."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts or ("hello",))]
    return {"messages": messages, "max_tokens": 4} | more


class Stream:
    """An answer that is read event by event. Leaving its context closes the socket."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._events = self._read()

    async def next(self) -> bytes:
        """The next event, byte for byte; raises StopAsyncIteration at the end."""
        async with asyncio.timeout(PATIENCE):
            return await anext(self._events)

    async def rest(self) -> list[bytes]:
        """All events that are left."""
        async with asyncio.timeout(PATIENCE):
            return [event async for event in self._events]

    async def _read(self) -> AsyncIterator[bytes]:
        splitter = EventSplitter()
        async for chunk in self.response.aiter_raw():
            for event in splitter.feed(chunk):
                yield event
        assert not splitter.rest(), splitter.rest()


class Wire:
    """One proxy as its clients see it; `service` is what lies behind, where it runs in the test's own process."""

    service: Service

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def post(self, path: str, body: object, **more: Any) -> httpx.Response:
        """A whole answer."""
        return await self.http.post(path, json=body, **more)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        """A whole answer."""
        return await self.http.get(path, **more)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any], **more: Any) -> AsyncIterator[Stream]:
        """A streamed answer."""
        async with self.http.stream("POST", path, json=body | {"stream": True}, **more) as response:
            yield Stream(response)

    async def events(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """All events of a streamed answer."""
        async with self.stream(path, body) as stream:
            return await stream.rest()

    async def state(self) -> dict[str, Any]:
        """GET /slotkeeper/state."""
        found: dict[str, Any] = (await self.get("/slotkeeper/state")).json()
        return found

    async def slots(self) -> list[str]:
        """The states of the first engine's slots."""
        return [slot["state"] for slot in (await self.state())["engines"][0]["slots"]]

    async def records(self) -> list[dict[str, Any]]:
        """Requests that are over, newest first."""
        found: list[dict[str, Any]] = (await self.get("/slotkeeper/requests")).json()["requests"]
        return found

    async def recorded(self, count: int) -> list[dict[str, Any]]:
        """Return the requests, newest first, once `count` are over."""

        async def there() -> bool:
            return len(await self.records()) >= count

        await until(there)
        return await self.records()

    async def waiting(self, count: int) -> None:
        """Return once `count` requests wait for a slot of the first engine."""

        async def there() -> bool:
            return bool((await self.state())["engines"][0]["waiting"] == count)

        await until(there)

    async def has_slots(self, *states: str) -> None:
        """Return once the first engine's slots are in these states, in any order."""

        async def there() -> bool:
            return sorted(await self.slots()) == sorted(states)

        await until(there)

    async def is_ready(self) -> bool:
        """Whether /readyz says so."""
        return (await self.get("/readyz")).status_code == 200


def data(event: bytes) -> dict[str, Any]:
    """The JSON of one event."""
    found: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return found


def progress_in(event: bytes) -> bool:
    """Whether an event is one of prefill progress."""
    return b'"prompt_progress"' in event
