"""Streams become the answers that were wanted whole; what only we asked for is told apart."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp.errors import EngineBroken, EngineRefused
from llamacpp.wire import Asked, Decoder, Progress, Timings, assemble, error_of, is_unasked, must_be_whole, streamed

TIMINGS = {"cache_n": 3, "prompt_n": 5, "prompt_ms": 1.5, "predicted_n": 2, "predicted_ms": 4.0}
PROGRESS = {"total": 8, "cache": 3, "processed": 5, "time_ms": 7}
USAGE = {"completion_tokens": 2, "prompt_tokens": 8, "total_tokens": 10}
HEAD = {"created": 1, "id": "chatcmpl-x", "model": "m", "system_fingerprint": "b1"}


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    """One event of a chat stream."""
    choice = {"finish_reason": finish, "index": index, "delta": delta}
    return {"choices": [choice], **HEAD, "object": "chat.completion.chunk", **more}


def piece(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One event of a /v1/completions stream."""
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice], **HEAD, "object": "text_completion", **more}


OPENING = {"role": "assistant", "content": None}
PROGRESS_CHUNK = chunk(OPENING, prompt_progress=PROGRESS)
USAGE_CHUNK = {"choices": [], **HEAD, "usage": USAGE, "timings": TIMINGS}


# --- sending ----------------------------------------------------------------------------------------------------------


def test_a_streamed_request_gets_progress_and_nothing_that_shows() -> None:
    """The client's own usage setting stays; the body given is not changed."""
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": False}}
    assert streamed(body, "chat") == {**body, "return_progress": True}
    assert "return_progress" not in body


def test_a_whole_chat_asks_for_its_usage() -> None:
    """Other stream options are kept."""
    sent = streamed({"stream": False, "stream_options": {"x": 1}}, "chat")
    assert sent["stream"] is True and sent["return_progress"] is True
    assert sent["stream_options"] == {"x": 1, "include_usage": True}
    assert "stream_options" not in streamed({}, "completion")


def test_response_fields_never_hide_the_figures() -> None:
    """Whole: applied after assembling. Streamed: the figures are added to what the client picked."""
    assert "response_fields" not in streamed({"response_fields": ["content"]}, "native")
    sent = streamed({"response_fields": ["content"], "stream": True}, "native")
    assert sent["response_fields"] == ["content", "timings"]


@pytest.mark.parametrize("odd", [None, 1, "x", [], {"a": 1}])
def test_wrong_types_are_the_engines_to_refuse(odd: object) -> None:
    """Nothing here fails over a body of wrong types."""
    body = {
        name: odd for name in ("stream", "stream_options", "return_progress", "response_fields", "logprobs", "stop")
    }
    for kind in ("chat", "completion", "native"):
        assert streamed(body, kind)["stream"] is True
        assert Asked.of(body, kind).stream is False
        must_be_whole(body, kind)


@pytest.mark.parametrize(
    ("kind", "body", "whole"),
    [
        ("chat", {"messages": [], "tools": [{}], "stop": ["x"]}, False),
        ("chat", {"logprobs": True}, True),
        ("chat", {"verbose": True}, True),
        ("chat", {"reasoning_format": "deepseek-legacy"}, True),
        ("completion", {"prompt": "x", "logprobs": 2}, False),
        ("completion", {"prompt": "x", "logprobs": 2, "stop": ["x"]}, True),
        ("completion", {"prompt": ["x", "y"]}, False),
        ("native", {"prompt": "x", "n_probs": 2}, False),
        ("native", {"prompt": "x", "return_tokens": True}, True),
        ("native", {"prompt": [1, 2, "x"]}, False),
        ("native", {"prompt": ["x"]}, False),
        ("native", {"prompt": ["x", "y"]}, True),
        ("native", {"prompt": [[1], [2]]}, True),
    ],
)
def test_must_be_whole(kind: Any, body: dict[str, Any], whole: bool) -> None:
    """What a stream does not carry has to be asked for whole."""
    assert (must_be_whole(body, kind) is not None) is whole


