"""One form for all spellings of a chat message that say the same to the model, and what sets two spellings apart.

Agents send their history back in other words than they sent or got it (agents.md, section 3): parts for strings,
arguments re-dumped, reasoning dropped, reminders moved. Two messages are equivalent when their normal forms are equal;
then the one that the engine has already read can stand for the other. What is not known to be harmless counts.

A message is JSON of any shape. Nothing here raises, nothing changes its input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Defaults: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> parameter -> the default that its schema states."""

REASONING = frozenset({"reasoning_content", "reasoning", "thinking", "reasoning_details", "reasoning_text"})
"""Fields of an assistant message that hold thoughts (llama-server reads the first; the others are clients')."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of parts that hold thoughts."""
_READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""What llama-server hands to templates besides thoughts (common/chat.cpp, common_chat_msgs_parse_oaicompat)."""
_UNREAD = frozenset({"cache_control", "refusal", "annotations", "audio", "id", "index", "type", "status", "metadata"})
"""Fields that clients add or keep and no template is given. Others count, unless they begin with `_`."""
_CALL_UNREAD = frozenset({"id", "type", "function", "index", "cache_control"})
_REMINDED = frozenset({"user", "tool"})
_TAG = re.compile(r"<(/?)([\w-]{1,64}-reminder)(?:\s[^<>]{0,200})?>")
_NOTHING: Mapping[str, Any] = {}


def defaults_of(tools: object) -> Defaults:
    """The defaults that the `tools` of a chat-completions body state; tools of other shapes have none."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = _dict(_dict(tool).get("function"))
        properties = _dict(_dict(function.get("parameters")).get("properties"))
        stated = {name: p["default"] for name, p in properties.items() if isinstance(p, dict) and "default" in p}
        if stated and isinstance(function.get("name"), str):
            found[function["name"]] = stated
    return found


def normal(message: Message, defaults: Defaults) -> bytes:
    """Canonical bytes of a message: equal for equivalent spellings, and for no others.

    Equivalent: a string or one text part; content that is null, "", missing or empty parts; `arguments` as text or
    object, equal as JSON (key order, spaces, escapes, 1.0 for 1; none and "" are {}), with or without parameters that
    have their default; white space at the end of what the assistant says; its reasoning; reminders in user messages and
    tool results, with the white space around them; fields that no template is given. Arguments that are no JSON are
    compared as text. Several parts are never equal to one: templates join them each in their way.
    """
    return _dumped(_canonical(message, defaults))


def differs_in(one: Message, other: Message, defaults: Defaults) -> str | None:
    """The most telling field in which two messages say different things, or None: a cause for a divergence."""
    a, b = _canonical(one, defaults), _canonical(other, defaults)
    if _dumped(a) == _dumped(b):
        return None
    for field, why in (("role", "role"), ("call_id", "call_ids"), ("content", "content")):
        if _dumped(a.get(field)) != _dumped(b.get(field)):
            return why
    calls = [[call[1:] if isinstance(call, list) else call for call in each.get("calls", ())] for each in (a, b)]
    if _dumped(a.get("calls")) != _dumped(b.get("calls")):
        return "call_ids" if _dumped(calls[0]) == _dumped(calls[1]) else "calls"
    return "keys"


def diff_kinds(ledger_message: Message, incoming_message: Message) -> tuple[str, ...]:
    """How two equivalent messages differ: content_form, whitespace, reminder, arguments, reasoning, extra_keys."""
    one, other = _dict(ledger_message), _dict(incoming_message)
    kinds = _content_kinds(one, other)
    calls = [_list(message.get("tool_calls")) for message in (one, other)]
    if not is_equal(*([_arguments_text(call) for call in each] for each in calls)):
        kinds.append("arguments")
    if not is_equal(thoughts(one), thoughts(other)):
        kinds.append("reasoning")
    if not is_equal(*(_rest(message) for message in (one, other))):
        kinds.append("extra_keys")
    return tuple(kinds)


