"""Answers pass through: unchanged, in order, at once; what only the proxy asked for is kept back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.conftest import StartProxy
from tests.fakes.http import Answer
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.wire import CHAT, Wire, chat, data, progress_in

DOORS = {
    CHAT: chat("tell me"),
    "/v1/completions": {"prompt": "tell me", "max_tokens": 4},
    "/completion": {"prompt": "tell me", "n_predict": 4},
    "/chat/completions": chat("tell me"),
    "/completions": {"prompt": "tell me", "n_predict": 4},
    "/infill": {"input_prefix": "def f", "input_suffix": "return", "n_predict": 4},
}


@pytest.mark.parametrize("path", DOORS)
async def test_each_event_arrives_before_the_next_is_made(path: str, wire: Wire, fake: FakeLlama) -> None:
    """The engine makes an event only after the client has seen the one before: nothing is held back or changed."""
    await lockstep(path, wire, fake)


async def test_the_real_process_does_not_hold_back_either(proxy_server: StartProxy, fake: FakeLlama) -> None:
    """The same with `slotkeeper serve` and its event loop."""
    proxy = await proxy_server("--upstream", fake.url)
    async with Wire(proxy.url) as wire:
        await lockstep(CHAT, wire, fake)


async def lockstep(path: str, wire: Wire, fake: FakeLlama) -> None:
    """One stream of which each event is made when the one before was seen."""
    pace = asyncio.Semaphore(1)  # the first event brings the head of the answer
    cue = Cue(pace=pace)
    fake.cues.append(cue)
    asking = {"return_progress": True, "stream_options": {"include_usage": True}}
    seen: list[bytes] = []
    async with wire.stream(path, DOORS[path] | asking) as stream:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                seen.append(await stream.next())
                assert seen == cue.sent
                pace.release()
    assert seen == cue.sent
    assert len(seen) > 6


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
async def test_split_anywhere(size: int, wire: Wire, fake: FakeLlama) -> None:
    """However the engine's bytes are cut (size 1: at every byte), the client gets the same events."""
    body = chat("split me", return_progress=True)
    cue = Cue()
    fake.cues.append(cue)
    expected = await wire.events(CHAT, body)
    fake.cues.append(Cue(script=chopped(b"".join(cue.sent), size)))
    assert await wire.events(CHAT, body) == expected == cue.sent


def chopped(data: bytes, size: int) -> Callable[[Answer], Awaitable[None]]:
    """A script that sends the bytes in chunks of `size`."""

    async def script(answer: Answer) -> None:
        await answer.begin_events()
        for start in range(0, len(data), size):
            await answer.send(data[start : start + size])

    return script


async def test_comments_and_other_line_ends_pass(wire: Wire, fake: FakeLlama) -> None:
    """Pings, named events and CRLF are passed on byte for byte."""
    cue = Cue()
    fake.cues.append(cue)
    await wire.events(CHAT, chat("hi"))
    plain = [event for event in cue.sent if not progress_in(event)]
    raw = b": ping\n\n" + b"event: x\r\n" + b"".join(plain).replace(b"\n\n", b"\r\n\r\n")
    fake.cues.append(Cue(script=chopped(raw, 11)))
    assert b"".join(await wire.events(CHAT, chat("hi"))) == raw


@pytest.mark.parametrize("path", DOORS)
async def test_progress_and_usage_only_when_asked(path: str, wire: Wire, fake: FakeLlama) -> None:
    """Upstream both are always asked for; the client sees them only when it asked."""
    shown = await wire.events(path, DOORS[path])
    assert not any(map(progress_in, shown))
    sent = fake.model_requests[-1].body
    assert (sent["stream"], sent["return_progress"]) == (True, True)
    asked = await wire.events(path, DOORS[path] | {"return_progress": True})
    assert any(map(progress_in, asked))
    assert [e for e in asked if b'"choices":[]' in e] == []
    if "chat" in path:
        with_usage = await wire.events(path, DOORS[path] | {"stream_options": {"include_usage": True}})
        assert [data(e)["usage"]["completion_tokens"] for e in with_usage if b'"choices":[]' in e] == [4]


@pytest.mark.parametrize("path", DOORS)
async def test_whole_answers_are_assembled_equal(path: str, wire: Wire, fake: FakeLlama) -> None:
    """An answer that was wanted whole is what the engine itself answers whole, though it was streamed to us."""
    whole = await wire.post(path, DOORS[path])
    sent = fake.model_requests[-1].body
    assert sent["stream"] is True
    async with httpx.AsyncClient(base_url=fake.url) as direct:
        body = DOORS[path] | {"id_slot": sent["id_slot"], "cache_prompt": False}
        expected = (await direct.post(path, json=body)).json()
    assert whole.headers["content-type"].startswith("application/json")
    assert whole.json() == expected


async def test_response_headers(wire: Wire) -> None:
    """Every model answer says where its tokens came from; its id leads to its record."""
    first = await wire.post(CHAT, chat("a long enough question"))
    async with wire.stream(CHAT, chat("a long enough question", " w0 w1 w2 w3", "more")) as stream:
        await stream.rest()
        second = stream.response
    names = ("request-id", "line", "slot", "placement", "waited-ms", "predicted-cache-n")
    for answer in (first, second):
        assert {f"x-slotkeeper-{name}" for name in names} <= set(answer.headers)
    assert second.headers["content-type"] == "text/event-stream"
    assert first.headers["x-slotkeeper-placement"] == "cold"
    assert second.headers["x-slotkeeper-placement"] == "continue"
    assert second.headers["x-slotkeeper-line"] == first.headers["x-slotkeeper-line"]
    record = (await wire.get(f"/slotkeeper/requests/{second.headers['x-slotkeeper-request-id']}")).json()
    assert (record["placement"], record["outcome"], record["cause"]) == ("continue", "ok", None)
    assert record["predicted_cache_n"] == record["cache_n"] == int(second.headers["x-slotkeeper-predicted-cache-n"])