@pytest.mark.parametrize(
    ("body", "event", "unasked"),
    [
        ({"stream": True}, PROGRESS_CHUNK, True),
        ({"stream": True, "return_progress": True}, PROGRESS_CHUNK, False),
        ({"stream": True}, chunk({"content": "echoed"}, prompt_progress=PROGRESS), False),
        ({"stream": True}, USAGE_CHUNK, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, USAGE_CHUNK, False),
        ({"stream": True}, chunk(OPENING), False),
        ({"stream": True}, chunk({}, "stop", timings=TIMINGS), False),
    ],
)
def test_is_unasked_chat(body: dict[str, Any], event: dict[str, Any], unasked: bool) -> None:
    """Kept back is only what is there because we asked."""
    assert is_unasked(event, Asked.of(body, "chat")) is unasked


def test_is_unasked_others() -> None:
    """Progress of the other two kinds has no text; their last event bears usage and is the client's."""
    completion, native = Asked.of({"stream": True}, "completion"), Asked.of({"stream": True}, "native")
    assert is_unasked(piece("", prompt_progress=PROGRESS), completion)
    assert not is_unasked(piece("", "stop", usage=USAGE), completion)
    assert is_unasked({"content": "", "tokens": [0], "stop": False, "prompt_progress": PROGRESS}, native)
    assert not is_unasked({"content": "", "stop": True}, native)


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_decoder_follows_a_chat() -> None:
    """Progress, text, finish reason, figures, as they pass."""
    decoder = Decoder("chat")
    decoder.feed(PROGRESS_CHUNK)
    assert decoder.progress == Progress(8, 3, 5, 7.0)
    assert (decoder.n_events, decoder.finish_reason, decoder.timings) == (0, None, None)
    decoder.feed(chunk(OPENING))
    decoder.feed(chunk({"reasoning_content": "hm"}))
    decoder.feed(chunk({"content": "Hel"}))
    decoder.feed(chunk({"content": "lo"}))
    assert (decoder.text, decoder.n_events) == ("Hello", 3)
    assert decoder.message == {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    decoder.feed(chunk({}, "stop"))
    decoder.feed(USAGE_CHUNK)
    assert decoder.timings == Timings(3, 5, 1.5, 2, 4.0)
    assert (decoder.finish_reason, decoder.usage) == ("stop", USAGE)


def test_assembled_chat() -> None:
    """Fields and their order: server-task.cpp, to_json_oaicompat_chat."""
    events = [PROGRESS_CHUNK, chunk(OPENING), chunk({"content": "Hi"}), chunk({}, "length"), USAGE_CHUNK]
    whole = assemble("chat", events)
    assert list(whole) == ["choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"]
    message = {"role": "assistant", "content": "Hi"}
    assert whole["choices"] == [{"finish_reason": "length", "index": 0, "message": message}]
    assert (whole["object"], whole["usage"], whole["timings"]) == ("chat.completion", USAGE, TIMINGS)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_assembled_keeps_what_a_verbose_engine_adds(kind: Any) -> None:
    """Started with --verbose it tells the prompt in every answer, in the last event with text of a stream."""
    told = {"prompt": "<|im_start|>", "content": "", "generation_settings": {"stream": True, "seed": 1}}
    if kind == "chat":
        events = [chunk({"content": "a"}), chunk({"content": "b"}, __verbose=told), chunk({}, "stop"), USAGE_CHUNK]
    else:
        events = [piece("a"), piece("b"), piece("", "stop", __verbose=told)]
    expected = {**told, "content": "ab", "generation_settings": {"stream": False, "seed": 1}}
    assert assemble(kind, events)["__verbose"] == expected


def test_assembled_choices_by_index() -> None:
    """Whatever order their events come in."""
    events = [
        chunk({"content": "b"}, index=1),
        chunk({"content": "a"}),
        chunk({}, "stop", index=1),
        chunk({}, "length"),
        USAGE_CHUNK,
    ]
    choices = assemble("chat", events)["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]


TEXT = st.text(max_size=20)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=5), TEXT), max_size=3)


