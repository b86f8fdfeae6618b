"""--sleep-idle-seconds: the engine may unload its model, and a conversation costs no prefill for it."""

import pytest

from tests.conftest import StartProxy
from tests.live.talk import CHATML, Conversation, foxes, until_engine

FLAGS = ("--parallel", "2", "--ctx-size", "4096")


@pytest.mark.parametrize("model", ["dense", "hybrid"])
async def test_a_conversation_survives_sleep(proxy_server: StartProxy, model: str) -> None:
    """Saved before, emptied then, restored when it goes on."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=(*CHATML, "--sleep-idle-seconds", "3"))
    talk = Conversation(proxy, foxes(1000, "Sleepy"))
    opened = await talk.say("hello")
    await until_engine(proxy, lambda e: e["snapshots"]["count"] >= 1 and not any(s["n_tokens"] for s in e["slots"]))
    assert "engine_sleeps" in proxy.said()
    back = await talk.say("go on")
    assert back.headers["x-slotkeeper-placement"] == "restore", proxy.said()
    assert back.cache_n >= opened.n_prompt - 4, (back, proxy.said())
