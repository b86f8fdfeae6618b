"""LlamaClient against real sockets, and against real engines."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.client import MOST_METRICS_BYTES, LlamaClient, pauses_between_looks
from llamacpp.errors import EngineBroken, EngineError, EngineRefused, EngineStarting, EngineUnreachable
from llamacpp.packed import pack, unpack
from tests.conftest import StartEngine
from tests.fakes.http import Answer, Broken, Request, Server

ENGINES = [pytest.param("B", marks=pytest.mark.live), pytest.param("A", marks=pytest.mark.native)]
PATIENCE = 20.0  # seconds; only a hanging test takes that long
LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_pack_and_unpack(tokens: list[int]) -> None:
    """Little-endian int32, 4 bytes a token."""
    packed = pack(tokens)
    assert packed == b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    assert unpack(packed) == tokens


async def answering(value: object, status: int, ask: Callable[[LlamaClient], Awaitable[object]]) -> object:
    """What `ask` gets from an engine that always answers `value`."""

    async def handler(_: Request, answer: Answer) -> None:
        if isinstance(value, bytes):
            await answer.whole(status, value)
        else:
            await answer.json(value, status)

    async with Server(handler) as server:
        client = LlamaClient(server.url)
        try:
            return await ask(client)
        finally:
            await client.aclose()


async def test_metrics_are_bounded_text() -> None:
    """Of an answer without end its beginning is read, whatever its bytes are; other answers are errors."""
    more = b"\xff" * 2 * MOST_METRICS_BYTES
    assert await answering(b"llamacpp:x 1\n\xff" + more, 200, lambda c: c.metrics()) == (
        "llamacpp:x 1\n" + "\ufffd" * (MOST_METRICS_BYTES - 13)
    )
    with pytest.raises(EngineRefused):
        await answering(more, 501, lambda c: c.metrics())


@pytest.mark.parametrize("ask", [lambda c: c.apply_template(b"{}"), lambda c: c.detokenize(b"")])
async def test_answers_that_may_hold_prompts_are_not_quoted(ask: Callable[[LlamaClient], Awaitable[object]]) -> None:
    """The sentence may be logged."""
    for value in ({"text": "a secret"}, b"a secret"):
        with pytest.raises(EngineBroken) as found:
            await answering(value, 200, ask)
        assert "secret" not in str(found.value)


QUESTIONS: list[Callable[[LlamaClient], Awaitable[object]]] = [
    lambda c: c.props(),
    lambda c: c.slots(),
    lambda c: c.apply_template(b"{}"),
    lambda c: c.tokenize("x"),
    lambda c: c.save_slot(0, "x"),
    lambda c: c.restore_slot(0, "x"),
    lambda c: c.erase_slot(0),
    lambda c: c.prime(0, pack([1])),
]


@pytest.mark.parametrize("ask", QUESTIONS)
async def test_errors_of_the_engine(ask: Callable[[LlamaClient], Awaitable[object]]) -> None:
    """Loading, refusals in its own words, errors without words."""
    with pytest.raises(EngineStarting, match="Loading model"):
        await answering(LOADING, 503, ask)
    refusal = {"error": {"code": 501, "message": "Start it with `--slots`", "type": "not_supported_error"}}
    with pytest.raises(EngineRefused, match="--slots") as refused:
        await answering(refusal, 501, ask)
    assert (refused.value.status, orjson.loads(refused.value.body)) == (501, refusal)
    with pytest.raises(EngineRefused, match="status 502"):
        await answering(b"<html>bad gateway", 502, ask)


@pytest.mark.parametrize("ask", QUESTIONS[:6])
@pytest.mark.parametrize("value", [b"<html>", b"", [], {}, 5, {"tokens": 5, "prompt": 5}, {"tokens": ["x"]}, ["x"]])
async def test_nonsense_from_the_upstream(ask: Callable[[LlamaClient], Awaitable[object]], value: object) -> None:
    """200 with something else than llama-server sends: a sentence, never another exception."""
    if value == [] and ask is QUESTIONS[1]:
        assert await answering(value, 200, ask) == []
        return
    with pytest.raises(EngineBroken, match="llama-server"):
        await answering(value, 200, ask)


async def test_nobody_there() -> None:
    """Connection refused: unhealthy, and a sentence with the address for every question."""
    async with Server(nothing) as server:
        url = server.url
    client = LlamaClient(url)
    assert await client.health() is False
    for ask in QUESTIONS:
        with pytest.raises(EngineUnreachable, match=url):
            await ask(client)
    await client.aclose()


async def nothing(_: Request, __: Answer) -> None:
    """Never called."""
    raise AssertionError


async def test_health() -> None:
    """200 is healthy; 503 is not."""
    assert await answering({"status": "ok"}, 200, lambda c: c.health()) is True
    assert await answering(LOADING, 503, lambda c: c.health()) is False


@pytest.mark.parametrize(("status", "is_serving"), [(200, True), (404, False), (500, False), (503, False)])
async def test_it_serves(status: int, is_serving: bool) -> None:
    """What it was asked for: anything may answer 404."""

    async def ask(client: LlamaClient) -> bool:
        await client.health()
        return client.served > 0

    assert await answering({}, status, ask) is is_serving


async def test_headers_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key goes as a bearer, nothing is compressed, proxies of the environment are not used."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    seen: list[Request] = []

    async def handler(request: Request, answer: Answer) -> None:
        seen.append(request)
        await answer.json({"tokens": [1, 2]})

    async with Server(handler) as server:
        client = LlamaClient(server.url + "/prefix/", "secret")
        assert await client.tokenize("né", add_special=True) == pack([1, 2])
        async with client.stream("POST", "/v1/x", b"{}", {"x-y": "z"}) as response:
            await response.aread()
        await client.aclose()
    assert [request.path for request in seen] == ["/prefix/tokenize", "/prefix/v1/x"]
    assert seen[0].body == {"content": "né", "add_special": True, "parse_special": True}
    for request in seen:
        assert request.headers["authorization"] == "Bearer secret"
        assert request.headers["accept-encoding"] == "identity"
        assert request.headers["content-type"] == "application/json"
    assert seen[1].headers["x-y"] == "z"


async def test_bytes_pass_as_they_come() -> None:
    """The body of a stream, and of an answer passed through, error statuses included."""

    async def handler(request: Request, answer: Answer) -> None:
        if request.method == "GET":
            await answer.whole(400, b"as it is", "text/x")
            return
        await answer.begin_events()
        for part in (b"data: a\n\n", b"da", b"ta: b\r\n\r\n"):
            await answer.send(part)

    async with Server(handler) as server:
        client = LlamaClient(server.url)
        async with client.stream("POST", "/x", b"{}") as response:
            assert b"".join([chunk async for chunk in response.aiter_raw()]) == b"data: a\n\ndata: b\r\n\r\n"
        answer = await client.request("GET", "/x", params={"a": "b"})
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (400, b"as it is", "text/x")
        await client.aclose()


class Streaming:
    """An engine that begins an answer (not even its head when `headless`) and waits until its client leaves."""

    def __init__(self, *, headless: bool = False) -> None:
        self.headless = headless
        self.arrived, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Request, answer: Answer) -> None:
        if not self.headless:
            await answer.begin_events()
            await answer.send(b"data: 1\n\n")
        self.arrived.set()
        await request.left.wait()
        self.left.set()
        raise Broken


async def test_leaving_early_closes_the_socket() -> None:
    """Leaving the context, before the client itself is closed."""
    engine = Streaming()
    async with Server(engine) as server, asyncio.timeout(PATIENCE):
        client = LlamaClient(server.url)
        async with client.stream("POST", "/x", b"{}") as response:
            assert await anext(response.aiter_raw()) == b"data: 1\n\n"
            assert not engine.left.is_set()
        await engine.left.wait()
        await client.aclose()


@pytest.mark.parametrize("headless", [False, True])
async def test_cancelling_closes_the_socket(headless: bool) -> None:
    """The task that reads is cancelled: while it waits for the answer's head, or for its next event."""
    engine = Streaming(headless=headless)
    async with Server(engine) as server, asyncio.timeout(PATIENCE):
        client = LlamaClient(server.url)

        async def read() -> None:
            async with client.stream("POST", "/x", b"{}") as response:
                async for _ in response.aiter_raw():
                    pass

        task = asyncio.create_task(read())
        await engine.arrived.wait()
        assert not engine.left.is_set()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await engine.left.wait()
        await client.aclose()


