"""What the model said, given back to it in its own words.

Clients drop the reasoning of an answer and dump the arguments of its calls anew (agents.md, section 3). The engine's
memory holds the tokens that were generated, so what comes back as an echo is sent as it was generated.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from policies.message_parts import REASONING, Message, role_of, thoughts
from policies.normal_form import READ, Defaults, diff_kinds, is_verbatim, normal, same_arguments

GAVE_UP = "gave_up"


def give_back(reply: Message, incoming: Message, defaults: Defaults) -> tuple[Message, tuple[str, ...]]:
    """The message to send for `incoming`, where the client may be telling what the model said in `reply`, and what was
    given back ("reasoning", "arguments", "whitespace", ...; `diff_kinds`); nothing when incoming is sent unchanged.

    `reply`: the assistant message as it was generated, `arguments` verbatim. An equivalent echo becomes the reply. The
    beginning of its text without calls (the client was interrupted), or a part of its calls, gets the reasoning that
    belongs to it, and each call its own arguments; what the client says beyond that stays. Calls that the reply does
    not know, or with other arguments, are the client's edit. ("gave_up",): call ids repeat, nothing is given back.
    Messages of any JSON shape are taken; neither is changed.
    """
    if role_of(reply) != "assistant" or role_of(incoming) != "assistant":
        return incoming, ()
    told = {key: value for key, value in incoming.items() if key in READ}  # the reply has no fields but the engine's
    if normal(reply, defaults) == normal(told, defaults):
        return _echoed(reply, incoming)
    said = incoming.get("tool_calls") or []
    if not said:
        return _interrupted(reply, incoming)
    known = reply.get("tool_calls") or []
    if not (isinstance(said, list) and isinstance(known, list)):
        return incoming, ()
    if _repeats(said) or _repeats(known):
        return incoming, (GAVE_UP,)
    return _partial(reply, incoming, defaults)


def _echoed(reply: Message, incoming: Message) -> tuple[Message, tuple[str, ...]]:
    kinds = tuple(kind for kind in diff_kinds(reply, incoming) if kind != "extra_keys")
    kept = {key: value for key, value in incoming.items() if key not in READ and key not in REASONING}
    if not thoughts(reply):  # They were not recorded: what the client knows of them stays.
        kinds = tuple(kind for kind in kinds if kind != "reasoning")
        kept |= {key: value for key, value in incoming.items() if key in REASONING}
        if thoughts({**incoming, **dict.fromkeys(REASONING)}):
            kept["content"] = incoming["content"]
    return ({**reply, **kept}, kinds) if kinds else (incoming, ())


def _interrupted(reply: Message, incoming: Message) -> tuple[Message, tuple[str, ...]]:
    """The client kept a beginning of the text. Thoughts are given back where text follows them: they were complete."""
    told, begun = reply.get("content"), incoming.get("content")
    text, start = _text(told), _text(begun)
    if text is None or start is None or not start.strip() or not text.startswith(start.rstrip()):
        return incoming, ()
    return _with_thoughts(reply, incoming)


def _partial(reply: Message, incoming: Message, defaults: Defaults) -> tuple[Message, tuple[str, ...]]:
    """The client kept some calls, and perhaps another text (gptme: the reasoning inlined in it)."""
    own = {call["id"]: call for call in reply.get("tool_calls") or [] if _id(call)}
    calls = []
    for call in incoming["tool_calls"]:
        match = own.get(_id(call) or "")
        if match is None or not _is_same_call(match, call, defaults):
            return incoming, ()
        calls.append({**call, "function": {**call["function"], "arguments": match["function"].get("arguments")}})
    message, kinds = incoming, []
    if not is_verbatim(calls, incoming["tool_calls"]):
        message, kinds = {**incoming, "tool_calls": calls}, ["arguments"]
    if _is_same_text(reply, incoming):
        message, more = _with_thoughts(reply, message)
        kinds += more
    return message, tuple(kinds)


def _with_thoughts(reply: Message, incoming: Message) -> tuple[Message, tuple[str, ...]]:
    own = {key: value for key, value in reply.items() if key in REASONING and value}
    has_parts = isinstance(incoming.get("content"), list) and thoughts(incoming)
    if not own or has_parts or all(incoming.get(key) == value for key, value in own.items()):
        return incoming, ()
    return {**{key: value for key, value in incoming.items() if key not in REASONING}, **own}, ("reasoning",)


def _is_same_text(one: Message, other: Message) -> bool:
    texts = [_text(message.get("content")) for message in (one, other)]
    return None not in texts and (texts[0] or "").rstrip() == (texts[1] or "").rstrip()


def _is_same_call(one: Any, other: Any, defaults: Defaults) -> bool:
    mine, theirs = (call.get("function") if isinstance(call, dict) else None for call in (one, other))
    if (
        not isinstance(mine, dict)
        or not isinstance(theirs, dict)
        or not is_verbatim(mine.get("name"), theirs.get("name"))
    ):
        return False
    name = mine.get("name")
    stated = defaults.get(name, {}) if isinstance(name, str) else {}
    return same_arguments(mine.get("arguments"), theirs.get("arguments"), stated)


def _repeats(calls: list[Any]) -> bool:
    return any(count > 1 for count in Counter(filter(None, map(_id, calls))).values())


def _id(call: object) -> str | None:
    name = call.get("id") if isinstance(call, dict) else None
    return name if isinstance(name, str) and name else None


def _text(content: object) -> str | None:
    """The content as one text; None when it has several parts or other ones."""
    if content is None:
        return ""
    if isinstance(content, list):
        if len(content) != 1 or not isinstance(content[0], dict) or content[0].get("type") != "text":
            return None
        content = content[0].get("text")
    return content if isinstance(content, str) else None
