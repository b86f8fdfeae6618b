"""A client that leaves, wherever its request is: the engine is told at once, the slot comes back when it is idle.

With `--finish-prefill never`: what goes on without its client is tests/wire/test_jobs.py's.
"""

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.api import door
from tests.conftest import StartProxy
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import PATIENCE, until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
WHERE = pytest.mark.parametrize("where", ["prefill", "generation"])


NEVER = {"finish_prefill": "never"}


@pytest.fixture
async def wire(serve: Serve, fake: FakeLlama) -> Wire:
    """A proxy that cancels what its client has left."""
    return await serve(fake, **NEVER)


async def within(waiting: Awaitable[None]) -> None:
    """What has to happen by itself: bounded, so that a request that is never told ends the test, not the run."""
    async with asyncio.timeout(PATIENCE):
        await waiting


def held(where: str, **more: Any) -> Cue:
    """A request that hangs for good in its prefill or after its first token."""
    for_ever = asyncio.Event()
    return Cue(hold_before=for_ever, **more) if where == "prefill" else Cue(hold_after=for_ever, **more)


async def begin(wire: Wire, fake: FakeLlama, where: str, body: dict[str, Any]) -> asyncio.Task[Any]:
    """A client whose request hangs there; of a stream that generates it has seen the first token."""
    seen, before = asyncio.Event(), len(fake.model_requests)

    async def run() -> None:
        if not body.get("stream"):
            await wire.post(CHAT, body)
            return
        async with wire.stream(CHAT, body) as stream:
            while b" w0" not in await stream.next():
                pass
            seen.set()
            await stream.rest()

    task = asyncio.create_task(run())
    await within(fake.arrived(before + 1))
    if body.get("stream") and where == "generation":
        await seen.wait()
    return task


async def leave(client: asyncio.Task[Any]) -> None:
    """The client closes its socket."""
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)


HOW = pytest.mark.parametrize(
    "more", [{"stream": True}, {}, {"logprobs": True}], ids=["streamed", "whole", "unstreamed"]
)


@HOW
@WHERE
async def test_the_engine_is_told(where: str, more: dict[str, bool], wire: Wire, fake: FakeLlama) -> None:
    """Our socket to the engine closes although the engine says nothing more; the slot is usable again."""
    fake.cues.append(held(where))
    client = await begin(wire, fake, where, chat("hi", **more))
    await leave(client)
    await within(fake.abandoned(1))
    await within(fake.idle())
    assert (await wire.recorded(1))[0]["outcome"] == "client_left"
    answer = await wire.post(CHAT, chat("hi"))
    assert answer.status_code == 200
    assert answer.headers["x-slotkeeper-slot"] == "0"


