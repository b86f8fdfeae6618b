"""What becomes of a chat's messages before an engine sees them."""

from typing import Any

import pytest

from proxy.api.read_chat import NO_NULLS, checked
from proxy.errors import BadRequest

PLAIN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("name", NO_NULLS)
def test_nulls_that_fail_in_the_engine(name: str) -> None:
    """They are left out; a null that means something stays, and so does a value."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    body = {"model": "m", "messages": [PLAIN, call | {name: None}, PLAIN | {name: ""}]}
    assert checked(body) == {"model": "m", "messages": [PLAIN, call, PLAIN | {name: ""}]}
    assert name in body["messages"][1]  # type: ignore[operator]


def test_others_are_the_clients_own() -> None:
    """Nothing is copied where nothing is changed."""
    body = {"messages": [PLAIN, {"role": "assistant", "content": None, "tool_calls": None}]}
    assert checked(body) is body


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (None, "missing"),
        ({}, "not a list"),
        ([], "empty"),
        ([PLAIN, None], "not an object"),
        ([PLAIN, {"content": "hi"}], r"messages\[1\] has no 'role'"),
        ([{"role": 1}], r"messages\[0\] has no 'role'"),
        ([{"role": "user", "tool_calls": "a"}], "'tool_calls'"),
    ],
)
def test_refusals(messages: Any, says: str) -> None:
    """What llama-server answers 500 for."""
    with pytest.raises(BadRequest, match=says):
        checked({"messages": messages})
