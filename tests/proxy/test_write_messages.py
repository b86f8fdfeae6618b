"""Answers in Anthropic's dialect: every stream passes a strict parser and says what the engine said."""

import itertools
import json
from typing import Any

import orjson
import pytest
from anthropic import types
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.errors import EngineBroken
from llamacpp.wire import assemble
from proxy.api.messages_tools import Dropped, Tools, read_tools
from proxy.api.write_messages import MessagesWriter, error_body
from proxy.errors import BadRequest, ContextExceeded, EngineAnswered, EngineFailed, InternalError, Unavailable
from tests.anthropic_events import read, split, strictly

DEFERRING = read_tools(
    [{"name": "Read", "input_schema": {}}, {"name": "WebFetch", "input_schema": {}, "defer_loading": True}],
    is_announced=False,
    dropped=Dropped(),
)
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 90},
}
TIMINGS = {"cache_n": 90, "prompt_n": 10, "prompt_ms": 1.0, "predicted_n": 7, "predicted_ms": 1.0}


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat chunk as llama-server writes it (server-task.cpp, to_json_oaicompat_chat)."""
    choices = [] if delta is None else [{"finish_reason": finish, "index": 0, "delta": delta}]
    head = {"created": 1, "id": "chatcmpl-x1", "model": "m", "system_fingerprint": "b1"}
    return {"choices": choices, **head, "object": "chat.completion.chunk", **fields}


def call(index: int, arguments: str, name: str | None = None, id_: str = "") -> dict[str, Any]:
    """A delta with one piece of a tool call."""
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    piece: dict[str, Any] = {"index": index, "function": function}
    if name is not None:
        piece |= {"id": id_ or f"call_{index}", "type": "function"}
    return {"tool_calls": [piece]}


def whole_stream(deltas: list[dict[str, Any]], finish: str) -> list[dict[str, Any]]:
    """All chunks of an answer with these deltas."""
    first = chunk({"role": "assistant", "content": None})
    return [first, *(chunk(d) for d in deltas), chunk({}, finish), chunk(usage=USAGE, timings=TIMINGS)]


def stream(chunks: list[dict[str, Any]], tools: Tools = DEFERRING, **kwargs: Any) -> bytes:
    """What a writer says to them."""
    writer = MessagesWriter(tools, **kwargs)
    return b"".join([*(writer.feed(c) for c in chunks), writer.end()])


def blocks(message: types.Message) -> list[dict[str, Any]]:
    """The content as plain JSON."""
    return [orjson.loads(block.to_json()) for block in message.content]


def test_text() -> None:
    """A plain answer: usage without the cached tokens, the engine's id and model."""
    message = read(stream(whole_stream([{"content": "Hel"}, {"content": "lo"}], "stop")))
    assert blocks(message) == [{"type": "text", "text": "Hello", "citations": None}]
    assert (message.stop_reason, message.model, message.id) == ("end_turn", "m", "msg_x1")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (
        10,
        90,
        7,
    )


def test_events_come_at_once() -> None:
    """Each piece of text leaves with its chunk, and a chunk without a word says nothing."""
    writer = MessagesWriter(Tools())
    assert writer.feed(chunk({"role": "assistant", "content": None})) == b""
    assert [e["type"] for e in split(writer.feed(chunk({"content": "a"})))] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
    ]
    assert writer.feed(chunk({"content": "é\n"})) == (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
        b'{"type":"text_delta","text":"\xc3\xa9\\n"}}\n\n'
    )
    assert writer.feed(chunk({}, "stop")) == b""


def test_progress_gives_the_prompt_at_once() -> None:
    """message_start says what the engine's progress said; clients budget with it."""
    writer = MessagesWriter(Tools())
    writer.progress(100, 90)
    start = split(writer.feed(chunk({"content": "a"})))[0]
    assert start["message"]["usage"] == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 90,
        "output_tokens": 0,
    }


def test_the_prompt_of_a_continued_message() -> None:
    """llama-server tells the role before its figures of the prompt there, and the text with them."""
    writer = MessagesWriter(Tools())
    writer.feed(chunk({"role": "assistant", "content": None}))
    writer.progress(11, 10)
    start = split(writer.feed(chunk({"content": "He"}, prompt_progress={"total": 11, "cache": 10})))[0]
    assert (start["message"]["usage"]["input_tokens"], start["message"]["usage"]["cache_read_input_tokens"]) == (1, 10)
    assert (start["message"]["id"], start["message"]["model"]) == ("msg_x1", "m")


def test_timings_stand_in_for_usage() -> None:
    """A stream without a usage chunk has the figures of its timings."""
    message = read(stream([chunk({"content": "a"}), chunk({}, "stop", timings=TIMINGS)]))
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (10, 90)
    assert message.usage.output_tokens == 7


