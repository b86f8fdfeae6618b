"""What the engine does wrong reaches the client as one error in its dialect, and costs nobody else anything."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy
from tests.fakes.http import Answer, Broken
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.dialects import BODIES, COUNT, MESSAGES, RESPONSES, error_of
from tests.wire.wire import CHAT, Wire, chat, data

PATHS = {
    CHAT: chat("hi"),
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/completion": {"prompt": "hi", "n_predict": 4},
}
OWN = {"code": 500, "message": "Context size has been exceeded.", "type": "server_error", "n_ctx": 9}


def garbage(*pieces: bytes, cut: bool = False) -> Callable[[], Cue]:
    """An engine that answers 200 and these bytes, in good order or cut off."""

    async def script(answer: Answer) -> None:
        await answer.begin_events()
        for piece in pieces:
            await answer.send(piece)
        if cut:
            raise Broken

    return lambda: Cue(script=script)


BROKEN: dict[str, tuple[Callable[[], Cue], str]] = {
    "dies": (lambda: Cue(break_at=2), "engine_failed"),
    "dies at once": (garbage(cut=True), "engine_failed"),
    "ends without its end": (lambda: Cue(end_at=2), "engine_failed"),
    "says nothing": (garbage(), "engine_failed"),
    "ends inside an event": (garbage(b'data: {"choices":'), "engine_failed"),
    "sends no JSON": (garbage(b'data: {"timings"\n\n'), "engine_failed"),
    "sends JSON of another shape": (garbage(b'data: {"timings": 1, "choices": 5}\n\n'), "engine_failed"),
    "sends a list": (garbage(b'data: ["timings"]\n\n'), "engine_failed"),
    "sends bytes": (garbage(bytes(range(256)) * 4), "engine_failed"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", BROKEN)
async def test_broken_streams(case: str, path: str, wire: Wire, fake: FakeLlama) -> None:
    """One error event or one error answer that names the engine, no [DONE], and the slot is usable again."""
    make, code = BROKEN[case]
    for stream in (True, False):
        fake.cues.append(make())
        answer = await wire.post(path, PATHS[path] | {"stream": stream})
        error = last_error(answer)
        assert (error["code"], error["source"]) == (code, "engine")
        assert "again" in error["message"] or "Check" in error["message"]
        assert b"[DONE]" not in answer.content
        assert stream or answer.status_code == 502
    await wire.has_slots(*["idle" if slot.tokens else "empty" for slot in fake.slots])
    assert (await wire.post(path, PATHS[path])).status_code == 200
    assert [r["outcome"] for r in await wire.records()] == ["ok", "engine_error", "engine_error"]


def last_error(answer: httpx.Response) -> dict[str, Any]:
    """The one error in an answer: its body, or the last event of a stream that had begun."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status_code >= 400
        found: dict[str, Any] = answer.json()["error"]
        return found
    assert answer.status_code == 200
    events = [event + b"\n\n" for event in answer.content.split(b"\n\n") if event.strip()]
    assert sum(b'{"error"' in event for event in events) == 1
    error: dict[str, Any] = data(events[-1])["error"]
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_refused_before_the_stream(stream: bool, path: str, wire: Wire, fake: FakeLlama) -> None:
    """Status and fields are the engine's; the source says so."""
    fake.cues.append(Cue(status=418, error={"code": 418, "message": "I am a teapot", "type": "teapot", "n_ctx": 8}))
    answer = await wire.post(path, PATHS[path] | {"stream": stream})
    own = {"code": 418, "message": "I am a teapot", "type": "teapot", "n_ctx": 8}
    assert answer.status_code == 418
    assert answer.json()["error"].items() >= (own | {"source": "engine"}).items()
    assert answer.json()["source"] == "engine"