def reminders(message: Message) -> tuple[str, ...]:
    """The `<system-reminder>...</system-reminder>` blocks (any tag that ends in `-reminder`) of a user message or a
    tool result, with their tags, in order."""
    if role_of(message) not in _REMINDED:
        return ()
    return tuple(text[start:end] for text in texts_of(message) for start, end in _blocks(text))


def only_reminders(message: Message) -> bool:
    """Whether it is a user message that says nothing else: it may come and go as its reminders do."""
    if role_of(message) != "user" or not reminders(message):
        return False
    return not _parts(message.get("content"), _plain)


def thoughts(message: Message) -> list[Any]:
    """What an assistant message carries of reasoning, in fields and parts."""
    if role_of(message) != "assistant":
        return []
    fields = [message[name] for name in sorted(REASONING) if message.get(name)]
    return [*fields, *(part for part in _list(message.get("content")) if _is_thought(part))]


def texts_of(message: Message) -> list[str]:
    """The texts of the content, one per part; empty ones left out."""
    content = _dict(message).get("content")
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in _list(content) if _is_text(part) and part["text"]]


def role_of(message: object) -> str | None:
    """The role, None where there is none."""
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else None


def same_arguments(one: object, other: object, stated: Mapping[str, Any]) -> bool:
    """Whether two `arguments` are equal as JSON; `stated`: the defaults of their tool's parameters."""
    return _dumped(_arguments(one, stated)) == _dumped(_arguments(other, stated))


def _content_kinds(one: Message, other: Message) -> list[str]:
    contents = one.get("content"), other.get("content")
    if is_equal(*contents):
        return []
    kinds = []
    if not (same_texts := texts_of(one) == texts_of(other)):
        kinds.append("reminder" if reminders(one) or reminders(other) else "whitespace")
    bare = [[part for part in each if not _is_thought(part)] for each in contents if isinstance(each, list)]
    is_other_form = same_texts and not is_equal(*bare) if len(bare) > 1 else type(contents[0]) is not type(contents[1])
    return [*kinds, "content_form"] if is_other_form else kinds


def _arguments_text(call: object) -> Any:
    return _dict(_dict(call).get("function")).get("arguments")


def _rest(message: Message) -> list[Any]:
    """All but content, thoughts and arguments; what is null or empty is nothing."""
    fields = {k: v for k, v in message.items() if v and k not in REASONING and k not in ("content", "tool_calls")}
    calls = [
        {**call, "function": {**_dict(call.get("function")), "arguments": None}} if isinstance(call, dict) else call
        for call in _list(message.get("tool_calls"))
    ]
    return [fields, calls]


# --- the canonical form ---------------------------------------------------------------------------------------------


def _canonical(message: object, defaults: Defaults) -> dict[str, Any]:
    """`content`: texts as strings, other parts wrapped; a call: [id, name, arguments, other fields]."""
    if not isinstance(message, dict):
        return {"other": message}
    role = message.get("role")
    form: dict[str, Any] = {"role": role}
    if parts := _content(role, message.get("content")):
        form["content"] = parts
    if calls := message.get("tool_calls"):
        form["calls"] = [_call(call, defaults) for call in calls] if isinstance(calls, list) else {"other": calls}
    for field, name in (("call_id", "tool_call_id"), ("name", "name")):
        if message.get(name):
            form[field] = message[name]
    if others := _others(message, role):
        form["more"] = others
    return form


def _content(role: object, content: object) -> list[Any]:
    is_reminded = isinstance(role, str) and role in _REMINDED
    parts = _parts(content, _plain if is_reminded else None)
    if role != "assistant":
        return parts
    parts = [part for part in parts if not _is_thought(part.get("part") if isinstance(part, dict) else None)]
    while parts and isinstance(parts[-1], str):
        if text := parts[-1].rstrip():
            return [*parts[:-1], text]
        parts.pop()
    return parts


