"""A server that passes requests on and their answers back, event by event: base of the tap and of the puppet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlencode

import httpx

from tests.fakes.http import Answer, Broken, Request, Server

OWN = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive"})
"""Request headers that belong to one connection."""


class Forward:
    """Listens on `port` (0: a free one) of loopback and asks `base`, with `headers` put over the client's."""

    def __init__(self, base: str, port: int = 0, headers: dict[str, str] | None = None) -> None:
        self.base, self.headers = base, headers or {}
        self._server = Server(self._handle, port)
        # No connection is used again: llama-server closes idle ones, now and then while a request is on its way.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(30, read=None), limits=limits, trust_env=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._server.url

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._server.__aexit__(None, None, None)
        await self._client.aclose()

    async def _handle(self, request: Request, answer: Answer) -> None:
        """Passes one on; what its client leaves is left here, too."""
        work = asyncio.create_task(self.passed(request, answer))
        gone = asyncio.create_task(request.left.wait())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Broken
            await work
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def passed(self, request: Request, answer: Answer) -> None:
        """One request and its answer."""
        query = f"?{urlencode(request.query)}" if request.query else ""
        headers = {k: v for k, v in request.headers.items() if k not in OWN} | self.headers
        content = self.asked(request)
        async with self._client.stream(
            request.method, f"{self.base}{request.path}{query}", headers=headers, content=content
        ) as found:
            self.answered(request, found)
            kind = found.headers.get("content-type", "application/octet-stream")
            if not kind.startswith("text/event-stream"):
                return await answer.whole(found.status_code, await found.aread(), kind)
            await answer.begin_events()
            async for data in self.events(request, found.aiter_raw()):
                await answer.send(data)

    def asked(self, request: Request) -> bytes:
        """The body that is sent on."""
        return request.content

    def answered(self, request: Request, found: httpx.Response) -> None:
        """The head of the answer is there."""

    def events(self, request: Request, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The bytes that are sent back."""
        del request
        return data
