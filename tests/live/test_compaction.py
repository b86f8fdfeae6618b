"""A conversation outgrows its slot: no error, one large step on a warm prefix, and the same prompt after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import StartProxy
from tests.live.talk import CHATML, Conversation, Json, Turn, foxes
from tests.servers import ProxyServer

N_CTX, N_TURNS = 8192, 20
FLAGS = ("--parallel", "1", "--ctx-size", str(N_CTX))
N_BASE, N_SAID, N_REPLY = 2000, 290, 100
"""Tokens of the base, of each question and of each answer: twenty turns of 400 (issue 6, "Must show")."""
MOST_SUMMARY, INSTRUCTION = 300, 100
PLACEHOLDER = "[Old tool result content cleared]"
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]


async def requests_of(proxy: ProxyServer) -> list[Json]:
    """Every request so far, the first one first."""
    found: list[Json] = (await proxy.client.get("/slotkeeper/requests?last=1000")).json()["requests"]
    return found[::-1]


def only(found: list[Json], kind: str) -> list[Json]:
    return [r for r in found if r["kind"] == kind]


async def talked(proxy: ProxyServer, n_turns: int, **more: Any) -> tuple[Conversation, list[Turn]]:
    talk = Conversation(proxy, foxes(N_BASE))
    turns = [await talk.say(foxes(N_SAID, f"Turn {i} reads src/part_{i}.py:"), N_REPLY, **more) for i in range(n_turns)]
    return talk, turns


async def test_twenty_turns(proxy_server: StartProxy) -> None:
    """Blocking only. Processed: at most 1.15 times what append-only needs, and instruction and summary."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    talk, turns = await talked(proxy, N_TURNS)
    found = await requests_of(proxy)
    mine, asked = only(found, "main"), only(found, "compaction")
    n_appended = turns[0].n_prompt + sum(t.predicted_n for t in turns)
    n_appended += sum(b.n_prompt - a.n_prompt - a.predicted_n for a, b in zip(turns, turns[1:]) if b.n_prompt > a.n_prompt)
    n_appended = N_BASE + N_TURNS * (N_SAID + N_REPLY + 20)
    processed = sum(r["prompt_n"] for r in found)
    print([(r["kind"], r["cache_n"], r["prompt_n"], r["compaction"], r["cause"], r['placement']) for r in found])
    print(processed, n_appended, turns[-1].n_prompt)
