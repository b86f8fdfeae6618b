"""A request's body as the text that a model reads, in order: system, tools as JSON, messages (as agents.md counts).

Any of the three dialects, translated or not. Templates add their own marks between the pieces; positions here are those
of the client's text, which a person finds again in what the agent sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Mapping[str, Any]
Section: TypeAlias = Literal["system", "tools", "messages", "params"]

LEADING = frozenset({"system", "developer"})
PARAMS = (
    *("chat_template", "chat_template_kwargs", "reasoning_effort", "reasoning_format", "enable_thinking"),
    *("tool_choice", "parallel_tool_calls", "response_format", "json_schema", "functions", "lora"),
)
"""Fields that change what a template prints, or KV (server-common.cpp, oaicompat_chat_params; proxy/api/read.py)."""
_TEXTS = ("text", "thinking", "refusal")
"""Keys under which parts of a content hold text, in all dialects."""
_ROLES = {"function_call": "assistant", "reasoning": "assistant", "function_call_output": "tool"}
"""Items of POST /v1/responses that have a type instead of a role."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Piece:
    """One text of a prompt. `message`: index in the body's list (of tools in the section "tools"); `group`: what it is
    part of within its message: pieces of one group are one text, however they are cut ("" marks a message's begin)."""

    section: Section
    message: int | None
    role: str | None
    path: str
    group: str
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces that are one text (policies/flatten). `ordinal` counts the messages of a section."""

    section: Section
    ordinal: int
    role: str | None
    name: str
    text: str
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> tuple[str, int, str | None, str]:
        """What two prompts' groups are matched by."""
        return self.section, self.ordinal, self.role, self.name

    def piece_at(self, offset: int) -> Piece:
        """The piece that holds a character of the text, the last one for its end."""
        for piece in self.pieces:
            if offset < len(piece.text):
                return piece
            offset -= len(piece.text)
        return self.pieces[-1]


def flatten(body: Json, *, ids: bool = False) -> list[Piece]:
    """The pieces of a body in the order of the flattened prompt. `ids`: with the ids of calls, which few templates
    print. Any JSON is taken, nothing raised; what is no message is a piece of its JSON."""
    messages = _list(body.get("messages", body.get("input")))
    n_leading = next((i for i, message in enumerate(messages) if role_of(message) not in LEADING), len(messages))
    pieces: list[Piece] = []
    for name in ("system", "instructions"):
        pieces += [Piece("system", None, "system", p, "content", t) for p, t in _content(name, body.get(name))]
    for i in range(n_leading):
        pieces += _message("system", i, messages[i], ids=ids)
    pieces += _tools(_list(body.get("tools")))
    for i in range(n_leading, len(messages)):
        pieces += _message("messages", i, messages[i], ids=ids)
    if isinstance(body.get("input"), str):
        pieces.append(Piece("messages", 0, "user", "input", "content", str(body["input"])))
    pieces += [Piece("messages", 0, None, p, "content", t) for p, t in _content("prompt", body.get("prompt"))]
    return pieces


def groups_of(pieces: Sequence[Piece]) -> list[Group]:
    """The texts of a prompt, each with the pieces it is made of."""
    groups, ordinal, last = [], -1, ""
    for (section, _, role, name), found in groupby(pieces, lambda p: (p.section, _owner(p), p.role, p.group)):
        ordinal = 0 if section != last else ordinal + (name == "")
        last = section
        members = tuple(found)
        groups.append(Group(section, ordinal, role, name, "".join(p.text for p in members), members))
    return groups


def _owner(piece: Piece) -> int | None:
    """Tools are one text; a message is one of its own."""
    return None if piece.section == "tools" else piece.message


def role_of(message: object) -> str | None:
    """A message's role; for items that have a type instead, the role that it stands for."""
    if not isinstance(message, dict):
        return None
    role, kind = message.get("role"), message.get("type")
    if isinstance(role, str):
        return role
    return _ROLES.get(kind) if isinstance(kind, str) else None


def dumps(value: object) -> str:
    """JSON as agents.md counts it: ASCII, with spaces, keys in their order. What is nested too deeply is only named."""
    try:
        return value if isinstance(value, str) else json.dumps(value, default=str)
    except (RecursionError, ValueError):
        return f"[{type(value).__name__}]"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tools(tools: list[Any]) -> list[Piece]:
    """Each definition a piece; together they are the list's JSON."""
    ends = {0: "["} | {i: ", " for i in range(1, len(tools))}
    pieces = [Piece("tools", i, None, f"tools[{i}]", "tools", ends[i] + dumps(tool)) for i, tool in enumerate(tools)]
    if pieces:
        pieces.append(Piece("tools", len(tools), None, "tools", "tools", "]"))
    return pieces


def _message(section: Section, i: int, message: Any, *, ids: bool) -> list[Piece]:
    role = role_of(message)
    pieces = [Piece(section, i, role, "", "", "")]
    if not isinstance(message, dict):
        return [*pieces, Piece(section, i, role, "", "content", dumps(message))]
    return pieces + [Piece(section, i, role, path, group, text) for path, group, text in _parts(message, ids=ids)]


def _parts(message: Json, *, ids: bool) -> Iterator[tuple[str, str, str]]:
    """(path, group, text) of a message, reasoning first, as templates print it."""
    for name in _REASONING:
        if message.get(name):
            yield name, "reasoning", dumps(message[name])
    is_reasoning = message.get("type") == "reasoning"
    for name in ("summary", "content", "output"):
        for path, text in _content(name, message.get(name)):
            yield path, "reasoning" if is_reasoning or path.endswith(".thinking") else "content", text
    if message.get("type") == "function_call":
        yield from _call("", "call", message)
    for i, call in enumerate(_list(message.get("tool_calls"))):
        yield from _call(f"tool_calls[{i}].function.", f"tool_calls[{i}]", call)
        if ids and isinstance(call, dict) and call.get("id"):
            yield f"tool_calls[{i}].id", f"tool_calls[{i}].id", dumps(call["id"])
    for name in ("tool_call_id", "call_id"):
        if ids and message.get(name):
            yield name, name, dumps(message[name])


def _call(path: str, group: str, call: object) -> Iterator[tuple[str, str, str]]:
    found = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(found, dict):
        yield path, group, dumps(call)
        return
    yield f"{path}name", f"{group}.name", dumps(found.get("name", ""))
    yield f"{path}arguments", f"{group}.arguments", dumps(found.get("arguments", ""))


def _content(path: str, content: object) -> Iterator[tuple[str, str]]:
    """(path, text) of a content: a text, or parts of any dialect."""
    if content is None or content == "":
        return
    if not isinstance(content, list):
        yield path, dumps(content)
        return
    for i, part in enumerate(content):
        yield from _part(f"{path}[{i}]", part)


def _part(path: str, part: object) -> Iterator[tuple[str, str]]:
    if not isinstance(part, dict):
        yield path, dumps(part)
        return
    found = [name for name in _TEXTS if isinstance(part.get(name), str)]
    for name in found:
        if part[name]:
            yield f"{path}.{name}", part[name]
    if part.get("type") == "tool_use":
        yield f"{path}.name", dumps(part.get("name", ""))
        yield f"{path}.input", dumps(part.get("input", {}))
    elif part.get("type") == "tool_result":
        yield from _content(f"{path}.content", part.get("content"))
    elif not found:
        yield path, dumps({name: value for name, value in part.items() if name != "cache_control"})