@given(TEXT, TEXT, CALLS, st.integers(1, 5))
def test_a_message_survives_any_cutting(reasoning: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    """Deltas of any size, merged, are the message."""
    deltas: list[dict[str, Any]] = [OPENING]
    deltas += [{"reasoning_content": part} for part in cut(reasoning, size)]
    deltas += [{"content": part} for part in cut(content, size)]
    for index, (name, arguments) in enumerate(calls):
        deltas.append(call_delta(index, id=f"call{index}", type="function", function={"name": name}))
        deltas += [call_delta(index, function={"arguments": part}) for part in cut(arguments, size)]
    whole = assemble("chat", [*map(chunk, deltas), chunk({}, "stop"), USAGE_CHUNK])
    expected: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        expected["reasoning_content"] = reasoning
    if calls:
        expected["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}, "id": f"call{index}"}
            for index, (name, arguments) in enumerate(calls)
        ]
    assert whole["choices"][0]["message"] == expected


def cut(text: str, size: int) -> list[str]:
    """Pieces of `size` characters."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def call_delta(index: int, **fields: Any) -> dict[str, Any]:
    """A delta with one piece of a tool call."""
    return {"tool_calls": [{"index": index, **fields}]}


def test_assembled_native_ignores_progress_and_unasked_tokens() -> None:
    """Progress events bear a token that nobody generated; tokens are shown when asked for; `stream` reads false."""
    events = [
        {"index": 0, "content": "", "tokens": [0], "stop": False, "prompt_progress": PROGRESS},
        {"index": 0, "content": "a", "tokens": [7], "stop": False},
        {"index": 0, "content": "b", "tokens": [8], "stop": False},
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "stop_type": "limit",
            "generation_settings": {"stream": True},
        },
    ]
    whole = assemble("native", events)
    assert (whole["content"], whole["tokens"], whole["generation_settings"]) == ("ab", [], {"stream": False})
    assert assemble("native", events, Asked.of({"return_tokens": True}, "native"))["tokens"] == [7, 8]
    fields = Asked.of({"response_fields": ["content", "generation_settings/stream", "content/x", "no"]}, "native")
    assert assemble("native", events, fields) == {"content": "ab", "generation_settings/stream": False}


@pytest.mark.parametrize("kind", ["chat", "completion", "native"])
def test_an_answer_without_end_is_broken(kind: Any) -> None:
    """Cut off or empty: never half an answer."""
    for events in ([], [chunk({"content": "Hi"})], [piece("Hi")], [{"content": "Hi", "stop": False}]):
        with pytest.raises(EngineBroken, match="ended before"):
            assemble(kind, events)


def test_an_error_in_the_stream_is_the_answer() -> None:
    """With the status and the body that the engine would have answered whole."""
    error = {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 8}}
    decoder = Decoder("chat")
    decoder.feed(chunk({"content": "Hi"}))
    decoder.feed(error)
    assert decoder.error == error["error"]
    with pytest.raises(EngineRefused, match="too long") as refused:
        decoder.whole()
    assert refused.value.status == 400
    assert json.loads(refused.value.body) == error


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        ({"error": {"message": "x"}}, 500, "x"),
        ({"error": {"code": 7, "message": "x"}}, 500, "x"),
        ({"error": {"code": "bad"}}, 500, "unknown error"),
        ({"error": "plain words"}, 500, "plain words"),
    ],
)
def test_error_of_odd_errors(event: object, status: int, message: str) -> None:
    """Every error has an HTTP error's status and some words."""
    found = error_of(event)
    assert found is not None
    assert (found.status, found.message) == (status, message)


@pytest.mark.parametrize("event", [{}, [], None, {"error": None}, {"error": {}}])
def test_error_of_no_error(event: object) -> None:
    """What bears no error gives none."""
    assert error_of(event) is None


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
FIELDS = (
    "choices delta content tool_calls function arguments index logprobs finish_reason usage timings error stop tokens"
)


@settings(max_examples=60)
@given(
    st.sampled_from(["chat", "completion", "native"]), st.lists(st.dictionaries(st.sampled_from(FIELDS.split()), ODD))
)
def test_nonsense_is_refused_with_a_sentence(kind: Any, events: list[dict[str, Any]]) -> None:
    """An upstream that is no llama-server never gets past our own errors."""
    try:
        whole = assemble(kind, events)
    except (EngineBroken, EngineRefused):
        return
    assert isinstance(whole, dict)


@pytest.mark.parametrize("choices", [5, ["x"], [{"delta": "x"}], [{"delta": {"content": 5}}], [{"logprobs": "x"}]])
def test_an_unknown_shape_is_named(choices: object) -> None:
    """Text that is no text, a choice that is no object."""
    with pytest.raises(EngineBroken, match="unknown shape"):
        Decoder("chat").feed({"choices": choices})


def test_negative_figures() -> None:
    """They count as nothing: counters only rise."""
    found = {"cache_n": -1, "prompt_n": -2, "prompt_ms": -1, "predicted_n": -3, "predicted_ms": -0.5}
    assert Timings.from_json(found) == Timings(0, 0, 0.0, 0, 0.0)
