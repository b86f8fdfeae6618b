"""Our templates in real engines: what they render, and that midnight and old reasoning change no prompt's beginning."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from llamacpp.client import LlamaClient
from llamacpp.templates import keep_reasoning
from tests.conftest import StartEngine, StartProxy
from tests.live.talk import KEY, Json, engine_client, foxes, post, user

DATA = Path(__file__).parent.parent / "data"
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
FAMILY = ("qwen3.jinja", "qwen3.5.jinja")


def calls(*arguments: str, content: str | None = None, **more: Any) -> Json:
    """An assistant message that calls tools."""
    made = [
        {"id": f"call{n}", "type": "function", "function": {"name": "look", "arguments": text}}
        for n, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def result(n: int = 0) -> Json:
    """What a tool said."""
    return {"role": "tool", "tool_call_id": f"call{n}", "content": f"result {n}"}


def answer(text: str, **more: Any) -> Json:
    """An assistant message without calls."""
    return {"role": "assistant", "content": text, **more}


def histories() -> list[list[Json]]:
    """Without reasoning: one or two turns of several kinds, with and without a system message."""
    turns: list[list[Json]] = [
        [answer("plain")],
        [answer("\n\nspaced \n")],
        [calls('{"a": 1}'), result(), answer("done", reasoning_content="")],
        [calls('{"a":1}', "{}", content="text"), result(0), result(1), answer("")],
        [calls('{"b": "x"}', content=""), result(), calls("{}"), result()],
    ]
    found = []
    for count in (1, 2):
        for kinds in itertools.product(turns, repeat=count):
            messages = [m for n, turn in enumerate(kinds) for m in ({"role": "user", "content": f"ask {n}"}, *turn)]
            found.append([*messages, {"role": "user", "content": "last"}])
            found.append([{"role": "system", "content": "be brief"}, *messages])
    return found


async def rendered(client: LlamaClient, messages: list[Json], **more: Any) -> str:
    """The prompt."""
    return await client.apply_template(json.dumps({"messages": messages, **more}).encode())


async def both(live_engine: StartEngine, tmp_path: Path, name: str) -> tuple[LlamaClient, LlamaClient]:
    """An engine with the family's own template, and one with ours."""
    ours = keep_reasoning((DATA / name).read_text())
    assert ours is not None
    (tmp_path / "ours.jinja").write_text(ours)
    files = (DATA / name, tmp_path / "ours.jinja")
    engines = [await live_engine("dense", extra=("--chat-template-file", str(file))) for file in files]
    return engines[0].client, engines[1].client


@pytest.mark.parametrize("name", FAMILY)
async def test_without_reasoning_nothing_changes(live_engine: StartEngine, tmp_path: Path, name: str) -> None:
    """Character for character, with tools and without, thinking or not."""
    old, new = await both(live_engine, tmp_path, name)
    for messages, more in itertools.product(histories(), ({}, {"tools": TOOLS})):
        assert await rendered(new, messages, **more) == await rendered(old, messages, **more)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for messages in histories()[-20:]:
        assert await rendered(new, messages, **off) == await rendered(old, messages, **off)
    known = [(await client.props()).raw["chat_template_caps"] for client in (old, new)]
    changed = {key for key in known[0] if known[0][key] != known[1][key]}
    assert changed <= {"supports_preserve_reasoning"}


@pytest.mark.parametrize("name", FAMILY)
async def test_with_reasoning_prompts_are_append_only(live_engine: StartEngine, tmp_path: Path, name: str) -> None:
    """Each prompt begins the next one, its opened reply included; with the family's own template it does not."""
    old, new = await both(live_engine, tmp_path, name)
    turns: list[list[Json]] = [
        user("one"),
        [calls('{"a": 1}', reasoning_content="I look."), result()],
        [answer("first", reasoning_content="I have seen."), *user("two")],
        [answer("second", reasoning_content="I know.\nStill."), *user("three")],
        [calls("{}", "{}", content="text", reasoning_content="Again."), result(0), result(1)],
        [answer("third", reasoning_content="Enough."), *user("four")],
    ]
    prompts: dict[LlamaClient, list[str]] = {old: [], new: []}
    for n, client in itertools.product(range(len(turns)), prompts):
        prompts[client].append(await rendered(client, list(itertools.chain(*turns[: n + 1])), tools=TOOLS))
    grows = {c: [b.startswith(a) for a, b in itertools.pairwise(found)] for c, found in prompts.items()}
    assert all(grows[new])
    assert not all(grows[old])
    thoughts = ("I look.", "I have seen.", "I know.\nStill.", "Again.", "Enough.")
    assert all(prompts[new][-1].count(text) == 1 for text in thoughts)


