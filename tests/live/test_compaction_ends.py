"""Compactions that are the client's own, and compactions in whose midst a process is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.conftest import StartProxy
from tests.live.talk import (
    CHATML,
    FOX,
    Conversation,
    Json,
    engine_pid,
    events_of,
    foxes,
    piece_of,
    post,
    until_engine,
    user,
)
from tests.live.test_compaction import only, requests_of
from tests.live.test_templates import TOOLS
from tests.servers import ProxyServer

MESSAGES = "/v1/messages"
WISH = (
    "Respond with TEXT ONLY. Do NOT call any tools. " + "Say what was asked for, decided and done, file by file. " * 10
)
CLAUDES = f"CRITICAL: {WISH} Write an <analysis> block followed by a <summary> block."
N_BASE, N_TURN = 1200, 300


def opencodes(transcript: str) -> list[Json]:
    """opencode's own compaction: another system text, and the whole conversation as one text."""
    asked = f"Here is the conversation so far:\n\n<conversation>\n{transcript}\n</conversation>\n\n{WISH}"
    return [{"role": "system", "content": "You sum up conversations."}, *user(asked)]


async def asked(proxy: ProxyServer, messages: list[Json], headers: dict[str, str], **more: object) -> None:
    body = {"model": "m", "messages": messages, "max_tokens": 16, **FOX, **more}
    path = MESSAGES if "x-claude-code-session-id" in headers else "/v1/chat/completions"
    answer = await proxy.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("agent", ["opencode", "claude"])
async def test_the_clients_own_compaction(proxy_server: StartProxy, agent: str) -> None:
    """Recognised by its shape; the base is found again behind it, whatever lay in the only slot; none is made by us."""
    proxy = await proxy_server("--parallel", "1", "--ctx-size", "4096", model="dense", engine_flags=CHATML)
    system, summary = foxes(N_BASE, "You are an agent:"), "We read five files. Open: the sixth."
    if agent == "opencode":
        headers = {"user-agent": "opencode/1.18.33", "x-session-id": "ses_1"}
        base: Json = {"tools": TOOLS}
        head: list[Json] = [{"role": "system", "content": system}]
    else:
        headers = {"user-agent": "claude-cli/2.1.332 (external, cli)", "x-claude-code-session-id": "1"}
        tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
        base, head = {"system": system, "tools": tools}, []
    messages: list[Json] = []
    for n in range(7):
        messages += user(foxes(N_TURN, f"Read file {n}:"))
        await asked(proxy, [*head, *messages], headers, **base)
        messages.append({"role": "assistant", "content": f"I read file {n}."})
    if agent == "opencode":
        await asked(proxy, opencodes(foxes(4 * N_TURN)), headers)
        after = [*head, *user("What did we do so far?"), {"role": "assistant", "content": summary}, *user("Go on.")]
    else:
        await asked(proxy, [*messages, *user(CLAUDES)], headers, **base)
        after = user(f"This session goes on from one that ran out of context. {summary} Go on.")
    await asked(proxy, after, headers, **base)
    *turns, own, first = await requests_of(proxy)
    print(agent, own["cache_n"], own["prompt_n"], first["cache_n"], first["prompt_n"])
    assert own["kind"] == "compaction" and {r["kind"] for r in turns} == {"main"}
    if agent == "claude":
        assert own["prompt_n"] < 600 < turns[-1]["prompt_n"] + turns[-1]["cache_n"] - 600 < own["cache_n"]
    n_base = turns[0]["prompt_n"] - N_TURN - 40
    assert first["cache_n"] >= n_base > N_BASE, (first, proxy.said())
    assert first["prompt_n"] <= 120
    assert [r["compaction"] for r in (*turns, own, first)] == [{}] * 9
    assert 'slotkeeper_compaction_tokens_total{side="before"} 0.0' in (await proxy.client.get("/metrics")).text


