"""Counting prompts: a few at a time, whoever leaves; nothing that is too long for the engine is kept."""

import asyncio
from typing import Any

import pytest

from proxy.api import count, door
from proxy.errors import InternalError
from tests.fakes.http import Answer, Request
from tests.fakes.llama import FakeLlama
from tests.wire.conftest import Serve
from tests.wire.dialects import COUNT, MESSAGES, RESPONSES, error_of
from tests.wire.test_leaving import leave, within
from tests.wire.wire import CHAT, Wire, chat

TEMPLATE = "/apply-template"


class SlowLlama(FakeLlama):
    """One that renders `slow` prompts only when it may."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.go = asyncio.Semaphore(0)

    async def _handle(self, request: Request, answer: Answer) -> None:
        if request.path == TEMPLATE and "slow" in str(request.body):
            self.requests.append(request)
            await self.go.acquire()
        await super()._handle(request, answer)

    async def rendering(self, n: int) -> None:
        """Return once n slow prompts have come."""
        await within(self._until(lambda: self.n_rendering() >= n))

    def n_rendering(self) -> int:
        """Slow prompts that have come and, each once more, those that went on."""
        return sum(r.path == TEMPLATE and "slow" in str(r.body) for r in self.requests)


def slow(number: int) -> dict[str, Any]:
    """A prompt that takes its time."""
    return {"messages": [{"role": "user", "content": f"slow {number}"}]}


async def test_few_at_a_time(serve: Serve) -> None:
    """The engine's threads are for model requests, too; more wait, and more than that are refused."""
    async with SlowLlama() as fake:
        wire = await serve(fake, max_waiting=1)
        counts = [asyncio.create_task(wire.post(COUNT, slow(i))) for i in range(count.AT_ONCE)]
        await fake.rendering(count.AT_ONCE)
        more = [asyncio.create_task(wire.post(COUNT, slow(i))) for i in (7, 8)]
        done, waiting = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert (refused.status_code, error_of(COUNT, refused)["code"]) == (503, "waiting_line_full")
        assert "retry-after" in refused.headers
        assert fake.n_rendering() == count.AT_ONCE
        assert (await wire.post(CHAT, chat("hi"))).status_code == 200
        for _ in range(count.AT_ONCE + 1):
            fake.go.release()
        answers = await asyncio.gather(*counts, waiting.pop())
        assert all(answer.json()["input_tokens"] > 0 for answer in answers)


async def test_a_client_that_leaves_keeps_its_turn(serve: Serve) -> None:
    """The engine renders on for it; nothing more is asked of the engine until it has done so."""
    async with SlowLlama() as fake:
        wire = await serve(fake)
        counts = [asyncio.create_task(wire.post(COUNT, slow(i))) for i in range(count.AT_ONCE)]
        await fake.rendering(count.AT_ONCE)
        for client in counts:
            await leave(client)
        last = asyncio.create_task(wire.post(COUNT, slow(9)))
        assert (await wire.post(CHAT, chat("hi"))).status_code == 200
        assert (fake.n_rendering(), last.done()) == (count.AT_ONCE, False)
        for _ in range(count.AT_ONCE + 1):
            fake.go.release()
        assert (await last).json()["input_tokens"] > 0


async def test_what_cannot_run_is_not_kept(wire: Wire) -> None:
    """A rendering that no slot can hold serves nobody, and may be as large as the largest body."""
    known = wire.service.engines.all[0].known
    long = {"messages": [{"role": "user", "content": "word " * 9000}]}
    assert (await wire.post(COUNT, long)).json()["input_tokens"] > 9000
    assert (await wire.post(MESSAGES, long | {"max_tokens": 1})).status_code == 400
    assert len(known) == 0
    assert (await wire.post(COUNT, {"messages": [{"role": "user", "content": "word"}]})).status_code == 200
    assert len(known) == 1


async def test_fields_without_effect_are_counted(wire: Wire) -> None:
    """As they are where the same body asks for an answer."""
    assert (await wire.post(COUNT, slow(1) | {"strange": 1})).status_code == 200
    assert 'slotkeeper_dropped_fields_total{dialect="messages"} 1.0' in (await wire.get("/metrics")).text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COUNT])
async def test_a_mistake_of_ours(path: str, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called one, in the dialect, whatever type the exception has: it is none of the client's."""

    def fails(*_: object) -> None:
        raise TypeError("unsupported operand type(s) for +: 'int' and 'str'")

    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    with monkeypatch.context() as patch:
        patch.setattr(door, "read", fails)
        answer = await wire.post(path, body)
    assert (answer.status_code, error_of(path, answer)["code"]) == (500, InternalError.code)
    where = "render_chat" if path == COUNT else "carry_out"
    with monkeypatch.context() as patch:
        patch.setattr(f"proxy.api.count.{where}" if path == COUNT else f"proxy.exchange.{where}", fails)
        answer = await wire.post(path, body)
    assert (answer.status_code, error_of(path, answer)["code"]) == (500, InternalError.code)
