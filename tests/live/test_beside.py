"""Beside a conversation: its twin without a name, titles, suggestions; and what the modes promise, in every dialect."""

import asyncio
import itertools
from typing import Any

import pytest

from tests.conftest import StartProxy
from tests.live.talk import (
    CHATML,
    FOX,
    KEY,
    Conversation,
    Json,
    Turn,
    engine_client,
    engine_state,
    foxes,
    post,
)
from tests.live.test_append_only import tool
from tests.servers import ProxyServer

FLAGS = ("--parallel", "4", "--ctx-size", "32768")
TOOLS = [tool(f"tool{n}", 100) for n in range(4)]
CLOCK = "You are terse. Time: {}. Today's date: Sun Nov 29 2026"

# --- twins -----------------------------------------------------------------------------------------------------------


def continues(turn: Turn, before: Turn) -> bool:
    """All of its last prompt came from the cache (where there are tools the engine takes the answer's first space away,
    so that the answer itself is other tokens when it comes back)."""
    return turn.cache_n >= before.n_prompt


async def together(*talks: Any) -> list[Turn]:
    """Their turns at the same time."""
    return list(await asyncio.gather(*talks))


@pytest.mark.parametrize("first", ["the same", "another"])
async def test_twins_without_a_name(proxy_server: StartProxy, first: str) -> None:
    """Two conversations with one base, begun at once in the same words: each keeps its tail, and has a slot."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    a, b = (Conversation(proxy, foxes(600, "You help")) for _ in range(2))
    words = foxes(50, "Hello") if first == "the same" else foxes(50, "Goodbye")
    last = await together(a.say(foxes(50, "Hello"), tools=TOOLS), b.say(words, tools=TOOLS))
    for n in range(3):
        turns = await together(
            a.say(foxes(60, f"A{n}"), tools=TOOLS, stream=True), b.say(foxes(60, f"B{n}"), tools=TOOLS, stream=True)
        )
        assert all(map(continues, turns, last)), (n, turns, last, proxy.said())
        assert len({turn.headers["x-slotkeeper-slot"] for turn in turns}) == 2
        assert len({turn.headers["x-slotkeeper-line"] for turn in turns}) == 2
        last = turns
    assert sum(slot["n_tokens"] > 600 for slot in (await engine_state(proxy))["slots"]) == 2


async def test_twins_one_after_the_other(proxy_server: StartProxy) -> None:
    """The second one begins when the first is on its way, in the same words."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    a, b = (Conversation(proxy, foxes(600, "You help")) for _ in range(2))
    last_a = await a.say("hello", tools=TOOLS)
    last_a = await a.say(foxes(60, "A"), tools=TOOLS)
    last_b = await b.say("hello", tools=TOOLS)
    assert last_b.prompt_n < 60
    for n in range(2):
        turn_a = await a.say(foxes(60, f"A{n}"), tools=TOOLS)
        assert continues(turn_a, last_a), (n, turn_a, last_a, proxy.said())
        turn_b = await b.say(foxes(60, f"B{n}"), tools=TOOLS)
        assert continues(turn_b, last_b) or n == 0, (n, turn_b, last_b, proxy.said())
        assert turn_b.prompt_n < 90
        last_a, last_b = turn_a, turn_b
    assert last_a.headers["x-slotkeeper-slot"] != last_b.headers["x-slotkeeper-slot"]