@pytest.mark.parametrize("name", FAMILY)
async def test_replies_are_read_alike(live_engine: StartEngine, tmp_path: Path, name: str) -> None:
    """llama-server derives its parser from the template: it must come out the same."""
    forms = []
    for client in await both(live_engine, tmp_path, name):
        body = {"messages": user("hi"), "tools": TOOLS, "max_tokens": 1, "__verbose": True, "verbose": True}
        got = await client.request("POST", "/v1/chat/completions", content=json.dumps(body).encode())
        settings = got.json()["__verbose"]["generation_settings"]
        forms.append({k: v for k, v in settings.items() if k != "seed"})
    assert forms[0] == forms[1]


@pytest.mark.parametrize(
    ("arguments", "kept"), [((), True), (("--chat-template-kwargs", '{"preserve_reasoning":false}'), False)]
)
async def test_templates_that_can_keep_reasoning_do(
    live_engine: StartEngine, arguments: tuple[str, ...], kept: bool
) -> None:
    """llama-server's own default, which the embedded engine has to be told."""
    engine = await live_engine(
        "dense", extra=("--chat-template", "{{ preserve_thinking }} {{ clear_thinking }}", *arguments)
    )
    assert await rendered(engine.client, user("hi")) == f"{kept} {not kept}"


@pytest.mark.parametrize("mode", ["repair", "observe"])
async def test_clock(proxy_server: StartProxy, mode: str) -> None:
    """Constants in our modes, the date of the day in observe; a request may have it, too."""
    extra = ("--chat-template-file", str(DATA / "clock.jinja"))
    proxy = await proxy_server("--mode", mode, model="dense", engine_flags=extra, environment=KEY)
    before = time.strftime("Today is %Y-%m-%d, %d %b %Y, %B %d, %Y.")
    async with engine_client(proxy) as client:
        bodies = [
            {"messages": user("hi")},
            {"messages": user("hi"), "tools": TOOLS},
            {
                "messages": user("hi"),
                "chat_template_kwargs": {"template_date": "a", "template_date_2": "b", "template_date_3": "c"},
            },
            {"messages": user("hi"), "chat_template_kwargs": {"date_string": "mine"}},
        ]
        prompts = [(await client.post("/apply-template", json=body)).json()["prompt"] for body in bodies]
    after = time.strftime("Today is %Y-%m-%d, %d %b %Y, %B %d, %Y.")
    if mode == "observe":
        assert before in prompts[0] or after in prompts[0]
        assert not (proxy.state_dir / "template.jinja").exists()
        assert "midnight" in (await proxy.logged("template_prints_clock"))["consequence"]
        return
    fixed = "Today is [[env:template_date]], [[env:template_date_2]]"
    assert f"{fixed}, [[env:template_date_3]]." in prompts[0]
    assert f"{fixed}." in prompts[1]
    assert "Today is a, [[env:template_date_2]], c." in prompts[2]
    assert "Today is [[env:template_date]], mine, [[env:template_date_3]]." in prompts[3]
    assert all(line["event"] != "template_prints_clock" for line in proxy.lines)


async def test_append_only_template_saves_a_tool_loop(proxy_server: StartProxy) -> None:
    """A new question after a long thought: only what is new is processed, by `timings`."""
    flags = ("--mode", "repair", "--append-only-template")
    extra = ("--chat-template-file", str(DATA / "qwen3.jinja"))
    proxy = await proxy_server(*flags, model="dense", engine_flags=extra)
    loop = [*user("one"), calls("{}", reasoning_content=foxes(400)), result()]
    body = {"messages": loop, "tools": TOOLS, "max_tokens": 1}
    first = await post(proxy, "/v1/chat/completions", body)
    messages = [*loop, answer("seen", reasoning_content="Well."), *user("two")]
    second = await post(proxy, "/v1/chat/completions", body | {"messages": messages})
    assert second.cache_n >= first.n_prompt - 8
    assert second.prompt_n < 60
