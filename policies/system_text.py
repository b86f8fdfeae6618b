"""System text in mid-conversation, spelled so that a strict chat template takes it.

Templates like Qwen3.5's and Mistral's refuse system messages that are not first; Claude Code and Codex send them. Here
such text becomes part of the user's side of the conversation, where it stands:

- It is appended to the user message or tool result before it. A tool result rather than a user message of its own,
  because that would be a new query to Qwen3.5 (which then drops the reasoning of the running tool loop) and a broken
  alternation to Mistral.
- Behind an assistant message it begins the next user message or tool result, or is one when none follows.

What becomes of a message depends only on those before it and on the next one, never on anything behind a later answer.
So when a history was cut where the model was to answer, its folded form is a prefix of the longer one's, and the slot
that holds it goes on. (At any other cut the last message only grows at its end.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Content: TypeAlias = str | list[dict[str, Any]]

OPEN, CLOSE = "<system-reminder>", "</system-reminder>"
"""The tags in which Claude Code itself sends the same texts to models that it knows (agents.md, section 2)."""
SEPARATOR = "\n\n"
FILLER = "Done."
"""What opencode lets the assistant say between a tool result and a user message for Mistral (provider/transform.ts); an
empty text is refused by Ministral's template."""

_SYSTEM = frozenset({"system", "developer"})
_ASKING = frozenset({"user", "tool"})


def fold(
    messages: list[Message], *, late_system: bool, several_leading: bool, must_alternate: bool = False
) -> list[Message]:
    """The chat messages as a template takes them that can do only what the arguments say (`TemplateFacts`).

    `late_system`: system and developer messages behind the first other one are taken. `several_leading`: more than one
    before it are. `must_alternate`: user and assistant messages have to take turns, tool loops not counted.
    Every text stays, in its order. Messages whose shape the engine refuses are left for it to refuse: any list of JSON
    is taken, nothing raised. The input is not changed.
    """
    if not several_leading:
        messages = _merge_leading(messages)
    if not late_system:
        messages = _fold_late(messages)
    return _alternate(messages) if must_alternate else messages


def _merge_leading(messages: list[Message]) -> list[Message]:
    count = _leading(messages)
    if count < 2 or not all(_is_readable(message) for message in messages[:count]):
        return messages
    content = messages[0]["content"]
    for message in messages[1:count]:
        content = _join(content, message["content"])
    return [{**messages[0], "content": content}, *messages[count:]]


def _fold_late(messages: list[Message]) -> list[Message]:
    leading = _leading(messages)
    if not any(_role(message) in _SYSTEM for message in messages[leading:]):
        return messages
    folded = messages[:leading]
    waiting: Content = ""  # system text that stands behind an answer, for the next message to begin with
    for message in messages[leading:]:
        asks = _role(message) in _ASKING and _is_readable(message)
        if _role(message) in _SYSTEM and _is_readable(message):
            text = _wrapped(message["content"])
            if folded and _role(folded[-1]) in _ASKING and _is_readable(folded[-1]):
                folded[-1] = {**folded[-1], "content": _join(folded[-1]["content"], text)}
            else:
                waiting = _join(waiting, text)
            continue
        if waiting and not asks:
            folded.append({"role": "user", "content": waiting})
        folded.append({**message, "content": _join(waiting, message["content"])} if waiting and asks else message)
        waiting = ""
    return [*folded, {"role": "user", "content": waiting}] if waiting else folded


def _alternate(messages: list[Message]) -> list[Message]:
    """Merge neighbours of one role; put FILLER where the user speaks before a tool loop's answer was given.

    Mistral's rule: without tool results and assistant messages that call tools, the rest is user, assistant, user ...
    """
    out: list[Message] = []
    answered = True
    for message in messages:
        role, before = _role(message), out[-1] if out else None
        if before is not None and role == "user" and _role(before) == "user" and _both_readable(before, message):
            out[-1] = {**before, "content": _join(before["content"], message["content"])}
            continue
        if before is not None and _continues_answer(before, message):
            out[-1] = _merged_answer(before, message)
        else:
            if role == "user" and not answered:
                out.append({"role": "assistant", "content": FILLER})
            out.append(message)
        if role == "user":
            answered = False
        elif role == "assistant":
            answered = not out[-1].get("tool_calls")
    return out


def _continues_answer(before: Message, message: Message) -> bool:
    return (
        _role(before) == _role(message) == "assistant"
        and not before.get("tool_calls")
        and all(_is_content(each.get("content") or "") for each in (before, message))
    )


def _merged_answer(before: Message, message: Message) -> Message:
    merged = {**before, **message, "content": _join(before.get("content") or "", message.get("content") or "")}
    thoughts = [before.get("reasoning_content"), message.get("reasoning_content")]
    if all(isinstance(thought, str) for thought in thoughts):
        merged["reasoning_content"] = SEPARATOR.join(filter(None, thoughts))
    return merged


def _leading(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if _role(message) not in _SYSTEM), len(messages))


def _role(message: object) -> str | None:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else None


def _is_readable(message: Message) -> bool:
    return _is_content(message.get("content"))


def _both_readable(one: Message, other: Message) -> bool:
    return _is_readable(one) and _is_readable(other)


def _is_content(content: object) -> bool:
    """Text, or a list of parts (JSON objects): what llama-server reads as `content`."""
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _wrapped(content: Content) -> Content:
    """System text in its tags; parts that are no text (images) behind it; "" when there is nothing to say."""
    parts = _parts(content)
    # llama-server joins text parts by a line break for templates that take only text (common/chat.cpp).
    text = "\n".join(part["text"] for part in parts if _is_text(part))
    bare = text.strip()
    if bare and not (bare.startswith(OPEN) and bare.endswith(CLOSE)):
        text = f"{OPEN}\n{text}\n{CLOSE}"
    others = [part for part in parts if not _is_text(part)]
    return _join(text if bare else "", others) if others else text if bare else ""


def _join(one: Content, other: Content) -> Content:
    """One content behind the other. Text is appended to text, in parts too: templates join parts each in their way."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{SEPARATOR}{other}" if one and other else one or other
    head, tail = _parts(one), _parts(other)
    if head and tail and _is_text(head[-1]) and _is_text(tail[0]):
        text = _join(head[-1]["text"], tail[0]["text"])
        return [*head[:-1], {**head[-1], "text": text}, *tail[1:]]
    return [*head, *tail]


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