# --- questions on the side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["s", None])
async def test_side_requests(proxy_server: StartProxy, session: str | None) -> None:
    """A title before and between the turns, a suggestion behind one: the main line costs its new messages."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    main = Conversation(proxy, foxes(300, "You help"), session)
    title = Conversation(proxy, foxes(100, "Make a title"), session)
    await title.say(foxes(40, "Hello"))
    last = await main.say(foxes(40, "Hello"), tools=TOOLS)
    for n in range(3):
        await title.say(foxes(40, f"Title {n}"))
        suggestion = Conversation(proxy, session=session)
        suggestion.messages = list(main.messages)
        asked = await suggestion.say(foxes(50, "Suggest what I may say next"), tools=TOOLS)
        assert continues(asked, last), (n, asked, last, proxy.said())
        turn = await main.say(foxes(40, f"Turn {n}"), tools=TOOLS)
        assert continues(turn, last), (n, turn, last, proxy.said())
        last = turn


# --- modes -----------------------------------------------------------------------------------------------------------


def volatile(n: int) -> Json:
    """Request n of a conversation whose clock, tools and spellings change all the time."""
    messages: list[Json] = [{"role": "system", "content": CLOCK.format(f"1{n}:00:00")}]
    for i in range(n + 1):
        text = f"turn {i}"
        messages.append({"role": "user", "content": text if (i + n) % 2 else [{"type": "text", "text": text}]})
        messages.append({"role": "assistant", "content": f"answer {i}" + " " * (n % 3)})
    tools = [*TOOLS[n % 4 :], *TOOLS[: n % 4]]
    return {"messages": messages[:-1], "tools": tools, "max_tokens": 1, **FOX}


@pytest.mark.parametrize("where", ["server", "header"])
async def test_observe_renders_what_the_client_sent(proxy_server: StartProxy, where: str) -> None:
    """Token for token what the engine makes of the client's own body, among requests that are repaired, too."""
    environment = KEY | {"LLAMA_SERVER_SLOTS_DEBUG": "1"}
    flags = ("--mode", "observe") if where == "server" else ()
    headers = {"x-slotkeeper-mode": "observe"} if where == "header" else {}
    proxy = await proxy_server(*FLAGS, *flags, model="dense", engine_flags=CHATML, environment=environment)
    async with engine_client(proxy) as engine:
        for n in range(5):
            if where == "header":
                await post(proxy, "/v1/chat/completions", volatile(n))
            turn = await post(proxy, "/v1/chat/completions", volatile(n), headers)
            given = {k: v for k, v in volatile(n).items() if k in ("messages", "tools")}
            wanted = (await engine.post("/apply-template", json=given)).json()["prompt"]
            slots = (await engine.get("/slots")).json()
            newest = max(slots, key=lambda slot: slot.get("id_task", -1))
            assert newest["prompt"] == wanted
            tokens = (await engine.post("/tokenize", json={"content": wanted, "parse_special": True})).json()["tokens"]
            assert turn.n_prompt == len(tokens)


def in_dialect(dialect: str, texts: list[str]) -> tuple[str, Json]:
    """Path and body of a conversation, user and assistant in turns."""
    roles = itertools.cycle(("user", "assistant"))
    turns: list[Json] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if dialect == "responses":
        return "/v1/responses", {"instructions": "Be kind.", "input": turns, "max_output_tokens": 1}
    if dialect == "messages":
        return "/v1/messages", {"system": "Be kind.", "messages": turns, "max_tokens": 1}
    return "/v1/chat/completions", {"messages": [{"role": "system", "content": "Be kind."}, *turns], "max_tokens": 1}


async def test_strict_refuses_in_each_dialect(proxy_server: StartProxy) -> None:
    """409 with the dialect's own error body, and where it departs."""
    proxy = await proxy_server(*FLAGS, "--mode", "strict", model="dense", engine_flags=CHATML)
    for dialect in ("chat", "messages", "responses"):
        headers = {"x-slotkeeper-session": dialect}
        for texts in (["one"], ["one", "well", "two"], ["one", "well", "two", "so", "three"]):
            path, body = in_dialect(dialect, texts)
            assert (await proxy.client.post(path, json=body, headers=headers)).status_code == 200
        for stream in (False, True):
            path, body = in_dialect(dialect, ["one", "WELL", "two", "so", "three"])
            refused = await proxy.client.post(path, json=body | {"stream": stream}, headers=headers)
            assert refused.status_code == 409, (dialect, refused.text)
            check_refusal(dialect, refused.json())
        path, body = in_dialect(dialect, ["one", "WELL", "two", "so", "three"])
        answer = await proxy.client.post(path, json=body, headers=headers | {"x-slotkeeper-mode": "repair"})
        assert answer.status_code == 200


def check_refusal(dialect: str, body: Json) -> None:
    """The dialect's error, and the position."""
    error = body["error"]
    assert "message 2" in error["message"] and "repair" in error["message"]
    assert error["type"] == "invalid_request_error"
    if dialect == "messages":
        assert body["type"] == "error"
    else:
        assert error["code"] in ("broken_line", 409)
    assert "2" in str(body)


async def test_repair_in_the_other_dialects(proxy_server: StartProxy) -> None:
    """A clock in the instructions costs nothing there either."""
    proxy: ProxyServer = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    for dialect in ("messages", "responses"):
        before = 0
        for n in range(3):
            path, body = in_dialect(dialect, ["one", "well", "two", "so", "three"][: 2 * n + 1])
            body["system" if dialect == "messages" else "instructions"] = CLOCK.format(f"10:0{n}:00")
            usage = (await proxy.client.post(path, json=body, headers={"x-slotkeeper-session": dialect})).json()[
                "usage"
            ]
            if dialect == "messages":
                cached, whole = (
                    usage["cache_read_input_tokens"],
                    usage["input_tokens"] + usage["cache_read_input_tokens"],
                )
            else:
                cached, whole = usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
            assert cached >= before, (dialect, n, usage)
            before = whole
