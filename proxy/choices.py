"""A request for several choices (`n`) or prompts: one request each, one after the other, merged by index.

llama-server would take further slots of its own choice for them and wipe what those hold (llama-server.md, "Requests").
One after the other, a prompt is processed once for all its choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from llamacpp.sse import EventSplitter, data_of
from proxy.api.read import Json, ModelRequest, one_by_one
from proxy.errors import SlotkeeperError
from proxy.exchange import Exchange
from proxy.relay import Out
from proxy.service import Service
from proxy.settle import Record


async def run_choices(service: Service, request: ModelRequest, out: Out, record: Record) -> None:
    """Runs the choices and answers once; the first that fails ends the answer with its error."""
    wholes: list[Any] = []
    shared = Shared(out, request.stream, request.n_choices, request.n_answers)
    for index, one in enumerate(one_by_one(request)):
        part = replace(record, id=f"{record.id}.{index}")
        collector = Indexed(shared, index)
        await Exchange(service, one, collector, part).run()
        if collector.failed:
            return
        if not request.stream:
            wholes.append(orjson.loads(b"".join(collector.parts)))
    if not request.stream:
        await out.start(200, collector.headers)
        await out.write(orjson.dumps(merged(wholes, request.n_choices)))
        await out.end()


@dataclass
class Shared:
    """What the choices of one answer have in common: the client, and of a stream its id and its usage so far."""

    out: Out
    stream: bool
    n_choices: int
    n_answers: int
    head: Json = field(default_factory=dict)
    completion_tokens: int = 0
    prompt_tokens: int = 0


class Indexed:
    """One choice's side of the answer: collects a whole one, renumbers the events of a streamed one."""

    def __init__(self, shared: Shared, index: int) -> None:
        self._shared, self._index = shared, index
        self._last = index == shared.n_answers - 1
        self.parts: list[bytes] = []
        self.headers: Mapping[str, str] = {}
        self.failed = False
        self.started = shared.out.started

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The first choice's head is the answer's."""
        self.started, self.headers = True, headers
        if self._shared.stream and not self._shared.out.started:
            await self._shared.out.start(status, headers)

    async def write(self, data: bytes) -> None:
        """Whole events, or a piece of a whole answer."""
        if not self._shared.stream:
            self.parts.append(data)
            return
        if shown := b"".join(map(self._renumbered, EventSplitter().feed(data))):
            await self._shared.out.write(shown)

    async def end(self) -> None:
        """Only the last choice ends the answer."""
        if self._shared.stream and self._last:
            await self._shared.out.end()

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """The answer ends here."""
        self.failed = True
        await self._shared.out.fail(error, headers)

    def _renumbered(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        if data == b"[DONE]":
            return event if self._last else b""
        found = orjson.loads(data)
        for choice in found.get("choices") or ():
            choice["index"] = self._index
        if "choices" not in found:
            found["index"] = self._index
        elif not self._is_shown(found):
            return b""
        return b"data: " + orjson.dumps(found) + b"\n\n"

    def _is_shown(self, found: Json) -> bool:
        """One id for the stream; the usage of all choices in one event, after the last."""
        shared = self._shared
        shared.head = shared.head or {name: found[name] for name in ("id", "created") if name in found}
        found.update(shared.head)
        if isinstance(usage := found.get("usage"), dict):
            shared.completion_tokens += usage.get("completion_tokens", 0)
            if self._index % shared.n_choices == 0:
                shared.prompt_tokens += usage.get("prompt_tokens", 0)
            usage["completion_tokens"], usage["prompt_tokens"] = shared.completion_tokens, shared.prompt_tokens
            usage["total_tokens"] = shared.prompt_tokens + shared.completion_tokens
        return bool(found["choices"]) or self._last


def merged(wholes: list[Any], n_choices: int) -> Any:
    """One answer of several: choices by index, usage summed, a prompt once for its choices; native ones as a list."""
    if "choices" not in wholes[0]:
        return [{**whole, "index": i} for i, whole in enumerate(wholes)]
    choices = [{**w["choices"][0], "index": i} for i, w in enumerate(wholes)]
    usage = dict(wholes[0].get("usage") or {})
    if usage:
        usage["completion_tokens"] = sum(w["usage"]["completion_tokens"] for w in wholes)
        usage["prompt_tokens"] = sum(w["usage"]["prompt_tokens"] for w in wholes[::n_choices])
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return {**wholes[0], "choices": choices, "usage": usage}
