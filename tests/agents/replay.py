"""The same requests again, to llama-server alone: what it computes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from tests.agents.tap import Seen

SHORTEST = {"/v1/chat/completions": "max_tokens", "/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
DROPPED = ("max_completion_tokens", "stream_options")


def short(seen: Seen) -> dict[str, Any]:
    """Its body with an answer of one token."""
    body = {k: v for k, v in seen.body.items() if k not in DROPPED}
    return body | {SHORTEST[seen.path]: 1}


def before(seen: Sequence[Seen]) -> list[list[int]]:
    """For each request those that had been answered when it came: they are waited for, the others run beside it."""
    return [[i for i, other in enumerate(seen) if 0 < other.ended <= one.started] for one in seen]


async def replay(seen: Sequence[Seen], client: httpx.AsyncClient) -> None:
    """All of them, as much at once as they were. Raises httpx.HTTPStatusError."""
    waited = before(seen)
    tasks: list[asyncio.Task[None]] = []

    async def one(number: int) -> None:
        await asyncio.gather(*(tasks[i] for i in waited[number]))
        answer = await client.post(seen[number].path, json=short(seen[number]))
        answer.raise_for_status()

    for number in range(len(seen)):
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
