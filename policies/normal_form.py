"""One form for all spellings of a chat message that say the same to the model, and what sets two spellings apart.

Agents send their history back in other words than they sent or got it (agents.md, section 3): parts for strings,
arguments re-dumped, reasoning dropped, reminders moved. Two messages are equivalent when their normal forms are equal;
then the one that the engine has already read can stand for the other. What is not known to be harmless counts.

A message is JSON of any shape. Nothing here raises, nothing changes its input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from policies.message_parts import (
    REASONING,
    REMINDED,
    Message,
    as_dict,
    as_list,
    is_thought,
    parts_of,
    plain,
    reminders,
    texts_of,
    thoughts,
)

Defaults: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> parameter -> the default that its schema states."""

READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""What llama-server hands to templates besides thoughts (common/chat.cpp, common_chat_msgs_parse_oaicompat)."""
_UNREAD = frozenset({"cache_control", "refusal", "annotations", "audio", "id", "index", "type", "status", "metadata"})
"""Fields that clients add or keep and no template is given. Others count, unless they begin with `_`."""
_CALL_UNREAD = frozenset({"id", "type", "function", "index", "cache_control"})
_NOTHING: Mapping[str, Any] = {}


def defaults_of(tools: object) -> Defaults:
    """The defaults that the `tools` of a chat-completions body state; tools of other shapes have none."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = as_dict(as_dict(tool).get("function"))
        properties = as_dict(as_dict(function.get("parameters")).get("properties"))
        stated = {name: p["default"] for name, p in properties.items() if isinstance(p, dict) and "default" in p}
        if stated and isinstance(function.get("name"), str):
            found[function["name"]] = stated
    return found


def normal(message: Message, defaults: Defaults) -> bytes:
    """Canonical bytes of a message: equal for equivalent spellings, and for no others.

    Equivalent: a string or one text part; content that is null, "", missing or empty parts; `arguments` as text or
    object, equal as JSON (key order, spaces, escapes, 1.0 for 1; none and "" are {}), with or without parameters that
    have their default; white space at the end of what the assistant says; its reasoning; reminders in user messages and
    tool results, with the white space around them; a tool result's `name` beside its call id, which repeats the call's
    (Hermes drops it when it resumes); fields that no template is given. Arguments that are no JSON are
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
    one, other = as_dict(ledger_message), as_dict(incoming_message)
    kinds = _content_kinds(one, other)
    calls = [as_list(message.get("tool_calls")) for message in (one, other)]
    if not is_verbatim(*([_arguments_text(call) for call in each] for each in calls)):
        kinds.append("arguments")
    if not is_verbatim(thoughts(one), thoughts(other)):
        kinds.append("reasoning")
    if _dumped(_rest(one)) != _dumped(_rest(other)):
        kinds.append("extra_keys")
    return tuple(kinds)


def same_arguments(one: object, other: object, stated: Mapping[str, Any]) -> bool:
    """Whether two `arguments` are equal as JSON; `stated`: the defaults of their tool's parameters."""
    return _dumped(_arguments(one, stated)) == _dumped(_arguments(other, stated))


def _content_kinds(one: Message, other: Message) -> list[str]:
    contents = one.get("content"), other.get("content")
    if is_verbatim(*contents):
        return []
    kinds = []
    if not (same_texts := texts_of(one) == texts_of(other)):
        kinds.append("reminder" if reminders(one) or reminders(other) else "whitespace")
    bare = [[part for part in each if not is_thought(part)] for each in contents if isinstance(each, list)]
    is_other_form = (
        same_texts and not is_verbatim(*bare) if len(bare) > 1 else type(contents[0]) is not type(contents[1])
    )
    return [*kinds, "content_form"] if is_other_form else kinds


def _arguments_text(call: object) -> Any:
    return as_dict(as_dict(call).get("function")).get("arguments")


def _rest(message: Message) -> list[Any]:
    """All but content, thoughts and arguments; what is null or empty is nothing."""
    fields = {k: v for k, v in message.items() if v and k not in REASONING and k not in ("content", "tool_calls")}
    calls = [
        {**call, "function": {**as_dict(call.get("function")), "arguments": None}} if isinstance(call, dict) else call
        for call in as_list(message.get("tool_calls"))
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
    if call_id := message.get("tool_call_id"):
        form["call_id"] = call_id
    if (name := message.get("name")) and not (role == "tool" and call_id):
        form["name"] = name
    if others := _others(message, role):
        form["more"] = others
    return form


def _content(role: object, content: object) -> list[Any]:
    is_reminded = isinstance(role, str) and role in REMINDED
    parts = parts_of(content, plain if is_reminded else None)
    if role != "assistant":
        return parts
    parts = [part for part in parts if not is_thought(part.get("part") if isinstance(part, dict) else None)]
    while parts and isinstance(parts[-1], str):
        if text := parts[-1].rstrip():
            return [*parts[:-1], text]
        parts.pop()
    return parts


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
    if READ.issuperset(message):
        return {}
    ignored = _UNREAD | REASONING if (role or message.get("role")) == "assistant" else _UNREAD
    return {
        key: value
        for key, value in message.items()
        if key not in READ and key not in ignored and not key.startswith("_") and value is not None
    }


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


def _dumped(value: Any, *, in_order: bool = True) -> bytes:
    try:
        return json.dumps(value, sort_keys=in_order, separators=(",", ":")).encode()
    except RecursionError:
        return b"deep" + b"".join(_flat(value))


def is_verbatim(one: object, other: object) -> bool:
    """Equality as JSON text, key order included: what a template prints of both is the same."""
    return _dumped(one, in_order=False) == _dumped(other, in_order=False)


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
