"""A small recorded session, played to a Slotkeeper whose context is too small for what it holds.

Two conversations of one agent (pi, tests/data) in turns, so that they evict and restore each other; then one whose
client shuffles its tools at every turn, in observe mode, which sends them as they come.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]
RECORDING = Path(__file__).parent.parent / "data" / "pi-run1.json"
FLAGS = ("--parallel", "2", "--ctx-size", "4096", "--reply-reserve", "64")
REPLY = {"max_tokens": 4, "max_completion_tokens": 4, "temperature": 0, "stream": True}
AT_A_TIME = 3
"""Turns of one conversation before the other has its own."""
AT_ONCE = 3
"""Conversations that ask at the same time."""
SHUFFLED = 6
"""Turns of the conversation whose tools are shuffled."""


def bodies() -> list[Json]:
    """The recording's requests, each a longer prefix of one conversation."""
    found = json.loads(RECORDING.read_text())
    made = []
    for request in found["requests"]:
        body = found["conversations"][request["conversation"]]
        made.append(body | REPLY | {"messages": body["messages"][: request["messages"]]})
    return made


def another(body: Json, question: str) -> Json:
    """The same request of a conversation that began with another question."""
    made = copy.deepcopy(body)
    first = next(m for m in made["messages"] if m["role"] == "user")
    first["content"] = question
    return made


def shuffled(body: Json, order: random.Random) -> Json:
    """The same request with its tools in another order."""
    tools = list(body["tools"])
    while tools == body["tools"]:
        order.shuffle(tools)
    return body | {"tools": tools}


async def play(url: str, say: Callable[[str], None] = lambda _: None) -> None:
    """All of it, some 36 requests; fails unless each is answered with 200. `say` is told of each part and answer."""
    first, second = bodies(), [another(b, "What does this repository do?") for b in bodies()]
    answers, n_answers = itertools.count(1), 2 * len(first) + AT_ONCE + len(first[:SHUFFLED])

    async def count(_: httpx.Response) -> None:
        say(f"  answer {next(answers)} of {n_answers} begins")

    hooks = {"response": [count]}
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, event_hooks=hooks) as client:
        say(f"{2 * len(first)} turns of two conversations, in a context too small for both")
        for start in range(0, len(first), AT_A_TIME):
            for name, turns in (("one", first), ("two", second)):
                for body in turns[start : start + AT_A_TIME]:
                    await send(client, body, {"x-slotkeeper-session": name})
        say(f"both at once, and a third: {AT_ONCE} turns")
        headers = [{"x-slotkeeper-session": name} for name in ("one", "two", "three")]
        bodies_now = [first[-1], second[-1], another(first[1], "And now something else.")]
        await asyncio.gather(*(send(client, b, h) for b, h in zip(bodies_now, headers, strict=True)))
        say(f"one that shuffles its tools at every turn (observe mode): {SHUFFLED} turns")
        await play_shuffled(client)


async def play_shuffled(client: httpx.AsyncClient) -> None:
    """A conversation whose tools come in another order each time."""
    order, last = random.Random(7), bodies()[0]
    for body in bodies()[:SHUFFLED]:
        last = shuffled(body | {"tools": last["tools"]}, order)
        question = another(last, "Which tests are there?")
        await send(client, question, {"x-slotkeeper-session": "shuffled", "x-slotkeeper-mode": "observe"})


async def send(client: httpx.AsyncClient, body: Json, headers: dict[str, str]) -> None:
    """One request, its events read to their end."""
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
