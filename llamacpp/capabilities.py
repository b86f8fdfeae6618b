"""What an engine's chat template takes, asked of the engine itself, never guessed from the model's name.

`/apply-template` renders a chat body exactly as a chat request would, llama-server's own workarounds included, and
processes no token. Each question renders a few lines of conversation with marks in them, and looks for the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from llamacpp.errors import EngineRefused

_CALL_ID = "slotkeep1"
"""Nine letters and digits: Mistral's template refuses other tool call ids."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "markedtool",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


class Template(Protocol):
    """The part of `llamacpp.client.LlamaClient` that is used here."""

    async def apply_template(self, body: bytes) -> str: ...


class Tokens(Template, Protocol):
    """With its tokeniser."""

    async def tokenize(self, text: str, *, add_special: bool = False) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What one engine's chat template takes.

    late_system: system and developer messages behind the first user message render without an error.
    several_leading: so do several of them at the beginning.
    must_alternate: two user messages in a row, or one behind a tool result, are refused.
    takes_tools: tool definitions reach the prompt. takes_reasoning: an assistant message's `reasoning_content` does, at
    least inside a tool loop.
    late_in_place, leading_in_place: all of these texts stand in the prompt where they were sent. False where a template
    takes them without a word and drops some, or moves late ones to the top.
    """

    late_system: bool
    several_leading: bool
    must_alternate: bool
    takes_tools: bool
    takes_reasoning: bool
    late_in_place: bool = True
    leading_in_place: bool = True

    @property
    def takes_anything(self) -> bool:
        """No message has to move for it to render."""
        return self.late_system and self.several_leading and not self.must_alternate


async def probe_template(client: Template) -> TemplateFacts:
    """Ask the engine about its template: at most eleven short calls of /apply-template, which may wake a sleeping one.

    Raises EngineRefused when not even one user message renders (no chat model, wrong key), and what the client raises
    for an engine that is starting, unreachable or no llama-server.
    """
    await client.apply_template(_body(_say("user", "word1")))
    late = [await _render(client, *_late(role)) for role in ("system", "developer")]
    leading = [await _render(client, *_several(role)) for role in ("system", "developer")]
    return TemplateFacts(
        late_system=None not in late,
        several_leading=None not in leading,
        must_alternate=await _must_alternate(client),
        takes_tools="markedtool" in (await _render(client, _say("user", "word1"), tools=[_TOOL]) or ""),
        takes_reasoning=await _takes_reasoning(client),
        late_in_place=all(_in_order(text, 6) for text in late),
        leading_in_place=all(_in_order(text, 3) for text in leading),
    )


async def probe_printed(client: Template, texts: Sequence[str]) -> dict[tuple[bool, bool], frozenset[str]]:
    """Which of `texts` the template prints by itself: by whether there is a system message and whether there are tools.

    Four short calls of /apply-template. What does not render is taken to print all. Raises what the client raises, but
    for refusals.
    """
    printed = {}
    for has_system, has_tools in ((False, False), (False, True), (True, False), (True, True)):
        messages = [*([_say("system", "word1")] if has_system else []), _say("user", "word2")]
        prompt = await _render(client, *messages, **({"tools": [_TOOL]} if has_tools else {}))
        printed[has_system, has_tools] = frozenset(t for t in texts if prompt is None or t in prompt)
    return printed


async def probe_opening(client: Tokens) -> int:
    """Tokens at a prompt's end that the next prompt may not have there: what the template opens the model's turn with,
    where a turn of the history begins otherwise (`<think>` in most templates of reasoning models).

    At most four short calls of /apply-template and four of /tokenize. Raises what the client raises, but for refusals.
    """
    ask, more = _say("user", "word1"), [_say("assistant", "word2"), _say("user", "word3")]
    calls = _tool_loop()
    pairs = [
        (await _render(client, ask), await _render(client, ask, *more)),
        (await _render(client, ask, tools=[_TOOL]), await _render(client, ask, *calls, tools=[_TOOL])),
    ]
    return max([0, *[await _not_repeated(client, a, b) for a, b in pairs if a is not None and b is not None]])


async def _not_repeated(client: Tokens, prompt: str, later: str) -> int:
    one, two = await client.tokenize(prompt, add_special=True), await client.tokenize(later, add_special=True)
    places = range(0, len(one), 4)
    return len(one) // 4 - next((i // 4 for i in places if one[i : i + 4] != two[i : i + 4]), len(one) // 4)


def _late(role: str) -> list[dict[str, Any]]:
    """The two places in which Claude Code has them: behind the first prompt, and behind a later one."""
    roles = (role, "user", role, "assistant", "user", role)
    return [_say(each, f"word{n}") for n, each in enumerate(roles, 1)]


def _several(role: str) -> list[dict[str, Any]]:
    return [_say(role, "word1"), _say(role, "word2"), _say("user", "word3")]


async def _must_alternate(client: Template) -> bool:
    if await _render(client, _say("user", "word1"), _say("user", "word2")) is None:
        return True
    loop = [_say("user", "word1"), *_tool_loop()]
    return await _render(client, *loop) is not None and await _render(client, *loop, _say("user", "word2")) is None


async def _takes_reasoning(client: Template) -> bool:
    thought = {"reasoning_content": "markedthought"}
    loop = await _render(client, _say("user", "word1"), *_tool_loop(**thought), tools=[_TOOL])
    if "markedthought" in (loop or ""):
        return True
    turns = [_say("user", "word1"), {**_say("assistant", "word2"), **thought}, _say("user", "word3")]
    return "markedthought" in (await _render(client, *turns) or "")


async def _render(client: Template, *messages: dict[str, Any], **more: object) -> str | None:
    """The prompt; None when the template refuses the messages."""
    try:
        return await client.apply_template(_body(*messages, **more))
    except EngineRefused:  # 400 or 500, by template and version
        return None


def _in_order(text: str | None, count: int) -> bool:
    """Whether word1 .. wordN stand in the prompt, in this order; a refusal is no matter of place."""
    if text is None:
        return True
    places = [text.find(f"word{n}") for n in range(1, count + 1)]
    return -1 not in places and places == sorted(places)


def _tool_loop(**more: object) -> list[dict[str, Any]]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "markedtool", "arguments": '{"word":"a"}'}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": _CALL_ID, "content": "result"},
    ]


def _say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _body(*messages: dict[str, Any], **more: object) -> bytes:
    return orjson.dumps({"messages": messages, **more})
