"""What each dialect costs the proxy: CPU per request before an instant upstream, the same conversation in all three.

Issue 3: Messages and Responses at most twice the CPU of chat. One conversation a dialect grows by one short turn a
request, as in overhead.py, whose stub answers.
"""

import time
from typing import Any

import httpx
import orjson

from tests.bench.overhead import SYSTEM, cpu_of

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
WARM = 10
"""Requests before the measurement: the first of a process import, the first of a conversation render."""
SETTLE = 3.0  # seconds for what goes on after the last answer; overhead.py's default


def body_of(dialect: str, system: str, turns: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """A streamed request of `turns` (role, content) for `tokens` new tokens."""
    common = {"model": "bench", "stream": True, "temperature": 0}
    if dialect == "messages":
        return {**common, "system": system, "messages": turns, "max_tokens": tokens}
    if dialect == "responses":
        return {**common, "instructions": system, "input": turns, "max_output_tokens": tokens}
    return {**common, "messages": [{"role": "system", "content": system}, *turns], "max_tokens": tokens}


def text_of(dialect: str, event: dict[str, Any]) -> str:
    """What an event adds to the answer's text."""
    if dialect == "messages":
        text = event.get("delta", {}).get("text", "")
    elif dialect == "responses":
        text = event["delta"] if event["type"] == "response.output_text.delta" else ""
    else:
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return str(text)


class Talk:
    """One conversation of `kilobytes` with a proxy at `base`."""

    def __init__(self, dialect: str, base: str, kilobytes: int, tokens: int) -> None:
        self._dialect, self._tokens = dialect, tokens
        self._system = SYSTEM * (kilobytes * 1024 // len(SYSTEM))
        self._turns: list[dict[str, str]] = []
        self._client = httpx.Client(base_url=base, timeout=60, trust_env=False)

    def turn(self) -> None:
        """Asks once more and takes the answer into the conversation. Raises RuntimeError for one without text."""
        self._turns.append({"role": "user", "content": f"step {len(self._turns)}"})
        body = body_of(self._dialect, self._system, self._turns, self._tokens)
        text = ""
        with self._client.stream(
            "POST", PATHS[self._dialect], json=body, headers={"x-session-id": f"bench-{self._dialect}"}
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += text_of(self._dialect, orjson.loads(line[6:]))
        if not text:
            raise RuntimeError(f"an answer in {self._dialect} bore no text")
        self._turns.append({"role": "assistant", "content": text})


def cpu_per_request(dialect: str, base: str, pid: int, turns: int, kilobytes: int, tokens: int = 64) -> float:
    """Milliseconds of the proxy's CPU a request, background work included."""
    talk = Talk(dialect, base, kilobytes, tokens)
    for _ in range(WARM):
        talk.turn()
    before: float = cpu_of(pid)  # type: ignore[no-untyped-call]
    for _ in range(turns):
        talk.turn()
    time.sleep(SETTLE)
    after: float = cpu_of(pid)  # type: ignore[no-untyped-call]
    return (after - before) / turns * 1e3
