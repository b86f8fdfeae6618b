"""What agents break, and what it costs then: clocks, tools in random order, midnight, another directory, other modes.

Tokens are the engine's own counts (`timings`); the figures are those of issue 4, "Must show".
"""

import json
import random
from typing import Any

import pytest

from tests.conftest import StartProxy
from tests.live.talk import CHATML, FOX, Conversation, Json, Turn, foxes, post
from tests.live.test_replay import DATA
from tests.servers import ProxyServer

FLAGS = ("--parallel", "4", "--ctx-size", "65536")
SPARE = 64
"""Tokens beyond its new messages that a request may process on whose way the date changes."""
DAY, NEXT_DAY = "Sun Nov 29 2026", "Mon Nov 30 2026"
REPOSITORY, OTHER = "/home/dev/repo", "/srv/checkouts/other-project"


def tool(name: str, n: int = 40) -> Json:
    """A definition of about n tokens and ten."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": foxes(n - 20, f"The {name}"), "parameters": parameters}
    return {"type": "function", "function": function}


def recorded(name: str = "opencode-run1", conversation: int = 1, n_tools: int = 6) -> Json:
    """The longest request of a recorded conversation, with its first tools."""
    body: Json = json.loads((DATA / f"{name}.json").read_text())["conversations"][conversation]
    return {"messages": body["messages"], "tools": body.get("tools", [])[:n_tools]}


def replaced(body: Json, old: str, new: str) -> Json:
    """The same with one text for another, wherever it stands; it does stand there."""
    text = json.dumps(body)
    assert old in text
    found: Json = json.loads(text.replace(old, new))
    return found


async def ask(proxy: ProxyServer, body: Json, n_messages: int, headers: dict[str, str]) -> Turn:
    """The first messages of a recorded request, answered with one token."""
    short = {**body, "messages": body["messages"][:n_messages], "max_tokens": 1, "verbose": True, **FOX}
    return await post(proxy, "/v1/chat/completions", short, headers)


async def n_new(proxy: ProxyServer, body: Json, n_before: int, n_messages: int) -> int:
    """Tokens that the template makes of the messages behind the first n_before."""
    lengths = []
    for n in (n_before, n_messages):
        short = {**body, "messages": body["messages"][:n]}
        prompt = (await proxy.client.post("/apply-template", json=short)).json()["prompt"]
        answer = await proxy.client.post("/tokenize", json={"content": prompt, "parse_special": True})
        lengths.append(len(answer.json()["tokens"]))
    return lengths[1] - lengths[0]


# --- clocks ----------------------------------------------------------------------------------------------------------


async def clock_turns(proxy: ProxyServer, times: tuple[str, ...], **headers: str) -> list[Turn]:
    """Four short turns; the system prompt says what time it is."""
    talk, turns = Conversation(proxy), []
    talk.headers = {"x-slotkeeper-salt": "-".join((*times, *headers.values()))} | headers
    for number, time in enumerate(times):
        talk.messages[0]["content"] = f"You are terse. Time: {time}."
        turns.append(await talk.say(f"turn {number}"))
    return turns


def processed(turns: list[Turn]) -> int:
    """Prompt tokens that the engine computed."""
    return sum(turn.prompt_n for turn in turns)


async def test_clock_in_the_system_prompt(proxy_server: StartProxy) -> None:
    """It ticks, and costs what one costs that stands still; observed, each turn is processed from the clock on."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    still = await clock_turns(proxy, ("10:00:00",) * 4)
    ticking = tuple(f"10:0{minute}:00" for minute in range(4))
    moving = await clock_turns(proxy, ticking)
    assert processed(moving) <= 1.05 * processed(still), (processed(moving), processed(still))
    assert [t.cache_n for t in moving[1:]] == [t.n_prompt + 8 - 1 for t in moving[:-1]]
    seen = await clock_turns(proxy, ticking, **{"x-slotkeeper-mode": "observe"})
    assert processed(seen) > 2 * processed(moving), "without repair it costs nothing either: what is tested here?"
    print(json.dumps({"still": processed(still), "moving": processed(moving), "observe": processed(seen)}))


