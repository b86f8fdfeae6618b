"""Messages and Responses through the real application: split events, errors before and inside a stream, leaving."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from llamacpp.reports import Timings
from llamacpp.wire import Asked
from proxy.api import read_messages, read_responses
from proxy.errors import SlotkeeperError
from proxy.relay import Relay
from tests.fakes.http import Answer
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.proxy.responses_chunks import BODY, ROLE, USAGE, Json, called, chunk, ending
from tests.wire.conftest import Serve
from tests.wire.dialects import BODIES, COUNT, MESSAGES, PARSERS, RESPONSES, error_of, said
from tests.wire.test_doors import all_ready
from tests.wire.test_errors import BROKEN, OWN, garbage
from tests.wire.test_leaving import NEVER, STREAMED, WHERE, held, leave, within
from tests.wire.wire import CHAT, Wire, chat

EACH = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "agents__spawn")]
ASKING: dict[str, Json] = {MESSAGES: BODIES[MESSAGES] | {"tools": TOOLS, "stream": True}, RESPONSES: BODY}
CHUNKS = [
    ROLE,
    chunk(prompt_progress={"total": 30, "cache": 20, "processed": 25, "time_ms": 1}),
    chunk({"reasoning_content": 'hm "usage" {"error": 1}'}),
    chunk({"content": "Hé🙂"}),
    chunk({"content": " data: [DONE]\n\nevent: x\r\n"}),
    chunk(called(0, "c1", "look", '{"a":')),
    chunk(called(0, arguments='"\\u00e9🙂"}')),
    chunk(called(1, "c2", "agents__spawn", "{}")),
    *ending("tool_calls"),
]
RAW = b"".join(b"data: " + orjson.dumps(found) + b"\n\n" for found in CHUNKS) + b"data: [DONE]\n\n"
READERS = {MESSAGES: read_messages.read, RESPONSES: read_responses.read}


class Client:
    """proxy.exchange.Out that keeps what it gets."""

    def __init__(self) -> None:
        self.started, self.said = False, bytearray()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The head."""
        assert status == 200
        self.started = True

    async def write(self, data: bytes) -> None:
        """A piece."""
        self.said += data

    async def end(self) -> None:
        """The end."""

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """Nothing fails here."""
        raise error


async def relayed(path: str, pieces: list[bytes], *, stream: bool = True) -> bytes:
    """What a client reads when the engine's answer comes in these pieces."""
    translated = READERS[path](ASKING[path] | {"stream": stream}, {})
    client, settled = Client(), list[Timings]()

    async def upstream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    asked = Asked.of(translated.body, "chat")
    await Relay("chat", asked, client, {}, settled.append, translated.writer()).events(upstream(), None)
    assert [(t.cache_n, t.prompt_n) for t in settled] == [(20, 10)]
    return bytes(client.said)


@EACH
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_split_at_any_byte(path: str, end: bytes) -> None:
    """Wherever the engine's bytes are cut, the client reads the same events, streamed and whole."""
    raw = RAW.replace(b"\n", end)
    whole = await relayed(path, [raw])
    PARSERS[path](whole)
    assert whole.count("Hé🙂".encode()) >= 1
    for at in range(len(raw) + 1):
        assert await relayed(path, [raw[:at], raw[at:]]) == whole
    singly = [raw[at : at + 1] for at in range(len(raw))]
    assert await relayed(path, singly) == whole
    assert await relayed(path, singly, stream=False) == await relayed(path, [raw], stream=False)


@EACH
async def test_usage_and_identity_of_an_answer(path: str, wire: Wire, fake: FakeLlama) -> None:
    """The engine's figures in the dialect's fields, and the same headers as chat."""

    async def script(answer: Answer) -> None:
        await answer.begin_events()
        await answer.send(RAW)

    fake.cues.append(Cue(script=script))
    answer = await wire.post(path, ASKING[path])
    found = PARSERS[path](answer.content)
    if path == MESSAGES:
        used = found.usage
        assert (used.input_tokens, used.cache_read_input_tokens, used.output_tokens) == (10, 20, 7)
        assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.id for block in found.content[2:]] == ["c1", "c2"]
    else:
        used = found.response["usage"]
        assert (used["input_tokens"], used["input_tokens_details"]["cached_tokens"]) == (30, 20)
        assert used["output_tokens"] == USAGE["completion_tokens"]
        assert [item["type"] for item in found.response["output"]][-2:] == ["function_call"] * 2
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-slotkeeper-placement"] == "cold"
    assert answer.headers["x-slotkeeper-request-id"] == (await wire.recorded(1))[0]["id"]


