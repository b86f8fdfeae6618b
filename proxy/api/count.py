"""How many tokens would this Messages request be? Rendered by the engine, without taking a slot."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
from starlette.types import Receive, Scope, Send

from proxy.api import read_messages
from proxy.api.door import AsgiOut, read_request, until_left
from proxy.api.read import ModelRequest, folded
from proxy.engine_errors import at_fault, whatever
from proxy.errors import Busy, ClientLeft, SlotkeeperError
from proxy.rendering import render_chat
from proxy.serving import wake

if TYPE_CHECKING:
    from proxy.service import Service

AT_ONCE = 2
"""Prompts that are counted at a time. The engine renders and tokenises in the few threads that also take its model
requests, and goes on when we leave: 40,000 messages kept one busy for two minutes."""


class Counting:
    """POST /v1/messages/count_tokens; an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers `{"input_tokens": N}`: exact, media estimated."""
        out = AsgiOut(send, "messages")
        try:
            request = await read_request(self._service, "messages", scope["path"], scope, receive)
        except ClientLeft:
            return
        except Exception as error:
            await out.fail(whatever(error, "count_tokens"), {})
            return
        await until_left(asyncio.create_task(self._answer(request, out), name="count"), receive, out)

    async def _answer(self, request: ModelRequest, out: AsgiOut) -> None:
        found = await self._in_turn(request)
        if isinstance(found, SlotkeeperError):
            await out.fail(found, {})
            return
        body = read_messages.count(found)
        await out.start(200, {"content-type": "application/json", "content-length": str(len(body))})
        await out.write(body)
        await out.end()

    async def _in_turn(self, request: ModelRequest) -> int | SlotkeeperError:
        if self._waiting >= self._service.settings.max_waiting:
            return Busy("Too many prompts wait to be counted (--max-waiting). Try again.", retry_after=2)
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        counting = self._service.tasks.spawn(self._counted(request), "count-tokens")
        counting.add_done_callback(lambda _: self._turns.release())
        # The engine goes on when its client has left, so the turn lasts as long as its work.
        return await asyncio.shield(counting)

    async def _counted(self, request: ModelRequest) -> int | SlotkeeperError:
        try:
            await wake(self._service.engines, request.model, "chat")
            engine = self._service.engines.pick(request.model)
            engine.require_ready()
            body = orjson.dumps(folded(request.body, engine.template))
            return (await render_chat(engine, request.who.tenant, request.prompt.base, body)).n_tokens
        except Exception as error:
            return at_fault(whatever(error, "count_tokens"))
