"""The assembled answer against the engine's own whole one: same request, greedy or same seed, both engines."""

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from llamacpp.client import LlamaClient
from llamacpp.errors import EngineRefused
from llamacpp.sse import EventSplitter, data_of
from llamacpp.wire import Asked, Decoder, Json, Kind, is_unasked, streamed
from tests.conftest import StartEngine

ENGINES = [pytest.param("B", marks=pytest.mark.live), pytest.param("A", marks=pytest.mark.native)]
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "native": "/completion"}
DATA = Path(__file__).parent.parent / "data"
TOOLS_TEMPLATE = ("--chat-template-file", str(DATA / "chatml-tools.jinja"))
THINK_TEMPLATE = ("--chat-template-file", str(DATA / "think.jinja"))
USER = {"role": "user", "content": "hello there, what is it?"}
COMMON = {"temperature": 0, "seed": 1, "id_slot": 0, "cache_prompt": False, "max_tokens": 12, "ignore_eos": True}
ONCE = {"prompt": "Once upon a time there"}
PARAMETERS = {"type": "object", "properties": {"path": {"enum": ["a.txt", "b.txt"]}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in ("read", "write")]

PLAIN: list[tuple[Kind, Json]] = [
    ("chat", {"messages": [USER]}),
    ("chat", {"messages": [USER], "max_tokens": 0}),
    ("chat", {"messages": [USER], "timings_per_token": True}),
    ("chat", {"messages": [USER], "stream_options": {"include_usage": False}}),
    ("chat", {"messages": [USER], "temperature": 1, "max_tokens": 40}),
    ("chat", {"messages": [USER, {"role": "assistant", "content": "It is"}]}),
    (
        "chat",
        {"messages": [USER], "response_format": {"type": "json_object", "schema": PARAMETERS}, "ignore_eos": False},
    ),
    ("completion", ONCE),
    ("completion", ONCE | {"max_tokens": 0}),
    ("completion", ONCE | {"logprobs": 2}),
    ("completion", ONCE | {"stop": ["e", "a"], "temperature": 1, "max_tokens": 40}),
    ("completion", {"prompt": ["Once upon", "a time"], "id_slot": -1}),
    ("native", ONCE),
    ("native", ONCE | {"n_predict": 0, "max_tokens": 0}),
    ("native", ONCE | {"n_probs": 2}),
    ("native", ONCE | {"n_probs": 2, "post_sampling_probs": True, "temperature": 1}),
    ("native", ONCE | {"stop": ["e", "a"], "temperature": 1, "max_tokens": 40}),
    ("native", ONCE | {"response_fields": ["content", "timings/cache_n", "generation_settings/stream", "no"]}),
    ("native", {"prompt": [9, 10, 11]}),
]


async def whole(client: LlamaClient, kind: Kind, body: Json) -> Json:
    """The engine's own answer."""
    headers = {"content-type": "application/json"}
    answer = await client.request("POST", PATHS[kind], content=orjson.dumps(body), headers=headers)
    if answer.status_code != 200:
        raise EngineRefused(answer.status_code, answer.content, answer.text)
    found: Json = orjson.loads(answer.content)
    return found


async def events_of(client: LlamaClient, kind: Kind, body: Json) -> list[Json]:
    """All events of the stream, parsed."""
    splitter = EventSplitter()
    events: list[bytes] = []
    async with client.stream("POST", PATHS[kind], orjson.dumps(body)) as response:
        if response.status_code != 200:
            raise EngineRefused(response.status_code, await response.aread(), "refused")
        async for chunk in response.aiter_raw():
            events += splitter.feed(chunk)
    assert splitter.rest() == b""
    found = [data for event in events if (data := data_of(event)) not in (None, b"[DONE]")]
    return [orjson.loads(data) for data in found if data is not None]


async def assembled(client: LlamaClient, kind: Kind, body: Json) -> Json:
    """The answer as the proxy gives it."""
    decoder = Decoder(kind)
    for event in await events_of(client, kind, streamed(body, kind)):
        decoder.feed(event)
    return decoder.whole(Asked.of(body, kind))


def comparable(answer: Json) -> Json:
    """Without what differs between any two answers: ids, times."""
    found = orjson.loads(orjson.dumps(answer))
    for name in ("id", "created"):
        found.pop(name, None)
    if "timings" in found:
        found["timings"] = {k: v if k.endswith("_n") else 0 for k, v in found["timings"].items()}
    for call in calls_of(found):
        assert call.pop("id")
    return found


def calls_of(answer: Json) -> Iterator[Json]:
    """The tool calls of all choices."""
    for choice in answer.get("choices", ()):
        yield from choice.get("message", {}).get("tool_calls", ())


async def check(client: LlamaClient, kind: Kind, body: Json) -> Json:
    """Both ways, equal to the order of the fields; returns the engine's own."""
    body = COMMON | body
    await client.erase_slot(0)
    theirs = comparable(await whole(client, kind, body))
    await client.erase_slot(0)
    ours = comparable(await assembled(client, kind, body))
    assert ours == theirs, body
    assert orjson.dumps(ours) == orjson.dumps(theirs), body
    return theirs


@pytest.mark.parametrize("_engine", ENGINES)
async def test_assembled_equals_whole(live_engine: StartEngine, _engine: str) -> None:
    """Text, logprobs, stop words, echoed beginnings, JSON, several prompts, all three shapes."""
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    for kind, body in PLAIN:
        await check(engine.client, kind, body)


@pytest.mark.parametrize("_engine", ENGINES)
async def test_assembled_tool_calls(live_engine: StartEngine, _engine: str) -> None:
    """Several calls in one answer, begun for the model, which has random weights; and a call that is none: an error."""
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    begun = [USER, {"role": "assistant", "content": '<tool_call>{"name": '}]
    body = {"messages": begun, "tools": TOOLS, "temperature": 1, "max_tokens": 120, "parallel_tool_calls": True}
    counts = [
        len([*calls_of(await check(engine.client, "chat", body | {"tool_choice": "required", "seed": seed}))])
        for seed in range(2)
    ]
    assert max(counts) > 1, counts
    with pytest.raises(EngineRefused) as theirs:
        await whole(engine.client, "chat", COMMON | body)
    with pytest.raises(EngineRefused) as ours:
        await assembled(engine.client, "chat", COMMON | body)
    assert ours.value.status == theirs.value.status
    assert orjson.loads(ours.value.body) == orjson.loads(theirs.value.body)


@pytest.mark.parametrize("_engine", ENGINES)
async def test_assembled_reasoning(live_engine: StartEngine, _engine: str) -> None:
    """A model that only thinks, and one that is made to stop thinking."""
    engine = await live_engine("dense", extra=THINK_TEMPLATE)
    thinking = await check(engine.client, "chat", {"messages": [USER]})
    assert thinking["choices"][0]["message"]["reasoning_content"]
    done = {"role": "assistant", "reasoning_content": "hm", "content": "So"}
    both = await check(engine.client, "chat", {"messages": [USER, done]})
    message = both["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "hm" and message["content"].startswith("So")


@pytest.mark.parametrize("_engine", ENGINES)
async def test_what_we_add_can_be_taken_away(live_engine: StartEngine, _engine: str) -> None:
    """A stream with progress, without the events that nobody asked for, is the stream that the client asked for."""
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    shapes: list[tuple[Kind, Json]] = [("chat", {"messages": [USER]}), ("completion", ONCE), ("native", ONCE)]
    for kind, shape in shapes:
        body = COMMON | shape | {"stream": True}
        theirs = await events_of(engine.client, kind, body)
        ours = await events_of(engine.client, kind, streamed(body, kind))
        assert any("prompt_progress" in event for event in ours)
        shown = [event for event in ours if not is_unasked(event, Asked.of(body, kind))]
        assert list(map(comparable, shown)) == list(map(comparable, theirs)), kind