def _parts(content: object, clean: Callable[[str], str] | None) -> list[Any]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list):
        return [] if content is None else [{"other": content}]
    out: list[Any] = []
    for part in content:
        if _is_text(part):
            if text := clean(part["text"]) if clean else part["text"]:
                out.append(text)
        elif isinstance(part, dict):
            out.append({"part": {key: value for key, value in part.items() if key != "cache_control"}})
        else:
            out.append({"other": part})
    return out


def _call(call: object, defaults: Defaults) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return {"other": call}
    name = function.get("name")
    stated = defaults.get(name, _NOTHING) if isinstance(name, str) else _NOTHING
    more = {key: value for key, value in call.items() if key not in _CALL_UNREAD and value is not None}
    more |= {f"function.{k}": v for k, v in function.items() if k not in ("name", "arguments") and v is not None}
    kind = call.get("type")
    form = [call.get("id") or None, name, _arguments(function.get("arguments"), stated)]
    return [*form, more, kind] if more or kind not in (None, "function") else form


def _arguments(given: object, stated: Mapping[str, Any]) -> Any:
    """Arguments as JSON without what the schema says anyway, or {"text": ...} for what is no JSON."""
    if given is None or given == "":
        value: Any = {}
    elif isinstance(given, str):
        try:
            value = _loads(given)
        except (ValueError, RecursionError):
            return {"text": given}
    else:
        value = _renumbered(given)
    if isinstance(value, dict) and stated:
        value = {key: v for key, v in value.items() if key not in stated or not _is_same(v, stated[key])}
    return {"json": value}


def _is_same(value: Any, default: Any) -> bool:
    return _dumped(value) == _dumped(_renumbered(default))


def _others(message: Message, role: object = None) -> dict[str, Any]:
    """Fields that count though nothing here knows them."""
    if _READ.issuperset(message):
        return {}
    ignored = _UNREAD | REASONING if (role or message.get("role")) == "assistant" else _UNREAD
    return {
        key: value
        for key, value in message.items()
        if key not in _READ and key not in ignored and not key.startswith("_") and value is not None
    }


# --- reminders ------------------------------------------------------------------------------------------------------


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


def _plain(text: str) -> str:
    """A text without its reminders: what stood around one is joined by the longer of the white spaces beside it."""
    if not (blocks := _blocks(text)):
        return text
    starts, ends = zip(*blocks, strict=True)
    plain = text[: starts[0]]
    for start, end in zip(ends, (*starts[1:], len(text)), strict=True):
        piece = text[start:end]
        before, after = plain.rstrip(), piece.lstrip()
        gaps = plain[len(before) :], piece[: len(piece) - len(after)]
        plain = before + (max(gaps, key=len) if before and after else "") + after
    return plain if plain.strip() else ""


# --- JSON -----------------------------------------------------------------------------------------------------------


def _number(text: str) -> int | float:
    """A number as JavaScript knows it: 1.0 is 1."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("no JSON number can say it")
    return int(value) if value.is_integer() else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _loads(text: str) -> Any:
    return json.loads(text, parse_float=_number, parse_constant=_refuse)


def _renumbered(value: Any) -> Any:
    """The value with its numbers as `_loads` reads them."""
    if value is None or isinstance(value, str | bool | int):
        return value
    try:
        return _loads(json.dumps(value))
    except (ValueError, RecursionError):
        return value


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except RecursionError:
        return b"deep" + b"".join(_flat(value))


def is_equal(one: object, other: object) -> bool:
    """Equality as JSON: true is not 1, and no depth is too deep."""
    return _dumped(one) == _dumped(other)


def _flat(value: Any) -> Iterable[bytes]:
    """A value that is nested too deep for the encoder, token by token."""
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield b"{%d" % len(item)
            for key in sorted(item, reverse=True):
                waiting += (item[key], key)
        elif isinstance(item, list):
            yield b"[%d" % len(item)
            waiting += reversed(item)
        else:
            yield json.dumps(item).encode() + b","


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_thought(part: object) -> bool:
    return isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _THOUGHTS
