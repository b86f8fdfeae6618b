"""Recorded requests, read from a file of JSON lines: what a recording proxy wrote, or bodies alone.

A line is a request as an object with `body` (a JSON object), and where known `path`, `headers`, `status` and `resp`
(the model's answer: `reasoning`, `text`, `calls`), or it is a body itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from proxy.errors import UsageError

Json = dict[str, Any]
Dialect = Literal["chat", "completion", "messages", "responses"]
LONGEST_LINE = 256 * 2**20
"""Bytes of one line; a body that llama-server could still read is shorter."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One model request. `number`: its line in the file; `reply`: the assistant message it was answered with."""

    number: int
    body: Json
    dialect: Dialect
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    reply: Json | None = None
    n_bytes: int = 0


@dataclass(slots=True)
class Trace:
    """A file that is read once, from start to end. `skipped`: lines that are no answered model request."""

    file: Path
    skipped: int = 0
    n_read: int = 0

    @property
    def n_bytes(self) -> int:
        """The file's size; raises UsageError."""
        try:
            return self.file.stat().st_size
        except OSError as error:
            raise self._unreadable(error) from None

    def __iter__(self) -> Iterator[Recorded]:
        """The model requests in their order. Raises UsageError for what is no such file, naming the line."""
        number = 0
        try:
            with self.file.open("rb") as lines:
                while line := lines.readline(LONGEST_LINE + 1):
                    number += 1
                    self.n_read += len(line)
                    found = self._request(number, line) if line.strip() else None
                    self.skipped += found is None and bool(line.strip())
                    if found is not None:
                        yield found
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> UsageError:
        return UsageError(f"{self.file} cannot be read: {(error.strerror or 'unknown reason').lower()}.")

    def _request(self, number: int, line: bytes) -> Recorded | None:
        if len(line) > LONGEST_LINE:
            raise self._wrong(number, f"is longer than {LONGEST_LINE // 2**20} MB")
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            found = self._lenient(number, line)
        if not isinstance(found, dict):
            raise self._wrong(number, f"is a JSON {type(found).__name__}, not an object")
        return recorded(found, number, len(line))

    def _lenient(self, number: int, line: bytes) -> Any:
        """What only Python's parser takes: surrogates by half, NaN."""
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise self._wrong(number, "is not JSON") from None

    def _wrong(self, number: int, what: str) -> UsageError:
        return UsageError(f"{self.file}, line {number}, {what}: one JSON object a line is what is read here.")


def recorded(found: Json, number: int = 1, n_bytes: int = 0) -> Recorded | None:
    """What a line's object records; None for what is no answered model request."""
    is_wrapped = "body" in found
    body = found["body"] if is_wrapped else found
    if not isinstance(body, dict) or not _is_answered(found if is_wrapped else {}):
        return None
    path = found["path"] if is_wrapped and isinstance(found.get("path"), str) else ""
    dialect = dialect_of(path, body)
    if dialect is None:
        return None
    headers = found.get("headers") if is_wrapped else None
    names = headers if isinstance(headers, dict) else {}
    return Recorded(
        number=number,
        body=body,
        dialect=dialect,
        path=path,
        headers={str(k).lower(): v for k, v in names.items() if isinstance(v, str)},
        reply=_reply(found.get("resp")) if is_wrapped else None,
        n_bytes=n_bytes,
    )


def dialect_of(path: str, body: Json) -> Dialect | None:
    """Whose shapes a body has; None for what is no model request."""
    path = path.partition("?")[0].rstrip("/")
    if path.endswith("/count_tokens"):
        return None
    if path.endswith("/messages"):
        return "messages" if "messages" in body else None
    if isinstance(body.get("input"), list | str) and "messages" not in body:
        return None if path.endswith(("/embeddings", "/rerank")) else "responses"
    if isinstance(body.get("messages"), list):
        is_messages = not path and ("system" in body or _has_blocks(body["messages"]))
        return "messages" if is_messages else "chat"
    return "completion" if "prompt" in body else None


def _has_blocks(messages: list[Any]) -> bool:
    """Calls and results as parts of a content are Anthropic's."""
    contents = (m.get("content") for m in messages if isinstance(m, dict))
    parts = (p for content in contents if isinstance(content, list) for p in content if isinstance(p, dict))
    return any(p.get("type") in ("tool_use", "tool_result") for p in parts)


def _is_answered(found: Json) -> bool:
    """Refused requests (status 400 and above) were not processed."""
    status = found.get("status")
    return not isinstance(status, int) or status < 400


def _reply(resp: Any) -> Json | None:
    """The recorded answer as an assistant message."""
    if not isinstance(resp, dict):
        return None
    text, reasoning, calls = resp.get("text"), resp.get("reasoning"), resp.get("calls")
    message: Json = {"role": "assistant", "content": text if isinstance(text, str) else ""}
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    known = [call for call in (calls if isinstance(calls, list) else []) if isinstance(call, dict)]
    if known:
        message["tool_calls"] = [_call(call) for call in known]
    return message


def echoed(dialect: Dialect, reply: Json) -> list[Json]:
    """An assistant message as a client of a dialect that changes nothing would send it back: messages, or items."""
    text, reasoning = reply["content"], reply.get("reasoning_content")
    calls = [call["function"] for call in reply.get("tool_calls", ())]
    if dialect == "messages":
        parts: list[Json] = [{"type": "thinking", "thinking": reasoning}] if reasoning else []
        parts += [{"type": "text", "text": text}] if text else []
        return [{"role": "assistant", "content": [*parts, *map(_tool_use, calls)]}]
    if dialect != "responses":
        return [reply]
    items: list[Json] = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]}]
    items = items if reasoning else []
    items += [{"role": "assistant", "content": [{"type": "output_text", "text": text}]}] if text else []
    return [*items, *({"type": "function_call", **call} for call in calls)]


def _tool_use(function: Json) -> Json:
    try:
        given = json.loads(function["arguments"])
    except ValueError:
        given = function["arguments"]
    return {"type": "tool_use", "name": function["name"], "input": given}


def _call(call: Json) -> Json:
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    arguments = inner.get("arguments", inner.get("args", inner.get("input", "")))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": inner.get("name", ""), "arguments": text},
    }
