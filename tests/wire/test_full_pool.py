"""Answers that may say so much and no more, side by side in a pool that has just room for them."""

import asyncio

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, chat


async def test_who_says_all_that_was_reserved_outgrows_nothing(serve: Serve) -> None:
    """Events that bear no token are none: neither answer is ended for the other's sake."""
    async with FakeLlama(n_slots=2, n_ctx=1000) as fake:
        wire = await serve(fake)
        go = asyncio.Event()
        fake.cues += [Cue(hold_after=go, hold_at=40), Cue(hold_after=go, hold_at=40)]
        bodies = [chat(f"{name} " + "word " * 440, max_tokens=40) for name in "ab"]
        tasks = [asyncio.create_task(wire.events(CHAT, body)) for body in bodies]
        await fake.arrived(2)
        go.set()
        for task in tasks:
            events = await task
            assert events[-1].startswith(b"data: [DONE]"), events[-1]
            assert sum(b'" w' in event for event in events) == 40
