"""Chat chunks as llama-server sends them, and a writer that they are fed to."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from proxy.api.read_responses import read
from proxy.api.write_responses import ResponsesWriter

Json = dict[str, Any]
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 7,
    "total_tokens": 37,
    "prompt_tokens_details": {"cached_tokens": 20},
}
TIMINGS = {"cache_n": 20, "prompt_n": 10, "prompt_ms": 1.5, "predicted_n": 7, "predicted_ms": 2.5}
TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "web_search"},
]
BODY: Json = {"model": "m", "input": "hi", "tools": TOOLS, "metadata": {"a": "b"}, "stream": True}


def writer(body: Json = BODY) -> ResponsesWriter:
    made = read(body, {}).writer()
    assert isinstance(made, ResponsesWriter)
    return made


def chunk(delta: Json | None = None, finish: str | None = None, **beside: object) -> Json:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    told = {"id": "chatcmpl-AbC", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}
    return {**told, "choices": choices, **beside}


def ending(finish: str = "stop") -> list[Json]:
    return [chunk({}, finish), chunk(usage=USAGE, timings=TIMINGS)]


def called(index: int, id: str | None = None, name: str | None = None, arguments: str | None = None) -> Json:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    call: Json = {"index": index, "function": function}
    return {"tool_calls": [call if id is None else {**call, "id": id, "type": "function"}]}


ROLE = chunk({"role": "assistant", "content": None})


def written(chunks: list[Json], body: Json = BODY) -> bytes:
    made = writer(body)
    return b"".join([made.feed(c) for c in chunks]) + made.end()


SPOKEN = [
    ROLE,
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "Hé🙂"}),
    chunk(called(0, "c1", "agents__spawn", '{"a":')),
    chunk(called(0, arguments="1}")),
    *ending("tool_calls"),
]


PIECES = st.text(min_size=1, max_size=6)
MOVES = st.one_of(
    st.tuples(st.just("reasoning"), PIECES),
    st.tuples(st.just("text"), PIECES),
    st.tuples(st.just("call"), st.sampled_from(["look", "agents__spawn", "other"])),
    st.tuples(st.just("arguments"), PIECES),
    st.tuples(st.just("nothing"), st.just("")),
)


@st.composite
def answers(draw: st.DrawFn) -> list[Json]:
    """Chunks as compute_diffs makes them: only the last call grows; a name may come again before its arguments."""
    chunks, n_calls = [ROLE], 0
    for kind, text in draw(st.lists(MOVES, max_size=12)):
        if kind == "reasoning":
            chunks.append(chunk({"reasoning_content": text}))
        elif kind == "text":
            chunks.append(chunk({"content": text}))
        elif kind == "call":
            n_calls += 1
            id = draw(st.sampled_from([f"c{n_calls}", None]))
            if draw(st.booleans()):
                chunks.append(chunk(called(n_calls - 1, id, text[:2])))
            first = draw(st.sampled_from([None, "", "{"]))
            chunks.append(chunk(called(n_calls - 1, id, text, first)))
        elif kind == "arguments" and n_calls:
            chunks.append(chunk(called(n_calls - 1, arguments=text)))
        elif kind == "nothing":
            chunks.append(chunk({}))
    finish = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))
    if draw(st.booleans()):
        return [*chunks, *ending(finish)]
    return [*chunks, chunk({}, finish, timings=TIMINGS)]