def test_thinking_text_and_parallel_calls() -> None:
    """Blocks follow one another; arguments go out as they come, once a call's name is known."""
    deltas = [
        {"reasoning_content": "hm"},
        {"content": "ok"},
        call(0, "", "Rea"),
        call(0, '{"a":', "Read"),
        call(0, "1}"),
        call(1, '{"b":2}', "Read", "second"),
    ]
    message = read(stream(whole_stream(deltas, "tool_calls")))
    assert [b["type"] for b in blocks(message)] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(b["id"], b["name"], b["input"]) for b in blocks(message)[2:]] == [
        ("call_0", "Read", {"a": 1}),
        ("second", "Read", {"b": 2}),
    ]
    assert message.stop_reason == "tool_use"


def test_a_deferred_tool_is_called_by_its_own_name() -> None:
    """The generic call becomes the tool's own, streamed in pieces or whole."""
    arguments = '{"name": "WebFetch", "arguments": {"url": "u"}}'
    deltas = [call(0, "", "call_deferred_tool"), *(call(0, piece) for piece in arguments)]
    chunks = whole_stream(deltas, "tool_calls")
    want = [{"type": "tool_use", "id": "call_0", "name": "WebFetch", "input": {"url": "u"}}]
    assert blocks(read(stream(chunks))) == want
    assert MessagesWriter(DEFERRING).whole(assemble("chat", chunks))["content"] == want


@pytest.mark.parametrize(
    ("arguments", "name", "given"),
    [
        ('{"name":"X"}', "X", {}),
        ('{"name":"X","arguments":null}', "X", {}),
        ('{"name":"X","arguments":"{\\"a\\":1}"}', "X", {"a": 1}),
        ('{"name":"","arguments":{}}', "call_deferred_tool", {"name": "", "arguments": {}}),
        ('{"arguments":{}}', "call_deferred_tool", {"arguments": {}}),
        ('{"name":"X","arguments":[1]}', "call_deferred_tool", {"name": "X", "arguments": [1]}),
        ('{"name":"X","argu', "call_deferred_tool", {}),
        ("garbage {}", "call_deferred_tool", {}),
        ("", "call_deferred_tool", {}),
    ],
)
def test_wrong_calls_of_the_generic_tool(arguments: str, name: str, given: dict[str, Any]) -> None:
    """What names no tool stays the generic call, so that the client can tell the model; nothing breaks."""
    message = read(stream(whole_stream([call(0, arguments, "call_deferred_tool")], "tool_calls")))
    assert [(b["name"], b["input"]) for b in blocks(message)] == [(name, given)]


def test_arguments_that_are_no_object() -> None:
    """What a model without a grammar says in place of arguments is none, streamed and whole: SDKs fail on it."""
    chunks = whole_stream([call(0, " not", "Read"), call(0, " {json}"), call(1, " {", "Read"), call(1, "}")], "stop")
    message = read(stream(chunks))
    assert [(b["name"], b["input"]) for b in blocks(message)] == [("Read", {}), ("Read", {})]
    assert [b["input"] for b in MessagesWriter(DEFERRING).whole(assemble("chat", chunks))["content"]] == [{}, {}]


@pytest.mark.parametrize(
    ("finish", "word", "has_call", "reason", "said"),
    [
        ("stop", None, False, "end_turn", None),
        ("stop", "END", False, "stop_sequence", "END"),
        ("stop", "<|im_end|>", False, "end_turn", None),
        ("length", None, False, "max_tokens", None),
        ("length", None, True, "max_tokens", None),
        ("tool_calls", None, True, "tool_use", None),
        ("content_filter", None, False, "refusal", None),
    ],
)
def test_stop_reasons(finish: str, word: str | None, has_call: bool, reason: str, said: str | None) -> None:
    """Why an answer ended, streamed and whole."""
    chunks = whole_stream([call(0, "{}", "Read") if has_call else {"content": "a"}], finish)
    verbose = {} if word is None else {"__verbose": {"stopping_word": word}}
    chunks[-2] |= verbose
    message = read(stream(chunks, stops=frozenset(["END"])))
    assert (message.stop_reason, message.stop_sequence) == (reason, said)
    whole = MessagesWriter(DEFERRING, frozenset(["END"])).whole(assemble("chat", chunks) | verbose)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, said)


