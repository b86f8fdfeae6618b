"""How the fake llama-server runs one model request: prefill, events, answer, and what was cued for it."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.http import Answer, Broken


class Ended(Exception):
    """The stream ends here, in good order: an error event was its last."""


@dataclass
class Cue:
    """What happens to one model request. Holds are events that the test sets; counts are generated tokens.

    `pace`: one permit is taken before each event of a stream. `script` answers instead of the engine, byte for byte.
    `hold_left`: the slot stays busy after its client left, as an engine's does until its batch is done.
    `end_at`: the stream ends there in good order, without its last events. `sent` collects the events of a stream.
    `finish`: the reason why the answer ended.
    """

    status: int | None = None
    error: dict[str, Any] | None = None
    hold_before: asyncio.Event | None = None
    hold_after: asyncio.Event | None = None
    hold_at: int = 1
    break_at: int | None = None
    error_at: int | None = None
    garbage_at: int | None = None
    text: list[str] | None = None
    ignore_leaving: bool = False
    pace: asyncio.Semaphore | None = None
    script: Callable[[Answer], Awaitable[None]] | None = None
    hold_left: asyncio.Event | None = None
    end_at: int | None = None
    finish: str = "length"
    sent: list[bytes] = field(default_factory=list)


@dataclass
class Slot:
    """One sequence: its tokens, and whether a request runs in it."""

    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    id_task: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Run:
    """One model request in its slot."""

    def __init__(self, kind: str, body: dict[str, Any], tokens: list[int], cue: Cue, **place: Any) -> None:
        self.kind, self.body, self.tokens, self.cue = kind, body, tokens, cue
        self.slot: Slot = place["slot"]
        self.number: int = place["number"]
        self.tokens_of: Callable[[str], list[int]] = place["tokens_of"]
        limit = body.get("max_tokens", body.get("n_predict"))
        if limit not in (None, -1):
            limit = min(limit, place["most"])
        words = cue.text or [f" w{i}" for i in range(8 if limit in (None, -1) else limit)]
        self.words = words[:limit] if limit not in (None, -1) else words
        shared = _common(self.slot.tokens, tokens) if body.get("cache_prompt", True) else 0
        self.cache_n = min(shared, max(0, len(tokens) - 1))  # the last token is always computed

    @property
    def prompt_n(self) -> int:
        """Prompt tokens that had to be computed."""
        return len(self.tokens) - self.cache_n

    async def answer(self, answer: Answer) -> None:
        """The whole answer, streamed or not."""
        if not self.body.get("stream"):
            return await self._whole(answer)
        await answer.begin_events()
        with contextlib.suppress(Ended):
            await self._stream(answer)

    async def _stream(self, answer: Answer) -> None:
        await self._prefill(answer)
        if self.kind == "chat":
            await self._event(answer, _chat_delta({"role": "assistant", "content": None}))
        for number, word in enumerate(self.words):
            await self._cued(answer, number)
            await self._event(answer, self._piece(word))
        await self._cued(answer, len(self.words))
        self._settle()
        await self._last(answer)

    async def _prefill(self, answer: Answer | None) -> None:
        total = len(self.tokens)
        if answer and self.body.get("return_progress"):
            await self._progress(answer, self.cache_n)
        if self.cue.hold_before is not None:
            await self.cue.hold_before.wait()
        self.slot.tokens = self.tokens[:]
        if answer and self.body.get("return_progress"):
            await self._progress(answer, total)

    async def _progress(self, answer: Answer, processed: int) -> None:
        value = {"total": len(self.tokens), "cache": self.cache_n, "processed": processed, "time_ms": 1}
        base = _chat_delta({"role": "assistant", "content": None}) if self.kind == "chat" else self._piece("")
        await self._event(answer, base | {"prompt_progress": value})

    async def _cued(self, answer: Answer, number: int) -> None:
        cue = self.cue
        if cue.hold_after is not None and number == cue.hold_at:
            await cue.hold_after.wait()
        if number == cue.break_at:
            raise Broken
        if number == cue.end_at:
            raise Ended
        if number == cue.garbage_at:
            await answer.send(b"data: {not json\n\n")
        if number == cue.error_at:
            error = cue.error or {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}
            await answer.send(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            raise Ended

    def _settle(self) -> None:
        self.slot.tokens = self.tokens + [self.tokens_of(word)[0] for word in self.words[:-1]]

    async def _last(self, answer: Answer) -> None:
        final = self._final()
        if self.kind == "chat":
            await self._event(answer, _chat_delta({}, self.cue.finish))
            if (self.body.get("stream_options") or {}).get("include_usage"):
                final = {"choices": []} | _CHAT | {"usage": self._usage(), "timings": self._timings()}
            else:
                final = _chat_delta({}, self.cue.finish) | {"timings": self._timings()}
        await self._event(answer, final)
        if self.kind != "native":
            await self._send(answer, b"data: [DONE]\n\n")

    async def _whole(self, answer: Answer) -> None:
        await self._prefill(None)
        for number in range(len(self.words) + 1):
            await self._cued(answer, number)
        self._settle()
        if self.kind == "chat":
            message = {"role": "assistant", "content": "".join(self.words)}
            choice = {"finish_reason": self.cue.finish, "index": 0, "message": message}
            head = _CHAT | {"object": "chat.completion"}
            await answer.json({"choices": [choice]} | head | {"usage": self._usage(), "timings": self._timings()})
        elif self.kind == "completion":
            final = self._final()
            final["choices"][0]["text"] = "".join(self.words)
            await answer.json(final)
        else:
            await answer.json(self._final() | {"content": "".join(self.words)})

    async def _event(self, answer: Answer, value: dict[str, Any]) -> None:
        await self._send(answer, b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    async def _send(self, answer: Answer, event: bytes) -> None:
        if self.cue.pace is not None:
            await self.cue.pace.acquire()
        self.cue.sent.append(event)
        await answer.send(event)

    def _piece(self, word: str) -> dict[str, Any]:
        if self.kind == "chat":
            return _chat_delta({"content": word})
        if self.kind == "completion":
            return {"choices": [{"text": word, "index": 0, "logprobs": None, "finish_reason": None}]} | _TEXT
        ids = self.tokens_of(word) or [0]
        return {"index": 0, "content": word, "tokens": ids, "stop": False, "id_slot": -1, "tokens_predicted": 1}

    def _final(self) -> dict[str, Any]:
        if self.kind == "completion":
            choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": self.cue.finish}
            return {"choices": [choice]} | _TEXT | {"usage": self._usage(), "timings": self._timings()}
        return {"index": 0, "content": "", "tokens": [], "id_slot": self.number, "stop": True, "stop_type": "limit"} | {
            "tokens_predicted": len(self.words),
            "tokens_evaluated": len(self.tokens),
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, Any]:
        counts = {"cache_n": self.cache_n, "prompt_n": self.prompt_n, "predicted_n": len(self.words)}
        return counts | {"prompt_ms": float(self.prompt_n), "predicted_ms": float(len(self.words))}

    def _usage(self) -> dict[str, Any]:
        prompt, reply = len(self.tokens), len(self.words)
        counts = {"completion_tokens": reply, "prompt_tokens": prompt, "total_tokens": prompt + reply}
        return counts | {"prompt_tokens_details": {"cached_tokens": self.cache_n}}


_CHAT = {
    "created": int(time.time()),
    "id": "chatcmpl-fake",
    "model": "fake",
    "system_fingerprint": "b0-fake",
    "object": "chat.completion.chunk",
}
_TEXT = _CHAT | {"object": "text_completion"}


def _chat_delta(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish, "index": 0, "delta": delta}]} | _CHAT


def render(body: dict[str, Any]) -> str:
    """ChatML, tools first: what /apply-template answers and what a chat request processes."""
    tools = json.dumps(body["tools"]) if body.get("tools") else ""
    parts = [f"<|im_start|>tools\n{tools}<|im_end|>\n"] if tools else []
    for message in body.get("messages", []):
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<|im_start|>{message['role']}\n{content}{calls}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
