"""Bad input and limits: each a status, a sentence that says what to do, and nothing upstream."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat

JSON = {"content-type": "application/json"}
BAD_BODIES: dict[str, tuple[str, bytes]] = {
    "empty": (CHAT, b""),
    "broken": (CHAT, b'{"messages": ['),
    "not UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}'),
    "half a surrogate": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "nested without end": (CHAT, b"[" * 100_000),
    "a list": (CHAT, b"[]"),
    "null": (CHAT, b"null"),
    "a number": ("/completion", b"5"),
    "no messages": (CHAT, b"{}"),
    "messages of text": (CHAT, b'{"messages": "hi"}'),
    "messages of numbers": (CHAT, b'{"messages": [1]}'),
    "empty messages": (CHAT, b'{"messages": []}'),
    "null messages": (CHAT, b'{"messages": null}'),
    "no role": (CHAT, b'{"messages": [{"content": "hi"}]}'),
    "role of a number": (CHAT, b'{"messages": [{"role": 5, "content": "hi"}]}'),
    "tools of text": (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "tools": "t"}'),
    "tool calls of a number": (CHAT, b'{"messages": [{"role": "assistant", "tool_calls": 5}]}'),
    "n of text": (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "n": "2"}'),
    "n of nothing": (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "n": 0}'),
    "n without bound": (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "n": 1000000}'),
    "n is true": (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "n": true}'),
    "no prompt": ("/v1/completions", b"{}"),
    "empty prompt": ("/completion", b'{"prompt": []}'),
    "large and broken": (CHAT, b'{"messages": [' + b" " * 300_000),
}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_bad_bodies(case: str, wire: Wire, fake: FakeLlama) -> None:
    """400 in OpenAI's shape, from us; the engine is not asked, the connection stays usable."""
    path, raw = BAD_BODIES[case]
    answer = await wire.http.post(path, content=raw, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["source"]) == (400, "invalid_request_error", "slotkeeper")
    assert error["message"].endswith(".")
    assert answer.headers["x-slotkeeper-request-id"].startswith("req_")
    assert fake.model_requests == []
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


@pytest.mark.parametrize("prompt", [[2**40], [1.5], [1, None], ["a", {}], 5, {"a": 1}])
async def test_prompts_that_are_the_engines_to_judge(prompt: Any, wire: Wire, fake: FakeLlama) -> None:
    """What we cannot read as tokens goes on as it is, and the engine's refusal comes back."""
    fake.cues.append(Cue(status=400, error={"code": 400, "message": "no prompt", "type": "invalid_request_error"}))
    answer = await wire.post("/completion", {"prompt": prompt, "n_predict": 2})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no prompt")
    assert fake.model_requests[-1].body["prompt"] == prompt


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
async def test_bodies_over_the_limit(path: str, serve: Serve, fake: FakeLlama) -> None:
    """413 whether the length is declared or not; nothing of it goes upstream."""
    wire = await serve(fake, max_body_bytes=5000)
    before = len(fake.requests)
    declared = await wire.http.post(path, content=b" " * 5001, headers=JSON)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(600):
            yield b" " * 10

    chunked = await wire.http.post(path, content=pieces(), headers=JSON)
    for answer in (declared, chunked):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "body_too_large")
        assert "5000 bytes" in error["message"]
    assert [r.path for r in fake.requests[before:] if r.path == path] == []
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_a_declared_length_is_refused_before_the_body_comes(serve: Serve, fake: FakeLlama) -> None:
    """The client need not send what will not be read."""
    wire = await serve(fake, max_body_bytes=5000)
    host, port = wire.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 99999999\r\n\r\n".encode())
    status = await reader.readline()
    assert status.startswith(b"HTTP/1.1 413 ")
    writer.close()
    await writer.wait_closed()


async def test_a_body_at_the_limit_is_served(serve: Serve, fake: FakeLlama) -> None:
    """The limit is the largest size that passes."""
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    wire = await serve(fake, max_body_bytes=len(body))
    assert (await wire.http.post(CHAT, content=body, headers=JSON)).status_code == 200
    assert (await wire.http.post(CHAT, content=body + b" ", headers=JSON)).status_code == 413


async def test_large_bodies_are_served(wire: Wire, fake: FakeLlama) -> None:
    """Those that are read off the event loop arrive whole."""
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 400_000}}]
    assert (await wire.post(CHAT, chat("hi", tools=tools))).status_code == 200
    assert fake.model_requests[-1].body["tools"] == tools


