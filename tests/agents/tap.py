"""Between an agent and Slotkeeper, on the address that the README names: what was asked, when, how it was placed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tests.agents.forward import Forward
from tests.agents.script import is_main
from tests.fakes.http import Answer, Request

PORT = 8484
MODEL_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass
class Seen:
    """One request and the head of its answer. Times are seconds of one monotonic clock; status 0: no answer."""

    method: str
    path: str
    body: dict[str, Any]
    started: float
    ended: float = 0.0
    status: int = 0
    line: str = ""
    placement: str = ""

    @property
    def is_model_request(self) -> bool:
        """Whether the model answers it."""
        return self.method == "POST" and self.path in MODEL_PATHS

    @property
    def is_main(self) -> bool:
        """Whether it is a turn of the conversation."""
        return self.is_model_request and is_main(self.body)


class Tap(Forward):
    """Notes every request in `seen`, in the order of their arrival."""

    def __init__(self, base: str) -> None:
        super().__init__(base, PORT)
        self.seen: list[Seen] = []
        self._by_request: dict[int, Seen] = {}

    async def passed(self, request: Request, answer: Answer) -> None:
        seen = Seen(request.method, request.path, _body(request), time.monotonic())
        self.seen.append(seen)
        self._by_request[id(request)] = seen
        try:
            await super().passed(request, answer)
        finally:
            seen.ended = time.monotonic()
            del self._by_request[id(request)]

    def answered(self, request: Request, found: httpx.Response) -> None:
        seen = self._by_request[id(request)]
        seen.status = found.status_code
        seen.line = found.headers.get("x-slotkeeper-line", "")
        seen.placement = found.headers.get("x-slotkeeper-placement", "")


def _body(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(request.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
