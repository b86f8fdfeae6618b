"""No field of a client's is lost silently: it is refused, or goes to the engine, or is named among those dropped."""

import copy
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from proxy.api.messages_tools import MOST_DROPPED
from proxy.api.read import SLOT_FIELDS, Told, read
from proxy.errors import BadRequest
from proxy.lines import Identity
from tests.wire.bodies import GOOD
from tests.wire.dialects import MESSAGES, RESPONSES
from tests.wire.wire import CHAT

Json = dict[str, Any]
DIALECTS = {CHAT: "chat", MESSAGES: "messages", RESPONSES: "responses"}
TEXT = {"type": "text", "text": "t"}
MORE_BLOCKS = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}},
    {"type": "search_result", "title": "t", "source": "s", "content": [TEXT]},
    {"type": "document", "source": {"type": "content", "content": [TEXT]}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}},
    {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "z", "input_schema": {}}}},
]
MORE_PARTS = [{"type": "input_image", "image_url": "data:image/png;base64,aa"}]
FREE = {("client_metadata",), ("system", 0, "cache_control")}
"""Objects whose fields are the client's own, or have no effect as a whole."""


def good(path: str) -> Json:
    """A body that uses as much of its dialect as there is."""
    body = copy.deepcopy(GOOD[path])
    if path == MESSAGES:
        body["messages"][0]["content"] += copy.deepcopy(MORE_BLOCKS)
        body["messages"][1]["content"].append({"type": "compaction", "content": "c"})
        body["output_config"]["format"] = {"type": "json_schema", "schema": {"type": "object"}}
    if path == RESPONSES:
        body["input"][1]["content"] += MORE_PARTS
        body["input"][3]["content"].append({"type": "refusal", "refusal": "x"})
        body["text"]["format"] = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
        body["tools"].pop()  # no function: dropped whole, and named
    return body


def objects(node: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a JSON object lies in `node`."""
    if isinstance(node, dict):
        yield at
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from objects(value, (*at, key))


def is_lost(path: str, body: Json) -> bool:
    """Whether nobody hears of the field `fld`, whose value is `val`."""
    told = Told()
    try:
        found = read(DIALECTS[path], path, orjson.dumps(body), Identity("t"), told)  # type: ignore[arg-type]
    except BadRequest:
        return False
    return b'"val"' not in orjson.dumps(found.body).replace(b"\\", b"") and not any("fld" in n for n in told.dropped)


@pytest.mark.parametrize("path", DIALECTS)
def test_unknown_fields_anywhere(path: str) -> None:
    """Of the body, of messages, blocks, parts, sources, tools."""
    whole = good(path)
    assert not is_lost(path, whole | {"fld": "val"})
    lost = []
    for at in objects(whole):
        body = copy.deepcopy(whole)
        node: Any = body
        for key in at:
            node = node[key]
        node["fld"] = "val"
        if at not in FREE and is_lost(path, body):
            lost.append(at)
    assert lost == []


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("name", SLOT_FIELDS)
def test_fields_about_slots(path: str, name: str) -> None:
    """They are our business: never passed on, and said to be dropped."""
    told = Told()
    found = read(DIALECTS[path], path, orjson.dumps(GOOD[path] | {name: 3}), Identity("t"), told)  # type: ignore[arg-type]
    assert name in told.dropped and name not in found.body


def test_what_responses_do_not_know() -> None:
    """One answer is all there is, and `messages` are another dialect's; one choice asks for nothing."""
    told = Told()
    read("responses", RESPONSES, orjson.dumps({"input": "a", "n": 2, "messages": [5]}), Identity("t"), told)
    assert sorted(told.dropped) == ["messages", "n"]
    told = Told()
    read("responses", RESPONSES, orjson.dumps({"input": "a", "n": 1}), Identity("t"), told)
    assert told.dropped == []


def test_as_many_as_are_told() -> None:
    """A body of nothing but strange names does not fill the log's work."""
    told = Told()
    item = {"role": "user", "content": "a"} | {f"k{i}": 1 for i in range(1000)}
    read("responses", RESPONSES, orjson.dumps({"input": [item]}), Identity("t"), told)
    assert len(told.dropped) == MOST_DROPPED
