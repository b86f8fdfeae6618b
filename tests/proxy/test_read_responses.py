"""Responses bodies as chat bodies: what recorded Codex sessions send, what the API refuses, and any JSON at all."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.read_responses import read
from proxy.errors import BadRequest
from tests.proxy.responses_bodies import AGENTS, CALL, RESULT, SPAWN, USER, Json, messages, refused, translated

CUT = orjson.loads((Path(__file__).parents[1] / "data" / "codex-cut.json").read_bytes())
TRACE = Path(os.environ.get("SLOTKEEPER_TRACES", "/work/shared/traces")) / "codex-run1.jsonl"
# --- recorded sessions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bodies",
    [
        CUT,
        pytest.param(
            [orjson.loads(line)["body"] for line in TRACE.read_bytes().splitlines()] if TRACE.exists() else [],
            marks=pytest.mark.skipif(not TRACE.exists(), reason="the recorded traces are not here"),
        ),
    ],
    ids=["cut", "whole"],
)
def test_a_codex_session_translates_append_only(bodies: list[Json]) -> None:
    before: list[Json] = []
    tools = None
    for body in bodies:
        found = read(body, {})
        assert found.body["messages"][: len(before)] == before
        assert len(found.body["messages"]) > len(before)
        before = found.body["messages"]
        assert tools in (None, orjson.dumps(found.body["tools"])), "the tools' bytes stay"
        tools = orjson.dumps(found.body["tools"])
        assert found.dropped == ("tools.namespace.description", "tools.web_search", "reasoning.summary")
        assert found.session == body["prompt_cache_key"] and found.agent is None and found.parent is None
        assert "multi_agent_v1__close_agent" in [tool["function"]["name"] for tool in found.body["tools"]]
        assert set(found.body) == {
            "messages", "model", "stream", "tools", "tool_choice", "parallel_tool_calls", "stream_options"
        }  # fmt: skip
    assert [m["role"] for m in before[:5]] == ["developer", "developer", "user", "user", "assistant"]
    reasoning, said, call, result = bodies[-1]["input"][4:8]
    assert before[4] == {
        "role": "assistant",
        "content": [{"type": "text", "text": said["content"][0]["text"]}],
        "reasoning_content": reasoning["content"][0]["text"],
        "tool_calls": [
            {
                "function": {"arguments": call["arguments"], "name": call["name"]},
                "id": call["call_id"],
                "type": "function",
            }
        ],
    }
    assert before[5] == {"role": "tool", "tool_call_id": call["call_id"], "content": result["output"]}


# --- input -------------------------------------------------------------------------------------------------------


def test_a_text_is_a_user_message_after_the_instructions() -> None:
    assert translated(instructions="Be kind.").body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]


def test_what_one_answer_said_is_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}], "id": "msg_1"}
    second = CALL | {"call_id": "c2", "namespace": "agents", "name": "spawn"}
    found = messages(USER, reasoning, said, CALL, second, RESULT, RESULT | {"call_id": "c2"})
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "tool"]
    assert found[1] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "ok"}],
        "reasoning_content": "hm",
        "tool_calls": [
            {"function": {"arguments": '{"a": 1}', "name": "look"}, "id": "c1", "type": "function"},
            {"function": {"arguments": '{"a": 1}', "name": "agents__spawn"}, "id": "c2", "type": "function"},
        ],
    }


@pytest.mark.parametrize("content", [[], None, [{"type": "reasoning_text", "text": ""}]])
def test_reasoning_without_content_says_nothing(content: object) -> None:
    empty = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": ""}
    assert messages(USER, empty, CALL, RESULT) == messages(USER, CALL, RESULT)
    assert translated(input=[USER, empty]).dropped == ()


def test_encrypted_reasoning_of_others_is_named_as_lost() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    assert translated(input=[USER, sealed]).dropped == ("input[].encrypted_content",)


def test_roles_and_the_order_of_items_stay() -> None:
    late = {"role": "developer", "content": "Be quick."}
    found = messages({"role": "system", "content": "S"}, USER, CALL, RESULT, late, USER)
    assert [m["role"] for m in found] == ["system", "user", "assistant", "tool", "developer", "user"]


def test_images_and_results_in_parts() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    result = RESULT | {"output": [{"type": "input_text", "text": "see"}, image]}
    found = messages({"role": "user", "content": [image]}, CALL, result)
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert found[0]["content"] == [shown]
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "see"}, shown]}


def test_a_refusal_is_what_the_model_said() -> None:
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert messages(USER, refusal)[1]["content"] == [{"type": "text", "text": "no"}]


@pytest.mark.parametrize(
    "items, says",
    [
        ([RESULT], "No tool call found"),
        ([USER, CALL], "No tool output found"),
        ([CALL, USER, RESULT | {"call_id": "c2"}], "No tool call found"),
        ([{"type": "item_reference", "id": "x"}], "item_reference"),
        ([{"type": "web_search_call", "id": "x"}], "web_search_call"),
        ([{"id": "x"}], "no type"),
        ([{"type": ["message"]}], "no type"),
        (["hi"], "not an object"),
        ([{"role": "tool", "content": "x"}], "'role'"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "sent as text"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "data URL"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "'text'"),
        ([{"role": "assistant", "content": [{"type": "audio"}]}], "output_text"),
        ([CALL | {"arguments": {}}, RESULT], "'arguments'"),
        ([CALL | {"namespace": 1}, RESULT], "'namespace'"),
        ([CALL, RESULT | {"output": None}], "output is missing"),
        ([{"type": "reasoning", "content": "hm"}], "reasoning_text"),
        ([{"type": "reasoning", "content": ["hm"]}], "reasoning_text"),
        ([], "empty"),
        (None, "'input' is missing"),
        ({"role": "user"}, "'input' is missing"),
    ],
)
def test_items_that_are_refused(items: object, says: str) -> None:
    error = refused(input=items)
    assert says in error.message and error.param is not None and error.param.startswith("input")


# --- any JSON ----------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TYPES = st.sampled_from(
    "message function_call function_call_output reasoning item_reference input_text input_image output_text refusal "
    "function namespace custom user assistant developer json_schema allowed_tools auto c1".split()
)
KEYS = st.sampled_from(
    "input instructions tools tool_choice text format type role content name arguments call_id output namespace "
    "reasoning "
    "effort summary include metadata client_metadata session_id stream stream_options image_url detail schema".split()
) | st.text(max_size=4)
JSON = st.recursive(
    SCALARS | TYPES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


def judged(body: Json) -> None:
    try:
        found = read(body, {})
    except BadRequest as error:
        assert error.message.endswith(".")
        return
    orjson.dumps(found.body)
    assert found.body == read(body, {}).body
    orjson.dumps(found.writer().whole({"choices": [{"message": {"content": "x"}}]}))
    assert found.writer().end()


@given(st.dictionaries(KEYS, JSON, max_size=6))
def test_any_object_is_translated_or_refused(body: Json) -> None:
    judged(body)


def spots(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, held in inner for spot in spots(held, (*path, key)))]


FULL: Json = {
    **CUT[-1],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "tools": [AGENTS, SPAWN],
}
SPOTS = spots(FULL)[1:]


@given(st.lists(st.tuples(st.sampled_from(SPOTS), st.just("drop") | JSON), min_size=1, max_size=3))
def test_a_good_body_with_something_wrong_is_translated_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    body = copy.deepcopy(FULL)
    for path, value in changes:
        holder: Any = body
        try:
            for key in path[:-1]:
                holder = holder[key]
            if value == "drop":
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    judged(body)


@st.composite
def turns(draw: st.DrawFn) -> list[list[Json]]:
    """A history in steps, each of which ends where a client asks for an answer."""
    found, n_calls = [[USER]], 0
    for kind in draw(st.lists(st.sampled_from(["calls", "answer", "note"]), max_size=6)):
        step: list[Json] = []
        if kind != "note":
            if draw(st.booleans()):
                step.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]})
            if kind == "answer" or draw(st.booleans()):
                step.append({"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "t"}]})
        if kind == "calls":
            new = range(n_calls, n_calls := n_calls + draw(st.integers(1, 3)))
            step += [CALL | {"call_id": f"c{i}", "namespace": draw(st.sampled_from([None, "n"]))} for i in new]
            step += [RESULT | {"call_id": f"c{i}"} for i in new]
        else:
            step.append({"role": draw(st.sampled_from(["user", "developer"])), "content": "more"})
        found.append(step)
    return found


@given(turns())
def test_messages_of_a_growing_history_are_only_appended(steps: list[list[Json]]) -> None:
    before: list[Json] = []
    for n in range(1, len(steps) + 1):
        found = messages(*(item for step in steps[:n] for item in step))
        assert found[: len(before)] == before and len(found) > len(before)
        before = copy.deepcopy(found)
