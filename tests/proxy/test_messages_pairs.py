"""Histories in which calls and results do not belong together are refused as Anthropic's API refuses them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api import read_messages
from proxy.api.messages_pairs import check_pairs
from proxy.errors import BadRequest

Json = dict[str, Any]


def call(*ids: str) -> Json:
    """An assistant message with a text and these calls."""
    uses = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in ids]
    return {"role": "assistant", "content": [{"type": "text", "text": "t"}, *uses]}


def result(*ids: str, role: str = "user") -> Json:
    """A user message with these results and a text."""
    results = [{"type": "tool_result", "tool_use_id": name, "content": "r"} for name in ids]
    return {"role": role, "content": [*results, {"type": "text", "text": "u"}]}


USER: Json = {"role": "user", "content": "hi"}
ANSWER: Json = {"role": "assistant", "content": "yes"}
LATE: Json = {"role": "system", "content": "late"}
GOOD = {
    "a loop": [USER, call("a"), result("a"), call("b"), result("b"), ANSWER, USER],
    "several": [USER, call("a", "b"), result("b", "a")],
    "results in two messages": [USER, call("a", "b"), result("a"), result("b")],
    "calls in two messages": [USER, call("a"), call("b"), result("a", "b")],
    "a call before a text": [USER, call("a"), ANSWER, result("a")],
    "a late system message": [USER, call("a"), LATE, result("a"), LATE, USER],
    "an id that comes again": [USER, call("a"), result("a"), call("a"), result("a")],
    "two results of one call": [USER, call("a"), result("a", "a")],
    "no calls": [USER, ANSWER, USER],
    "nothing": [],
}
BAD = {
    "no call at all": ([result("a")], "messages.0.content.0", "tool_use_id"),
    "another id": ([USER, call("a"), result("b")], "messages.2.content.0", "tool_use_id"),
    "one too many": ([USER, call("a"), result("a", "b")], "messages.2.content.1", "tool_use_id"),
    "too late": ([USER, call("a"), result("a"), ANSWER, result("a")], "messages.4.content.0", "tool_use_id"),
    "none": ([USER, call("a"), USER], "messages.1", "`tool_use` ids"),
    "none yet": ([USER, call("a")], "messages.1", "`tool_use` ids"),
    "one missing": ([USER, call("a", "b"), result("a")], "messages.1", "after: b."),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_belongs_together(name: str) -> None:
    """Accepted."""
    check_pairs(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_does_not(name: str) -> None:
    """Refused in Anthropic's words, with the place."""
    messages, place, words = BAD[name]
    with pytest.raises(BadRequest, match=words) as raised:
        read_messages.read({"model": "m", "max_tokens": 1, "messages": messages}, {})
    assert raised.value.param == place
    assert raised.value.message.startswith(f"{place}: ")


@given(st.lists(st.lists(st.sampled_from("abc"), unique=True, max_size=3), max_size=5), st.data())
def test_a_history_that_grows_by_whole_turns_stays_good(calls: list[list[str]], data: st.DataObject) -> None:
    """And leaving out any one result makes it bad."""
    messages: list[Json] = [USER]
    for ids in calls:
        messages += [call(*ids), result(*ids)]
        check_pairs(messages)
    places = [(i, k) for i, m in enumerate(messages) for k in range(len(m["content"]) - 1) if m["role"] == "user" and i]
    if places:
        i, k = data.draw(st.sampled_from(places))
        short = {**messages[i], "content": messages[i]["content"][:k] + messages[i]["content"][k + 1 :]}
        with pytest.raises(BadRequest):
            check_pairs([*messages[:i], short, *messages[i + 1 :]])


@pytest.mark.parametrize("stops", [[""], ["END", ""]])
def test_an_empty_stop_sequence(stops: list[str]) -> None:
    """It would end every answer before it begins."""
    with pytest.raises(BadRequest, match="empty"):
        read_messages.read({"max_tokens": 1, "messages": [USER], "stop_sequences": stops}, {})