@EACH
async def test_pings_keep_a_stream_alive(path: str, wire: Wire, fake: FakeLlama) -> None:
    """Comments that the engine sends during a long prefill reach the client and disturb nobody."""

    async def script(answer: Answer) -> None:
        await answer.begin_events()
        await answer.send(b": ping\n\n" + RAW)

    fake.cues.append(Cue(script=script))
    answer = await wire.post(path, ASKING[path])
    assert answer.content.startswith(b": ping\n\n")
    PARSERS[path](answer.content.removeprefix(b": ping\n\n"))


# --- errors ----------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("case", BROKEN)
async def test_broken_streams(case: str, path: str, wire: Wire, fake: FakeLlama) -> None:
    """One error in the dialect, which names the engine; the slot is usable again."""
    make, code = BROKEN[case]
    for stream in (True, False):
        fake.cues.append(make())
        answer = await wire.post(path, BODIES[path] | {"stream": stream})
        error = error_of(path, answer)
        assert error["source"] == "engine"
        assert error["code"] == (code if answer.status_code != 200 or path == MESSAGES else "server_error")
        assert "again" in error["message"] or "Check" in error["message"]
        assert stream or answer.status_code == 502
    assert said(path, (await wire.post(path, BODIES[path] | {"stream": True})).content) == " w0 w1 w2 w3"
    assert [r["outcome"] for r in await wire.records()] == ["ok", "engine_error", "engine_error"]


SHAPES: list[Any] = [
    {"choices": [{"delta": {"content": 5}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": "x"}]}}]},
    {"choices": [{"delta": {"tool_calls": 5}}]},
    {"choices": [5]},
    {"choices": 5},
    {"usage": 5, "timings": 5},
    [1],
    5,
]


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@STREAMED
async def test_events_of_no_known_shape(stream: bool, shape: Any, path: str, wire: Wire, fake: FakeLlama) -> None:
    """The engine is at fault, not we."""
    fake.cues.append(garbage(b"data: " + orjson.dumps(CHUNKS[3]) + b"\n\ndata: " + orjson.dumps(shape) + b"\n\n")())
    error = error_of(path, await wire.post(path, BODIES[path] | {"stream": stream}))
    assert error["source"] == "engine"


@EACH
@STREAMED
async def test_refused_before_the_stream(stream: bool, path: str, wire: Wire, fake: FakeLlama) -> None:
    """Status, message and further fields are the engine's."""
    fake.cues.append(Cue(status=418, error={"code": 418, "message": "I am a teapot", "type": "teapot", "n_ctx": 8}))
    answer = await wire.post(path, BODIES[path] | {"stream": stream})
    error = error_of(path, answer)
    assert (answer.status_code, error["message"], error["n_ctx"]) == (418, "I am a teapot", 8)
    assert error["source"] == "engine"


@EACH
@pytest.mark.parametrize("error_at", [0, 2])
async def test_error_in_mid_stream(path: str, error_at: int, wire: Wire, fake: FakeLlama) -> None:
    """What came before is passed on; the error is the last event."""
    fake.cues.append(Cue(error_at=error_at, error=OWN))
    answer = await wire.post(path, BODIES[path] | {"stream": True})
    error = error_of(path, answer)
    assert (error["message"], error["n_ctx"], error["source"]) == (OWN["message"], 9, "engine")
    assert answer.text.count('" w') == error_at
    assert (await wire.records())[0]["outcome"] == "engine_error"


REFUSED: list[tuple[Json, bytes | None, int]] = [
    ({}, b"{", 400),
    ({}, b"[]", 400),
    ({}, b"\xff", 400),
    ({"messages": [], "input": []}, None, 400),
    ({"messages": 5, "input": 5}, None, 400),
    ({"model": 5}, None, 400),
    ({"previous_response_id": "resp_1", "messages": [5]}, None, 400),
]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, COUNT])
@pytest.mark.parametrize(("more", "raw", "status"), REFUSED)
async def test_bad_bodies(path: str, more: Json, raw: bytes | None, status: int, wire: Wire, fake: FakeLlama) -> None:
    """The dialect's own error, and nothing goes upstream."""
    content = orjson.dumps(BODIES.get(path, BODIES[MESSAGES]) | more) if raw is None else raw
    answer = await wire.http.post(path, content=content)
    error = error_of(path, answer)
    assert (answer.status_code, error["source"]) == (status, "slotkeeper")
    assert fake.model_requests == []


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, COUNT])
async def test_too_large_a_body(path: str, serve: Serve, fake: FakeLlama) -> None:
    """413 in the dialect."""
    wire = await serve(fake, max_body_bytes=2048)
    answer = await wire.post(path, BODIES.get(path, BODIES[MESSAGES]) | {"x": "y" * 4096})
    assert (answer.status_code, error_of(path, answer)["code"]) == (413, "body_too_large")


