"""What a template takes: asked of toy templates and of real engines."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamacpp.capabilities import TemplateFacts, probe_opening, probe_printed, probe_template
from llamacpp.client import LlamaClient
from llamacpp.errors import EngineRefused, EngineStarting, EngineUnreachable
from policies.system_text import fold
from tests.conftest import StartEngine

DATA = Path(__file__).parent.parent / "data"
LENIENT = TemplateFacts(
    late_system=True, several_leading=True, must_alternate=False, takes_tools=False, takes_reasoning=False
)
REFUSED = EngineRefused(500, b"", "System message must be at the beginning.")

Messages = list[dict[str, Any]]


class ToyTemplate:
    """Renders the messages that `rule` gives back; `rule` raises to refuse them."""

    def __init__(self, rule: Callable[[Messages], Messages]) -> None:
        self.rule = rule
        self.asked = 0

    async def apply_template(self, body: bytes) -> str:
        self.asked += 1
        messages = self.rule(json.loads(body)["messages"])
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def keep(messages: Messages) -> Messages:
    return messages


def drop_late(messages: Messages) -> Messages:
    return [m for i, m in enumerate(messages) if i == 0 or m["role"] not in ("system", "developer")]


def keep_the_last(messages: Messages) -> Messages:
    """One system text, as templates that assign it in a loop have it."""
    systems = [m for m in messages if m["role"] in ("system", "developer")]
    return [m for m in messages if m not in systems[:-1]]


def to_the_top(messages: Messages) -> Messages:
    return sorted(messages, key=lambda m: m["role"] not in ("system", "developer"))


def refuse_developers(messages: Messages) -> Messages:
    if any(m["role"] == "developer" for m in messages):
        raise REFUSED
    return messages


def refuse_prompts_behind_results(messages: Messages) -> Messages:
    roles = [m["role"] for m in messages]
    if ("tool", "user") in itertools.pairwise(roles):
        raise REFUSED
    return messages


def refuse_prompts_in_a_row(messages: Messages) -> Messages:
    roles = [m["role"] for m in messages]
    if ("user", "user") in itertools.pairwise(roles):
        raise REFUSED
    return messages


def think_in_loops(messages: Messages) -> Messages:
    """Qwen3: reasoning before the last prompt is dropped."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    return [
        {**m, "content": m.get("reasoning_content", m["content"])} if i > last else m for i, m in enumerate(messages)
    ]


def refuse_tool_results(messages: Messages) -> Messages:
    if any(m["role"] == "tool" for m in messages):
        raise REFUSED
    return messages


@pytest.mark.parametrize(
    ("rule", "facts"),
    [
        (keep, {}),
        (drop_late, {"late_in_place": False, "leading_in_place": False}),
        (keep_the_last, {"late_in_place": False, "leading_in_place": False}),
        (to_the_top, {"late_in_place": False}),
        (refuse_developers, {"late_system": False, "several_leading": False}),
        (refuse_prompts_behind_results, {"must_alternate": True}),
        (refuse_prompts_in_a_row, {"must_alternate": True}),
        (think_in_loops, {"takes_reasoning": True}),
        (refuse_tool_results, {}),
    ],
)
async def test_toy_templates(rule: Callable[[Messages], Messages], facts: dict[str, bool]) -> None:
    toy = ToyTemplate(rule)
    assert await probe_template(toy) == dataclasses.replace(LENIENT, **facts)
    assert toy.asked <= 11


async def test_engine_that_renders_nothing_is_no_answer() -> None:
    def refuse(messages: Messages) -> Messages:
        raise REFUSED

    with pytest.raises(EngineRefused):
        await probe_template(ToyTemplate(refuse))


@pytest.mark.parametrize("error", [EngineStarting, EngineUnreachable])
async def test_engine_that_goes_away_is_no_refusal(error: type[Exception]) -> None:
    """Its template must not be taken for a strict one."""

    def go_away(messages: Messages) -> Messages:
        if len(messages) > 1:
            raise error("gone")
        return messages

    with pytest.raises(error):
        await probe_template(ToyTemplate(go_away))


