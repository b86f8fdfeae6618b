"""A chat's messages, as far as llama-server has to be able to read them: its own failures (500) are told as mistakes of
the client (400), or made good where the meaning is plain."""

from __future__ import annotations

from typing import Any

from proxy.api.dialect import Json
from proxy.errors import BadRequest

NO_NULLS = ("reasoning_content", "name", "tool_call_id")
"""Fields whose null llama-server fails on (common/chat.cpp, common_chat_msgs_parse_oaicompat: "type must be string, but
is null"). Clients that write out every field of their types send it where there is none."""


def checked(body: Json) -> Json:
    """The body with messages that an engine can read. Raises BadRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("'messages' is missing or not a list. Send at least one message.", param="messages")
    if not messages:
        raise BadRequest("'messages' is empty. Send at least one message.", param="messages")
    for i, message in enumerate(messages):
        _check(message, i)
    if not isinstance(body.get("tools") or [], list):
        raise BadRequest("'tools' is not a list. Send a list of functions, or none.", param="tools")
    return {**body, "messages": list(map(_without_nulls, messages))} if any(map(_has_null, messages)) else body


def _check(message: Any, i: int) -> None:
    if not isinstance(message, dict):
        raise BadRequest("'messages' holds something that is not an object.", param="messages")
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{i}] has no 'role', or one that is not a text. Name one.", param="messages")
    if not isinstance(message.get("tool_calls") or [], list):
        raise BadRequest(f"'tool_calls' of messages[{i}] is not a list. Send a list.", param="messages")


def _has_null(message: Json) -> bool:
    return any(name in message and message[name] is None for name in NO_NULLS)


def _without_nulls(message: Json) -> Json:
    return {name: value for name, value in message.items() if value is not None or name not in NO_NULLS}