def long_history(n: int) -> list[Json]:
    """A conversation of about 170 tokens for each turn, and a question."""
    turns = ((*user(foxes(150, f"{i}:")), {"role": "assistant", "content": foxes(15)}) for i in range(n))
    return [{"role": "system", "content": foxes(300)}, *(m for turn in turns for m in turn), *user("And now?")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", MESSAGES])
async def test_engine_killed_while_it_sums_up(proxy_server: StartProxy, path: str) -> None:
    """The client is told to come again, in its dialect; then it has its compaction, and its next turn continues it."""
    proxy = await proxy_server("--parallel", "1", "--ctx-size", "4096", model="dense", engine_flags=CHATML)
    messages = long_history(27)
    system = {"system": messages.pop(0)["content"]} if path == MESSAGES else {}
    body = {"model": "m", "messages": messages, "max_tokens": 8, **system}
    waiting = asyncio.create_task(proxy.client.post(path, json=body))
    await until_engine(proxy, lambda engine: engine["slots"][0]["state"] == "busy")
    os.kill(engine_pid(proxy), signal.SIGKILL)
    answer = await waiting
    assert answer.status_code in (502, 503) and "retry-after" in answer.headers, answer.text
    assert (answer.json().get("type") == "error") is (path == MESSAGES)
    broken = only(await requests_of(proxy), "compaction")
    assert [r["outcome"] for r in broken] == ["engine_error"], broken
    await until_engine(proxy, lambda engine: engine["ready"] and engine["instance"] == 2)
    again = await proxy.client.post(path, json=body)
    assert again.status_code == 200, again.text
    found = (await requests_of(proxy))[-1]
    assert found["compaction"]["outcome"] in ("summary", "digest")
    said = again.json()
    text = said["content"][0]["text"] if path == MESSAGES else said["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, *user("And then?")]
    assert (await proxy.client.post(path, json=body)).status_code == 200
    last = (await requests_of(proxy))[-1]
    assert (last["match"], last["compaction"], last["prompt_n"] <= 64) == ("extends", {}, True), last


async def test_proxy_killed_behind_a_compaction(proxy_server: StartProxy) -> None:
    """SIGKILL before the next turn: nothing was saved at exit. The next turn fits, and the one behind it continues."""
    flags = ("--parallel", "1", "--ctx-size", "2048", "--compact-prepare-at", "1.0")
    talk = Conversation(await proxy_server(*flags, model="dense", engine_flags=CHATML), foxes(300))
    talk.messages = long_history(11)[:-1]
    first = await talk.say("And now?", 16)
    assert only(await requests_of(talk.proxy), "main")[-1]["compaction"]["outcome"] in ("summary", "digest")
    await talk.proxy.stop(signal.SIGKILL)
    talk.proxy = await proxy_server(*flags, model="dense", engine_flags=CHATML)
    second = await talk.say("And then?", 16)
    assert second.n_prompt < first.n_prompt + 100
    third = await talk.say("At last?", 16)
    assert (third.headers["x-slotkeeper-placement"], third.prompt_n <= 64) == ("continue", True), third
    assert await post(talk.proxy, "/v1/chat/completions", {"messages": user("Who are you?"), "max_tokens": 4, **FOX})


async def test_signs_of_life_while_it_sums_up(proxy_server: StartProxy) -> None:
    """A cold history that does not fit: the client hears of the work on the summary, then its answer."""
    flags = ("--parallel", "1", "--ctx-size", "4096", "--keep-alive", "0.05s")
    proxy = await proxy_server(*flags, model="dense", engine_flags=CHATML)
    body = {"messages": long_history(24), "max_tokens": 8, "stream": True, **FOX}
    async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        events = [event async for event in events_of(answer)]
    *asked, main = await requests_of(proxy)
    assert {r["kind"] for r in asked} == {"compaction"} and main["compaction"]["outcome"] in ("summary", "digest")
    early = [e for e in events if e["id"] == f"chatcmpl-{main['id']}"]
    assert events[: len(early)] == early and len(early) >= 2, "before the engine was sent the request itself"
    assert all(e["choices"][0]["delta"] == {} for e in early)
    assert "".join(map(piece_of, events)) == " fox" * 8
