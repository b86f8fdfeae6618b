"""Placeholders in answers, whatever way the answer is cut into chunks."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policies.placeholders import Resolver, resolved

VALUES = {"[[env:cwd]]": '/home/a "b"', "[[env:cwd_2]]": "/srv", "[[env:date]]": "today"}
PIECE = st.sampled_from(
    [
        "[[env:cwd]]",
        "[[env:cwd_2]]",
        "[[env:date]]",
        "[[",
        "[",
        "]]",
        "[[env:cw",
        "x",
        " ",
        "[[env:cwd",
        "[[[env:date]]",
        "[[cwd]]",
    ]
)


def by_hand(text: str, quoted: bool = False) -> str:
    for mark, value in VALUES.items():
        text = text.replace(mark, json.dumps(value)[1:-1] if quoted else value)
    return text


def chunks(field: str, text: str, cuts: list[int]) -> list[dict[str, Any]]:
    ends = sorted({min(c, len(text)) for c in cuts} | {len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    found: list[dict[str, Any]] = []
    for piece in pieces:
        call = [{"index": 0, "function": {"arguments": piece}}]
        delta = {"tool_calls": call} if field == "arguments" else {field: piece}
        found.append({"choices": [{"index": 0, "finish_reason": None, "delta": delta}]})
    return [*found, {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]}]


def text_of(found: dict[str, Any], field: str) -> str:
    delta = found["choices"][0]["delta"]
    if field != "arguments":
        return str(delta.get(field, ""))
    return "".join(call["function"]["arguments"] for call in delta.get("tool_calls", []))


@given(
    st.sampled_from(["content", "reasoning_content", "arguments"]),
    st.lists(PIECE, max_size=6).map("".join),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_any_cut_gives_the_same(field: str, text: str, cuts: list[int]) -> None:
    resolver = Resolver(VALUES)
    said = "".join(text_of(resolver.chunk(chunk), field) for chunk in chunks(field, text, cuts))
    assert said == by_hand(text, field == "arguments")
    assert not resolver.is_holding


def test_text_without_brackets_is_never_held() -> None:
    resolver = Resolver(VALUES)
    for chunk in chunks("content", "a list[0] of x", [3, 6, 8]):
        resolver.chunk(chunk)
        assert not resolver.is_holding


def test_a_whole_message() -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": '{"path": "[[env:cwd]]/a"}'}}
    message = {"role": "assistant", "content": "In [[env:cwd_2]].", "tool_calls": [call]}
    found = resolved(message, VALUES)
    assert found["content"] == "In /srv."
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == {"path": '/home/a "b"/a'}
    assert message["content"] == "In [[env:cwd_2]]."
    plain = {"role": "assistant", "content": "no"}
    assert resolved(plain, VALUES) is plain


def test_what_a_model_writes_in_other_languages_stays() -> None:
    """R, wikis and TOML write double brackets, too."""
    text = "df[[date]], See [[cwd]]. [[files]] a[[cwd_2]]"
    assert resolved({"role": "assistant", "content": text}, VALUES)["content"] == text


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda s: st.lists(s, max_size=2)))
def test_any_json_is_taken(junk: Any) -> None:
    shapes = [
        {"choices": junk},
        {"choices": [junk]},
        {"choices": [{"delta": junk}]},
        {"choices": [{"delta": {"content": junk, "tool_calls": junk}}]},
        {"choices": [{"delta": {"tool_calls": [junk, {"function": junk}]}, "finish_reason": "stop"}]},
    ]
    for shape in shapes:
        Resolver(VALUES).chunk(shape)
    resolved({"tool_calls": junk, "content": junk}, VALUES)
    resolved({"tool_calls": [junk, {"function": junk}]}, VALUES)
