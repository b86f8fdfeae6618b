"""A stop while answers run: clients are told, in their dialect, and nobody is left waiting."""

import asyncio

import pytest

from proxy.service import Service
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, chat


@pytest.mark.parametrize("stream", [True, False])
async def test_running_answers_end_with_a_sentence(stream: bool, serve: Serve, fake: FakeLlama) -> None:
    """A second signal ends them at once: 503, or an error event in a stream that has begun."""
    wire = await serve(fake)
    fake.cues.append(Cue(pace=asyncio.Semaphore(4)))
    sent = asyncio.create_task(wire.post(CHAT, chat("hi", stream=stream)))
    await wire.has_slots("busy", "empty")
    service: Service = wire.service
    service.begin_stop(at_once=True)
    answer = await sent
    assert answer.status_code == (200 if stream else 503)
    assert "Slotkeeper is stopping" in answer.text
    assert '"source":"slotkeeper"' in answer.text
    refused = await wire.post(CHAT, chat("later"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
