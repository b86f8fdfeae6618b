"""A request for several choices (`n`): one request each, one after the other in the same slot, merged by index.

llama-server would take further slots of its own choice for them and wipe what those hold (llama-server.md, "Requests").
One after the other, the prompt is processed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from llamacpp.sse import data_of
from proxy.api.read import ModelRequest
from proxy.errors import SlotkeeperError
from proxy.exchange import Exchange, Out
from proxy.service import Service
from proxy.settle import Record


async def run_choices(service: Service, request: ModelRequest, out: Out, record: Record) -> None:
    """Runs the choices and answers once; the first that fails ends the answer with its error."""
    wholes: list[Any] = []
    for index in range(request.n_choices):
        part = replace(record, id=f"{record.id}.{index}")
        collector = Indexed(out, index, last=index == request.n_choices - 1, stream=request.stream)
        await Exchange(service, replace(request, n_choices=1), collector, part).run()
        if collector.failed:
            return
        if not request.stream:
            wholes.append(orjson.loads(b"".join(collector.parts)))
    if not request.stream:
        await out.start(200, collector.headers)
        await out.write(orjson.dumps(merged(wholes)))
        await out.end()


class Indexed:
    """One choice's side of the answer: collects a whole one, renumbers the events of a streamed one."""

    def __init__(self, out: Out, index: int, *, last: bool, stream: bool) -> None:
        self._out, self._index, self._last, self._stream = out, index, last, stream
        self.parts: list[bytes] = []
        self.headers: Mapping[str, str] = {}
        self.failed = False
        self.started = out.started

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The first choice's head is the answer's."""
        self.started, self.headers = True, headers
        if self._stream and not self._out.started:
            await self._out.start(status, headers)

    async def write(self, data: bytes) -> None:
        """Whole events, or a piece of a whole answer."""
        if not self._stream:
            self.parts.append(data)
            return
        for event in data.split(b"\n\n"):
            if shown := self._renumbered(event):
                await self._out.write(shown + b"\n\n")

    async def end(self) -> None:
        """Only the last choice ends the answer."""
        if self._stream and self._last:
            await self._out.end()

    async def fail(self, error: SlotkeeperError, headers: Mapping[str, str]) -> None:
        """The answer ends here."""
        self.failed = True
        await self._out.fail(error, headers)

    def _renumbered(self, event: bytes) -> bytes:
        data = data_of(event + b"\n\n") if event else None
        if data is None:
            return event
        if data == b"[DONE]":
            return event if self._last else b""
        found = orjson.loads(data)
        for choice in found.get("choices") or ():
            choice["index"] = self._index
        if "choices" not in found:
            found["index"] = self._index
        return b"data: " + orjson.dumps(found)


def merged(wholes: list[Any]) -> Any:
    """One answer of several: choices by index, usage of generated tokens summed; native answers as a list."""
    if "choices" not in wholes[0]:
        return [{**whole, "index": i} for i, whole in enumerate(wholes)]
    choices = [{**w["choices"][0], "index": i} for i, w in enumerate(wholes)]
    usage = dict(wholes[0].get("usage") or {})
    if usage:
        usage["completion_tokens"] = sum(w["usage"]["completion_tokens"] for w in wholes)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return {**wholes[0], "choices": choices, "usage": usage}
