"""What a chat message says, whatever its shape: role, texts, thoughts, reminders.

Takes JSON of any shape, raises nothing, changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

REASONING = frozenset({"reasoning_content", "reasoning", "thinking", "reasoning_details", "reasoning_text"})
"""Fields of an assistant message that hold thoughts (llama-server reads the first; the others are clients')."""
REMINDED = frozenset({"user", "tool"})
"""Roles whose reminders count apart from what they say."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of parts that hold thoughts."""
MEDIA_MARKS = (b'"type":"image_url"', b'"type":"input_audio"', b'"type":"input_video"')
"""How a part of media is written by orjson."""
_MAY_BE_MEDIA = b'"type":"i'
"""What all of them begin with: one look at a long text instead of three."""
MEDIA_TOKENS = 1024
"""Tokens that an image or a sound is taken for; projectors make 64 to about 1,500 of one."""
MEDIA_BYTES = 4 * MEDIA_TOKENS
"""Bytes of text that make about as many tokens."""
_DATA = re.compile(rb"[A-Za-z0-9+/=_-]{1024,}")
"""What an image or a sound is sent as."""
_TAG = re.compile(r"<(/?)([\w-]{1,64}-reminder)(?:\s[^<>]{0,200})?>")


def role_of(message: object) -> str | None:
    """The role, None where there is none."""
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else None


def size_of(blob: bytes) -> int:
    """Bytes of a message's JSON by which its share of a prompt's tokens is estimated: an image or a sound counts as
    MEDIA_BYTES, however long its data are."""
    n_media = sum(map(blob.count, MEDIA_MARKS)) if _MAY_BE_MEDIA in blob else 0
    if not n_media:
        return len(blob)
    return len(blob) - sum(found.end() - found.start() for found in _DATA.finditer(blob)) + n_media * MEDIA_BYTES


def texts_of(message: Message) -> list[str]:
    """The texts of the content, one per part; empty ones left out."""
    content = as_dict(message).get("content")
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in as_list(content) if is_text(part) and part["text"]]


def thoughts(message: Message) -> list[Any]:
    """What an assistant message carries of reasoning, in fields and parts."""
    if role_of(message) != "assistant":
        return []
    fields = [message[name] for name in sorted(REASONING) if message.get(name)]
    return [*fields, *(part for part in as_list(message.get("content")) if is_thought(part))]


def thought_texts(message: Message) -> list[str]:
    """The texts of `thoughts`, without white space: one per field, one for all parts. What is no text says nothing."""
    if role_of(message) != "assistant":
        return []
    said = [message.get(name) for name in sorted(REASONING)]
    said.append([part for part in as_list(message.get("content")) if is_thought(part)])
    texts = ["".join(map(_thought, value)) if isinstance(value, list) else _thought(value) for value in said]
    return [bare for text in texts if (bare := "".join(text.split()))]


def _thought(value: object) -> str:
    found = (value.get("thinking") or value.get("text")) if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def reminders(message: Message) -> tuple[str, ...]:
    """The `<system-reminder>...</system-reminder>` blocks (any tag that ends in `-reminder`) of a user message or a
    tool result, with their tags, in order."""
    if role_of(message) not in REMINDED:
        return ()
    return tuple(text[start:end] for text in texts_of(message) for start, end in _blocks(text))


def inner_of(block: str) -> tuple[str, str]:
    """Tag and text of a block that `reminders` found."""
    opening, closing = _TAG.match(block), block.rfind("<")
    return (opening[2], block[opening.end() : closing].strip()) if opening else ("", block)


def only_reminders(message: Message) -> bool:
    """Whether it is a user message that says nothing else: it may come and go as its reminders do."""
    if role_of(message) != "user" or not reminders(message):
        return False
    return not parts_of(message.get("content"), plain)


def without_reminders(message: Message, dropped: Iterable[str]) -> Message:
    """The message without those of its reminder blocks, each as often as it stands in `dropped`; parts that said
    nothing else are gone. The same object when it has none of them."""
    left = Counter(dropped)
    if not (left & Counter(reminders(message))):
        return message

    def clean(text: str) -> str:
        spans = []
        for start, end in _blocks(text):
            if left[text[start:end]] > 0:
                left[text[start:end]] -= 1
                spans.append((start, end))
        return _joined(text, spans)

    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": clean(content)}
    parts = [{**part, "text": clean(part["text"])} if is_text(part) else part for part in content]
    return {**message, "content": [part for part in parts if not is_text(part) or part["text"]]}


def parts_of(content: object, clean: Callable[[str], str] | None) -> list[Any]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list):
        return [] if content is None else [{"other": content}]
    out: list[Any] = []
    for part in content:
        if is_text(part):
            if text := clean(part["text"]) if clean else part["text"]:
                out.append(text)
        elif isinstance(part, dict):
            out.append({"part": {key: value for key, value in part.items() if key != "cache_control"}})
        else:
            out.append({"other": part})
    return out


def _blocks(text: str) -> list[tuple[int, int]]:
    """Where reminders stand, outermost only. Linear in the length: a tag that is never closed opens nothing."""
    if "-reminder" not in text:
        return []
    tags = list(_TAG.finditer(text))
    closed = {tag[2]: tag.start() for tag in tags if tag[1]}
    found, name, start = [], "", 0
    for tag in tags:
        if not name and not tag[1] and closed.get(tag[2], -1) > tag.start():
            name, start = tag[2], tag.start()
        elif name and tag[1] and tag[2] == name:
            found.append((start, tag.end()))
            name = ""
    return found


def plain(text: str) -> str:
    """A text without its reminders."""
    return _joined(text, _blocks(text))


def _joined(text: str, blocks: Sequence[tuple[int, int]]) -> str:
    """A text without those spans: what stood around one is joined by the longer of the white spaces beside it."""
    if not blocks:
        return text
    starts, ends = zip(*blocks, strict=True)
    said = [text[: starts[0]].rstrip()]
    gap = text[len(said[0]) : starts[0]]  # white space behind what was said so far
    for start, end in zip(ends, (*starts[1:], len(text)), strict=True):
        piece = text[start:end]
        if after := piece.strip():
            begins = piece.index(after[0])
            said += [max(gap, piece[:begins], key=len) if len(said) > 1 or said[0] else "", after]
            gap = piece[begins + len(after) :]
        else:
            gap = ""
    return "".join([*said, gap]) if any(said) else ""


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def is_thought(part: object) -> bool:
    return isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _THOUGHTS
