"""Many clients at once, who leave at random and read slowly: is a slot lost, does anybody hear another's words, does
memory grow?

Each conversation has a nonce, a word of one token that no other one has then, and biases the model to say nothing else:
any model gives it back, and whatever else comes is another stream's. Clients of all three dialects ask on one engine;
some ask again for what they have left. Memory counts from the first third of the time on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.bench.dialects import PATHS, body_of, text_of
from tests.bench.overhead import resident_mb
from tests.bench.process import ROOT

BIAS = 100.0
"""More than any logit is ahead of another."""
GROWTH_MB = 24
"""Resident memory that may be added after the first third: ledgers and records fill up to their bounds (README)."""
LOOK_SECONDS = 20.0
"""Between two looks at memory."""
REST_SECONDS = 60.0
"""Until every slot has to be free again, after the last client has gone."""
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
Json = dict[str, Any]


class Wrong(AssertionError):
    """What must not happen."""


class Clients:
    """All of them, on the proxy at `base`; `seed`: of what they do. `words`: nonces, more than clients."""

    def __init__(self, base: str, words: list[str], seconds: float, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._words = deque(words)
        self._until = time.monotonic() + seconds
        self._random = random.Random(seed)
        options: Json = {"base_url": base, "timeout": 300, "trust_env": False}
        limits = httpx.Limits(max_connections=None)
        self._usual = httpx.AsyncClient(limits=limits, **options)
        slow = httpx.AsyncHTTPTransport(limits=limits, socket_options=SMALL_BUFFER)
        self._slow = httpx.AsyncClient(transport=slow, **options)

    async def run(self, count: int) -> None:
        """Until the time is over. Raises Wrong."""
        async with self._usual, self._slow, asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._client(list(PATHS)[number % len(PATHS)]))

    async def _client(self, dialect: str) -> None:
        """One client: conversations of a few turns, each answer the next one's history."""
        while time.monotonic() < self._until:
            nonce, turns = self._words.popleft(), list[Json]()
            for _ in range(self._random.randint(1, 3)):
                filler = " ".join(
                    self._random.choices("keep the slot and send all of it again".split(), k=self._size())
                )
                turns.append({"role": "user", "content": f"Say{nonce}: {filler}"})
                body = body_of(dialect, "You are terse.", turns, self._random.choice((8, 24, 80)))
                body |= {"logit_bias": [[nonce, BIAS]], "ignore_eos": True}
                text = await self._ask(dialect, body, nonce)
                if text is None or time.monotonic() > self._until:
                    break
                turns.append({"role": "assistant", "content": text})
            self._words.append(nonce)

    def _size(self) -> int:
        return self._random.choice((20, 100, 400, 1500))

    async def _ask(self, dialect: str, body: Json, nonce: str) -> str | None:
        """One request in one of the ways that clients have; the answer's text, None for one that was left."""
        way = self._random.choice(("whole", "read", "read", "slow", "leave", "leave", "again"))
        if way == "whole":
            return await self._whole(dialect, {**body, "stream": False}, nonce)
        if way == "leave":
            return await self._left(dialect, body, nonce)
        if way == "again":
            await self._read(dialect, body, nonce, slow=False, way="done at once", most=1)
        return await self._read(dialect, body, nonce, slow=way == "slow", way=way)

    async def _whole(self, dialect: str, body: Json, nonce: str) -> str | None:
        answer = await self._usual.post(PATHS[dialect], json=body)
        if not self._is_served(answer):
            return None
        text = whole_text_of(dialect, answer.json())
        self._check(text, nonce)
        self.outcomes["whole"] += 1
        return text

    async def _left(self, dialect: str, body: Json, nonce: str) -> None:
        """A client that leaves soon, in whatever state its request is then, or after some events."""
        with suppress(TimeoutError):
            most = self._random.choice((None, 2, 10))
            async with asyncio.timeout(None if most else self._random.choice((0.01, 0.1, 0.5, 2.0))):
                await self._read(dialect, body, nonce, slow=False, way="done before leaving", most=most)
                return
        self.outcomes["left waiting"] += 1

    async def _read(
        self, dialect: str, body: Json, nonce: str, *, slow: bool, way: str, most: int | None = None
    ) -> str | None:
        """One stream, checked word by word; left after `most` events."""
        text, count = "", 0
        async with (self._slow if slow else self._usual).stream("POST", PATHS[dialect], json=body) as answer:
            if not self._is_served(answer):
                return None
            async for event in events_of(answer):
                text += text_of(dialect, event)
                self._check(text, nonce)
                count += 1
                if count == most:
                    self.outcomes["left speaking" if text else "left in prefill"] += 1
                    return None
                if slow:
                    await asyncio.sleep(0.02)
            if "x-slotkeeper-joined" in answer.headers:
                self.outcomes["joined"] += 1
        if not text:
            raise Wrong(f"a {dialect} stream of {nonce} ended without a word")
        self.outcomes[way] += 1
        return text

    def _is_served(self, answer: httpx.Response) -> bool:
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers:
            self.outcomes["503, come again"] += 1
        elif answer.status_code != httpx.codes.OK:
            raise Wrong(f"{answer.status_code} {dict(answer.headers)}")
        return answer.status_code == httpx.codes.OK

    @staticmethod
    def _check(text: str, nonce: str) -> None:
        said = text.strip()
        if not (nonce.strip() + nonce * (len(said) // len(nonce))).startswith(said):
            raise Wrong(f"the stream of {nonce} heard {text[-80:]!r}")


async def events_of(answer: httpx.Response) -> AsyncIterator[Json]:
    """The parsed events of a stream; raises Wrong for an error among them."""
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event or event.get("type") in ("error", "response.failed"):
                raise Wrong(line[:500])
            yield {"choices": [], "type": "", **event}


def whole_text_of(dialect: str, answer: Json) -> str:
    """The text of an answer that came in one piece."""
    if dialect == "messages":
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    if dialect == "responses":
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
        return "".join(part["text"] for part in parts if part["type"] == "output_text")
    return str(answer["choices"][0]["message"]["content"])


async def nonces(base: str) -> list[str]:
    """Words that are one token each, from the project's own README."""
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as client:
        asked = {"content": (ROOT / "README.md").read_text(), "with_pieces": True}
        tokens = (await client.post("/tokenize", json=asked)).json()["tokens"]
    pieces = dict.fromkeys(token["piece"] for token in tokens if isinstance(token["piece"], str))
    return [piece for piece in pieces if re.fullmatch(r" [A-Za-z]{3,}", piece)]


async def watch(pids: dict[str, int], seconds: float) -> list[Json]:
    """Resident memory in megabytes every LOOK_SECONDS, more often in a short run."""
    found, looks = [], max(3, round(seconds / LOOK_SECONDS))
    for _ in range(looks):
        await asyncio.sleep(seconds / looks)
        found.append({name: resident_mb(pid) for name, pid in pids.items()})
    return found


async def rested(base: str) -> Json:
    """The proxy's state once no slot, waiting request or job is left over; raises Wrong when something stays."""
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as client:
        deadline = time.monotonic() + REST_SECONDS
        while True:
            state: Json = (await client.get("/slotkeeper/state")).json()
            slots = [slot["state"] for engine in state["engines"] for slot in engine["slots"]]
            waiting = sum(engine["waiting"] for engine in state["engines"])
            if set(slots) <= {"idle", "empty"} and not waiting:
                return state
            if time.monotonic() > deadline:
                raise Wrong(f"left over: slots {slots}, waiting {waiting}")
            await asyncio.sleep(0.2)


def engine_of(pid: int) -> int:
    """The process id of a proxy's only child, its engine."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def measure(base: str, pid: int, count: int, seconds: float, seed: int) -> Json:
    """Everything, as one line of figures; raises Wrong."""
    return asyncio.run(_measure(base, {"proxy": pid, "engine": engine_of(pid)}, count, seconds, seed))


async def _measure(base: str, pids: dict[str, int], count: int, seconds: float, seed: int) -> Json:
    clients = Clients(base, await nonces(base), seconds, seed)
    watching = asyncio.create_task(watch(pids, seconds))
    await clients.run(count)
    memory = await watching
    state = await rested(base)
    memory.append({name: resident_mb(pid) for name, pid in pids.items()})
    grown = memory[-1]["proxy"] - memory[len(memory) // 3 - 1]["proxy"]
    if grown > GROWTH_MB:
        raise Wrong(f"the proxy grew by {grown} MB after its first third: {memory}")
    slots = Counter(slot["state"] for engine in state["engines"] for slot in engine["slots"])
    return {"clients": count, "seconds": seconds, "requests": dict(clients.outcomes), "slots": slots, "mb": memory}
