"""Replies given back: the model's own words where the client echoes them, the client's where it says something else."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.append_only import normal
from policies.placeholders import resolved
from policies.replay import give_back, has_other_thoughts, places_again
from tests.policies.respellings import DEFAULTS, Message, assistants, call, messages, respelled

TEXT = '{"path": "a\\u00e9", "other":1.50}'
DUMPED = '{"other":1.5,"path":"aé"}'


def reply(content: object = "So.", *given: Any, **more: object) -> Message:
    calls = [call("edit", each, f"c{n}") for n, each in enumerate(given)]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **more}


def back(own: Message, incoming: Message) -> tuple[Message, tuple[str, ...]]:
    before = copy.deepcopy((own, incoming))
    got = give_back(own, incoming, DEFAULTS)
    assert (own, incoming) == before
    return got


@given(st.data(), assistants())
def test_an_echo_becomes_the_reply(data: st.DataObject, own: Message) -> None:
    incoming = data.draw(respelled(own))
    got, kinds = back(own, incoming)
    assert (got.get("content") or "") == own["content"]
    assert normal(got, DEFAULTS) == normal(own, DEFAULTS)
    if kinds:
        assert got.get("tool_calls") == own.get("tool_calls")
    if "reasoning_content" in own:
        assert got["reasoning_content"] == own["reasoning_content"]
    else:
        assert got.get("reasoning_content") == incoming.get("reasoning_content")
    assert back(own, got) == (got, ())


@given(assistants(), messages())
def test_nothing_that_the_client_says_is_lost(own: Message, incoming: Message) -> None:
    got, kinds = back(own, incoming)
    assert normal(got, DEFAULTS) == normal(incoming, DEFAULTS)
    if incoming.get("reasoning_content"):
        is_own = has_other_thoughts(own, incoming)
        given = () if is_own else (own.get("reasoning_content"),)
        assert got.get("reasoning_content") in (incoming["reasoning_content"], *given)
    if got is incoming:
        assert kinds in ((), ("gave_up",))


@given(st.data(), assistants(), st.text("xyz", min_size=1))
def test_thoughts_of_the_clients_own_stay(data: st.DataObject, own: Message, other: str) -> None:
    """Another answer in the same words, another model's: whatever else is respelled, it is not this reply."""
    incoming = {**data.draw(respelled(own)), "reasoning_content": other}
    told = "".join(own.get("reasoning_content", "").split())
    is_same = told.startswith(other) or other.startswith(told)
    got = back(own, incoming)
    if "reasoning_content" not in own:
        assert got[0]["reasoning_content"] == other
    elif not is_same:
        assert got[0] is incoming and got[1] == ()
    assert has_other_thoughts(own, incoming) is (not told or not is_same)


@pytest.mark.parametrize(
    ("field", "value", "is_other"),
    [
        ("reasoning", "Hm.", False),
        ("reasoning_details", [{"type": "reasoning.text", "text": "Hm"}, {"text": "."}], False),
        ("reasoning_details", [{"type": "reasoning.encrypted", "data": "aa"}], False),
        ("content", [{"type": "thinking", "thinking": "H m."}], False),
        ("content", [{"type": "thinking", "thinking": "Other."}], True),
        ("reasoning", "Other.", True),
        ("reasoning_content", {"a": 1}, False),
        ("reasoning_content", " \n", False),
    ],
)
def test_where_clients_put_thoughts(field: str, value: object, is_other: bool) -> None:
    own = reply("So.", reasoning_content="Hm.")
    assert has_other_thoughts(own, {"role": "assistant", "content": "So.", field: value}) is is_other


short = st.lists(st.sampled_from([b"u", b"v", b"a", b"b"]), max_size=12)


@given(short, short, st.integers(0, 12))
def test_places_behind_an_edit(ledger: list[bytes], incoming: list[bytes], start: int) -> None:
    """The nearest place of the same message behind the same one, wherever there is one."""
    found = places_again(ledger, incoming, start)
    for position in range(len(incoming)):
        pair = incoming[position - 1 : position + 1]
        places = [at for at in range(max(start, 1), len(ledger)) if ledger[at - 1 : at + 1] == pair]
        if position < max(start, 1) or not places:
            assert position not in found
        else:
            assert found[position] in places
            assert abs(found[position] - position) == min(abs(at - position) for at in places)


VALUES = {"[[date]]": "Sun Nov 29", "[[cwd]]": "/home/u"}
pieces = st.lists(st.sampled_from(["a", " ", "b[", "]", *VALUES]), min_size=1, max_size=8)


@given(pieces, pieces)
def test_a_beginning_that_names_placeholders(begun: list[str], rest: list[str]) -> None:
    """The client was told values; the model goes on from what it said itself."""
    own = reply("".join(begun + rest) + ".", reasoning_content="In [[cwd]].")
    told = resolved(reply("".join(begun)), VALUES)
    got, kinds = give_back(own, told, DEFAULTS, VALUES)
    if not told["content"].strip():
        assert got is told
        return
    assert got["reasoning_content"] == "In [[cwd]]." and "reasoning" in kinds
    assert own["content"].startswith(got["content"].rstrip())
    assert resolved({**got}, VALUES)["content"] == told["content"]
    cut = give_back(own, reply(resolved(own, VALUES)["content"][:3]), DEFAULTS, VALUES)[0]
    assert resolved(cut, VALUES)["content"] == resolved(own, VALUES)["content"][:3]


