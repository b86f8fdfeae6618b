"""The engine's shared pool: two runners never kill each other (design.md, rule 8)."""

import asyncio
import json

from tests.conftest import StartProxy
from tests.live.talk import (
    CHATML,
    Conversation,
    Json,
    Turn,
    events_of,
    foxes,
    post,
    states_of,
    streaming,
    until_engine,
    user,
)
from tests.servers import ProxyServer

CHAT = "/v1/chat/completions"


async def test_second_runner_waits(proxy_server: StartProxy) -> None:
    """Prompts and reserves of both exceed the pool: the second is admitted when the first is done."""
    proxy = await proxy_server("--parallel", "2", "--ctx-size", "4096", model="dense", engine_flags=CHATML)
    async with streaming(proxy, {"messages": user(foxes(1000, "One")), "max_tokens": 1500}) as events:
        body = {"messages": user(foxes(1000, "Two")), "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        second = asyncio.create_task(post(proxy, CHAT, body))
        await until_engine(proxy, lambda engine: engine["waiting"] == 1)
        first = [event async for event in events]
        assert not second.done(), "the second runner did not wait"
        answered = await second
    assert first[-1]["timings"]["predicted_n"] == 1500
    assert answered.predicted_n == 1500
    assert int(answered.headers["x-slotkeeper-waited-ms"]) > 0


async def test_younger_runner_ends_when_the_pool_fills(proxy_server: StartProxy) -> None:
    """Both outgrow their reserves: the older finishes, the younger gets a clear error, the idle slot is saved."""
    flags = ("--parallel", "3", "--ctx-size", "2048", "--reply-reserve", "64")
    proxy = await proxy_server(*flags, model="dense", engine_flags=CHATML)
    idle = Conversation(proxy, foxes(300, "Idle"), "idle")
    opened = await idle.say("hello")
    older = asyncio.create_task(answer(proxy, foxes(100, "Older"), 1400))
    await until_engine(proxy, lambda engine: states_of(engine).count("busy") == 1)
    younger = asyncio.create_task(answer(proxy, foxes(100, "Younger"), 1400))
    finished, ended = await older, await younger
    assert finished[-1].get("timings", {}).get("predicted_n") == 1400, (finished[-1], proxy.said())
    error = ended[-1].get("error", {})
    assert (error.get("code"), error.get("source")) == ("pool_exceeded", "slotkeeper"), (ended[-1], proxy.said())
    assert "max_tokens" in error["message"]
    back = await idle.say("are you there?")
    assert back.cache_n == opened.n_prompt + 8 - 1, (back, proxy.said())
    assert back.headers["x-slotkeeper-placement"] == "restore"


async def test_a_turn_of_more_tokens_than_estimated(proxy_server: StartProxy) -> None:
    """A line of four bytes a token goes on with one of one byte a token: it is counted, and waits for the other."""
    flags = ("--parallel", "2", "--ctx-size", "2048", "--reply-reserve", "64")
    proxy = await proxy_server(*flags, model="dense", engine_flags=CHATML)
    talk = Conversation(proxy, foxes(200))
    await talk.say("one")
    async with streaming(proxy, {"messages": user(foxes(900, "Other")), "max_tokens": 500}) as events:
        turn = asyncio.create_task(talk.say("0123456789" * 90))
        first = [event async for event in events]
        second = await turn
    assert first[-1].get("timings", {}).get("predicted_n") == 500, (first[-1], proxy.said())
    assert second.n_prompt + 900 + 500 > 2048, "both would have fitted"
    assert int(second.headers["x-slotkeeper-waited-ms"]) > 0


async def answer(proxy: ProxyServer, text: str, n: int) -> list[Json]:
    """All events of a streamed answer, errors included."""
    body = {"messages": user(text), "max_tokens": n, "stream": True, "temperature": 0, "ignore_eos": True}
    async with proxy.client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        return [event async for event in events_of(response)]


async def test_many_at_once(proxy_server: StartProxy) -> None:
    """More conversations than slots, more tokens than the pool holds: all answered, none mixed up."""
    proxy = await proxy_server("--parallel", "2", "--ctx-size", "2048", model="dense", engine_flags=CHATML)
    words = [" cat", " dog", " cow", " hen", " bee"]
    # Nothing in common: what one conversation loses, no other one's slot has.
    bases = [foxes(300, f"Agent{word}").replace("fox", word.strip()) for word in words]
    talks = [Conversation(proxy, base, word.strip()) for base, word in zip(bases, words, strict=True)]

    async def two_turns(talk: Conversation, word: str) -> list[Turn]:
        bias = {"logit_bias": [[word, 50]]}
        return [await talk.say(text, stream=True, **bias) for text in ("one", "two")]

    for word, turns in zip(words, await asyncio.gather(*map(two_turns, talks, words)), strict=True):
        assert [t.text.split() for t in turns] == [[word.strip()] * 8] * 2
        assert turns[1].cache_n >= turns[0].n_prompt, json.dumps(turns[1].raw)


async def test_answers_that_are_not_seen_growing(proxy_server: StartProxy) -> None:
    """Log-probabilities come whole only: such a runner gets its whole reply reserved, and the pool never overflows."""
    flags = ("--parallel", "2", "--ctx-size", "1024", "--reply-reserve", "32")
    proxy = await proxy_server(*flags, model="dense", engine_flags=CHATML)
    more = {"logprobs": True, "temperature": 0, "ignore_eos": True, "max_tokens": 700}
    both = [post(proxy, CHAT, {"messages": user(foxes(100, name)), **more}) for name in ("One", "Two")]
    for turn in await asyncio.gather(*both):
        assert turn.predicted_n == 700, turn.raw
