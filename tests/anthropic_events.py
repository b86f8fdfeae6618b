"""A strict reader of Anthropic's event stream: the SDK's models, the order of events, no unknown field."""

import json
from typing import Any

import orjson
from anthropic import types
from anthropic.lib.streaming._messages import accumulate_event
from pydantic import BaseModel

MODELS: dict[str, type[BaseModel]] = {
    "message_start": types.RawMessageStartEvent,
    "content_block_start": types.RawContentBlockStartEvent,
    "content_block_delta": types.RawContentBlockDeltaEvent,
    "content_block_stop": types.RawContentBlockStopEvent,
    "message_delta": types.RawMessageDeltaEvent,
    "message_stop": types.RawMessageStopEvent,
}
DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def strictly(model: type[BaseModel], data: Any) -> Any:
    """`data` as `model`, without conversions and without fields that the schema does not know."""
    found = model.model_validate(data, strict=True)
    _no_extras(found)
    return found


def _no_extras(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} does not know {value.model_extra}"
        for name in value.model_fields_set:
            _no_extras(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            _no_extras(one)


def split(stream: bytes) -> list[dict[str, Any]]:
    """The events' data; each event is `event: TYPE`, `data: {...}` and a blank line, and nothing else."""
    assert stream.endswith(b"\n\n") or not stream
    found = []
    for event in stream.split(b"\n\n")[:-1]:
        first, second = event.split(b"\n")
        assert first.startswith(b"event: ") and second.startswith(b"data: ")
        data = json.loads(second[6:])
        assert data["type"].encode() == first[7:]
        found.append(data)
    return found


def read(stream: bytes) -> types.Message:
    """The message that a whole stream makes, put together by the SDK. Fails for any wrong event or order."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    kind: str | None = None
    n_blocks, is_ended, is_stopped = 0, False, False
    for data in split(stream):
        assert not is_stopped, "an event after message_stop"
        if data["type"] == "ping":
            assert data == {"type": "ping"} and message is not None
            continue
        event = strictly(MODELS[data["type"]], data)
        if data["type"] == "message_start":
            assert message is None and event.message.content == [] and event.message.stop_reason is None
        elif data["type"] == "content_block_start":
            assert message is not None and kind is None and not is_ended and data["index"] == n_blocks
            kind = data["content_block"]["type"]
            n_blocks += 1
        elif data["type"] == "content_block_delta":
            assert kind is not None and data["index"] == n_blocks - 1
            assert data["delta"]["type"] in DELTAS[kind]
        elif data["type"] == "content_block_stop":
            assert kind is not None and data["index"] == n_blocks - 1
            kind = None
        elif data["type"] == "message_delta":
            assert message is not None and kind is None and not is_ended
            is_ended = True
        else:
            assert is_ended
            is_stopped = True
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    assert is_stopped, "no message_stop"
    return strictly(types.Message, orjson.loads(message.to_json()))
