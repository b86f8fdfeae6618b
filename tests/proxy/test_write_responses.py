"""Every sequence of chunks that the engine can send becomes a valid Responses stream and says what the whole says."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.errors import EngineBroken
from llamacpp.sse import EventSplitter
from llamacpp.wire import assemble
from proxy.api.read_responses import read
from proxy.api.write_responses import error_body
from proxy.errors import BadRequest, EngineAnswered, PoolExceeded, SlotkeeperError
from tests.proxy.responses_chunks import (
    BODY,
    ROLE,
    SPOKEN,
    TIMINGS,
    Json,
    answers,
    called,
    chunk,
    ending,
    writer,
    written,
)
from tests.proxy.responses_parser import parse_response, parse_stream


def test_reasoning_text_and_calls_in_the_order_that_codex_waits_for() -> None:
    chunks = [
        ROLE,
        chunk({"reasoning_content": "hm"}),
        chunk({"reasoning_content": "m"}),
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}),
        chunk(called(0, "c1", "look", '{"a"')),
        chunk(called(0, arguments=":1}")),
        chunk(called(1, "c2", "agents__spawn", "")),
        chunk(called(1, arguments="{}")),
        *ending("tool_calls"),
    ]
    stream = parse_stream(written(chunks))
    assert stream.kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    reasoning, message, look, spawn = stream.response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert reasoning["summary"] == [] and reasoning["encrypted_content"] == ""
    assert message["content"][0]["text"] == "Hello"
    assert (look["call_id"], look["name"], look["arguments"]) == ("c1", "look", '{"a":1}')
    assert "namespace" not in look
    assert (spawn["namespace"], spawn["name"], spawn["call_id"]) == ("agents", "spawn", "c2")


def test_usage_and_timings_are_the_engines() -> None:
    response = parse_stream(written([ROLE, chunk({"content": "x"}), *ending()])).response
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 37,
    }
    without_usage = [ROLE, chunk({"content": "x"}), chunk({}, "stop", timings=TIMINGS)]
    assert parse_stream(written(without_usage)).response["usage"] == response["usage"]
    last = written(without_usage).rstrip().rsplit(b"data: ", 1)[1]
    assert orjson.loads(last)["timings"] == TIMINGS


def test_an_answer_repeats_its_request() -> None:
    response = parse_stream(written([ROLE, *ending()])).response
    assert response["metadata"] == {"a": "b"}
    assert [tool["type"] for tool in response["tools"]] == [
        "function",
        "namespace",
    ]  # what the engine cannot is left out
    assert response["tool_choice"] == "auto" and response["truncation"] == "disabled"
    assert response["created_at"] == 1700000000 and response["model"] == "m"


@pytest.mark.parametrize("finish, reason", [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_a_cut_answer_is_incomplete_and_so_is_what_it_was_cut_in(finish: str, reason: str) -> None:
    chunks = [ROLE, chunk({"content": "a"}), chunk(called(0, "c1", "look", '{"a"')), *ending(finish)]
    stream = parse_stream(written(chunks))
    assert stream.kinds[-1] == "response.incomplete"
    assert stream.response["incomplete_details"] == {"reason": reason}
    assert [item["status"] for item in stream.response["output"]] == ["completed", "incomplete"]
    assert writer().whole(assemble("chat", chunks))["output"] == [
        item | {"status": status}
        for item, status in zip(stream.response["output"], ("completed", "incomplete"), strict=True)
    ]


def test_a_name_that_grows_is_announced_once_whole() -> None:
    chunks = [
        ROLE,
        chunk(called(0, "c1", "lo")),
        chunk(called(0, "c1", "look")),
        chunk(called(0, arguments="{}")),
        *ending("tool_calls"),
    ]
    (call,) = parse_stream(written(chunks)).response["output"]
    assert call["name"] == "look"


def test_a_call_without_arguments_or_id_is_announced_all_the_same() -> None:
    chunks = [ROLE, chunk(called(0, name="look")), chunk(called(1, name="look")), *ending("tool_calls")]
    first, second = parse_stream(written(chunks)).response["output"]
    assert first["call_id"] and second["call_id"] and first["call_id"] != second["call_id"]
    assert first["arguments"] == ""


def test_arguments_that_go_on_after_a_text_stay_one_call() -> None:
    chunks = [
        ROLE,
        chunk(called(0, "c1", "look", "{")),
        chunk({"content": "so"}),
        chunk(called(0, arguments="}")),
        *ending("tool_calls"),
    ]
    call, message = parse_stream(written(chunks)).response["output"]
    assert call["arguments"] == "{}" and message["content"][0]["text"] == "so"


def test_progress_and_timings_of_tokens_are_shown_where_llama_server_shows_them() -> None:
    progress = {"total": 9, "cache": 1, "processed": 4, "time_ms": 1}
    made = writer()
    raw = made.feed({**ROLE, "prompt_progress": progress}) + made.feed({**ROLE, "prompt_progress": progress})
    raw += made.feed(chunk({"content": "a"}, timings=TIMINGS)) + b"".join(map(made.feed, ending())) + made.end()
    assert parse_stream(raw).kinds.count("response.in_progress") == 2
    events = [orjson.loads(event.partition(b"data: ")[2]) for event in raw.split(b"\n\n")[:-1]]
    assert [e["type"] for e in events if "prompt_progress" in e] == ["response.in_progress"] * 2
    assert [e["type"] for e in events if "timings" in e] == ["response.output_text.delta", "response.completed"]


def test_logprobs_are_in_deltas_and_in_the_item() -> None:
    token = {"id": 5, "token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}
    token["top_logprobs"] = [{"id": 5, "token": "a", "bytes": [97], "logprob": -0.5}]
    said = chunk({"content": "a"})
    said["choices"][0]["logprobs"] = {"content": [token]}
    raw = written([ROLE, said, *ending()])
    (message,) = parse_stream(raw).response["output"]
    assert [p["bytes"] for p in message["content"][0]["logprobs"]] == [[97]]
    whole = orjson.dumps(writer().whole(assemble("chat", [ROLE, said, *ending()])))
    assert parse_response(whole).output[0].model_dump()["content"] == message["content"]


@pytest.mark.parametrize(
    "error, code",
    [
        (PoolExceeded("The pool is full. Try later."), "server_error"),
        (BadRequest("No. Send less.", param="input"), "invalid_prompt"),
        (EngineAnswered(400, {"message": "long", "type": "exceed_context_size_error", "n_ctx": 5}), "invalid_prompt"),
        (EngineAnswered(500, {"message": "oops", "type": "server_error"}), "server_error"),
    ],
)
@pytest.mark.parametrize("n_fed", [0, 1, 2, 4])
def test_an_error_ends_the_stream_whatever_was_open(error: SlotkeeperError, code: str, n_fed: int) -> None:
    chunks = [ROLE, chunk({"content": "a"}), chunk({"reasoning_content": "b"}), chunk(called(0, "c", "look", "{"))]
    made = writer()
    raw = b"".join([made.feed(c) for c in chunks[:n_fed]]) + made.error(error)
    response = parse_stream(raw).response
    assert response["status"] == "failed"
    assert response["error"]["code"] == code and response["error"]["message"] == error.message
    assert response["error"]["source"] == error.source
    assert len(response["output"]) == max(0, n_fed - 2)


def test_an_answer_without_an_end_is_a_failure() -> None:
    stream = parse_stream(written([ROLE, chunk({"content": "a"})]))
    assert stream.kinds[-1] == "response.failed"


def test_an_error_body_is_the_dialects_with_its_source() -> None:
    body = orjson.loads(error_body(BadRequest("No. Send less.", param="input")))
    assert body["source"] == "slotkeeper"
    assert body["error"]["param"] == "input" and body["error"]["type"] == "invalid_request_error"


# --- whatever the engine says ------------------------------------------------------------------------------------


def said(output: list[Json]) -> tuple[str, str, list[tuple[str, Any, str, str]]]:
    """What the items say, however they are cut into items."""
    text = {"message": "", "reasoning": ""}
    calls = []
    for item in output:
        if item["type"] == "function_call":
            calls.append((item["name"], item.get("namespace"), item["arguments"], item["call_id"][:1]))
        else:
            text[item["type"]] += item["content"][0]["text"]
    return text["reasoning"], text["message"], calls


@given(answers())
def test_every_answer_is_a_valid_stream_and_says_what_the_whole_says(chunks: list[Json]) -> None:
    stream = parse_stream(written(chunks))
    whole = writer().whole(assemble("chat", chunks))
    parsed = parse_response(orjson.dumps(whole))
    assert parsed.status == stream.response["status"]
    assert said(whole["output"]) == said(stream.response["output"])
    assert whole["usage"] == stream.response["usage"] and whole["id"] == stream.id
    assert {k: whole[k] for k in ("tools", "metadata", "text")} == {
        k: stream.response[k] for k in ("tools", "metadata", "text")
    }


@given(answers())
def test_the_same_chunks_give_the_same_bytes(chunks: list[Json]) -> None:
    assert written(chunks) == written(chunks)


@given(answers())
def test_a_history_of_an_answer_is_the_message_that_the_engine_made(chunks: list[Json]) -> None:
    """What a client sends back of an answer is, for the engine, what it said."""
    output = parse_stream(written(chunks)).response["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "r"}
        for item in output
        if item["type"] == "function_call"
    ]
    again = read({**BODY, "input": [{"role": "user", "content": "hi"}, *output, *results]}, {}).body["messages"]
    made = assemble("chat", chunks)["choices"][0]["message"]
    if not output:
        assert len(again) == 1
        return
    back = again[1]
    assert back.get("reasoning_content", "") == made.get("reasoning_content", "")
    assert "".join(part["text"] for part in back.get("content", ())) == made["content"]
    calls = [call["function"] for call in back.get("tool_calls", ())]
    assert calls == [call["function"] for call in made.get("tool_calls", ())]
    assert [call["id"] for call in made.get("tool_calls", ()) if "id" in call] == [
        call["id"]
        for call, engines in zip(back.get("tool_calls", ()), made.get("tool_calls", ()), strict=True)
        if "id" in engines
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from("id created model choices usage timings prompt_progress".split())


@given(st.dictionaries(NAMES, JSON), st.sampled_from(["delta", "message", "finish_reason", "logprobs"]), JSON)
def test_nonsense_from_the_engine_is_an_engine_error_and_nothing_else(beside: Json, name: str, value: object) -> None:
    choice = {"index": 0, "delta": {"content": "x"}, "message": {"content": "x"}, name: value}
    for found in (beside, chunk({}) | {"choices": [choice]}, chunk({"tool_calls": value, "content": value})):
        made = writer()
        with contextlib.suppress(EngineBroken):
            made.feed(found)
            made.end()
        with contextlib.suppress(EngineBroken):
            writer().whole(found)


@given(st.data())
def test_events_survive_being_split_at_any_byte(data: st.DataObject) -> None:
    raw = written(SPOKEN)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    splitter = EventSplitter()
    events = [e for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) for e in splitter.feed(raw[a:b])]
    assert splitter.rest() == b"" and b"".join(events) == raw
    assert parse_stream(b"".join(events)).kinds[-1] == "response.completed"
