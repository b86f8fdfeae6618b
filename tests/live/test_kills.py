"""kill -9, of the engine and of the proxy: nothing half-written is restored, nothing is left running."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

from tests.conftest import StartProxy
from tests.live.talk import (
    CHATML,
    FOX,
    Conversation,
    complete,
    engine_pid,
    events_of,
    foxes,
    streaming,
    until_engine,
    user,
)
from tests.servers import PATIENCE, until

FLAGS = ("--parallel", "2", "--ctx-size", "4096")
BIG = 6_000
"""Tokens of a slot that takes the engine some milliseconds to write."""
TRIES = 8
"""Saves until one is hit: a loaded machine may look away while a file is written."""


async def test_engine_killed_in_mid_stream(proxy_server: StartProxy) -> None:
    """The stream ends with an error, the engine comes back, and the newest snapshot serves the next turn."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    talk = Conversation(proxy, foxes(300), "talk")
    await talk.say("one")
    second = await talk.say("two")
    assert await proxy.stop() == 0
    proxy = talk.proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    old = engine_pid(proxy)
    body = {"messages": user("Something else."), "max_tokens": 3000}
    async with streaming(proxy, body) as events:
        os.kill(old, signal.SIGKILL)
        last = [event async for event in events][-1]
    assert last["error"]["source"] == "engine", last
    assert "Send the request again" in last["error"]["message"], last
    state = await until_engine(proxy, lambda engine: engine["ready"] and engine["instance"] == 2)
    assert {slot["state"] for slot in state["slots"]} == {"empty"}
    assert engine_pid(proxy) != old
    third = await talk.say("three")
    assert third.cache_n == second.n_prompt + 8 - 1, (third, proxy.said())


async def test_engine_killed_before_the_first_event(proxy_server: StartProxy) -> None:
    """Whoever has no answer yet gets a status with Retry-After, and so does whoever comes meanwhile."""
    proxy = await proxy_server("--ctx-size", "32768", model="dense", engine_flags=CHATML)
    # So long an answer that it cannot be over before we get to kill its engine, however busy the machine is.
    body = {"messages": user(foxes(16_000)), "max_tokens": 12_000, **FOX}
    asked = asyncio.create_task(proxy.client.post("/v1/chat/completions", json=body))
    await until_engine(proxy, lambda engine: any(slot["state"] == "busy" for slot in engine["slots"]))
    os.kill(engine_pid(proxy), signal.SIGKILL)
    answer = await asked
    assert answer.status_code in (502, 503), answer.text
    assert answer.json()["error"]["source"] == "engine"
    assert "retry-after" in answer.headers
    await until_engine(proxy, lambda engine: not engine["ready"] or engine["instance"] == 2)
    await until_engine(proxy, lambda engine: engine["ready"])
    assert (await complete(proxy, "hello", 2)).predicted_n == 2


async def test_proxy_killed_during_a_save(proxy_server: StartProxy, tmp_path: Path) -> None:
    """SIGKILL while the engine writes: the half file is deleted, the engine is gone, the conversation is whole."""
    flags = ("--parallel", "2", "--ctx-size", "16384")
    wide = (*CHATML, "-ctk", "f32", "-ctv", "f32")
    prefix, slots = foxes(BIG - 1), tmp_path / "state" / "slots"
    for _ in range(TRIES):
        proxy = await proxy_server(*flags, model="dense", engine_flags=wide)
        first = await complete(proxy, prefix, 8)
        engine = engine_pid(proxy)
        proxy.process.send_signal(signal.SIGTERM)
        await seen(slots)
        assert await proxy.stop(signal.SIGKILL) in (-signal.SIGKILL, 0)
        await until(lambda pid=engine: gone(pid))  # type: ignore[misc]
        if list(slots.glob("*.tmp")):
            break
        shutil.rmtree(tmp_path / "state")
    else:
        raise AssertionError(f"{TRIES} saves were over before they could be hit")
    again = await proxy_server(*flags, model="dense", engine_flags=wide)
    assert not list(slots.glob("*.tmp")), "a half-written file was kept"
    state = await until_engine(again, lambda e: e["ready"])
    assert state["snapshots"]["count"] == len(list(slots.glob("*.bin"))) == 0
    same = await complete(again, prefix, 8)
    assert (same.cache_n, same.text) == (0, first.text)


async def seen(slots: Path) -> None:
    """Returns as soon as a file is being written. Looks without a pause: the engine takes only milliseconds."""
    async with asyncio.timeout(PATIENCE):
        while not list(slots.glob("*.tmp")) and not list(slots.glob("*.bin")):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def gone(pid: int) -> bool:
    """Whether no such process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


async def test_proxy_killed_while_it_serves(proxy_server: StartProxy) -> None:
    """SIGKILL in mid-stream: no orphan engine, and the state directory can be used at once."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    engine = engine_pid(proxy)
    async with proxy.client.stream(
        "POST", "/v1/chat/completions", json={"messages": user("Hello."), "max_tokens": 3000, "stream": True}
    ) as answer:
        async for _ in events_of(answer):
            break
        proxy.process.kill()
        await proxy.process.wait()
    await until(lambda: gone(engine))
    again = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    assert (await complete(again, "hello", 2)).predicted_n == 2


async def test_last_words_are_nobody_elses(proxy_server: StartProxy) -> None:
    """An engine logs what it refuses; when it dies then, nobody is told a request's text, and our log holds none."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    body = {"messages": user("hi"), "tools": [{"name": "error: a secret"}]}
    assert "a secret" in (await proxy.client.post("/v1/chat/completions", json=body)).text
    os.kill(engine_pid(proxy), signal.SIGKILL)

    async def refused() -> bool:
        return (await proxy.client.get("/readyz")).status_code == 503

    await until(refused)
    said = (await proxy.client.get("/readyz")).text
    said += (await proxy.client.post("/v1/chat/completions", json={"messages": user("hi")})).text
    assert "a secret" not in said + proxy.said()
    assert "SIGKILL" in said