@EACH
@STREAMED
async def test_too_long_a_prompt(stream: bool, path: str, wire: Wire) -> None:
    """400 in llama-server's words, with its figures."""
    words = "word " * 9000
    body = BODIES[path] | {"messages": [{"role": "user", "content": words}], "input": words, "stream": stream}
    answer = await wire.post(path, {name: body[name] for name in (*BODIES[path], "stream")})
    error = error_of(path, answer)
    assert (answer.status_code, error["n_ctx"]) == (400, 8192)
    assert "exceeds the available context size" in error["message"] and error["n_prompt_tokens"] > 9000


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, COUNT])
async def test_unknown_models(path: str, serve: Serve) -> None:
    """404 where there is a choice of models."""
    async with FakeLlama(alias="big") as big, FakeLlama(alias="small") as small:
        wire = await serve(upstream=(big.url, small.url))
        await all_ready(wire)
        body = BODIES.get(path, BODIES[MESSAGES])
        answer = await wire.post(path, body | {"model": "gpt-4o"})
        assert (answer.status_code, error_of(path, answer)["code"]) == (404, "model_not_found")
        assert (await wire.post(path, body | {"model": "small"})).status_code == 200


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, COUNT, CHAT])
async def test_the_guard_speaks_the_dialect(path: str, serve: Serve, fake: FakeLlama, tmp_path: Path) -> None:
    """401 without a key or with a wrong one, 403 for a foreign host or page."""
    (tmp_path / "keys").write_text("anna:key-a\n")
    wire = await serve(fake, api_key_file=tmp_path / "keys")
    body = BODIES.get(path, BODIES[MESSAGES])
    key = {"x-api-key": "key-a"}
    cases: list[tuple[dict[str, str], int, str]] = [
        ({}, 401, "authentication_error"),
        ({"x-api-key": "key-b"}, 401, "authentication_error"),
        ({"host": "evil.example", **key}, 403, "permission_error"),
        ({"origin": "http://evil.example", **key}, 403, "permission_error"),
    ]
    for headers, status, kind in cases:
        answer = await wire.post(path, body, headers=headers)
        error = error_of(path, answer)
        assert (answer.status_code, error["type"], error["source"]) == (status, kind, "slotkeeper")
    assert fake.model_requests == []
    good = await wire.post(path, chat("hi") if path == CHAT else body, headers=key)
    assert good.status_code == 200


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_waiting_line_that_is_full(path: str, serve: Serve) -> None:
    """503 with Retry-After, which Anthropic calls overloaded."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake, max_waiting=0)
        go = asyncio.Event()
        fake.cues.append(Cue(hold_before=go))
        busy = asyncio.create_task(wire.post(path, BODIES[path]))
        await within(fake.arrived(1))
        answer = await wire.post(path, BODIES[path])
        go.set()
        assert (await busy).status_code == 200
        error = error_of(path, answer)
        kind = "overloaded_error" if path == MESSAGES else "unavailable_error"
        assert (answer.status_code, error["type"], error["code"]) == (503, kind, "waiting_line_full")
        assert int(answer.headers["retry-after"]) >= 1


# --- leaving ---------------------------------------------------------------------------------------------------------


@EACH
@WHERE
@STREAMED
@pytest.mark.parametrize("more", [{}, {"stop_sequences": ["END"], "stop": ["END"]}], ids=["plain", "stop"])
async def test_a_client_that_leaves(
    more: Json, stream: bool, where: str, path: str, serve: Serve, fake: FakeLlama
) -> None:
    """The engine is told at once, and the slot is usable again. With stop words, too: the one that was met is read from
    the last event."""
    wire = await serve(fake, **NEVER)
    fake.cues.append(held(where))
    body = BODIES[path] | more
    seen = asyncio.Event()

    async def ask() -> None:
        if not stream:
            await wire.post(path, body)
            return
        async with wire.stream(path, body) as events:
            while b" w0" not in await events.next():
                pass
            seen.set()
            await events.rest()

    client = asyncio.create_task(ask())
    await within(fake.arrived(1))
    if stream and where == "generation":
        await seen.wait()
    await leave(client)
    await within(fake.abandoned(1))
    await within(fake.idle())
    assert fake.model_requests[0].body["stream"] is True
    assert (await wire.recorded(1))[0]["outcome"] == "client_left"
    answer = await wire.post(path, body)
    assert (answer.status_code, answer.headers["x-slotkeeper-slot"]) == (200, "0")


@EACH
async def test_fields_without_effect_are_told_once(path: str, wire: Wire) -> None:
    """Counted each time."""
    for _ in range(2):
        assert (await wire.post(path, BODIES[path] | {"service_tier": "priority"})).status_code == 200
    text = (await wire.get("/metrics")).text
    found = [line for line in text.splitlines() if "dropped" in line and f'dialect="{path[4:]}"' in line]
    assert [float(line.rsplit(" ", 1)[1]) for line in found if "_total" in line] == [2.0]
