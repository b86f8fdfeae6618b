"""A client drops thoughts, dumps arguments anew, leaves in mid-answer, or meets a proxy that started again."""

import json
from pathlib import Path

import pytest

from tests.conftest import StartProxy
from tests.live.talk import (
    CHATML,
    FOX,
    KEY,
    Conversation,
    Json,
    Turn,
    all_free,
    engine_client,
    foxes,
    piece_of,
    post,
    streaming,
    until_engine,
    user,
)
from tests.live.test_replay import DATA
from tests.servers import ProxyServer

FLAGS = ("--parallel", "4", "--ctx-size", "32768")
DEBUG = KEY | {"LLAMA_SERVER_SLOTS_DEBUG": "1"}
"""The engine's GET /slots shows the prompts that it got."""
THOUGHT, SAID = " fox" * 20, "I say fox."


async def prompts(proxy: ProxyServer) -> list[str]:
    """What the engine was given, newest first."""
    async with engine_client(proxy) as client:
        slots = (await client.get("/slots")).json()
    used = [slot for slot in slots if slot.get("id_task") is not None]
    return [str(slot.get("prompt")) for slot in sorted(used, key=lambda slot: -slot["id_task"])]


async def chat(proxy: ProxyServer, messages: list[Json], salt: str = "", n: int = 8, **more: object) -> Turn:
    """One request; nothing is shared between salts."""
    headers = {"x-slotkeeper-salt": salt} if salt else {}
    return await post(proxy, "/v1/chat/completions", {"messages": messages, "max_tokens": n, **FOX, **more}, headers)


# --- what the client changes in its history --------------------------------------------------------------------------


async def only(proxy: ProxyServer, text: str) -> Json:
    """Fields that make random weights say this text, in the tokens that it has when it comes back."""
    answer = await proxy.client.post("/tokenize", json={"content": text})
    tokens = answer.json()["tokens"]
    return {"grammar": f"root ::= {json.dumps(text)}", "logit_bias": [[t, 50] for t in tokens], "ignore_eos": False}


async def test_reasoning_that_the_client_drops(proxy_server: StartProxy, tmp_path: Path) -> None:
    """It is given back: the next turn continues behind the whole answer, as if it had been kept."""
    template = tmp_path / "think.jinja"
    template.write_text((DATA / "think.jinja").read_text().replace("content }}\n</think>", "content }}</think>"))
    flags = ("--jinja", "--chat-template-file", str(template))
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=flags, environment=DEBUG)
    forced = await only(proxy, f"{THOUGHT}</think>\n\n{SAID}")
    found = {}
    for case in ("kept", "dropped", "observed"):
        mode = {"x-slotkeeper-mode": "observe"} if case == "observed" else {}
        headers = {"x-slotkeeper-salt": case, **mode}
        body = {"messages": user("hello"), "max_tokens": 60, **FOX, **forced}
        first = await post(proxy, "/v1/chat/completions", body, headers)
        answer = first.raw["choices"][0]["message"]
        assert (answer["reasoning_content"], answer["content"]) == (THOUGHT, SAID)
        echo = {
            k: answer[k]
            for k in ("role", "content", "reasoning_content")
            if case == "kept" or k[0] != "r" or k == "role"
        }
        body = {"messages": [*user("hello"), echo, *user("two")], "max_tokens": 1, **FOX}
        second = await post(proxy, "/v1/chat/completions", body, headers)
        found[case] = (second.cache_n, second.prompt_n)
        if case != "observed":
            assert second.cache_n >= first.n_prompt + first.predicted_n - 2, (case, first, second)
            assert f"{THOUGHT}</think>\n\n{SAID}<|im_end|>" in (await prompts(proxy))[0]
        else:
            assert second.cache_n <= first.n_prompt
    assert found["kept"] == found["dropped"]


def called(arguments: str) -> list[Json]:
    """A turn with a call and its result."""
    function = {"name": "look", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": foxes(30, "Found")},
    ]


DUMPED = {
    "spaces": '{"path":"é b","n":1,"deep":{"b":[1,2],"a":null}}',
    "escapes": '{"path": "\\u00e9 b", "n": 1, "deep": {"b": [1, 2], "a": null}}',
    "sorted": '{"deep": {"a": null, "b": [1, 2]}, "n": 1, "path": "é b"}',
    "all": '{"deep":{"a":null,"b":[1,2]},"n":1,"path":"\\u00e9 b"}',
}


