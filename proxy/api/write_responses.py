"""The engine's chat completion as an OpenAI Responses answer: events in the order that Codex waits for, or one JSON.

Codex shows a text only inside an open item, takes items from `output_item.done`, and forgets which item is open when
any other ends; so a text or a piece of reasoning is closed before anything else is said. A function call stays open
until the next one begins: the engine may go on with its arguments after a text, but never with an earlier call's
(common/chat.cpp, common_chat_msg_diff::compute_diffs).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from llamacpp.errors import EngineBroken
from proxy import errors
from proxy.api.dialect import Json
from proxy.api.responses_output import (
    Event,
    FunctionCall,
    Item,
    Message,
    Reasoning,
    Status,
    logprobs_of,
    usage_of,
)

_CUT: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""finish_reason of an answer that is not whole -> incomplete_details.reason."""
_BAD_REQUEST, _SERVER_ERROR = 400, 500


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer repeats of its request, as JSON and as the same in bytes, and the tools of namespaces: flat name
    -> (namespace, name)."""

    echo: Json
    encoded: bytes
    inner: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, echo: Json, inner: Mapping[str, tuple[str, str]]) -> Asked:
        """Raises TypeError for an `echo` nested too deep to be written."""
        return cls(echo, orjson.dumps(echo), inner)


class ResponsesWriter:
    """Writes one answer (proxy.api.dialect.Writer). Ids are made of the engine's own, so they are the same in every
    event and differ between answers."""

    __slots__ = (
        "_asked",
        "_begun",
        "_block",
        "_call",
        "_call_at",
        "_created",
        "_done",
        "_finish",
        "_id",
        "_left",
        "_model",
        "_n_items",
        "_now",
        "_pending",
        "_sequence",
        "_timings",
        "_usage",
    )

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._begun = False
        self._id, self._model, self._created, self._now = "", "", 0, 0
        self._sequence = self._n_items = 0
        self._block: Message | Reasoning | None = None
        self._call: FunctionCall | None = None
        self._call_at = -1  # the engine's index of the latest call
        self._pending: tuple[str, str] | None = None  # id and name of a call that has no arguments yet
        self._done: dict[int, Json] = {}
        self._finish: str | None = None
        self._usage: Json | None = None
        self._timings: Json | None = None
        self._left: list[bytes] = []
        """Events of a chunk that turned out to be broken: what they say is said, and their numbers are taken."""

    # --- streamed -----------------------------------------------------------------------------------------------

    def feed(self, chunk: Json) -> bytes:
        """Events for one chunk; raises EngineBroken for one of an unknown shape."""
        out: list[bytes] = []
        try:
            for event in self._feed(chunk):
                out.append(event)  # one by one: what came before a failure stays
            return b"".join(out)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._left = out
            raise EngineBroken(
                "llama-server sent a stream event of an unknown shape; the request was ended. "
                "Check that the upstream URL leads to a llama-server of a supported version."
            ) from error

    def end(self) -> bytes:
        """Closes what is open and tells the outcome: response.completed or, for an answer cut short,
        response.incomplete; response.failed when the engine never said that it is done."""
        if self._finish is None:
            return self.error(
                errors.EngineFailed("The engine's answer ended before it was complete. Send the request again.")
            )
        status: Status = "incomplete" if self._finish in _CUT else "completed"
        out = list(self._close_all(status))
        head = self._head(status, self._output(), self._finish)
        out.append(self._terminal(f"response.{status}", head, {}))
        return b"".join(out)

    def error(self, error: errors.SlotkeeperError) -> bytes:
        """response.failed, with the items that were whole."""
        out = self._left if self._begun else list(self._begin({}))
        head = self._head("failed", self._output(), None)
        head["error"] = {
            "code": _code(error),
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "source": error.source,
            **error.details(),
        }
        out.append(self._terminal("response.failed", head, {"source": error.source}))
        return b"".join(out)

    def _feed(self, chunk: Json) -> Iterator[bytes]:
        if not self._begun:
            yield from self._begin(chunk)
        elif (progress := chunk.get("prompt_progress")) is not None:
            head = self._head("in_progress", [], None)
            yield self._terminal("response.in_progress", head, {"prompt_progress": progress})
        if (created := chunk.get("created")) is not None:
            self._now = int(created)
        if (usage := chunk.get("usage")) is not None:
            self._usage = dict(usage)
        if (timings := chunk.get("timings")) is not None:
            self._timings = dict(timings)
        for choice in chunk.get("choices") or ():
            yield from self._choose(choice, timings)

    def _choose(self, choice: Json, timings: Json | None) -> Iterator[bytes]:
        if (finish := choice.get("finish_reason")) is not None:
            self._finish = str(finish)
        delta = choice.get("delta")
        if not delta:
            return
        if text := delta.get("reasoning_content"):
            yield from self._say(Reasoning, _text(text), [], timings)
        if text := delta.get("content"):
            yield from self._say(Message, _text(text), logprobs_of(choice), timings)
        for call in delta.get("tool_calls") or ():
            yield from self._call_on(call, timings)

    def _say(
        self, kind: type[Message] | type[Reasoning], text: str, logprobs: list[Json], timings: Json | None
    ) -> Iterator[bytes]:
        block = self._block
        if type(block) is not kind:
            yield from self._close_block("completed")
            block = self._block = kind(self._next_id("msg" if kind is Message else "rs"), self._n_items)
            yield from self._open(block)
        yield self._delta(block, text, logprobs, timings)

    def _call_on(self, call: Json, timings: Json | None) -> Iterator[bytes]:
        """A call's name may come again, longer, before its arguments begin (compute_diffs): it is announced then."""
        yield from self._close_block("completed")
        function = call.get("function") or {}
        index = int(call.get("index", 0))
        if index != self._call_at:
            yield from self._close_call("completed")
            self._call_at, self._pending = index, ("", "")
        if self._pending is not None:
            known_id, known_name = self._pending
            self._pending = _text(call.get("id") or known_id), _text(function.get("name") or known_name)
        if arguments := function.get("arguments"):
            yield from self._announce()
            if self._call is not None:
                yield self._delta(self._call, _text(arguments), [], timings)

    def _announce(self) -> Iterator[bytes]:
        if self._pending is not None:
            call_id, name = self._pending
            self._pending = None
            self._call = self._function(call_id, name)
            yield from self._open(self._call)

    def _delta(self, item: Item, text: str, logprobs: list[Json], timings: Json | None) -> bytes:
        if not logprobs and timings is None:
            self._sequence += 1
            return item.delta(text, self._sequence - 1)
        kind, data = item.delta_data(text, logprobs)
        return self._event(kind, data if timings is None else {**data, "timings": timings})

    def _open(self, item: Item) -> Iterator[bytes]:
        self._n_items += 1
        return self._events(item.opened())

    def _close(self, item: Item, status: Status) -> Iterator[bytes]:
        self._done[item.index] = item.whole(status)
        return self._events(item.closed(status))

    def _close_block(self, status: Status) -> Iterator[bytes]:
        if self._block is not None:
            block, self._block = self._block, None
            yield from self._close(block, status)

    def _close_call(self, status: Status) -> Iterator[bytes]:
        yield from self._announce()
        if self._call is not None:
            call, self._call = self._call, None
            yield from self._close(call, status)

    def _close_all(self, status: Status) -> Iterator[bytes]:
        """Only what the answer was cut in is incomplete: a call that was followed by a text was whole."""
        call: Status = "completed" if self._block is not None else status
        yield from self._close_block(status)
        yield from self._close_call(call)

    def _begin(self, chunk: Json) -> Iterator[bytes]:
        self._name(chunk)
        self._begun = True
        head = self._head("in_progress", [], None)
        yield self._terminal("response.created", head, {})
        progress = chunk.get("prompt_progress")
        yield self._terminal("response.in_progress", head, {} if progress is None else {"prompt_progress": progress})

    def _terminal(self, kind: str, head: Json, beside: Json) -> bytes:
        """An event that bears the response itself: what the request said is joined as bytes."""
        if self._timings is not None and kind != "response.in_progress":
            beside = {**beside, "timings": self._timings}
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **beside})
        self._sequence += 1
        whole = orjson.dumps(head)[:-1] + b"," + self._asked.encoded[1:]
        return b'event: %s\ndata: %s,"response":%s}\n\n' % (kind.encode(), data[:-1], whole)

    def _event(self, kind: str, data: Json) -> bytes:
        encoded = orjson.dumps({"type": kind, "sequence_number": self._sequence, **data})
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encoded)

    def _events(self, events: Iterator[Event]) -> Iterator[bytes]:
        for kind, data in events:
            yield self._event(kind, data)

    # --- whole --------------------------------------------------------------------------------------------------

    def whole(self, answer: Json) -> Json:
        """The response of an assembled chat completion; raises EngineBroken for one of an unknown shape."""
        try:
            return self._whole(answer)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineBroken(
                "llama-server's answer has an unknown shape; check that the upstream URL leads to a llama-server of a "
                "supported version."
            ) from error

    def _whole(self, answer: Json) -> Json:
        self._name(answer)
        choice = answer["choices"][0]
        self._usage, self._timings = answer.get("usage"), answer.get("timings")
        finish = str(choice.get("finish_reason") or "stop")
        status: Status = "incomplete" if finish in _CUT else "completed"
        items = list(self._items(choice))
        output = [item.whole("completed") for item in items[:-1]] + [item.whole(status) for item in items[-1:]]
        response = self._head(status, output, finish) | self._asked.echo
        return response if self._timings is None else {**response, "timings": self._timings}

    def _items(self, choice: Json) -> Iterator[Item]:
        message = choice["message"]
        if text := message.get("reasoning_content"):
            yield self._said(Reasoning(self._next_id("rs"), self._n_items), text, [])
        if text := message.get("content"):
            yield self._said(Message(self._next_id("msg"), self._n_items), text, logprobs_of(choice))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            item = self._function(_text(call.get("id") or ""), _text(function["name"]))
            yield self._said(item, function.get("arguments") or "", [])

    def _said(self, item: Item, text: object, logprobs: list[Json]) -> Item:
        item.delta_data(_text(text), logprobs)
        self._n_items += 1
        return item

    # --- both ---------------------------------------------------------------------------------------------------

    def _name(self, told: Json) -> None:
        stem = told.get("id")
        self._id = _text(stem).removeprefix("chatcmpl-") if stem else uuid.uuid4().hex
        self._model = _text(told.get("model") or "")
        self._created = self._now = int(told.get("created") or 0)

    def _next_id(self, kind: str) -> str:
        return f"{kind}_{self._id}_{self._n_items}"

    def _function(self, call_id: str, flat: str) -> FunctionCall:
        namespace, name = self._asked.inner.get(flat, (None, flat))
        item_id = self._next_id("fc")
        return FunctionCall(item_id, self._n_items, call_id or f"call_{item_id[3:]}", name, namespace)

    def _output(self) -> list[Json]:
        return [self._done[index] for index in sorted(self._done)]

    def _head(self, status: str, output: list[Json], finish: str | None) -> Json:
        """A response without what it repeats of the request."""
        cut = _CUT.get(finish or "")
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": self._now if status == "completed" else None,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "model": self._model,
            "output": output,
            "usage": usage_of(self._usage, self._timings) if status != "in_progress" else None,
        }


def error_body(error: errors.SlotkeeperError) -> bytes:
    """The error JSON of the dialect, which is that of chat, with `source`; a prompt that does not fit has OpenAI's code
    for it."""
    if error.kind != errors.ContextExceeded.kind:
        return errors.body(error)
    found = orjson.loads(errors.body(error))
    found["error"]["code"] = "context_length_exceeded"
    return orjson.dumps(found)


def _code(error: errors.SlotkeeperError) -> str:
    """One of the published codes (openai.types.responses.ResponseError). Codex ends the turn for invalid_prompt and
    sends the request again for others."""
    return "invalid_prompt" if _BAD_REQUEST <= error.status < _SERVER_ERROR else "server_error"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text expected")
    return value
