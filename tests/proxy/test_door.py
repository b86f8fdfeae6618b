"""When a model request is broken off."""

import asyncio

import pytest
from starlette.types import Message

from proxy.api.door import AsgiOut, until_left


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_disconnect(has_ended: bool) -> None:
    """Before the answer's end it is a client that left; after it, the server says so in any case, and what is left to
    do (settling, closing the engine's stream) is done."""
    gone, sent = asyncio.Event(), []

    async def send(message: Message) -> None:
        sent.append(message["type"])

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        await out.start(200, {})
        if has_ended:
            await out.end()
        gone.set()
        for _ in range(20):  # turns of the loop in which it could be cancelled
            await asyncio.sleep(0)
        return "settled"

    out = AsgiOut(send, "chat")
    task = asyncio.create_task(work())
    await until_left(task, receive, out)
    assert task.cancelled() is not has_ended
    assert sent == ["http.response.start", *(["http.response.body"] if has_ended else [])]
