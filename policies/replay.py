"""What the model said, given back to it in its own words.

Clients drop the reasoning of an answer and dump the arguments of its calls anew (agents.md, section 3). The engine's
memory holds the tokens that were generated, so what comes back as an echo is sent as it was generated.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from policies.message_parts import REASONING, Message, role_of, thought_texts, thoughts
from policies.normal_form import READ, Defaults, diff_kinds, is_verbatim, normal, same_arguments
from policies.placeholders import resolved

GAVE_UP = "gave_up"
_NOTHING: Mapping[str, str] = {}


def give_back(
    reply: Message, incoming: Message, defaults: Defaults, values: Mapping[str, str] = _NOTHING
) -> tuple[Message, tuple[str, ...]]:
    """The message to send for `incoming`, where the client may be telling what the model said in `reply`, and what was
    given back ("reasoning", "arguments", "whitespace", ...; `diff_kinds`); nothing when incoming is sent unchanged.

    `reply`: the assistant message as it was generated, `arguments` verbatim. An equivalent echo becomes the reply. The
    beginning of its text without calls (the client was interrupted), or a part of its calls, gets the reasoning that
    belongs to it, and each call its own arguments; what the client says beyond that stays. Calls that the reply does
    not know, or with other arguments, are the client's edit; so is an answer with thoughts that the reply has not
    (`has_other_thoughts`). ("gave_up",): call ids repeat, nothing is given back. `values`: what the client was told for
    placeholders in the reply ("placeholder": they are put back).
    Messages of any JSON shape are taken; neither is changed.
    """
    if role_of(reply) != "assistant" or role_of(incoming) != "assistant":
        return incoming, ()
    said = resolved(reply, values)
    if thoughts(reply) and has_other_thoughts(said, incoming):
        return incoming, ()
    told = normal({key: value for key, value in incoming.items() if key in READ}, defaults)  # the engine's fields alone
    if normal(reply, defaults) == told:
        return _echoed(reply, incoming)
    if said is not reply and normal(said, defaults) == told:
        return _echoed(reply, incoming, ("placeholder",))
    calls = incoming.get("tool_calls") or []
    if not calls:
        return _interrupted(reply, incoming, values)
    known = reply.get("tool_calls") or []
    if not (isinstance(calls, list) and isinstance(known, list)):
        return incoming, ()
    if _repeats(calls) or _repeats(known):
        return incoming, (GAVE_UP,)
    return _partial(reply, said, incoming, defaults)


def has_other_thoughts(reply: Message, incoming: Message) -> bool:
    """Whether the client sends thoughts that are not the reply's. The same: equal but for white space, or the one the
    beginning of the other. None, or none that can be read, are not other ones."""
    own, told = thought_texts(reply), thought_texts(incoming)
    return bool(told) and not any(a.startswith(b) or b.startswith(a) for a in own for b in told)


def places_again(ledger: Sequence[bytes], incoming: Sequence[bytes], start: int) -> dict[int, int]:
    """Behind an edit: position in `incoming`, from `start` on -> the nearest one in `ledger`, from `start` on, of the
    same message behind the same one. Both: normal forms. Equal short answers ("Done.") are told apart by what they
    answer. O(n log n)."""
    known = defaultdict(list)
    for at in range(max(start, 1), len(ledger)):
        known[ledger[at - 1], ledger[at]].append(at)
    found = {}
    for position in range(max(start, 1), len(incoming)):
        if places := known.get((incoming[position - 1], incoming[position])):
            i = bisect_left(places, position)
            found[position] = min(places[max(i - 1, 0) : i + 1], key=lambda at: abs(at - position))
    return found


def _echoed(reply: Message, incoming: Message, kinds: tuple[str, ...] = ()) -> tuple[Message, tuple[str, ...]]:
    kinds = kinds or tuple(kind for kind in diff_kinds(reply, incoming) if kind != "extra_keys")
    kept = {key: value for key, value in incoming.items() if key not in READ and key not in REASONING}
    if not thoughts(reply):  # They were not recorded: what the client knows of them stays.
        kinds = tuple(kind for kind in kinds if kind != "reasoning")
        kept |= {key: value for key, value in incoming.items() if key in REASONING}
        if thoughts({**incoming, **dict.fromkeys(REASONING)}):
            kept["content"] = incoming["content"]
    return ({**reply, **kept}, kinds) if kinds else (incoming, ())


def _interrupted(reply: Message, incoming: Message, values: Mapping[str, str]) -> tuple[Message, tuple[str, ...]]:
    """The client kept a beginning of the text. Thoughts are given back where text follows them: they were complete."""
    text, start = _text(reply.get("content")), _text(incoming.get("content"))
    own = None if text is None or start is None or not start.strip() else _beginning(text, start.rstrip(), values)
    if own is None or start is None:
        return incoming, ()
    own += start[len(start.rstrip()) :]
    if own == start:
        return _with_thoughts(reply, incoming)
    content = incoming["content"]
    content = own if isinstance(content, str) else [{**content[0], "text": own}]
    message, kinds = _with_thoughts(reply, {**incoming, "content": content})
    return message, ("placeholder", *kinds)


def _beginning(text: str, start: str, values: Mapping[str, str]) -> str | None:
    """The beginning of a text that reads `start` with the values of its placeholders; one that ends within a value has
    a part of that. None where it begins otherwise."""
    if text.startswith(start):
        return start
    own, left = "", start
    for piece in re.split(f"({'|'.join(map(re.escape, values))})", text) if values else ():
        said = values.get(piece, piece)
        if not left.startswith(said):
            return own + left if said.startswith(left) else None
        own, left = own + piece, left[len(said) :]
    return None if left or not own else own


def _partial(reply: Message, said: Message, incoming: Message, defaults: Defaults) -> tuple[Message, tuple[str, ...]]:
    """The client kept some calls, and perhaps another text (gptme: the reasoning inlined in it)."""
    pairs = zip(reply.get("tool_calls") or [], said.get("tool_calls") or [], strict=True)
    own = {call["id"]: (call, told) for call, told in pairs if _id(call)}
    calls = []
    for call in incoming["tool_calls"]:
        match, told = own.get(_id(call) or "", (None, None))
        if match is None or not _is_same_call(told, call, defaults):
            return incoming, ()
        calls.append({**call, "function": {**call["function"], "arguments": match["function"].get("arguments")}})
    message, kinds = incoming, []
    if not is_verbatim(calls, incoming["tool_calls"]):
        message, kinds = {**incoming, "tool_calls": calls}, ["arguments"]
    if _is_same_text(said, incoming):
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
