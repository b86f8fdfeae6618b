"""What the status page's figures are taken from: bases, busy slots, the newest text."""

import asyncio
from typing import Any

import pytest

from proxy.page.view import look, newest_text
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.wire import CHAT, Wire, chat

ROOT = "/slotkeeper/"


async def test_bases_are_counted_or_estimated(wire: Wire, fake: FakeLlama) -> None:
    """By the engine's tokens once they are there, before that by their share of the bytes; without one, not."""
    system = {"role": "system", "content": "Be careful, and never guess. " * 50}
    body = chat("a short question")
    await wire.post(CHAT, chat("nothing in front"))
    body["messages"].insert(0, system)
    await wire.post(CHAT, body)
    await wire.has_slots("idle", "idle")
    (engine,) = wire.service.engines.all
    slot = next(s for s in engine.table.slots if s.n_tokens > 200)
    plain, based = sorted(look(wire.service).engines[0].slots, key=lambda s: s.n_used)
    counted = len(fake.tokens_of(system["content"]))
    assert (plain.n_base, based.is_counted) == (None, False)
    assert based.n_base == pytest.approx(counted, rel=0.15)
    assert "base about" in (await wire.get(ROOT)).text
    engine.bases[slot.tenant or "", slot.base] = slot.tokens[:400]
    assert "base 100, line" in (await wire.get(ROOT)).text


async def test_a_busy_slot_is_its_requests(wire: Wire, fake: FakeLlama) -> None:
    """Not the conversation's that lies in it until the engine writes over it; its bar grows with the answer."""
    for text in ("one", "two"):
        await wire.post(CHAT, chat(f"{text} of a kind " * 9), headers={"x-slotkeeper-session": text})
    await wire.has_slots("idle", "idle")
    pace = asyncio.Semaphore(4)
    fake.cues.append(Cue(pace=pace))
    body = chat("three is another kind " * 20, max_tokens=30)
    async with wire.stream(CHAT, body, headers={"x-slotkeeper-session": "three"}) as stream:
        while b" w0" not in await stream.next():
            pass
        (busy,) = (s for s in look(wire.service).engines[0].slots if s.state == "busy")
        assert busy.owner is not None
        assert busy.owner.name == "three"
        for _ in range(8):
            pace.release()
        while b" w4" not in await stream.next():
            pass
        (later,) = (s for s in look(wire.service).engines[0].slots if s.state == "busy")
        assert later.n_used > busy.n_used > 80
        for _ in range(30):
            pace.release()
        await stream.rest()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "b"),
        ({"messages": [{"content": [{"text": "a"}, {"image_url": {}}, 3, {"text": "b"}, {"text": 4}]}]}, "a\nb"),
        ({"prompt": "p"}, "p"),
        ({"prompt": [1, 2, 3]}, ""),
        ({"input": [{"content": "i"}]}, "i"),
        ({"messages": []}, ""),
        ({"messages": [None]}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_the_newest_text(body: Any, text: str) -> None:
    """Of any body that may come."""
    assert newest_text(body) == text