async def test_a_clock_is_told_when_half_an_hour_has_passed(proxy_server: StartProxy) -> None:
    """In the newest message, and the beginning stays."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    turns = await clock_turns(proxy, ("10:00:00", "10:10:00", "10:45:00", "10:50:00"))
    assert [t.cache_n for t in turns[1:]] == [t.n_prompt + 8 - 1 for t in turns[:-1]]
    n_new = [t.n_prompt - t.cache_n for t in turns[1:]]
    assert n_new[0] == n_new[2] < n_new[1] < n_new[0] + SPARE


# --- tools -----------------------------------------------------------------------------------------------------------


async def ten_turns(proxy: ProxyServer, salt: str, shuffle: random.Random | None) -> float:
    """The hit rate of ten turns with 120 tokens of history each."""
    tools = [tool(f"tool{n}") for n in range(10)]
    talk, turns = Conversation(proxy, foxes(298, "You help")), []
    talk.headers = {"x-slotkeeper-salt": salt}
    for number in range(10):
        if shuffle is not None:
            shuffle.shuffle(tools)
        turns.append(await talk.say(foxes(96, f"Turn {number}"), tools=tools))
    return 1 - processed(turns) / sum(turn.n_prompt for turn in turns)


async def test_tools_in_random_order(proxy_server: StartProxy) -> None:
    """As good as a stable order."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    stable = await ten_turns(proxy, "stable", None)
    shuffled = await ten_turns(proxy, "shuffled", random.Random(4))
    print(json.dumps({"stable": stable, "shuffled": shuffled}))
    assert abs(stable - shuffled) <= 0.01
    assert stable >= 0.8, "less than block-cache arithmetic"


async def test_plan_and_build(proxy_server: StartProxy) -> None:
    """A mode without one tool, and back, twice: from the second time on each base is still there."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    build = [tool(f"tool{n}", 200) for n in range(5)]
    talk, turns = Conversation(proxy, foxes(300, "You help")), []
    for number in range(5):
        tools = [build[0], *build[2:]] if number % 2 else build
        turns.append(await talk.say(f"turn {number}", tools=tools))
    n_base = turns[0].n_prompt
    assert n_base > 1200
    assert turns[1].prompt_n > n_base / 4, "the smaller base costs nothing new: what is tested here?"
    for turn in turns[2:]:
        assert turn.prompt_n <= 0.15 * turn.n_prompt, (turn, proxy.said())


# --- other days and places -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["dense", "hybrid"])
async def test_midnight(proxy_server: StartProxy, model: str) -> None:
    """The date changes on the way: the request costs its new messages and the new date."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML)
    body = recorded(n_tools=3)
    late = replaced(body, DAY, NEXT_DAY)
    headers = {"x-session-id": "night"}
    for n in (2, 4, 6):
        await ask(proxy, body, n, headers)
    turn = await ask(proxy, late, 8, headers)
    assert turn.prompt_n <= await n_new(proxy, late, 6, 8) + SPARE, (turn, proxy.said())
    after = await ask(proxy, late, 10, headers)
    assert after.prompt_n <= await n_new(proxy, late, 8, 10) + SPARE, "the date was told again"


@pytest.mark.parametrize(("name", "session"), [("opencode-run1", True), ("pi-run1", False), ("cline-run1", False)])
async def test_two_directories(proxy_server: StartProxy, name: str, session: bool) -> None:
    """An agent in another directory: nearly all of its first prompt is there."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML)
    body = recorded(name, 1 if name == "opencode-run1" else 0)
    other = replaced(body, REPOSITORY, OTHER)
    headers: list[dict[str, Any]] = [{"x-session-id": s} if session else {} for s in ("one", "two")]
    opened = await ask(proxy, body, 2, headers[0])
    turn = await ask(proxy, other, 2, headers[1])
    assert turn.prompt_n <= 0.15 * turn.n_prompt, (turn, proxy.said())
    told = json.dumps(turn.raw["__verbose"]["prompt"])
    assert OTHER in told and REPOSITORY not in told.replace(OTHER, ""), "it is told the other one's directory"
    back = await ask(proxy, body, 4, headers[0])
    assert back.cache_n >= opened.n_prompt, "the second session took the first one's tail"