async def test_an_engine_that_dies_in_a_stream() -> None:
    """The reader gets EngineUnreachable, inside the context."""

    async def handler(_: Request, answer: Answer) -> None:
        await answer.begin_events()
        await answer.send(b"data: 1\n\n")
        raise Broken

    async with Server(handler) as server:
        client = LlamaClient(server.url)
        with pytest.raises(EngineUnreachable, match="Is it running"):
            async with client.stream("POST", "/x", b"{}") as response:
                async for _ in response.aiter_raw():
                    pass
        await client.aclose()


async def test_a_kept_connection_that_closes_costs_nothing() -> None:
    """llama-server closes kept connections when it likes; the request that meets it goes out once more, only once."""
    arrivals: list[str] = []
    fail_at = {2}

    async def handler(request: Request, answer: Answer) -> None:
        arrivals.append(request.path)
        if len(arrivals) in fail_at:
            raise Broken
        await answer.json({"prompt": "x"})

    async with Server(handler) as server:
        client = LlamaClient(server.url)
        assert await client.apply_template(b"{}") == "x"
        async with client.stream("POST", "/apply-template", b"{}") as response:
            assert await response.aread() == b'{"prompt": "x"}'
        assert len(arrivals) == 3
        fail_at |= {4, 5}
        with pytest.raises(EngineUnreachable):
            await client.apply_template(b"{}")
        assert len(arrivals) == 5
        await client.aclose()


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (b'data: {"error": {"code": 500, "message": "Context size has been exceeded"}}\n\n', EngineRefused),
        (b'data: {"content": ""}\n\n', EngineBroken),
        (b'data: "timings"\n\n', EngineBroken),
        (b'data: {"timings": {"x": \n\n', EngineBroken),
        (b"", EngineBroken),
    ],
)
async def test_prime_that_fails(events: bytes, error: type[EngineError]) -> None:
    """An error in the stream, an end without figures, nonsense."""

    async def handler(_: Request, answer: Answer) -> None:
        await answer.begin_events()
        if events:
            await answer.send(events)

    async with Server(handler) as server:
        client = LlamaClient(server.url)
        with pytest.raises(error):
            await client.prime(0, pack([1, 2]))
        await client.aclose()


