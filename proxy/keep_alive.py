"""Signs of life during a long prefill, in the events that clients' watchdogs count as progress.

Comments reset only some of them (agents.md, demand.md 1I). Each sign follows a report of the engine on the prompt, so
nothing is said before the engine has accepted the request (an overflow still is a plain 400), nothing by an engine that
hangs, and nothing inside an event.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

Json = dict[str, Any]


class KeepAlive:
    """When one answer's next sign is due. `seconds`: between two, None for none; `began`: when its client asked, by
    time.perf_counter."""

    def __init__(self, seconds: float | None, began: float) -> None:
        self._seconds, self._last = seconds, began

    def is_due(self) -> bool:
        """Whether the client has heard nothing for so long; it is told now, if so."""
        now = time.perf_counter()
        if self._seconds is None or now - self._last < self._seconds:
            return False
        self._last = now
        return True


def silent(progress: Json) -> bytes:
    """An event that says nothing, made of the engine's own on its progress: id, model and time are the answer's.

    A chat's has an empty delta, a text completion's an empty text, llama-server's own an empty content.
    """
    event = {name: value for name, value in progress.items() if name not in ("prompt_progress", "timings", "usage")}
    if event.get("object") == "chat.completion.chunk":
        event["choices"] = [{"index": 0, "delta": {}, "finish_reason": None}]
    if "tokens" in event:
        event["tokens"] = []
    return b"data: " + orjson.dumps(event) + b"\n\n"
