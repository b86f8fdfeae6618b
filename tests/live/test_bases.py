"""A new conversation of a known agent costs its own new tokens, not the agent's system text and tools again."""

import asyncio
import json
from typing import Any

import pytest

from tests.conftest import StartProxy
from tests.live.talk import CHATML, FOX, Conversation, all_free, engine_state, foxes, post, states_of, until_engine

FLAGS = ("--parallel", "4", "--ctx-size", "16384")
SPARE = 64
"""Tokens beyond its own that a second conversation may cost (issue 2, "Must show")."""
SYSTEM = "You are a coding agent." + " jumps over the lazy dog." * 200
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Does it." * 20, "parameters": {"type": "object"}}}
    for name in ("read", "write", "bash")
]

BEHIND: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Looks." * 100, "parameters": {"type": "object"}}}
    for name in ("todo", "web")
]


async def n_rendered(talk: Conversation, proxy_tokens_of: str) -> int:
    """Tokens of a text, by the engine."""
    answer = await talk.proxy.client.post("/tokenize", json={"content": proxy_tokens_of, "parse_special": True})
    return len(answer.json()["tokens"])


async def own_tokens(talk: Conversation, text: str) -> int:
    """Tokens of a first user message and all that the template puts around it and behind it."""
    return await n_rendered(talk, f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("model", ["dense", "swa", "hybrid"])
async def test_second_conversation(proxy_server: StartProxy, model: str) -> None:
    """Right after the first one, whose slot keeps what it holds, and again after a restart."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    first, second = Conversation(proxy, SYSTEM, "one"), Conversation(proxy, SYSTEM, "two")
    opened = await first.say(foxes(200, "First"), tools=TOOLS)
    text = foxes(50, "Second")
    turn = await second.say(text, tools=TOOLS)
    assert turn.prompt_n <= await own_tokens(second, text) + SPARE, (turn, proxy.said())
    back = await first.say("go on", tools=TOOLS)
    # Hybrid: its reply is tokenised otherwise; the engine's checkpoint lies four tokens before the prompt's end.
    assert back.cache_n >= opened.n_prompt - 4, "the second conversation took the first one's tail"
    assert await proxy.stop() == 0
    again = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    third = Conversation(again, SYSTEM, "three")
    turn = await third.say(text, tools=TOOLS)
    assert turn.prompt_n <= await own_tokens(third, text) + SPARE, (turn, again.said())


async def test_base_snapshot_is_made_when_idle(proxy_server: StartProxy) -> None:
    """Dense: after ten idle seconds the base has a file of its own, which serves when nothing else holds it."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    first = Conversation(proxy, SYSTEM, "one")
    await first.say(foxes(2000, "First"), tools=TOOLS)
    await until_engine(proxy, lambda engine: engine["snapshots"]["count"] >= 2)
    await until_engine(proxy, lambda engine: sum(s["n_tokens"] > 0 for s in engine["slots"]) == 1)
    text = foxes(50, "Second")
    second = Conversation(proxy, SYSTEM, "two")
    turn = await second.say(text, tools=TOOLS)
    assert turn.prompt_n <= await own_tokens(second, text) + SPARE, (turn, proxy.said())
    assert turn.headers["x-slotkeeper-placement"] == "restore"
    held = (await engine_state(proxy))["slots"]
    assert sum(slot["n_tokens"] > 0 for slot in held) == 2, json.dumps(held)


async def test_leaving_while_a_base_is_processed(proxy_server: StartProxy) -> None:
    """Hybrid: the base is processed ahead of its prompt; that ends with its client where any other prefill does."""
    flags = ("--parallel", "1", "--ctx-size", "32768", "--finish-prefill", "never")
    proxy = await proxy_server(*flags, model="hybrid", engine_flags=CHATML)
    body = {"messages": [{"role": "system", "content": foxes(16_000, "Long")}, {"role": "user", "content": "hi"}]}
    client = asyncio.create_task(proxy.client.post("/v1/chat/completions", json=body))
    await until_engine(proxy, lambda engine: states_of(engine) == ["leased"])
    client.cancel()
    await until_engine(proxy, all_free)
    (slot,) = (await engine_state(proxy))["slots"]
    assert slot["n_tokens"] < 16_000, "the engine went on for nobody"
    assert (await Conversation(proxy).say("still there?")).predicted_n == 8


async def test_a_base_that_was_processed_ahead_is_counted(proxy_server: StartProxy) -> None:
    """Hybrid: it is work that the first conversation caused, though the engine's own words to the client call it
    cached (README, "Slow prefills")."""
    proxy = await proxy_server(*FLAGS, model="hybrid", engine_flags=CHATML)
    turn = await Conversation(proxy, SYSTEM, "one").say("hello", tools=TOOLS)
    (record,) = (await proxy.client.get("/slotkeeper/requests")).json()["requests"]
    assert (record["cache_n"], record["prompt_n"]) == (0, turn.n_prompt)
    assert turn.cache_n > 0
    assert f'prompt_tokens_processed_total{{engine="engine0",kind="main",model="hybrid"}} {turn.n_prompt}.0' in (
        (await proxy.client.get("/metrics")).text
    )


async def test_a_repeated_prompt_does_not_cost_its_snapshot(proxy_server: StartProxy) -> None:
    """Hybrid: the same prompt again ends with its file, which engine A cannot use then; the next turn still does."""
    flags = ("--parallel", "1", "--ctx-size", "8192")
    proxy = await proxy_server(*flags, model="hybrid", engine_flags=CHATML)
    talk = Conversation(proxy, foxes(1500, "Talk"), "one")
    opened = await talk.say("hello")
    await Conversation(proxy, foxes(1500, "Other"), "two").say("hello")
    body = {"messages": talk.messages[:2], "max_tokens": 8, **FOX}
    await post(proxy, "/v1/chat/completions", body, talk.headers)
    await Conversation(proxy, foxes(1500, "Third"), "three").say("hello")
    back = await talk.say("go on")
    assert back.cache_n >= opened.n_prompt - 4, (back, proxy.said())


@pytest.mark.parametrize("model", ["swa", "hybrid"])
async def test_the_first_sub_agent_after_a_restart(proxy_server: StartProxy, model: str) -> None:
    """It lacks the tool that started it: what its base shares with its parent's has a file of its own."""
    start = {**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "task"}}
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    await Conversation(proxy, SYSTEM, "parent").say("go", tools=[*TOOLS, start, *BEHIND])
    assert await proxy.stop() == 0
    again = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    turn = await Conversation(again, SYSTEM, "child").say("look", tools=[*TOOLS, *BEHIND])
    assert turn.headers["x-slotkeeper-placement"] == "restore", again.said()
    assert turn.cache_n > turn.n_prompt / 2 > 500, turn
