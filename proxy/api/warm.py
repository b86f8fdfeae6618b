"""POST /warm on the control socket: `{"requests": [...], "tenant": NAME}` or `{"from_state": true}`; the answer is a
line of JSON for each step: `{"item", "of", "done", "total"}` on the way, then what came of the item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.engine_errors import whatever
from proxy.errors import BadRequest
from proxy.service import Service
from proxy.warm import Wanted, Warmer

Json = dict[str, Any]
NO_KEYS = "the server has no --api-key-file, so all prompts are of one; leave --tenant out"
Make = Callable[[], Awaitable[Wanted | None]]


class WarmDoor:
    """An ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service, self._warmer = service, Warmer(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Warms one item after another; whoever hangs up ends it."""
        items = self._items(orjson.loads(await Request(scope, receive).body()))
        await StreamingResponse(self._told(items), media_type="application/x-ndjson")(scope, receive, send)

    def _items(self, asked: Json) -> list[Make]:
        warmer, known = self._warmer, self._service.tenants.names
        if asked.get("from_state"):
            return [lambda s=s: warmer.of_snapshot(s) for s in warmer.stale()]  # type: ignore[misc]
        tenant = asked.get("tenant") or (next(iter(known)) if len(known) == 1 else "")
        if tenant and tenant not in known:
            who = f"the tenants are {', '.join(sorted(known))}" if self._service.tenants.has_keys else NO_KEYS
            raise BadRequest(f"There is no tenant {tenant!r}: {who}.")
        if tenant not in known:
            raise BadRequest(f"Name whose prompts these are with --tenant: {', '.join(sorted(known))}.")
        return [lambda r=r: warmer.of_request(r, tenant) for r in asked["requests"]]  # type: ignore[misc]

    async def _told(self, items: list[Make]) -> AsyncIterator[bytes]:
        said: asyncio.Queue[Json | None] = asyncio.Queue()
        work = self._service.tasks.spawn(self._all(items, said), "warm")
        try:
            while (found := await said.get()) is not None:
                yield orjson.dumps(found) + b"\n"
        finally:
            work.cancel()

    async def _all(self, items: list[Make], said: asyncio.Queue[Json | None]) -> None:
        try:
            for number, make in enumerate(items):
                place = {"item": number, "of": len(items)}

                def tell(done: int, total: int, place: Json = place) -> None:
                    said.put_nowait({**place, "done": done, "total": total})

                try:
                    wanted = await make()
                    result = {"state": "unknown"} if wanted is None else await self._warmer.warm(wanted, tell)
                except Exception as error:
                    result = {"state": "failed", "error": whatever(error, "warm").message}
                said.put_nowait({**place, **result})
        finally:
            said.put_nowait(None)
