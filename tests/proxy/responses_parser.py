"""A strict parser of Responses events and answers: the SDK's own models, no field that they do not know, and the order
of events that the API keeps to. Raises AssertionError or pydantic.ValidationError."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import orjson
from openai import BaseModel
from openai.types.responses import Response, ResponseStreamEvent

Json = dict[str, Any]

OURS = ("timings", "prompt_progress", "source", "n_ctx", "n_prompt_tokens")
"""llama-server's and Slotkeeper's own fields."""
MODELS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}
LAST = ("response.completed", "response.incomplete", "response.failed")


def parse_response(encoded: bytes) -> Response:
    response = Response.model_validate_json(encoded, strict=True)
    _known(response, "response")
    return response


@dataclass
class Stream:
    """What a client knows when it has read all events. `done`: items by output index."""

    kinds: list[str] = field(default_factory=list)
    opened: dict[int, Json] = field(default_factory=dict)
    parts: dict[int, str] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    done: dict[int, Json] = field(default_factory=dict)
    active: int | None = None
    response: Json = field(default_factory=dict)
    id: str = ""


def parse_stream(raw: bytes) -> Stream:
    """Whole events of one answer, from response.created to its last event."""
    assert raw.endswith(b"\n\n")
    stream = Stream()
    for number, event in enumerate(raw[:-2].split(b"\n\n")):
        name, _, data = event.partition(b"\n")
        assert name.startswith(b"event: ") and data.startswith(b"data: ") and b"\n" not in data
        found = orjson.loads(data[6:])
        assert found["type"] == name[7:].decode()
        assert found["sequence_number"] == number
        _known(MODELS[found["type"]].model_validate_json(data[6:], strict=True), found["type"])
        _take(stream, found)
    assert stream.kinds[:2] == ["response.created", "response.in_progress"]
    assert stream.kinds[-1] in LAST
    assert not set(LAST) & set(stream.kinds[:-1])
    return stream


def _take(stream: Stream, event: Json) -> None:
    kind: str = event["type"]
    stream.kinds.append(kind)
    if "response" in event:
        _take_response(stream, event)
    elif kind == "response.output_item.added":
        _take_added(stream, event)
    elif kind == "response.content_part.added":
        _check_item(stream, event)
        assert event["output_index"] not in stream.parts
        stream.parts[event["output_index"]] = event["part"]["type"]
        assert event["part"]["text"] == ""
    elif kind.endswith(".delta"):
        _check_item(stream, event)
        _check_open(stream, event)
        assert event["delta"] != ""
        stream.texts[event["output_index"]].append(event["delta"])
    elif kind == "response.output_item.done":
        _take_done(stream, event)
    else:
        _take_text_done(stream, event)


def _take_response(stream: Stream, event: Json) -> None:
    response = event["response"]
    stream.id = stream.id or response["id"]
    assert response["id"] == stream.id
    status = {"created": "in_progress"}.get(event["type"][9:], event["type"][9:])
    assert response["status"] == status
    if event["type"] not in LAST:
        assert response["output"] == [] and response["usage"] is None
        return
    stream.response = response
    assert response["output"] == [stream.done[i] for i in sorted(stream.done)]
    assert (response["error"] is not None) == (status == "failed")
    assert (response["incomplete_details"] is not None) == (status == "incomplete")
    if status != "failed":
        assert sorted(stream.done) == sorted(stream.opened) == list(range(len(stream.opened)))
    ids = [item["id"] for item in stream.opened.values()]
    assert len(set(ids)) == len(ids)


def _take_added(stream: Stream, event: Json) -> None:
    index, item = event["output_index"], event["item"]
    assert index == len(stream.opened)
    assert item["status"] == "in_progress"
    assert item.get("content", []) == [] and item.get("arguments", "") == ""
    stream.opened[index] = item
    stream.texts[index] = []
    if item["type"] != "function_call":
        assert stream.active is None, "Codex: a text within another item"
        stream.active = index


def _take_done(stream: Stream, event: Json) -> None:
    index, item = event["output_index"], event["item"]
    opened = stream.opened[index]
    assert index in stream.finished and index not in stream.done
    assert item["status"] in ("completed", "incomplete")
    for name in ("id", "type", "role", "name", "namespace", "call_id"):
        assert item.get(name) == opened.get(name)
    text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    assert text == "".join(stream.texts[index])
    assert stream.active in (None, index), "Codex: any item's end closes the active one"
    stream.active = None
    stream.done[index] = item


def _take_text_done(stream: Stream, event: Json) -> None:
    _check_item(stream, event)
    index = event["output_index"]
    whole = "".join(stream.texts[index])
    kind = event["type"]
    if kind == "response.content_part.done":
        assert index in stream.finished
        assert event["part"]["type"] == stream.parts[index] and event["part"]["text"] == whole
        return
    assert index not in stream.finished
    if kind == "response.function_call_arguments.done":
        assert event["arguments"] == whole
    else:
        assert kind in ("response.output_text.done", "response.reasoning_text.done")
        assert event["text"] == whole
    stream.finished.add(index)


def _check_item(stream: Stream, event: Json) -> None:
    assert stream.opened[event["output_index"]]["id"] == event["item_id"]


def _check_open(stream: Stream, event: Json) -> None:
    index = event["output_index"]
    assert index not in stream.finished
    wanted = {
        "response.output_text.delta": ("message", "output_text"),
        "response.reasoning_text.delta": ("reasoning", "reasoning_text"),
        "response.function_call_arguments.delta": ("function_call", None),
    }[event["type"]]
    assert (stream.opened[index]["type"], stream.parts.get(index)) == wanted
    if wanted[1] is not None:
        assert stream.active == index, "Codex: a delta without an active item"


def _known(found: object, where: str) -> None:
    """No model has a field that its schema does not name."""
    if isinstance(found, BaseModel):
        extra = set(found.model_extra or {}) - set(OURS)
        assert not extra, f"{where}: {extra}"
        for name in type(found).model_fields:
            # What the request said is the client's own business.
            if name not in ("tools", "tool_choice", "text", "reasoning", "metadata"):
                _known(getattr(found, name), f"{where}.{name}")
    elif isinstance(found, list):
        for i, entry in enumerate(found):
            _known(entry, f"{where}[{i}]")
