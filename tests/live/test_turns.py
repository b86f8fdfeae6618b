"""The main job in small: append-only turns, and a prefix that survives a restart."""

import pytest

from tests.conftest import StartProxy
from tests.live.talk import CHATML, Conversation, complete, foxes

FLAGS = ("--parallel", "2", "--ctx-size", "4096")
N_GENERATED = 8
N_PREFIX = 748
"""Tokens of the prefix in issue 2, "Must show"."""


@pytest.mark.parametrize("model", ["dense", "swa", "hybrid"])
async def test_append_only_turns(proxy_server: StartProxy, model: str) -> None:
    """From the second turn on the cache holds the previous prompt and all generated tokens but the last."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    talk = Conversation(proxy)
    turns = [await talk.say(f"turn {i}: and then?", N_GENERATED, stream=i % 2 == 1) for i in range(4)]
    assert [t.predicted_n for t in turns] == [N_GENERATED] * 4
    assert [t.cache_n for t in turns[1:]] == [t.n_prompt + N_GENERATED - 1 for t in turns[:-1]]
    assert [t.headers["x-slotkeeper-placement"] for t in turns] == ["cold", "continue", "continue", "continue"]


@pytest.mark.parametrize("model", ["dense", "swa", "hybrid"])
async def test_prefix_survives_restart(proxy_server: StartProxy, model: str) -> None:
    """A prefix, SIGTERM, start again: the prefix and five tokens more cost five tokens."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    prefix = foxes(N_PREFIX - 1)
    first = await complete(proxy, prefix, 1)
    assert (first.n_prompt, first.cache_n) == (N_PREFIX, 0)
    assert await proxy.stop() == 0, proxy.said()
    again = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    longer = await complete(again, prefix + " fox" * 5, 1)
    assert abs(longer.cache_n - N_PREFIX) <= 2, again.said()
    assert abs(longer.prompt_n - 5) <= 2
    assert longer.headers["x-slotkeeper-placement"] == "restore"


async def test_conversation_survives_restart(proxy_server: StartProxy) -> None:
    """A chat goes on after SIGTERM and a new start as if nothing had happened."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    talk = Conversation(proxy, foxes(300))
    await talk.say("one")
    second = await talk.say("two")
    assert await proxy.stop() == 0, proxy.said()
    talk.proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    third = await talk.say("three")
    assert third.cache_n == second.n_prompt + N_GENERATED - 1, talk.proxy.said()


@pytest.mark.parametrize("model", ["dense", "swa", "hybrid"])
async def test_reply_that_comes_back_otherwise(proxy_server: StartProxy, model: str) -> None:
    """A client spells the reply in its own way; after a restart everything before it is still there."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    talk = Conversation(proxy, foxes(300))
    await talk.say("one")
    talk.messages[-1]["content"] = "As I said."
    second = await talk.say("two")
    talk.messages[-1]["content"] = "As I said."
    assert await proxy.stop() == 0, proxy.said()
    talk.proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    third = await talk.say("three")
    assert third.cache_n == second.n_prompt, (third, talk.proxy.said())