@pytest.mark.parametrize("error_at", [0, 2])
@pytest.mark.parametrize("path", PATHS)
async def test_error_event_in_mid_stream(path: str, error_at: int, wire: Wire, fake: FakeLlama) -> None:
    """What came before is passed on; the engine's fields are in the one error event, which is the last."""
    fake.cues.append(Cue(error_at=error_at, error=OWN))
    answer = await wire.post(path, PATHS[path] | {"stream": True})
    error = last_error(answer)
    assert error.items() >= (OWN | {"source": "engine"}).items()
    assert answer.text.count(" w") == error_at
    assert (await wire.records())[0]["outcome"] == "engine_error"


@pytest.mark.parametrize("path", PATHS)
async def test_error_event_of_a_whole_answer(path: str, wire: Wire, fake: FakeLlama) -> None:
    """Nothing was sent yet, so the client gets a status."""
    fake.cues.append(Cue(error_at=2, error=OWN))
    answer = await wire.post(path, PATHS[path])
    assert (answer.status_code, answer.json()["error"]["n_ctx"]) == (500, 9)


@pytest.mark.parametrize("junk", [b"", b"<html>", b'{"choices": ['])
async def test_a_whole_answer_that_is_no_json(junk: bytes, wire: Wire, fake: FakeLlama) -> None:
    """Requests that cannot be streamed upstream (here: log probabilities) are answered whole, or by an error."""

    async def script(answer: Answer) -> None:
        await answer.whole(200, junk)

    assert (await wire.post(CHAT, chat("hi", logprobs=True))).json()["timings"]["predicted_n"] == 4
    assert fake.model_requests[-1].body.get("stream") is None
    fake.cues.append(Cue(script=script))
    answer = await wire.post(CHAT, chat("hi", logprobs=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_garbage_beside_content(wire: Wire, fake: FakeLlama) -> None:
    """Content is not parsed on its way (that is what keeps it cheap), so garbage in it is the client's to see; an
    answer that has to be assembled cannot hold it."""
    fake.cues.extend([Cue(garbage_at=2), Cue(garbage_at=2)])
    assert b"data: {not json\n\n" in await wire.events(CHAT, chat("hi"))
    answer = await wire.post(CHAT, chat("hi"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_content_that_quotes_an_error_is_content(wire: Wire, fake: FakeLlama) -> None:
    """Text that looks like a mark is passed on."""
    words = [' {"error": {"message": "x"}}', ' "timings"', " data: [DONE]"]
    fake.cues.append(Cue(text=words))
    events = await wire.events(CHAT, chat("quote", max_tokens=3))
    assert "".join(data(e)["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == "".join(words)


async def test_too_long_a_prompt(wire: Wire, fake: FakeLlama) -> None:
    """Refused in llama-server's words and fields."""
    answer = await wire.post(CHAT, chat("word " * 9000))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_ctx"], error["n_prompt_tokens"] > 9000) == (fake.n_ctx, True)
    assert (await wire.recorded(1))[0]["outcome"] == "overflow"


async def test_engine_that_loads_again(wire: Wire, fake: FakeLlama) -> None:
    """Attached, then loading: 503 with Retry-After, in the engine's words."""
    fake.loading = True
    answer = await wire.post(CHAT, chat("hi"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")
    assert int(answer.headers["retry-after"]) >= 1


async def test_engine_that_loads_at_first(serve: Serve, fake: FakeLlama) -> None:
    """Not ready yet: 503 with Retry-After; ready once it is loaded."""
    fake.loading = True
    wire = await serve(fake, wait=False)
    await fake.asked("/health", 1)
    for path in (CHAT, "/completion"):
        answer = await wire.post(path, PATHS[path])
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert "it is loading its model. Try again" in answer.json()["error"]["message"]
    ready = await wire.get("/readyz")
    assert (ready.status_code, ready.headers["retry-after"]) == (503, "2")
    fake.loading = False
    await until(wire.is_ready)
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_engine_that_is_not_there(serve: Serve) -> None:
    """502 that names the address; the proxy itself lives, and attaches once the engine is up."""
    async with FakeLlama() as fake:
        port = fake._server.port
    wire = await serve(upstream=(f"http://127.0.0.1:{port}",), wait=False)

    async def is_down() -> bool:
        return (await wire.post(CHAT, chat("hi"))).status_code == 502

    await until(is_down)
    error = (await wire.post(CHAT, chat("hi"))).json()["error"]
    assert (error["code"], error["source"], str(port) in error["message"]) == ("engine_down", "engine", True)
    assert (await wire.get("/healthz")).status_code == 200
    async with FakeLlama(port=port):
        await until(wire.is_ready)
        assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_engine_that_wants_another_key(serve: Serve) -> None:
    """The client's key is not to blame, so it gets no 401; what to do is said there."""
    async with FakeLlama(api_key="right") as fake:
        wire = await serve(fake, wait=False, upstream_api_key="wrong")
        await fake.asked("/props", 1)

        async def says_so() -> bool:
            return "Invalid API Key" in (await wire.get("/readyz")).text

        await until(says_so)
        answer = await wire.post(CHAT, chat("hi"))
        assert (answer.status_code, answer.json()["source"]) == (502, "engine")
        assert "SLOTKEEPER_UPSTREAM_API_KEY" in answer.json()["error"]["message"]
        assert "Is it running" not in answer.text


@pytest.mark.parametrize(("key", "said"), [("wrong", "refuses the key"), (None, "asks for a key")])
async def test_a_missing_key_is_said_once(key: str | None, said: str, proxy_server: StartProxy) -> None:
    """One warning, at the first look."""
    async with FakeLlama(api_key="right") as fake:
        environment = {"SLOTKEEPER_UPSTREAM_API_KEY": key} if key else {}
        proxy = await proxy_server("--upstream", fake.url, wait=False, environment=environment)
        await fake.asked("/props", 3)
        await proxy.stop()
    lines = [line for line in proxy.lines if line["level"] == "warning"]
    assert [line["event"] for line in lines] == ["engine_not_attached"]
    assert said in lines[0]["why"]
    assert "SLOTKEEPER_UPSTREAM_API_KEY" in lines[0]["why"]


async def test_killed_in_mid_stream(proxy_server: StartProxy, fake: FakeLlama) -> None:
    """Against the real process: the connection breaks, the client has its error, the next request is served."""
    proxy = await proxy_server("--upstream", fake.url)
    async with Wire(proxy.url) as wire:
        fake.cues.append(Cue(break_at=2))
        async with wire.stream(CHAT, chat("hi")) as stream:
            events = await stream.rest()
        assert json.loads(events[-1][6:])["error"]["code"] == "engine_failed"
        assert (await wire.post(CHAT, chat("hi"))).status_code == 200


REFUSED = {"code": 500, "message": "Failed to parse tool call arguments as JSON", "type": "server_error"}


@pytest.mark.parametrize("is_chats_fault", [True, False])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_chat_that_the_template_cannot_take(
    is_chats_fault: bool, path: str, wire: Wire, fake: FakeLlama
) -> None:
    """llama-server's 500 for it is a 400 in the engine's words, so that no SDK sends it again; another stays a 500."""
    fake.reason_template_fails = REFUSED["message"] if is_chats_fault else None
    fake.cues.append(Cue(status=500, error=REFUSED))
    answer = await wire.post(path, BODIES.get(path, PATHS[CHAT]))
    error = error_of(path, answer)
    assert (answer.status_code, error["source"]) == (400 if is_chats_fault else 500, "engine")
    assert error["message"] == REFUSED["message"]
    if is_chats_fault:
        assert error["type"] == "invalid_request_error"


async def test_counting_what_the_template_cannot_take(wire: Wire, fake: FakeLlama) -> None:
    """The same refusal."""
    fake.reason_template_fails = str(REFUSED["message"])
    answer = await wire.post(COUNT, BODIES[MESSAGES])
    assert (answer.status_code, error_of(MESSAGES, answer)["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_when_to_come_again(status: int, path: str, wire: Wire, fake: FakeLlama) -> None:
    """The engine names no time; clients that retry want one."""
    fake.cues.append(Cue(status=status, error={"code": status, "message": "busy", "type": "unavailable_error"}))
    answer = await wire.post(path, BODIES.get(path, PATHS[CHAT]))
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "2")
