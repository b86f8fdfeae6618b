"""One spelling of a request's base (leading system messages and tools), so that it stays the same from day to day.

Volatile values leave the base and are told in the first user message, changed ones in the newest; nothing is lost.
Tools keep the order in which they were first seen. The lead of the story is proxy/prepare.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.layout_learn import changed_lines, excerpts, learn
from policies.layout_rules import RULES, Rule
from policies.layout_text import Learned, Value, placeholder, take_out
from policies.types import digest

__all__ = [
    "Laid",
    "Learned",
    "Value",
    "change_note",
    "changed_lines",
    "described",
    "first_note",
    "lay_out",
    "learn",
    "line_note",
    "order_tools",
    "to_tell",
    "tool_key",
    "with_note",
]

CLOCK_TOLERANCE = 30 * 60
"""Seconds by which a clock may be off before it is told again (issue 4: the model was told a time, not a stopwatch)."""
SEPARATOR = "\n\n"
OPEN, CLOSE = "<context>", "</context>"
_BETWEEN = "\n\0\n"
"""Between tools' texts while they are looked at as one."""

_NO_TEXT = frozenset({"default", "enum", "const", "examples", "example"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


@dataclass(frozen=True, slots=True)
class Laid:
    """A base in its one spelling, the values taken out of it, and the names of what was changed."""

    leading: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    values: tuple[Value, ...]
    changes: tuple[str, ...]


def lay_out(
    leading: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    rules: Sequence[Rule] = RULES,
    learned: Sequence[Learned] = (),
) -> Laid:
    """The base with placeholders for its volatile values. Any JSON is taken, nothing raised, the input not changed.

    Of tools only descriptions and titles are read: what a call may contain (names, enums, defaults) stays literal.
    """
    system = list(_system_texts(leading))
    described = list(_descriptions(tools))
    joined = [_BETWEEN.join(described)] if described and not any("\0" in text for text in described) else []
    texts, values = take_out([*system, *joined], len(system), rules, learned, lambda: repr([*leading, tools]))
    if not values:
        return Laid(tuple(leading), tools, (), ())
    system_texts = iter(texts)
    laid = tuple(_with_texts(message, system_texts) for message in leading)
    laid_tools = tools
    if texts[len(system) :] != joined:
        described_texts = iter(texts[-1].split(_BETWEEN))
        laid_tools = [_described(tool, described_texts) for tool in tools or ()]
    return Laid(laid, laid_tools, tuple(values), tuple(dict.fromkeys(value.name for value in values)))


def _system_texts(leading: Sequence[dict[str, Any]]) -> Iterator[str]:
    for message in leading:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if _is_text(part))


def _with_texts(message: dict[str, Any], new: Iterator[str]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": next(new)}
    if isinstance(content, list):
        return {**message, "content": [{**part, "text": next(new)} if _is_text(part) else part for part in content]}
    return message


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _descriptions(node: object) -> Iterator[str]:
    """Description and title texts of tool definitions, in document order."""
    if isinstance(node, list):
        for item in node:
            yield from _descriptions(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("description", "title") and isinstance(value, str):
                yield value
            elif key in _BY_NAME and isinstance(value, dict):
                for schema in value.values():
                    yield from _descriptions(schema)
            elif key not in _NO_TEXT:
                yield from _descriptions(value)


def described(tools: object) -> str:
    """The texts of tool definitions as one, the same for any order of the tools: what is learned from."""
    found = [_BETWEEN.join(_descriptions(tool)) for tool in (tools if isinstance(tools, list) else ())]
    return _BETWEEN.join(sorted(found))


def _described(node: Any, new: Iterator[str]) -> Any:
    """`node` with the texts that `_descriptions` finds replaced by those of `new`."""
    if isinstance(node, list):
        return [_described(item, new) for item in node]
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("description", "title") and isinstance(value, str):
            out[key] = next(new)
        elif key in _BY_NAME and isinstance(value, dict):
            out[key] = {name: _described(schema, new) for name, schema in value.items()}
        else:
            out[key] = value if key in _NO_TEXT else _described(value, new)
    return out


def tool_key(tool: dict[str, Any]) -> bytes:
    """16-byte digest of a tool's definition, the same for any order of its keys."""
    return digest(json.dumps(tool, sort_keys=True, separators=(",", ":")).encode())


def order_tools(keys: Sequence[bytes], known: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    """The tools `keys` (tool_key, in the client's order) in the order of the base that they join.

    That is the first known order of exactly these tools, else the largest known one that holds nothing else (the
    earliest on ties), the client's other tools behind it in the client's order. A tool that stands twice stays twice.
    """
    mine = Counter(keys)
    best: tuple[bytes, ...] = ()
    for order in known:
        if len(order) > len(best) and Counter(order) <= mine:
            best = order
    missing = mine - Counter(best)
    rest: list[bytes] = []
    for key in reversed(keys):  # the last of equal tools are the new ones
        if missing[key] > 0:
            missing[key] -= 1
            rest.append(key)
    return (*best, *reversed(rest))


def first_note(values: Sequence[Value]) -> str:
    """What the first user message tells about the placeholders of the base; "" for no values."""
    if not values:
        return ""
    lines = [f"{placeholder(value.name)} = {value.text}" for value in values]
    return "\n".join([OPEN, f"Values of the {placeholder('names')} in the instructions:", *lines, CLOSE])


def change_note(values: Sequence[Value], told: Mapping[str, str] | None = None) -> str:
    """What the newest message tells about values that have changed since they were told (`told`: text by name); "" for
    none. Of a path it says what it was, since what the model wrote before with its placeholder lies there still."""
    if not values:
        return ""
    before = {v.name: (told or {}).get(v.name) for v in values if v.action == "path"}
    until = {name: f" (until here: {text})" for name, text in before.items() if text is not None}
    lines = [f"{placeholder(v.name)} is now {v.text}{until.get(v.name, '')}" for v in values]
    return "\n".join([OPEN, *lines, CLOSE])


def line_note(old: str, new: str) -> str:
    """What the newest message tells about a line that changed within a base that is kept, `old` as it was told last."""
    before, now = excerpts(old, new)
    return f'In the system prompt, "{before}" now reads "{now}".'


def with_note(message: dict[str, Any], note: str, *, front: bool) -> dict[str, Any]:
    """`message` with `note` before or behind its text, in the text part there if its content has parts.

    Content that is neither text nor a list nor nothing is left for the engine to refuse. The input is not changed.
    """
    content = message.get("content")
    if not note or not (content is None or isinstance(content, str | list)):
        return message
    if isinstance(content, list):
        return {**message, "content": _parts_with(content, note, front)}
    return {**message, "content": _joined(content or "", note, front)}


def _parts_with(parts: list[Any], note: str, front: bool) -> list[Any]:
    at = 0 if front else -1
    if not parts or not _is_text(parts[at]):
        part = {"type": "text", "text": note}
        return [part, *parts] if front else [*parts, part]
    part = {**parts[at], "text": _joined(parts[at]["text"], note, front)}
    return [part, *parts[1:]] if front else [*parts[:-1], part]


def _joined(text: str, note: str, front: bool) -> str:
    if not text:
        return note
    return f"{note}{SEPARATOR}{text}" if front else f"{text}{SEPARATOR}{note}"


def to_tell(told: Mapping[str, str], values: Sequence[Value]) -> tuple[Value, ...]:
    """The values whose text is not what was told last (`told`: text by name), clocks only when CLOCK_TOLERANCE away.

    A changed date is told with the clocks beside it, so that an old time is never read on a new day. A value that is
    gone is not told.
    """
    changed = [value for value in values if told.get(value.name) != value.text]
    due = {value.name for value in changed if value.action != "clock" or is_late(told.get(value.name), value.text)}
    if any(value.name in due and value.name.startswith(("date", "day")) for value in changed):
        due.update(value.name for value in changed if value.action == "clock")
    return tuple(value for value in changed if value.name in due)


_TIME = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d)(?:[.,]\d+)?)?(?: ?([ap])\.?m\b\.?)?", re.IGNORECASE)
_EPOCH = re.compile(r"1\d{9}(?:\d{3}|\.\d+)?\Z")
_LASTING = re.compile(r"(\d+(?:\.\d+)?) ?(ms|d|h|m|s)[a-z]*", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def is_late(old: str | None, new: str) -> bool:
    """Whether the clock text `new` has to be told after `old`: CLOCK_TOLERANCE away, or not readable as a clock."""
    if old is None:
        return True
    before, after = _seconds(old), _seconds(new)
    if before is None or after is None or before[0] != after[0]:
        return True
    apart = abs(before[1] - after[1])
    return (min(apart, 86400 - apart) if before[0] else apart) >= CLOCK_TOLERANCE


def _seconds(text: str) -> tuple[str, float] | None:
    """What a clock text says beside its seconds ("" for times that do not wrap at midnight), and the seconds."""
    if found := _TIME.search(text):
        hours, minutes, seconds, half = int(found[1]), int(found[2]), int(found[3] or 0), (found[4] or "").lower()
        hours = hours % 12 + (12 if half == "p" else 0) if half else hours
        return f"{text[: found.start()]}:{text[found.end() :]}", hours * 3600 + minutes * 60 + seconds
    if _EPOCH.match(text):
        return "", float(text) / (1000 if len(text) == 13 and "." not in text else 1)
    parts = _LASTING.findall(text)
    if not parts or _LASTING.sub("", text).strip(" ,"):
        return None
    return "", sum(float(number) * _UNITS[unit.lower()] for number, unit in parts)