TEMPLATES = [
    ("chatml-tools.jinja", dataclasses.replace(LENIENT, takes_tools=True)),
    ("think.jinja", dataclasses.replace(LENIENT, takes_reasoning=True)),
    ("strict.jinja", dataclasses.replace(LENIENT, late_system=False, several_leading=False, takes_tools=True)),
    (
        "alternating.jinja",
        dataclasses.replace(LENIENT, late_system=False, several_leading=False, must_alternate=True, takes_tools=True),
    ),
]


def say(role: str, text: str, **more: object) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


CALL = {"id": "call00000", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
HISTORY = [
    say("system", "mark01"),
    say("developer", "mark02"),
    say("user", "mark03"),
    say("system", "mark04"),
    say("assistant", "mark05", tool_calls=[CALL]),
    say("tool", "mark06", tool_call_id="call00000"),
    say("system", "mark07"),
    say("user", "mark08"),
    say("assistant", "mark09"),
    say("system", "mark10"),
    say("user", "mark11"),
    say("user", "mark12"),
]
REQUESTS = [4, 7, 8, 11, 12]
"""Where HISTORY was cut when it was sent; at 8 and 12 the cut before was interrupted."""


@pytest.mark.live
@pytest.mark.parametrize(("template", "facts"), TEMPLATES)
async def test_live_templates(live_engine: StartEngine, template: str, facts: TemplateFacts) -> None:
    await check_template(live_engine, template, facts)


@pytest.mark.native
@pytest.mark.parametrize(("template", "facts"), TEMPLATES)
async def test_native_templates(live_engine: StartEngine, template: str, facts: TemplateFacts) -> None:
    await check_template(live_engine, template, facts)


async def check_template(live_engine: StartEngine, template: str, facts: TemplateFacts) -> None:
    """The facts, no token processed for them, and a hard history that renders once it is folded by them."""
    engine = await live_engine("dense", ctx_size=512, extra=("--jinja", "--chat-template-file", str(DATA / template)))
    assert await probe_template(engine.client) == facts
    assert [slot.n_prompt_tokens for slot in await engine.client.slots()] in ([0, 0], [None, None])
    if not facts.several_leading:
        with pytest.raises(EngineRefused):
            await engine.client.apply_template(json.dumps({"messages": HISTORY}).encode())
    earlier = ""
    for end in REQUESTS:
        prompt = await rendered(engine.client, HISTORY[:end], facts)
        places = [prompt.find(f"mark{n:02}") for n in range(1, end + 1)]
        assert -1 not in places
        assert places == sorted(places)
        asked = earlier.removesuffix("<think>\n").removesuffix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
        assert prompt.startswith(asked)
        earlier = prompt


async def rendered(client: LlamaClient, history: Messages, facts: TemplateFacts) -> str:
    messages = fold(
        history,
        late_system=facts.late_system,
        several_leading=facts.several_leading,
        must_alternate=facts.must_alternate,
    )
    return await client.apply_template(json.dumps({"messages": messages}).encode())


async def test_what_a_template_prints_by_itself() -> None:
    """Mistral's way: a date where there is no system message; what is refused is taken to print it."""

    def rule(messages: Messages) -> Messages:
        return (
            messages if messages[0]["role"] == "system" else [{"role": "system", "content": "It is [[a]]."}, *messages]
        )

    def refuse(messages: Messages) -> Messages:
        raise REFUSED

    bare, rest = frozenset({"[[a]]"}), frozenset[str]()
    found = {(False, False): bare, (False, True): bare, (True, False): rest, (True, True): rest}
    assert await probe_printed(ToyTemplate(rule), ["[[a]]", "[[b]]"]) == found
    assert set((await probe_printed(ToyTemplate(refuse), ["[[a]]"])).values()) == {bare}


class Opening(ToyTemplate):
    """Opens the model's turn with `text`; a token a character."""

    def __init__(self, text: str) -> None:
        super().__init__(keep)
        self.text = text

    async def apply_template(self, body: bytes) -> str:
        return await super().apply_template(body) + "<assistant>" + self.text

    async def tokenize(self, text: str, *, add_special: bool = False) -> bytes:
        return text.encode("utf-32-le")


@pytest.mark.parametrize(("text", "opening"), [("", 0), ("<think>", 7)])
async def test_what_a_turn_is_opened_with(text: str, opening: int) -> None:
    """What the next prompt does not have in that place."""
    assert await probe_opening(Opening(text)) == opening
