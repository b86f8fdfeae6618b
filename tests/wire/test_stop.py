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


async def test_a_second_signal_waits_for_no_slot_file(serve: Serve, fake: FakeLlama) -> None:
    """What saves at the end is broken off, or does not begin; what is over was done."""
    service: Service = (await serve(fake)).service
    done: list[str] = []

    async def work(name: str, gate: asyncio.Event) -> None:
        await gate.wait()
        done.append(name)

    opened, closed = asyncio.Event(), asyncio.Event()
    opened.set()
    await service.unless_hurried(work("first", opened))
    saving = asyncio.create_task(service.unless_hurried(work("second", closed)))
    service.begin_stop(at_once=False)
    assert not (await asyncio.wait({saving}, timeout=0.05))[0]
    service.begin_stop(at_once=True)
    await saving
    await service.unless_hurried(work("third", closed))
    assert done == ["first"]
