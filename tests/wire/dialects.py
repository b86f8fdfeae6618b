"""What the wire tests of the other dialects share: a body, the parser of each, the error in an answer."""

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import orjson
from pydantic import TypeAdapter

from tests import anthropic_events
from tests.anthropic_events import split
from tests.proxy import responses_parser

Json = dict[str, Any]
MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
BODIES: dict[str, Json] = {
    MESSAGES: {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "fake", "max_output_tokens": 4, "input": "hi"},
}
PARSERS: dict[str, Callable[[bytes], Any]] = {
    MESSAGES: anthropic_events.read,
    RESPONSES: responses_parser.parse_stream,
}
ERROR: TypeAdapter[Any] = TypeAdapter(anthropic.types.ErrorResponse)


def said(path: str, raw: bytes) -> str:
    """The text of a whole stream, by its strict parser."""
    found = PARSERS[path](raw)
    if path == MESSAGES:
        return "".join(block.text for block in found.content if block.type == "text")
    return "".join(
        part["text"] for item in found.response["output"] if item["type"] == "message" for part in item["content"]
    )


def error_of(path: str, answer: httpx.Response) -> Json:
    """The one error in an answer, in the shape of its dialect: a body, or the last event of a stream that had begun."""
    if answer.headers["content-type"].startswith("application/json"):
        assert answer.status_code >= 400
        return _error(path, answer.json())
    assert answer.status_code == 200
    assert b"[DONE]" not in answer.content
    if path == RESPONSES:
        stream = responses_parser.parse_stream(answer.content)
        assert stream.kinds[-1] == "response.failed"
        failed: Json = stream.response["error"]
        return failed
    events = split(answer.content)
    assert [event["type"] for event in events].count("error") == 1 and "message_stop" not in str(events)
    return _error(path, events[-1])


def _error(path: str, body: Json) -> Json:
    """The error of an error body, which has its dialect's shape."""
    error: Json = body["error"]
    assert body["source"] == error["source"]
    if path == RESPONSES or path.startswith("/v1/chat"):
        assert error.keys() >= {"message", "type", "param", "code"} and "type" not in body
    else:
        # Anthropic's own model, which knows each of its types.
        ERROR.validate_json(orjson.dumps(body))
        assert body["type"] == "error"
    return error