def test_placeholders_in_a_part_of_the_calls() -> None:
    own = reply("In [[cwd]].", '{"path": "[[cwd]]/a"}', '{"path": "b"}', reasoning_content="Hm, [[cwd]].")
    told = reply("In /home/u.", '{"path":"/home/u/a"}', reasoning_content="Hm, /home/u.")
    got, kinds = give_back(own, told, DEFAULTS, VALUES)
    assert got["tool_calls"][0]["function"]["arguments"] == '{"path": "[[cwd]]/a"}'
    assert (got["reasoning_content"], kinds) == ("Hm, [[cwd]].", ("arguments", "reasoning"))
    assert give_back(own, reply("In /home/v."), DEFAULTS, VALUES)[1] == ()


@pytest.mark.parametrize(
    ("own", "incoming", "kinds"),
    [
        (reply("So.", reasoning_content="Hm."), reply("So."), ("reasoning",)),
        (reply("So.\n", reasoning_content="Hm."), reply("So.", reasoning_content="Hm."), ("whitespace",)),
        (reply("", TEXT), reply(None, DUMPED), ("content_form", "arguments")),
        (reply("", TEXT, reasoning_content="Hm."), reply("", json.loads(DUMPED)), ("arguments", "reasoning")),
        (reply("", '{"path":"a"}'), reply("", '{"all":false,"path":"a"}'), ("arguments",)),
        (reply("", '{"path":"a"'), reply("", '{"path":"a"', reasoning="x"), ()),
    ],
)
def test_what_was_given_back_has_a_name(own: Message, incoming: Message, kinds: tuple[str, ...]) -> None:
    got, told = back(own, incoming)
    assert told == kinds
    assert normal(got, DEFAULTS) == normal(own, DEFAULTS)


@pytest.mark.parametrize("text", ["Let me l", "Let me look", "Let me ", "Let me look."])
def test_an_interrupted_answer_keeps_its_beginning(text: str) -> None:
    own = reply("Let me look. Then", TEXT, reasoning_content="Hm.")
    assert back(own, reply(text)) == (reply(text, reasoning_content="Hm."), ("reasoning",))
    assert back(own, reply(text, reasoning_content="Hm.")) == (reply(text, reasoning_content="Hm."), ())
    parts = [{"type": "text", "text": text}]
    assert back(own, reply(parts)) == (reply(parts, reasoning_content="Hm."), ("reasoning",))


@pytest.mark.parametrize("content", ["", None, [], " ", "Other", "Let me look. Then not", [{"type": "text"}]])
def test_what_is_no_beginning_stays_as_it_is(content: object) -> None:
    incoming = reply(content, reasoning_content="Hm")
    got = back(reply("Let me look. Then", TEXT, reasoning_content="Hm."), incoming)
    assert got[0] is incoming and got[1] == ()


def test_a_part_of_the_calls_gets_its_arguments() -> None:
    own = reply("So.", TEXT, '{"path": "b"}', reasoning_content="Hm.")
    same_text = back(own, reply("So.", DUMPED))
    assert same_text == (reply("So.", TEXT, reasoning_content="Hm."), ("arguments", "reasoning"))
    inlined = back(own, reply("<think>Hm.</think>So.", DUMPED))
    assert inlined == (reply("<think>Hm.</think>So.", TEXT), ("arguments",))


@pytest.mark.parametrize(
    "incoming",
    [
        reply("So.", '{"path": "edited"}'),
        reply("So.", TEXT, '{"path": "b"}', '{"path": "unknown"}'),
        {**reply("So."), "tool_calls": [call("write", TEXT, "c0")]},
        {**reply("So."), "tool_calls": [call("edit", TEXT, "other")]},
        {**reply("So."), "tool_calls": [{"type": "function", "function": {"name": "edit", "arguments": TEXT}}]},
        {**reply("So."), "tool_calls": {"a": 1}},
        {**reply("So."), "tool_calls": [1]},
        {**reply("So."), "role": "user"},
    ],
)
def test_an_edit_is_the_clients(incoming: Message) -> None:
    got = back(reply("So.", TEXT, '{"path": "b"}', reasoning_content="Hm."), incoming)
    assert got[0] is incoming and got[1] == ()


def test_fields_that_only_the_client_knows_stay() -> None:
    """litellm adds `provider_specific_fields` to what it echoes."""
    own, more = reply("So.\n", TEXT, reasoning_content="Hm."), {"provider_specific_fields": {"a": 1}}
    got, kinds = back(own, {**reply("So.", DUMPED), **more})
    assert got == own | more
    assert kinds == ("whitespace", "arguments", "reasoning")
    assert back(own, own | more) == (own | more, ())


def test_call_ids_that_repeat_give_nothing_back() -> None:
    twice = {**reply("So."), "tool_calls": [call("edit", each, "c0") for each in (TEXT, '{"path": "b"}')]}
    once = reply("So.", DUMPED)
    assert back(twice, once) == (once, ("gave_up",))
    assert back(once, twice) == (twice, ("gave_up",))


def test_thoughts_that_only_the_client_knows_stay() -> None:
    incoming = reply("So.", reasoning_content="Hm.")
    assert back(reply("So.\n"), incoming) == (reply("So.\n", reasoning_content="Hm."), ("whitespace",))
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "So."}]
    assert back(reply("So."), reply(parts))[0]["content"] == parts
