"""Output items of a Responses answer while they grow: reasoning, message, function call.

Each knows its item as JSON in any state and its delta event as bytes: a delta is built by joining, for there is one for
every token. Shapes: the published schema (openai.types.responses), which llama-server's own events lack fields of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import orjson

from proxy.api.dialect import Json

Status = Literal["in_progress", "completed", "incomplete"]
Event = tuple[str, Json]
"""An event's type and its data without `type` and `sequence_number`."""


class Item(Protocol):
    """One output item. `index`: its place in `output`."""

    index: int

    def opened(self) -> Iterator[Event]:
        """The events that announce it."""
        ...

    def delta(self, text: str, sequence: int) -> bytes:
        """A whole event for a piece of it; the piece is kept."""
        ...

    def delta_data(self, text: str, logprobs: list[Json]) -> Event:
        """The same with something beside it: logprobs. Slower."""
        ...

    def closed(self, status: Status) -> Iterator[Event]:
        """The events that end it; the last one bears the item."""
        ...

    def whole(self, status: Status) -> Json:
        """The item as it is now."""
        ...


def _prefix(kind: str, place: Json) -> bytes:
    """An event up to its delta, which has to be the last field but the sequence number."""
    data = orjson.dumps({"type": kind, **place, "delta": 0})
    return b"event: %s\ndata: %s" % (kind.encode(), data[:-2])


class _Block:
    """A text in one content part of an item: what reasoning and messages have in common."""

    __slots__ = ("_place", "_prefix", "_texts", "id", "index", "logprobs")
    _delta: str
    _done: str

    def __init__(self, id: str, index: int) -> None:
        self.id, self.index = id, index
        self.logprobs: list[Json] = []
        self._texts: list[str] = []
        self._place: Json = {"item_id": id, "output_index": index, "content_index": 0}
        self._prefix = _prefix(self._delta, self._place | self._noted([]))

    def _noted(self, logprobs: list[Json]) -> Json:
        raise NotImplementedError

    def _part(self, text: str) -> Json:
        raise NotImplementedError

    def _item(self, content: list[Json], status: Status) -> Json:
        raise NotImplementedError

    def opened(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self.index, "item": self._item([], "in_progress")}
        yield "response.content_part.added", {**self._place, "part": self._part("")}

    def delta(self, text: str, sequence: int) -> bytes:
        self._texts.append(text)
        return b'%s%s,"sequence_number":%d}\n\n' % (self._prefix, orjson.dumps(text), sequence)

    def delta_data(self, text: str, logprobs: list[Json]) -> Event:
        self._texts.append(text)
        self.logprobs += logprobs
        return self._delta, {**self._place, **self._noted([_short(p) for p in logprobs]), "delta": text}

    def closed(self, status: Status) -> Iterator[Event]:
        text = "".join(self._texts)
        yield self._done, {**self._place, **self._noted([_short(p) for p in self.logprobs]), "text": text}
        yield "response.content_part.done", {**self._place, "part": self._part(text)}
        yield "response.output_item.done", {"output_index": self.index, "item": self.whole(status)}

    def whole(self, status: Status) -> Json:
        return self._item([self._part("".join(self._texts))], status)


class Message(_Block):
    """What the model says to the user."""

    __slots__ = ()
    _delta, _done = "response.output_text.delta", "response.output_text.done"

    def _noted(self, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs}

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs if text else [], "text": text}

    def _item(self, content: list[Json], status: Status) -> Json:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class Reasoning(_Block):
    """What the model thinks. `encrypted_content` is empty: the content itself comes back with the next turn."""

    __slots__ = ()
    _delta, _done = "response.reasoning_text.delta", "response.reasoning_text.done"

    def _noted(self, logprobs: list[Json]) -> Json:
        return {}

    def _part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text}

    def _item(self, content: list[Json], status: Status) -> Json:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": "",
            "status": status,
        }


class FunctionCall:
    """A call. `call_id` is the engine's id unchanged: some templates print it (Mistral), so it must come back so."""

    __slots__ = ("_arguments", "_place", "_prefix", "call_id", "id", "index", "name", "namespace")
    _delta = "response.function_call_arguments.delta"

    def __init__(self, id: str, index: int, call_id: str, name: str, namespace: str | None) -> None:
        self.id, self.index, self.call_id, self.name, self.namespace = id, index, call_id, name, namespace
        self._arguments: list[str] = []
        self._place: Json = {"item_id": id, "output_index": index}
        self._prefix = _prefix(self._delta, self._place)

    def opened(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self.index, "item": self.whole("in_progress")}

    def delta(self, text: str, sequence: int) -> bytes:
        self._arguments.append(text)
        return b'%s%s,"sequence_number":%d}\n\n' % (self._prefix, orjson.dumps(text), sequence)

    def delta_data(self, text: str, logprobs: list[Json]) -> Event:
        self._arguments.append(text)
        return self._delta, {**self._place, "delta": text}

    def closed(self, status: Status) -> Iterator[Event]:
        yield "response.function_call_arguments.done", {**self._place, "arguments": "".join(self._arguments)}
        yield "response.output_item.done", {"output_index": self.index, "item": self.whole(status)}

    def whole(self, status: Status) -> Json:
        item: Json = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "arguments": "".join(self._arguments),
            "call_id": self.call_id,
            "name": self.name,
        }
        return item if self.namespace is None else {**item, "namespace": self.namespace}


def logprobs_of(choice: Json) -> list[Json]:
    """A chat choice's logprobs as an output_text part has them."""
    return [
        {**_pick(found), "top_logprobs": [_pick(top) for top in found.get("top_logprobs") or ()]}
        for found in (choice.get("logprobs") or {}).get("content") or ()
    ]


def _pick(found: Json) -> Json:
    return {name: found[name] for name in ("token", "bytes", "logprob")}


def _short(found: Json) -> Json:
    """Events have them without bytes (openai.types.responses.ResponseTextDeltaEvent)."""
    tops = [{"token": top["token"], "logprob": top["logprob"]} for top in found["top_logprobs"]]
    return {"token": found["token"], "logprob": found["logprob"], "top_logprobs": tops}


def usage_of(usage: Json | None, timings: Json | None) -> Json | None:
    """The engine's figures under the API's names, in tokens; input_tokens include the cached ones.

    Without a usage chunk they are in the timings (llama-server.md, "Requests"). The engine does not count reasoning
    apart; where it does not, 0 stands for unknown, for the field is required.
    """
    if usage is None and timings is None:
        return None
    if usage is not None:
        given, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    else:
        told: dict[str, Any] = timings or {}
        cached, made = told.get("cache_n", 0), told.get("predicted_n", 0)
        given = cached + told.get("prompt_n", 0)
    reasoning = ((usage or {}).get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + made,
    }