WHOLE = {
    "/v1/messages": {"max_tokens": 4},
    "/v1/responses": {"input": "hi"},
    CHAT: {},
    "/completion": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", WHOLE)
async def test_tokens_of_a_whole_answer_are_seen(path: str, serve: Serve, fake: FakeLlama) -> None:
    """The pool's sums know how far it has grown, whatever its dialect, and its prefill is known to be over: what its
    client leaves then ends."""
    wire = await serve(fake)
    fake.cues.append(held("generation"))
    client = asyncio.create_task(wire.post(path, chat("hi") | WHOLE[path]))

    async def grown() -> bool:
        return any(slot.runner and slot.runner.n_decoded for slot in wire.service.engines.all[0].table.slots)

    await until(grown)
    await leave(client)
    await within(fake.abandoned(1))
    assert (await wire.recorded(1))[0]["outcome"] == "client_left"


@STREAMED
@WHERE
async def test_the_lease_returns_when_the_slot_is_idle(where: str, stream: bool, serve: Serve) -> None:
    """While the engine reports the slot busy nobody gets it; then whoever waits does."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, **NEVER)
        still_busy = asyncio.Event()
        fake.cues.append(held(where, hold_left=still_busy))
        await leave(await begin(wire, fake, where, chat("hi", stream=stream)))
        await within(fake.abandoned(1))
        waiting = asyncio.create_task(wire.post(CHAT, chat("another")))
        await wire.waiting(1)
        polls = sum(r.path == "/slots" for r in fake.requests)
        await within(fake.asked("/slots", polls + 3))
        assert await wire.slots() == ["unknown"]
        assert (len(fake.model_requests), waiting.done()) == (1, False)
        still_busy.set()
        assert (await waiting).status_code == 200
        await wire.has_slots("idle")


@STREAMED
async def test_leaving_the_waiting_line(stream: bool, serve: Serve) -> None:
    """Nothing of it reaches the engine, nothing of it is left behind."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake)
        go = asyncio.Event()
        fake.cues.append(Cue(hold_before=go))
        running = asyncio.create_task(wire.post(CHAT, chat("first")))
        await within(fake.arrived(1))
        client = asyncio.create_task(wire.post(CHAT, chat("second", stream=stream)))
        await wire.waiting(1)
        await leave(client)
        await wire.waiting(0)
        go.set()
        assert (await running).status_code == 200
        assert (await wire.post(CHAT, chat("third"))).status_code == 200
        texts = [r.body["messages"][0]["content"] for r in fake.model_requests]
        assert texts == ["first", "third"]
        outcomes = {r["outcome"] for r in await wire.recorded(3)}
        assert outcomes == {"ok", "client_left"}


@WHERE
async def test_a_repeated_request_waits_for_its_own_slot(where: str, wire: Wire, fake: FakeLlama) -> None:
    """A client that gives up and asks again continues what the engine has already processed."""
    still_busy = asyncio.Event()
    fake.cues.append(held(where, hold_left=still_busy))
    await leave(await begin(wire, fake, where, chat("the same question")))
    await within(fake.abandoned(1))
    again = asyncio.create_task(wire.post(CHAT, chat("the same question")))
    await wire.waiting(1)
    still_busy.set()
    assert (await again).headers["x-slotkeeper-slot"] == "0"


async def test_leaving_while_a_snapshot_is_saved(serve: Serve, tmp_path: Path) -> None:
    """A save runs to its end whatever the client does; its slot comes back, and the next client is served."""
    slots = tmp_path / "engine-slots"
    slots.mkdir()
    async with FakeLlama(n_slots=1, slot_dir=slots) as fake:
        wire = await serve(upstream=(f"{fake.url},slots={slots}",))
        assert (await wire.state())["engines"][0]["can_save"]
        assert (await wire.post(CHAT, chat("word " * 500))).status_code == 200
        fake.save_gate = asyncio.Event()
        saves = fake.saves
        client = asyncio.create_task(wire.post(CHAT, chat("quite another " * 90)))
        await wire.has_slots("saving")
        await leave(client)
        assert await wire.slots() == ["saving"]
        fake.save_gate.set()
        await wire.has_slots("idle")
        assert (fake.saves, len(await wire.records())) == (saves + 1, 2)
        assert (await wire.post(CHAT, chat("a third"))).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_leaving_while_the_body_is_sent(path: str, wire: Wire, fake: FakeLlama) -> None:
    """Half a request is no request."""
    host, port = wire.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200
    assert len(fake.model_requests) == 1
    assert all(r.content != b"{" for r in fake.requests)


async def test_leaving_between_choices(wire: Wire, fake: FakeLlama) -> None:
    """Of several choices the rest is not asked for."""
    fake.cues.extend([Cue(), held("generation")])
    client = asyncio.create_task(wire.post(CHAT, chat("hi", n=3)))
    await within(fake.arrived(2))
    await leave(client)
    await within(fake.abandoned(1))
    await wire.recorded(2)
    assert (await wire.post(CHAT, chat("hello"))).status_code == 200
    assert len(fake.model_requests) == 3


@STREAMED
@WHERE
async def test_against_the_real_process(where: str, stream: bool, proxy_server: StartProxy, fake: FakeLlama) -> None:
    """The same with `slotkeeper serve`, beside another stream that goes on."""
    proxy = await proxy_server("--upstream", fake.url, "--finish-prefill", "never")
    async with Wire(proxy.url) as wire, Wire(proxy.url) as other:
        pace = asyncio.Semaphore(4)
        fake.cues.append(Cue(pace=pace))
        async with other.stream(CHAT, chat("beside")) as stream_beside:
            await stream_beside.next()
            fake.cues.append(held(where))
            await leave(await begin(wire, fake, where, chat("hi", stream=stream)))
            await within(fake.abandoned(1))
            await wire.recorded(1)
            for _ in range(20):
                pace.release()
            assert (await stream_beside.rest())[-1] == b"data: [DONE]\n\n"
        await wire.has_slots("idle", "idle" if where == "generation" or fake.slots[1].tokens else "empty")
        assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_a_client_that_stops_reading(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays open and full: after a while it counts as gone, and the next request gets the slot."""
    monkeypatch.setattr(door, "STALLED_SECONDS", 0.2)
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake)
        fake.cues.append(Cue(text=[" " + "x" * 100_000] * 400))
        body = json.dumps(chat("hi", stream=True, max_tokens=400)).encode()
        url = httpx.URL(wire.url)
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await wire.recorded(1))[0]["outcome"] == "client_left"
        assert (await wire.post(CHAT, chat("you"))).status_code == 200
        writer.transport.abort()


async def test_what_was_done_until_then_is_recorded(wire: Wire, fake: FakeLlama) -> None:
    """Tokens of the prompt and of the answer; and the whole prompt is expected in the cache when it comes again."""
    fake.cues.append(Cue(hold_after=asyncio.Event()))
    await leave(await begin(wire, fake, "generation", chat("a question " * 50, stream=True)))
    (record,) = await wire.recorded(1)
    assert record["outcome"] == "client_left"
    assert (record["cache_n"], record["prompt_n"] > 100, record["predicted_n"] > 0) == (0, True, True)
    again = await wire.post(CHAT, chat("a question " * 50))
    cache_n = again.json()["timings"]["cache_n"]
    assert int(again.headers["x-slotkeeper-predicted-cache-n"]) == cache_n == record["prompt_n"] - 1
    assert (await wire.records())[0]["cause"] is None


async def test_a_prefill_that_was_left_is_recorded(wire: Wire, fake: FakeLlama) -> None:
    """Nothing is claimed of a prompt of which nothing was heard."""
    fake.cues.append(held("prefill"))
    await leave(await begin(wire, fake, "prefill", chat("a question " * 50)))
    (record,) = await wire.recorded(1)
    assert (record["cache_n"], record["prompt_n"], record["predicted_n"]) == (0, 0, 0)
