"""Our way through chat against llama-server's own /v1/responses: same request, greedy or same seed, both engines."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from llamacpp.client import LlamaClient
from llamacpp.errors import EngineRefused
from llamacpp.wire import assemble, streamed
from proxy.api.read_responses import read
from tests.conftest import StartEngine
from tests.llamacpp.test_wire_live import ENGINES, THINK_TEMPLATE, TOOLS_TEMPLATE, events_of
from tests.proxy.responses_parser import parse_response, parse_stream

Json = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"path": {"enum": ["a.txt", "b.txt"]}}, "required": ["path"]}
TOOLS = [{"type": "function", "name": n, "parameters": PARAMETERS} for n in ("read", "write")]
SPACE = [{"type": "namespace", "name": "files", "description": "", "tools": TOOLS}]
USER = {"role": "user", "content": "hello there, what is it?"}
COMMON: Json = {"temperature": 0, "seed": 1, "max_output_tokens": 12, "cache_prompt": False}
CALLS: Json = {"max_output_tokens": 120, "temperature": 1, "tool_choice": "required", "parallel_tool_calls": True}
BEGUN = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": '<tool_call>{"name": '}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.txt"}'}
HISTORY = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "kind."}]},
    USER,
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "It is a file."},
    USER,
]
SAME: list[Json] = [
    {"input": "hello there"},
    {"input": [USER], "instructions": "Be kind.", "max_output_tokens": 60, "temperature": 1},
    {"input": HISTORY, "tools": TOOLS},
    {"input": [USER, BEGUN], "tools": TOOLS, **CALLS},
    {"input": [USER, BEGUN], "tools": TOOLS, **CALLS, "seed": 2},
]


async def ours(client: LlamaClient, body: Json) -> tuple[Json, Json]:
    """What a client gets: the last event's response, and the whole answer."""
    asked = read(body | {"stream": True}, {})
    writer = asked.writer()
    raw = b""
    for event in await events_of(client, "chat", streamed(asked.body, "chat")):
        raw += b"" if "prompt_progress" in event else writer.feed(event)
    once = read(body, {})
    whole = once.writer().whole(assemble("chat", await events_of(client, "chat", streamed(once.body, "chat"))))
    parse_response(orjson.dumps(whole))
    return parse_stream(raw + writer.end()).response, whole


async def theirs(client: LlamaClient, body: Json) -> Json:
    headers = {"content-type": "application/json"}
    answer = await client.request("POST", "/v1/responses", content=orjson.dumps(body), headers=headers)
    assert answer.status_code == 200, answer.text
    found: Json = orjson.loads(answer.content)
    return found


def said(response: Json) -> list[Any]:
    return [
        (item["name"], item["arguments"]) if item["type"] == "function_call" else (item["type"], item["content"])
        for item in response["output"]
    ]


def counted(response: Json) -> list[int]:
    return [response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")]


@pytest.mark.parametrize("_engine", ENGINES)
async def test_answers_are_the_engines_own(live_engine: StartEngine, _engine: str) -> None:
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    n_calls = 0
    for body in SAME:
        own = await theirs(engine.client, COMMON | body)
        streamed_one, whole = await ours(engine.client, COMMON | body)
        assert said(whole) == said(own) and counted(whole) == counted(own)
        assert said(streamed_one) == said(own) and counted(streamed_one) == counted(own)
        n_calls += sum(item["type"] == "function_call" for item in own["output"])
    assert n_calls > 1


@pytest.mark.parametrize("_engine", ENGINES)
async def test_reasoning_is_the_engines_own(live_engine: StartEngine, _engine: str) -> None:
    engine = await live_engine("dense", extra=THINK_TEMPLATE)
    own = await theirs(engine.client, COMMON | {"input": [USER]})
    assert own["output"][0]["type"] == "reasoning"
    for found in await ours(engine.client, COMMON | {"input": [USER]}):
        assert said(found) == said(own) and counted(found) == counted(own)


@pytest.mark.parametrize("_engine", ENGINES)
async def test_calls_of_namespaces_go_back_under_their_names(live_engine: StartEngine, _engine: str) -> None:
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    for found in await ours(engine.client, COMMON | CALLS | {"input": [USER, BEGUN], "tools": SPACE}):
        calls = [item for item in found["output"] if item["type"] == "function_call"]
        assert calls and {call["namespace"] for call in calls} == {"files"}
        assert {call["name"] for call in calls} <= {"read", "write"}


@pytest.mark.parametrize("_engine", ENGINES)
async def test_structured_output_and_logprobs(live_engine: StartEngine, _engine: str) -> None:
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    for found in await ours(engine.client, COMMON | {"input": "x", "text": {"format": form}, "max_output_tokens": 200}):
        text = found["output"][0]["content"][0]["text"]
        assert found["status"] == "incomplete" or orjson.loads(text)["path"] in ("a.txt", "b.txt")
        assert text.lstrip().startswith("{")
    logged, _ = await ours(
        engine.client, COMMON | {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    )
    tokens = logged["output"][0]["content"][0]["logprobs"]
    assert len(tokens) > 1 and all(len(token["top_logprobs"]) == 2 for token in tokens)


@pytest.mark.parametrize("_engine", ENGINES)
async def test_an_image_without_a_projector_is_the_engines_error(live_engine: StartEngine, _engine: str) -> None:
    engine = await live_engine("dense", extra=TOOLS_TEMPLATE)
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    headers = {"content-type": "application/json"}
    own = await engine.client.request(
        "POST", "/v1/responses", content=orjson.dumps({"input": [image]}), headers=headers
    )
    with pytest.raises(EngineRefused) as caught:
        await ours(engine.client, {"input": [image]})
    assert (caught.value.status, orjson.loads(caught.value.body)) == (own.status_code, orjson.loads(own.content))