def test_nothing_said() -> None:
    """An answer without a word, and one without a chunk, are messages all the same."""
    assert blocks(read(stream(whole_stream([], "stop")))) == []
    assert blocks(read(stream([]))) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"choices": [1]},
        {"choices": 5},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"tool_calls": ["x"]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": "0"}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": 1}}]}}]},
        {"usage": {"prompt_tokens": "many"}},
        {"id": 5},
    ],
)
def test_nonsense_of_the_engine(bad: dict[str, Any]) -> None:
    """A chunk or an answer of an unknown shape is the engine's fault, said as such."""
    with pytest.raises(EngineBroken):
        MessagesWriter(Tools()).feed(bad)
    with pytest.raises(EngineBroken):
        MessagesWriter(Tools()).whole(bad)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no", param="messages"), "invalid_request_error"),
        (ContextExceeded("long", n_prompt_tokens=9, n_ctx=4), "invalid_request_error"),
        (EngineAnswered(500, {"message": "image input is not supported", "type": "x", "code": 500}), "api_error"),
        (EngineAnswered(422, {"message": "no"}), "invalid_request_error"),
        (EngineFailed("gone"), "api_error"),
        (InternalError("ours"), "api_error"),
        (Unavailable("later"), "overloaded_error"),
    ],
)
def test_errors(error: Any, kind: str) -> None:
    """Anthropic's shape, with who failed; the same in a stream."""
    body = orjson.loads(error_body(error))
    parsed = ErrorResponse.model_validate(body, strict=True)
    told = "prompt is too long: 9 tokens > 4 maximum: long" if isinstance(error, ContextExceeded) else error.message
    assert (parsed.error.type, parsed.error.message, body["source"]) == (kind, told, error.source)
    assert split(MessagesWriter(Tools()).error(error)) == [body]


def test_a_long_prompt_keeps_its_figures() -> None:
    """Agents recognise the engine's words and numbers, and compact."""
    inner = orjson.loads(error_body(ContextExceeded("long", n_prompt_tokens=9, n_ctx=4)))["error"]
    assert (inner["code"], inner["n_prompt_tokens"], inner["n_ctx"]) == ("exceed_context_size_error", 9, 4)


# --- any answer ------------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(WORDS, st.one_of(st.integers(-9, 9), WORDS, st.lists(WORDS, max_size=2)), max_size=3)


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """`text`, cut at any places."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@st.composite
def call_deltas(draw: st.DrawFn, index: int) -> tuple[tuple[str, dict[str, Any]], list[dict[str, Any]]]:
    """One tool call: what the client is to see, and its deltas."""
    name, given = draw(st.sampled_from(["Read", "WebFetch"])), draw(ARGUMENTS)
    spaced = json.dumps(given, ensure_ascii=draw(st.booleans()))
    own = name
    if name == "WebFetch":
        own, spaced = "call_deferred_tool", f'{{"name": "WebFetch", "arguments": {spaced}}}'
    first, *rest = draw(pieces(spaced))
    return (name, given), [call(index, first, own), *(call(index, p) for p in rest)]


def shuffled(draw: st.DrawFn, runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The runs mixed, each in its own order."""
    queue = [list(run) for run in runs if run]
    mixed = []
    while queue:
        run = draw(st.sampled_from(queue))
        mixed.append(run.pop(0))
        queue = [r for r in queue if r]
    return mixed


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What an engine said, and its chunks: in its own order, or (what none has been seen to do) in any."""
    thoughts, texts = draw(st.lists(WORDS, max_size=3)), draw(st.lists(WORDS, max_size=3))
    calls = [draw(call_deltas(i)) for i in range(draw(st.integers(0, 3)))]
    runs = [[{"reasoning_content": t} for t in thoughts], [{"content": t} for t in texts], *(c[1] for c in calls)]
    deltas = shuffled(draw, runs) if draw(st.booleans()) else list(itertools.chain.from_iterable(runs))
    said = {"thinking": "".join(thoughts), "text": "".join(texts), "calls": [c[0] for c in calls]}
    return said, whole_stream(deltas, "tool_calls" if calls else "stop")


def heard(content: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of a client's message; calls by their ids, which the engine numbered."""
    calls = sorted((b for b in content if b["type"] == "tool_use"), key=lambda b: b["id"])
    return {
        "thinking": "".join(b["thinking"] for b in content if b["type"] == "thinking"),
        "text": "".join(b["text"] for b in content if b["type"] == "text"),
        "calls": [(b["name"], b["input"]) for b in calls],
    }


@given(answers())
def test_any_answer(answer: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    """Whatever the order and the cuts: a valid stream that says what the engine said, and so does the whole answer."""
    said, chunks = answer
    message = read(stream(chunks))
    assert heard(blocks(message)) == said
    whole = strictly(types.Message, MessagesWriter(DEFERRING).whole(assemble("chat", chunks)))
    assert heard(blocks(whole)) == said
    assert (whole.stop_reason, whole.usage, whole.id) == (message.stop_reason, message.usage, message.id)


@given(answers(), st.data())
def test_a_cut_answer_is_still_a_message(answer: tuple[Any, list[dict[str, Any]]], data: st.DataObject) -> None:
    """Cut by its length anywhere, even inside arguments."""
    _, chunks = answer
    kept = chunks[: data.draw(st.integers(0, len(chunks) - 2))]
    message = read(stream([*kept, chunk({}, "length")]))
    assert message.stop_reason == "max_tokens"