@pytest.mark.parametrize("max_waiting", [0, 1])
async def test_a_full_waiting_line(max_waiting: int, serve: Serve) -> None:
    """503 with Retry-After beyond the bound; who waits and who runs is not disturbed."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, max_waiting=max_waiting)
        go = asyncio.Event()
        fake.cues.append(Cue(hold_before=go))
        served = [asyncio.create_task(wire.post(CHAT, chat("runs")))]
        await fake.arrived(1)
        served += [asyncio.create_task(wire.post(CHAT, chat(f"waits {i}"))) for i in range(max_waiting)]
        await wire.waiting(max_waiting)
        refused = await wire.post(CHAT, chat("one too many"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "waiting_line_full")
        assert int(refused.headers["retry-after"]) >= 1
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*served)] == [200] * len(served)
        assert (await wire.post(CHAT, chat("later"))).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_waited_too_long(stream: bool, serve: Serve) -> None:
    """503 with Retry-After; the place in the line is given up."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, max_wait_seconds=0.05)
        go = asyncio.Event()
        fake.cues.append(Cue(hold_before=go))
        runs = asyncio.create_task(wire.post(CHAT, chat("runs")))
        await fake.arrived(1)
        refused = await wire.post(CHAT, chat("waits", stream=stream))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "waited_too_long")
        assert int(refused.headers["retry-after"]) >= 1
        await wire.waiting(0)
        go.set()
        assert (await runs).status_code == 200
        assert [r["outcome"] for r in await wire.recorded(2)] == ["ok", "timeout"]


async def test_the_line_is_fair(serve: Serve, tmp_path: Path) -> None:
    """Tenants take turns: one who floods the line does not delay the other's single request."""
    keys = tmp_path / "keys"
    keys.write_text("anna:a\nben:b\nadmin:root\n")
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, api_key_file=keys)
        async with Wire(wire.url, "a") as anna, Wire(wire.url, "b") as ben, Wire(wire.url, "root") as admin:
            go = asyncio.Event()
            fake.cues.append(Cue(hold_before=go))
            sent = [asyncio.create_task(anna.post(CHAT, chat("a0")))]
            await fake.arrived(1)
            sent += [asyncio.create_task(anna.post(CHAT, chat(f"a{i}"))) for i in range(1, 5)]
            await admin.waiting(4)
            sent.append(asyncio.create_task(ben.post(CHAT, chat("b"))))
            await admin.waiting(5)
            go.set()
            assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
        order = [r.body["messages"][0]["content"] for r in fake.model_requests]
        assert order.index("b") == 1


@pytest.mark.parametrize("field", ["tools", "other"])
async def test_nesting_too_deep_to_be_written_again(field: str, wire: Wire) -> None:
    """JSON that can be read but not written is the client's mistake, wherever it stands."""
    raw = b'{"messages":[{"role":"user","content":"x"}],"' + field.encode() + b'":' + b"[" * 400 + b"]" * 400 + b"}"
    answer = await wire.http.post(CHAT, content=raw)
    assert (answer.status_code, answer.json()["source"]) == (400, "slotkeeper")
    assert "deeply" in answer.json()["error"]["message"]


async def test_what_is_refused_is_not_rendered(serve: Serve) -> None:
    """A flood costs the engine no more than the requests that may run or wait."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, max_waiting=2)
        fake.cues.append(Cue(hold_before=(hold := asyncio.Event())))
        asked = sum(request.path == "/apply-template" for request in fake.requests)
        posts = [asyncio.create_task(wire.post(CHAT, chat(f"number {i}"))) for i in range(40)]
        done: set[asyncio.Task[Any]] = set()
        while len(done) < 37:
            done, _ = await asyncio.wait(posts, timeout=0.1)
        assert {task.result().status_code for task in done} == {503}
        assert sum(request.path == "/apply-template" for request in fake.requests) - asked <= 3
        hold.set()
        assert sorted([(await post).status_code for post in posts])[:3] == [200] * 3


async def test_one_that_waits_for_its_own_slot_stops_nobody(serve: Serve) -> None:
    """A repeated request waits for its line's busy slot; others pass it by as often as they like while one is free."""
    async with FakeLlama(n_slots=2, n_ctx=32768) as fake:
        wire = await serve(fake, reply_reserve=64)
        long = chat("word " * 6000)
        assert (await wire.post(CHAT, long)).status_code == 200
        fake.cues.append(Cue(hold_before=(hold := asyncio.Event())))
        first = asyncio.create_task(wire.post(CHAT, long))
        await fake.arrived(2)
        second = asyncio.create_task(wire.post(CHAT, long))
        await wire.waiting(1)
        async with asyncio.timeout(20):
            for number in range(12):
                assert (await wire.post(CHAT, chat(f"number {number}"))).status_code == 200
        assert not second.done()
        hold.set()
        assert [(await post).status_code for post in (first, second)] == [200, 200]


async def test_a_lease_comes_back_whatever_fails(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when what an answer means cannot be worked out: the slot serves the next one."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("nobody thought of this")

    with monkeypatch.context() as patched:
        patched.setattr("proxy.exchange.after_answer", fails)
        for number in range(3):
            await wire.post(CHAT, chat(f"number {number}"))
    assert (await wire.post(CHAT, chat("and now"))).status_code == 200

    async def are_free() -> bool:
        return set(await wire.slots()) <= {"idle", "empty"}

    await until(are_free)
