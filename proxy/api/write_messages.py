"""The engine's chat completion as an Anthropic message: events of a stream, a whole answer, errors.

Blocks of a stream follow one another: each is closed before the next begins, as Anthropic's servers do it and SDKs
expect. llama-server's own writer closes all of them at the end; the content is the same. Sources: server-task.cpp,
to_json_anthropic and to_json_anthropic_stream; the `anthropic` SDK's types.
"""

from __future__ import annotations

from typing import Any

import orjson

from llamacpp.errors import EngineBroken
from proxy.api.dialect import Json
from proxy.api.messages_tools import Tools, parsed
from proxy.errors import ContextExceeded, SlotkeeperError

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_THINKING, _TEXT = "thinking", "text"
_EMPTY = {
    _THINKING: b'{"type":"thinking","thinking":"","signature":""}',
    _TEXT: b'{"type":"text","text":"","citations":null}',
}
_DELTA = {
    _THINKING: b'{"type":"thinking_delta","thinking":',
    _TEXT: b'{"type":"text_delta","text":',
    "": b'{"type":"input_json_delta","partial_json":',
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_LOWEST_SERVER_ERROR = 500


def _worded(error: SlotkeeperError) -> str:
    """Clients of this dialect compact when they read Anthropic's words for a prompt that does not fit; Claude Code
    knows llama-server's as well (agents.md, section 4). Both are there, with the numbers."""
    told = error.details()
    if error.kind != ContextExceeded.kind or "n_prompt_tokens" not in told:
        return error.message
    return f"prompt is too long: {told['n_prompt_tokens']} tokens > {told.get('n_ctx')} maximum: {error.message}"


def error_body(error: SlotkeeperError) -> bytes:
    """An error's JSON: Anthropic's shape and types; `source` and llama-server's own fields beside them."""
    fallback = "api_error" if error.status >= _LOWEST_SERVER_ERROR else "invalid_request_error"
    code = error.code if isinstance(error.code, str) else error.kind
    inner = {
        **error.details(),
        "type": _ERROR_TYPES.get(error.status, fallback),
        "message": _worded(error),
        "param": error.param,
        "code": code,
        "source": error.source,
    }
    return orjson.dumps({"type": "error", "error": inner, "source": error.source})


class _Call:
    """One tool call of a stream. `name` may come in several, longer versions before its arguments begin."""

    __slots__ = ("arguments", "id", "judged", "name", "sent")

    def __init__(self) -> None:
        self.id = self.name = ""
        self.arguments: list[str] = []
        self.sent = self.judged = 0
        """Pieces of the arguments that went to the client, and that `is_whole` has judged."""

    def add(self, piece: Json) -> None:
        """Takes a delta in."""
        function = piece.get("function") or {}
        self.id = _str(piece.get("id")) or self.id
        if not self.sent:
            self.name = _str(function.get("name")) or self.name
        if arguments := _str(function.get("arguments")):
            self.arguments.append(arguments)

    def is_object(self) -> bool:
        """Whether the arguments begin as a JSON object."""
        return "".join(self.arguments).lstrip()[:1] == "{"

    def is_whole(self) -> bool:
        """Whether the arguments are complete JSON; each state of them is parsed once."""
        if self.judged == len(self.arguments):
            return False
        self.judged = len(self.arguments)
        return parsed("".join(self.arguments)) is not None


class MessagesWriter:
    """proxy.api.dialect.Writer for one answer. `stops`: the client's own stop sequences."""

    __slots__ = (
        "_calls", "_delta", "_done", "_finish", "_id", "_index", "_key", "_model", "_pending", "_start", "_stops",
        "_tools", "_usage", "_word",
    )  # fmt: skip

    def __init__(self, tools: Tools, stops: frozenset[str] = frozenset()) -> None:
        self._tools, self._stops = tools, stops
        self._start = False
        self._id = self._model = ""
        self._usage = {**_prompt(0, 0), "output_tokens": 0}
        self._finish: str | None = None
        self._word: str | None = None
        self._index = -1
        self._key: str | int | None = None
        """The open block: thinking, text, or a tool call's number. `_delta`: what its delta events begin with."""
        self._delta = b""
        self._calls: dict[int, _Call] = {}
        self._done: set[int] = set()
        self._pending: list[tuple[str | int, list[str]]] = []
        """Blocks that wait until the open tool call is complete. No engine has been seen to need it."""

    def progress(self, total: int, cached: int) -> None:
        """What the engine said of the prompt before its first token, for message_start; in tokens."""
        self._usage |= _prompt(total, cached)

    def feed(self, chunk: Json) -> bytes:
        """Events for one chunk. Raises EngineBroken for a chunk of an unknown shape."""
        try:
            out: list[bytes] = []
            if not self._id:
                self._id, self._model = _str(chunk.get("id")), _str(chunk.get("model"))
            for choice in chunk.get("choices") or ():
                if delta := choice.get("delta"):
                    self._take(delta, out)
                self._finish = choice.get("finish_reason") or self._finish
            if "timings" in chunk or "usage" in chunk or "__verbose" in chunk:
                self._figures(chunk)
            return b"".join(out)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineBroken(
                "llama-server sent a stream event of an unknown shape; the request was ended. "
                "Check that the upstream URL leads to a llama-server of a supported version."
            ) from error

    def end(self) -> bytes:
        """Closes what is open and says how the answer ended."""
        out: list[bytes] = []
        self._begin(out)
        self._close(out)
        for key, pieces in self._pending:
            self._open(key, pieces, out)
            self._close(out)
        self._pending.clear()
        reason, word = self._reason(self._finish, bool(self._calls), self._word)
        delta = {"stop_reason": reason, "stop_sequence": word}
        out.append(_event(b"message_delta", {"type": "message_delta", "delta": delta, "usage": self._usage}))
        out.append(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        return b"".join(out)

    def error(self, error: SlotkeeperError) -> bytes:
        """An error event; SDKs raise it."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def whole(self, answer: Json) -> Json:
        """The whole message, from a whole chat completion. Raises EngineBroken for one of an unknown shape."""
        try:
            return self._whole(answer)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineBroken("llama-server sent an answer of an unknown shape; send the request again.") from error

    # --- figures ----------------------------------------------------------------------------------------------------

    def _begin(self, out: list[bytes]) -> None:
        """Before the first word, not with the role: where an assistant message is continued, the engine's figures of
        the prompt come between the two."""
        if self._start:
            return
        self._start = True
        out.append(_event(b"message_start", {"type": "message_start", "message": self._message([], None, None)}))
        out.append(PING)

    def _message(self, content: list[Json], reason: str | None, word: str | None) -> Json:
        return {
            "id": f"msg_{self._id.removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": dict(self._usage),
        }

    def _figures(self, found: Json) -> None:
        """Usage, or the timings where there is none, and the stop word."""
        usage, timings = found.get("usage"), found.get("timings")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self._usage |= _prompt(usage.get("prompt_tokens"), details.get("cached_tokens"))
            self._usage["output_tokens"] = _int(usage.get("completion_tokens"))
        elif timings:
            cached = _int(timings.get("cache_n"))
            self._usage |= _prompt(cached + _int(timings.get("prompt_n")), cached)
            self._usage["output_tokens"] = _int(timings.get("predicted_n"))
        if (verbose := found.get("__verbose")) is not None:
            self._word = _str(verbose.get("stopping_word")) or None

    def _reason(self, finish: str | None, has_calls: bool, word: str | None) -> tuple[str, str | None]:
        """The stop reason and stop sequence; a template's own stop words are none of the client's."""
        if finish == "length":
            return "max_tokens", None
        if finish == "content_filter":
            return "refusal", None
        if word is not None and word in self._stops:
            return "stop_sequence", word
        return ("tool_use" if has_calls else "end_turn"), None

    # --- blocks of a stream -----------------------------------------------------------------------------------------

    def _take(self, delta: Json, out: list[bytes]) -> None:
        if any(delta.get(name) for name in ("reasoning_content", "content", "tool_calls")):
            self._begin(out)
        if reasoning := delta.get("reasoning_content"):
            self._say(_THINKING, _str(reasoning), out)
        if text := delta.get("content"):
            self._say(_TEXT, _str(text), out)
        for piece in delta.get("tool_calls") or ():
            number = _int(piece.get("index"))
            if number in self._done:
                continue  # its arguments are complete: nothing can follow but white space
            call = self._calls.setdefault(number, _Call())
            call.add(piece)
            self._say(number, "", out)

    def _say(self, key: str | int, piece: str, out: list[bytes]) -> None:
        if key == self._key:
            self._emit(key, piece, out)
            return
        waiting = next((p for p in self._pending if p[0] == key), None) if isinstance(key, int) else None
        if waiting is None and self._pending and self._pending[-1][0] == key:
            waiting = self._pending[-1]
        if waiting is None:
            self._pending.append((key, [piece]))
        else:
            waiting[1].append(piece)
        while self._pending and self._may_close():
            self._close(out)
            self._open(*self._pending.pop(0), out)

    def _may_close(self) -> bool:
        return not isinstance(self._key, int) or self._calls[self._key].is_whole()

    def _open(self, key: str | int, pieces: list[str], out: list[bytes]) -> None:
        self._key = key
        if isinstance(key, str):
            self._start_block(_EMPTY[key], _DELTA[key], out)
        for piece in pieces:
            self._emit(key, piece, out)

    def _start_block(self, block: bytes, delta: bytes, out: list[bytes]) -> None:
        self._index += 1
        at = b"%d" % self._index
        out.append(
            b'event: content_block_start\ndata: {"type":"content_block_start","index":'
            + at + b',"content_block":' + block + b"}\n\n"
        )  # fmt: skip
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":' + at + b',"delta":' + delta
        )

    def _emit(self, key: str | int, piece: str, out: list[bytes]) -> None:
        """A delta of the open block; of a call, all that has come of its arguments and was not sent yet.

        A call begins with its arguments: before them its name may still grow. Calls of deferred tools are held until
        they are complete, and arguments that are no object (a model without a grammar) are too: SDKs fail on them.
        """
        if isinstance(key, int):
            call = self._calls[key]
            if call.sent == len(call.arguments) or not call.name or call.name == self._tools.generic:
                return
            if not call.sent:
                if not call.is_object():
                    return
                self._start_call(key, call, call.name, out)
            piece = "".join(call.arguments[call.sent :])
            call.sent = len(call.arguments)
        out.append(self._delta + orjson.dumps(piece) + b"}}\n\n")

    def _start_call(self, number: int, call: _Call, name: str, out: list[bytes]) -> None:
        """The call's block, under the name that the client knows."""
        block = {"type": "tool_use", "id": self._call_id(call.id, number), "name": name, "input": {}}
        self._start_block(orjson.dumps(block), _DELTA[""], out)

    def _call_id(self, given: str, number: int) -> str:
        """The engine's own id, which agents send back; else one that no other answer has."""
        return given or f"toolu_{self._id.removeprefix('chatcmpl-')}_{number}"

    def _close(self, out: list[bytes]) -> None:
        key, self._key = self._key, None
        if key is None:
            return
        if isinstance(key, int):
            self._done.add(key)
            call = self._calls[key]
            if not call.sent:
                name, arguments = self._tools.called(call.name, "".join(call.arguments))
                self._start_call(key, call, name, out)
                if parsed(arguments) is not None:  # others are none, as with llama-server
                    out.append(self._delta + orjson.dumps(arguments) + b"}}\n\n")
        elif key == _THINKING:
            at = b"%d" % self._index
            out.append(
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
                + at + b',"delta":{"type":"signature_delta","signature":""}}\n\n'
            )  # fmt: skip
        out.append(
            b'event: content_block_stop\ndata: {"type":"content_block_stop","index":' + b"%d" % self._index + b"}\n\n"
        )

    # --- whole ------------------------------------------------------------------------------------------------------

    def _whole(self, answer: Json) -> Json:
        choice = answer["choices"][0]
        message = choice["message"]
        self._id, self._model = _str(answer.get("id")), _str(answer.get("model"))
        self._figures(answer)
        content: list[Json] = []
        if reasoning := _str(message.get("reasoning_content")):
            content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if text := _str(message.get("content")):
            content.append({"type": "text", "text": text, "citations": None})
        for i, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            name, arguments = self._tools.called(_str(function.get("name")), _str(function.get("arguments")))
            given = parsed(arguments)  # cut arguments are none, as with llama-server
            tool_id = self._call_id(_str(call.get("id")), i)
            content.append({"type": "tool_use", "id": tool_id, "name": name, "input": {} if given is None else given})
        has_calls = bool(message.get("tool_calls"))
        return self._message(content, *self._reason(choice.get("finish_reason"), has_calls, self._word))


def _event(name: bytes, data: Json) -> bytes:
    return b"event: " + name + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _prompt(total: Any, cached: Any) -> dict[str, int]:
    """Anthropic's `input_tokens` exclude what came from the cache."""
    kept = _int(cached)
    return {
        "input_tokens": max(0, _int(total) - kept),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": kept,
    }


def _int(value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, int):
        raise TypeError("a whole number expected")
    return value


def _str(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("text expected")
    return value
