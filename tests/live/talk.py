"""Conversations with a real proxy, and what its state says. Tokens are the engine's own counts (`timings`)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.servers import ProxyServer

Json = dict[str, Any]
TEMPLATE = Path(__file__).parent.parent / "data" / "chatml-tools.jinja"
CHATML = ("--jinja", "--chat-template-file", str(TEMPLATE))
FOX: Json = {"temperature": 0, "ignore_eos": True, "logit_bias": [[" fox", 50]]}
"""Random weights emit text that tokenises otherwise when it comes back; " fox" is one token, however often."""
KEY = {"SLOTKEEPER_ENGINE_API_KEY": "engine-key"}
"""Environment of a proxy whose engine a test asks itself."""


@dataclass
class Turn:
    """One answer: how many prompt tokens came from the cache (`cache_n`), how many were processed (`prompt_n`)."""

    text: str
    cache_n: int
    prompt_n: int
    predicted_n: int
    headers: httpx.Headers
    n_events: int = 0
    raw: Json = field(default_factory=dict)

    @property
    def n_prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.cache_n + self.prompt_n


class Conversation:
    """A client that re-sends its whole history on every turn, as agents do."""

    def __init__(self, proxy: ProxyServer, system: str = "You are terse.", session: str | None = None) -> None:
        self.proxy = proxy
        self.messages: list[Json] = [{"role": "system", "content": system}]
        self.headers = {"x-slotkeeper-session": session} if session else {}

    async def say(self, text: str, n: int = 8, *, stream: bool = False, **more: Any) -> Turn:
        """One turn of n generated tokens; the answer becomes part of the history."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": n, "stream": stream, **FOX, **more}
        turn = await post(self.proxy, "/v1/chat/completions", body, self.headers)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn


async def post(proxy: ProxyServer, path: str, body: Json, headers: dict[str, str] | None = None) -> Turn:
    """One model request, streamed or whole; fails with the answer's body unless it is 200."""
    if body.get("stream"):
        async with proxy.client.stream("POST", path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise AssertionError((await answer.aread()).decode())
            events = [event async for event in events_of(answer)]
        text = "".join(map(piece_of, events))
        last = events[-1]
    else:
        answer = await proxy.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        last, events = answer.json(), []
        text = last["content"] if "content" in last else last["choices"][0]["message"]["content"]
    t = last["timings"]
    return Turn(text, t["cache_n"], t["prompt_n"], t["predicted_n"], answer.headers, len(events), last)


async def complete(proxy: ProxyServer, prompt: str | list[int], n: int = 1, **more: Any) -> Turn:
    """One POST /completion."""
    return await post(proxy, "/completion", {"prompt": prompt, "n_predict": n, **FOX, **more})


async def events_of(answer: httpx.Response) -> AsyncIterator[Json]:
    """The JSON events of a stream."""
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data not in (line, "[DONE]"):
            yield json.loads(data)


def piece_of(event: Json) -> str:
    """The generated text of one event."""
    if "choices" not in event:
        return str(event.get("content") or "")
    return "".join(c.get("delta", {}).get("content") or "" for c in event["choices"])


@asynccontextmanager
async def streaming(proxy: ProxyServer, body: Json) -> AsyncIterator[AsyncIterator[Json]]:
    """The events of a streamed chat answer, its first content event read already; leaving closes the connection."""
    async with proxy.client.stream("POST", "/v1/chat/completions", json={**FOX, **body, "stream": True}) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        events = events_of(answer)
        async for event in events:
            if piece_of(event):
                break
        yield events


def user(text: str) -> list[Json]:
    """Messages of a first turn."""
    return [{"role": "user", "content": text}]


def foxes(n: int, start: str = "A") -> str:
    """Text of about n tokens: distinct texts start differently."""
    return start + " fox" * n


async def engine_state(proxy: ProxyServer) -> Json:
    """The first engine in /slotkeeper/state."""
    answer = await proxy.client.get("/slotkeeper/state")
    state: Json = answer.json()
    return state["engines"][0] | {"snapshots": state["snapshots"]}


async def until_engine(proxy: ProxyServer, true: Callable[[Json], bool], seconds: float = 40.0) -> Json:
    """Polls the state until `true`; fails with what it said last."""
    seen: Json = {}
    try:
        async with asyncio.timeout(seconds):
            while not true(seen := await engine_state(proxy)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:.0f} s: {json.dumps(seen, indent=1)}\n{proxy.said()}") from None
    return seen


def states_of(engine: Json) -> list[str]:
    """The slots' states."""
    return [slot["state"] for slot in engine["slots"]]


def all_free(engine: Json) -> bool:
    """No slot is leased, busy or in doubt."""
    return set(states_of(engine)) <= {"empty", "idle"}


@asynccontextmanager
async def engine_client(proxy: ProxyServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the proxy's engine itself (the proxy was started with KEY)."""
    url = (await engine_state(proxy))["url"]
    headers = {"authorization": f"Bearer {KEY['SLOTKEEPER_ENGINE_API_KEY']}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def engine_pid(proxy: ProxyServer) -> int:
    """The process of the engine, by the file that lies in the state directory while it runs."""
    file = next(proxy.state_dir.glob("engine-*.json"))
    return int(json.loads(file.read_text())["pid"])