async def test_arguments_that_the_client_dumps_anew(proxy_server: StartProxy) -> None:
    """The spelling that was sent is sent again: each next turn costs its new message."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML, environment=DEBUG)
    own = '{"path": "é b", "n": 1, "deep": {"b": [1, 2], "a": null}}'
    history = [*user("look"), *called(own)]
    last = await chat(proxy, history)
    for number, arguments in enumerate(DUMPED.values()):
        history = [*history[:1], *called(arguments), *history[3:]]
        history += [{"role": "assistant", "content": last.text}, *user(f"and {number}?")]
        turn = await chat(proxy, history)
        assert turn.cache_n == last.n_prompt + 8 - 1, (arguments, turn, last)
        last = turn
    assert own in (await prompts(proxy))[0]
    changed = await chat(proxy, [*history[:1], *called(own.replace("1, 2", "1, 3")), *history[3:]])
    assert changed.cache_n < 60, "another argument is another history"
    assert "[1, 3]" in (await prompts(proxy))[0] and "[1, 2]" not in (await prompts(proxy))[0]


# --- what the client never heard to its end --------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["prefix", "empty", "nothing", "merged"])
async def test_a_cancelled_turn(proxy_server: StartProxy, kept: str) -> None:
    """The next prompt holds a beginning of the answer, an empty one, or nothing: up to there it is cached."""
    proxy = await proxy_server(*FLAGS, model="dense", engine_flags=CHATML, environment=DEBUG)
    talk = Conversation(proxy, foxes(200, "You help"))
    opened = await talk.say("one")
    asked = [*talk.messages, *user(foxes(40, "Two"))]
    heard = ""
    async with streaming(proxy, {"messages": asked, "max_tokens": 4000}) as events:
        async for event in events:
            heard += piece_of(event)
            if len(heard) > 60:
                break
    await until_engine(proxy, all_free)
    n_asked = await n_tokens(proxy, asked)
    history = {
        "prefix": [*asked, {"role": "assistant", "content": heard[: len(" fox") * 6]}],
        "empty": [*asked, {"role": "assistant", "content": ""}],
        "nothing": asked,
        "merged": talk.messages,
    }[kept]
    text = "three" if kept != "merged" else foxes(40, "Two") + "three"
    turn = await chat(proxy, [*history, *user(text)])
    if kept == "merged":
        assert turn.cache_n >= opened.n_prompt + 8 + 40
    else:
        # "nothing": the prompt opened an answer that is not there ("<|im_start|>assistant\n").
        assert turn.cache_n >= n_asked + (6 if kept == "prefix" else 0) - (3 if kept == "nothing" else 0), (
            turn,
            n_asked,
        )
    assert turn.prompt_n <= 30
    assert (await prompts(proxy))[0].count("Two") == 1


async def n_tokens(proxy: ProxyServer, messages: list[Json]) -> int:
    """Tokens of a prompt, by the engine."""
    async with engine_client(proxy) as client:
        prompt = (await client.post("/apply-template", json={"messages": messages})).json()["prompt"]
        answer = await client.post("/tokenize", json={"content": prompt, "parse_special": True})
    return len(answer.json()["tokens"])


# --- a proxy that starts again ---------------------------------------------------------------------------------------


def system(day: str) -> Json:
    """A base with a date."""
    return {"role": "system", "content": f"{foxes(200, 'You help')}\nToday's date: {day}\nBe kind."}


@pytest.mark.parametrize(("model", "lost"), [("dense", False), ("hybrid", False), ("dense", True)])
async def test_starting_again_after_midnight(proxy_server: StartProxy, lost: bool, model: str) -> None:
    """The ledger's texts come back with state.db. Without it one prompt is processed again, and says what is true."""
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML, environment=DEBUG)
    history = [system("Sun Nov 29 2026"), *user("one")]
    first = await chat(proxy, history)
    history = [system("Mon Nov 30 2026"), *history[1:], {"role": "assistant", "content": first.text}, *user("two")]
    second = await chat(proxy, history)
    told = (await prompts(proxy))[0]
    assert told.index("Sun Nov 29 2026") < told.index("one") < told.index("two") < told.index("is now Mon Nov 30 2026")
    assert await proxy.stop() == 0, proxy.said()
    if lost:
        for file in proxy.state_dir.glob("state.db*"):
            file.unlink()
    proxy = await proxy_server(*FLAGS, model=model, engine_flags=CHATML, environment=DEBUG)
    history = [*history, {"role": "assistant", "content": second.text}, *user("three")]
    third = await chat(proxy, history)
    prompt = (await prompts(proxy))[0]
    if lost:
        assert third.cache_n + third.prompt_n == third.n_prompt
        assert "Nov 29" not in prompt and prompt.count("Mon Nov 30 2026") == 1
    else:
        assert third.cache_n >= second.n_prompt - 4, (third, proxy.said())
        assert prompt.startswith(told)
    assert [prompt.count(word) for word in ("one", "two", "three")] == [1, 1, 1]
    history = [*history, {"role": "assistant", "content": third.text}, *user("four")]
    fourth = await chat(proxy, history)
    assert fourth.cache_n >= third.n_prompt - 4, "processed a second time"
    assert (await prompts(proxy))[0].startswith(prompt)
