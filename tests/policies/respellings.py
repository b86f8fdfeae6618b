"""Histories as agents tell them, and other words for the same messages: for tests of what counts as equal."""

import json
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "all": {"type": "boolean", "default": False},
                    "limit": {"type": "number", "default": 2000},
                    "where": {"type": "object", "default": {"a": [1, None]}},
                },
            },
        },
    }
]
DEFAULTS = {"edit": {"all": False, "limit": 2000, "where": {"a": [1, None]}}}

words = st.text('ab é\n\t"\\<>{}[]1🙂', max_size=12)
texts = st.builds(lambda first, rest: first + rest, st.sampled_from("xyz"), words)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {"path": words},
    optional={"all": st.booleans(), "limit": st.integers(1990, 2010), "where": values, "other": values},
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def call(name: str, given: object, call_id: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


@st.composite
def assistants(draw: st.DrawFn, call_ids: list[str] | None = None) -> Message:
    """An answer as a model generates it: text, thoughts, calls with their arguments as text."""
    message: Message = {"role": "assistant", "content": draw(texts)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(texts)
    ids = draw(st.lists(st.sampled_from(["c1", "c2", "c3"]), unique=True)) if call_ids is None else call_ids
    if ids:
        message["tool_calls"] = [call("edit", json.dumps(draw(arguments)), each) for each in ids]
        message["content"] = draw(texts | st.just(""))
    return message


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """A message of any role with something to say."""
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    if role == "assistant":
        return draw(assistants())
    message: Message = {"role": role, "content": draw(texts)}
    if role == "tool":
        message["tool_call_id"] = draw(st.sampled_from(["c1", "c2", "c3"]))
    elif role == "user" and draw(st.integers(0, 4)) == 0:
        message["content"] = [{"type": "text", "text": message["content"]}, IMAGE]
    return message


@st.composite
def reminded(draw: st.DrawFn) -> str:
    """A reminder block."""
    tag = draw(st.sampled_from(["system-reminder", "todo-reminder"]))
    return f"<{tag}>\n{draw(texts)}\n</{tag}>".replace("<\n", "")


@st.composite
def respelled(draw: st.DrawFn, message: Message) -> Message:
    """The same message in other words, by every kind of difference that issue 4 names."""
    out = dict(message)
    if out["role"] == "assistant":
        _respell_answer(draw, out)
    elif draw(st.booleans()) and out["role"] in ("user", "tool"):
        _remind(draw, out)
    out["content"] = draw(st.sampled_from(_forms(out)))
    keys = draw(st.permutations(list(out)))
    extra = draw(st.fixed_dictionaries({}, optional={"refusal": st.none(), "_source": words, "name": st.none()}))
    return {**{key: out[key] for key in keys}, **extra}


def _respell_answer(draw: st.DrawFn, out: Message) -> None:
    if draw(st.booleans()):
        out.pop("reasoning_content", None)
    elif (own := out.get("reasoning_content")) is None:
        out.update(draw(st.fixed_dictionaries({}, optional={"reasoning_content": words})))
    else:
        out["reasoning_content"] = draw(st.sampled_from([f"\n{own} ", own.strip(), own[: len(own) // 2], own]))
    out["content"] += draw(st.sampled_from(["", " ", "\n\n\t"]))
    for key in ("tool_calls",) if "tool_calls" in out else ():
        out[key] = [
            {**each, "function": {**each["function"], "arguments": draw(_dumps(each["function"]["arguments"]))}}
            for each in out[key]
        ]


@st.composite
def _dumps(draw: st.DrawFn, text: str) -> object:
    given = json.loads(text)
    for name, value in DEFAULTS["edit"].items():
        if given.get(name, value) == value and type(given.get(name, value)) is type(value) and draw(st.booleans()):
            given = {name: value, **{key: each for key, each in given.items() if key != name}}
    given = {key: given[key] for key in draw(st.permutations(list(given)))}
    if draw(st.booleans()):
        return given
    return json.dumps(
        given,
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])),
        sort_keys=draw(st.booleans()),
    )


def _remind(draw: st.DrawFn, out: Message) -> None:
    block, gap = draw(reminded()), draw(st.sampled_from(["", "\n", "\n\n"]))
    is_first = draw(st.booleans())
    if isinstance(out["content"], str):
        text = out["content"]
        if text == text.strip():
            out["content"] = f"{block}{gap}{text}" if is_first else f"{text}{gap}{block}"
    else:
        part = {"type": "text", "text": block + gap}
        out["content"] = [part, *out["content"]] if is_first else [*out["content"], part]


def _forms(out: Message) -> list[object]:
    content = out["content"]
    if isinstance(content, list):
        empty = {"type": "text", "text": ""}
        return [content, [empty, *content], [{**part, "cache_control": {"type": "ephemeral"}} for part in content]]
    part = {"type": "text", "text": content}
    forms: list[object] = [content, [part], [{**part, "cache_control": {"type": "ephemeral"}}]]
    return forms if content.strip() else [*forms, None, []]