@pytest.mark.parametrize("_engine", ENGINES)
async def test_a_real_engine(live_engine: StartEngine, _engine: str) -> None:
    """Every method once, on the slots of a real engine."""
    engine = await live_engine("dense", parallel=2, ctx_size=2048)
    client = engine.client
    props = await client.props()
    assert (props.total_slots, props.n_ctx, props.endpoint_slots, props.is_sleeping) == (2, 2048, True, False)
    assert props.chat_template and props.build_info and props.model_path.endswith("dense.gguf")
    assert [(slot.id, slot.is_processing, slot.speculative) for slot in await client.slots()] == [
        (0, False, False),
        (1, False, False),
    ]
    text = await client.apply_template(orjson.dumps({"messages": [{"role": "user", "content": "hello " * 50}]}))
    tokens = await client.tokenize(text)
    count = len(tokens) // 4
    assert "hello" in text and count > 50

    primed = await client.prime(1, tokens)
    assert (primed.cache_n, primed.prompt_n) == (0, count)
    assert (await client.slots())[1].n_prompt_tokens == count
    saved = await client.save_slot(1, "x.bin")
    assert (saved.n_tokens, saved.n_bytes) == (count, (engine.slot_dir / "x.bin").stat().st_size)
    assert await client.erase_slot(1) == count
    restored = await client.restore_slot(0, "x.bin")
    assert (restored.n_tokens, restored.n_bytes) == (count, saved.n_bytes)
    again = await client.prime(0, tokens + pack([9]))
    assert (again.cache_n, again.prompt_n) == (count, 1)
    assert "llamacpp:prompt_tokens_total" in await client.metrics()

    with pytest.raises(EngineRefused) as refused:
        await client.restore_slot(0, "missing.bin")
    assert refused.value.status == 400
    with pytest.raises(EngineRefused) as refused:
        await client.prime(0, pack([9]) * 2100)
    assert b"exceed_context_size_error" in refused.value.body
    stranger = LlamaClient(client.base_url)
    with pytest.raises(EngineRefused) as refused:
        await stranger.props()
    assert refused.value.status == 401
    await stranger.aclose()


async def test_a_client_that_was_closed() -> None:
    """Its engine ended and another took its place meanwhile: an engine's failure, not a mistake of ours."""
    client = LlamaClient("http://127.0.0.1:9")
    await client.aclose()
    with pytest.raises(EngineUnreachable):
        await client.slots()
    with pytest.raises(EngineUnreachable):
        await client.prime(0, pack([9]))
    assert not await client.health()


def test_looks_leave_the_engine_its_second() -> None:
    """Soon a few, for an engine about to notice; then none within the second that it waits for results."""
    pauses = list(islice(pauses_between_looks(), 12))
    assert max(pauses[:3]) < 0.1
    assert sum(pauses[:6]) < 1.0 < min(pauses[6:])
