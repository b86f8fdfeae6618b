"""System text folded for strict templates: nothing lost or moved, nothing changed that an earlier request held."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.system_text import CLOSE, FILLER, OPEN, fold

Message = dict[str, Any]
STRICT = {"late_system": False, "several_leading": False}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
RULES = st.fixed_dictionaries({name: st.booleans() for name in ("late_system", "several_leading", "must_alternate")})


def say(role: str, content: object, **more: object) -> Message:
    return {"role": role, "content": content, **more}


def system(text: str) -> str:
    return f"{OPEN}\n{text}\n{CLOSE}"


def calls(text: str = "", n: int = 1) -> Message:
    call = {"type": "function", "function": {"name": "ls", "arguments": "{}"}}
    return say("assistant", text, tool_calls=[{**call, "id": f"call{i:05}"} for i in range(n)])


def shown(content: object) -> str:
    """The text of a content, whatever its form."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())  # type: ignore[attr-defined]


def is_late(messages: list[Message]) -> bool:
    """Whether a system message stands behind another one."""
    roles = ["system" if m["role"] in ("system", "developer") else m["role"] for m in messages]
    return "system" in roles[next((i for i, role in enumerate(roles) if role != "system"), len(roles)) :]


def alternates(messages: list[Message]) -> bool:
    """Mistral's rule, as its templates have it."""
    counted = [m for m in messages if m["role"] not in ("system", "developer", "tool") and not m.get("tool_calls")]
    return all((m["role"] == "user") == (i % 2 == 0) for i, m in enumerate(counted))


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """What agents send: system messages anywhere but between calls and their results, queries in a row, tool loops,
    reminders behind results, answers; each text a word of its own."""
    out: list[Message] = []
    texts = (f"w{n}." for n in range(1000))

    def add(role: str) -> None:
        text = next(texts)
        parted = draw(st.booleans())
        out.append(say(role, [{"type": "text", "text": text}] if parted and role != "tool" else text))

    def add_systems(most: int) -> None:
        for _ in range(draw(st.integers(0, most))):
            add(draw(st.sampled_from(["system", "developer"])))

    add_systems(3)
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 2))):
            add("user")
            add_systems(1)
        for _ in range(draw(st.integers(0, 2))):
            n = draw(st.integers(1, 2))
            out.append(calls(next(texts), n))
            for _ in range(n):
                add("tool")
            add_systems(2)
        if draw(st.booleans()):
            add("assistant")
            add_systems(1)
    return out


def is_request(history: list[Message], end: int) -> bool:
    """Whether the history up to `end` asks for an answer."""
    return end > 0 and history[end - 1]["role"] != "assistant" and (end == len(history) or is_answer(history[end]))


def is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


@given(histories(), RULES)
def test_grown_history_extends_every_request_before(history: list[Message], rules: dict[str, bool]) -> None:
    whole = fold(history, **rules)
    for end in range(len(history)):
        if is_request(history, end) and is_answer(history[end]):
            earlier = fold(history[:end], **rules)
            assert whole[: len(earlier)] == earlier


@given(histories(), RULES)
def test_at_any_cut_only_the_last_message_grows_and_at_its_end(history: list[Message], rules: dict[str, bool]) -> None:
    """An interrupted request, whose next one goes on from its last user message."""
    whole = fold(history, **rules)
    for end in range(1, len(history)):
        earlier = fold(history[:end], **rules)
        last = len(earlier) - 1
        assert whole[:last] == earlier[:last]
        assert whole[last]["role"] == earlier[last]["role"]
        assert shown(whole[last]["content"]).startswith(shown(earlier[last]["content"]))


@given(histories(), RULES)
def test_every_text_stays_in_its_order(history: list[Message], rules: dict[str, bool]) -> None:
    text = " ".join(shown(message["content"]) for message in fold(history, **rules))
    texts = [shown(message["content"]) for message in history]
    places = [text.find(each) for each in texts]
    assert -1 not in places
    assert places == sorted(places)
    assert len(text.replace(FILLER, "")) >= sum(map(len, texts))


@given(histories(), RULES)
def test_folded_history_keeps_the_rules(history: list[Message], rules: dict[str, bool]) -> None:
    folded = fold(history, **rules)
    leading = [m["role"] in ("system", "developer") for m in folded]
    assert rules["late_system"] or not is_late(folded)
    assert rules["several_leading"] or leading[:2] != [True, True]
    assert not rules["must_alternate"] or alternates(folded)
    assert fold(folded, **rules) == folded


@given(histories(), RULES)
def test_input_is_not_changed(history: list[Message], rules: dict[str, bool]) -> None:
    before = copy.deepcopy(history)
    fold(history, **rules)
    assert history == before


@given(histories())
def test_lenient_template_gets_what_was_sent(history: list[Message]) -> None:
    assert fold(history, late_system=True, several_leading=True) is history


CONTENTS = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none() | st.dictionaries(st.text(), st.text()))
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
ODD_MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"]) | ODD,
        "content": CONTENTS | ODD,
        "tool_calls": ODD,
        "reasoning_content": ODD,
    },
)


@given(st.lists(ODD_MESSAGES | ODD, max_size=8), RULES)
def test_any_json_is_taken(messages: list[Any], rules: dict[str, bool]) -> None:
    """And what was folded is still JSON: no message is made of nothing."""
    folded = fold(messages, **rules)
    json.dumps(folded)
    assert len(folded) <= 2 * len(messages)


def test_claude_codes_texts_join_the_prompt_and_the_tool_result_before_them() -> None:
    """claude-tui: environment behind the first prompt, agents behind a tool result, a date behind an answer."""
    history = [
        say("system", "base"),
        say("user", [{"type": "text", "text": "status"}, {"type": "text", "text": "prompt"}]),
        say("system", "environment"),
        calls("look"),
        say("tool", "files", tool_call_id="call00000"),
        say("system", "agents"),
        say("assistant", "done"),
        say("system", [{"type": "text", "text": "date"}]),
        say("user", "next"),
    ]
    assert fold(history, **STRICT) == [
        history[0],
        say(
            "user", [{"type": "text", "text": "status"}, {"type": "text", "text": f"prompt\n\n{system('environment')}"}]
        ),
        history[3],
        say("tool", f"files\n\n{system('agents')}", tool_call_id="call00000"),
        history[6],
        say("user", f"{system('date')}\n\nnext"),
    ]


def test_codexs_two_developer_items_are_one_system_message() -> None:
    history = [say("developer", "rules"), say("developer", [{"type": "text", "text": "skills"}]), say("user", "hi")]
    assert fold(history, **STRICT) == [say("developer", [{"type": "text", "text": "rules\n\nskills"}]), history[2]]
    assert fold(history, late_system=False, several_leading=True) is history


@pytest.mark.parametrize("content", [None, 7, {}, ["text"]])
def test_unreadable_leading_messages_are_left_for_the_engine_to_refuse(content: object) -> None:
    history = [say("system", "a"), say("system", content), say("user", "q")]
    assert fold(history, **STRICT) == history


@pytest.mark.parametrize(
    ("rest", "folded"),
    [
        ([say("system", "s")], [say("user", system("s"))]),
        ([say("system", "s"), say("assistant", "b")], [say("user", system("s")), say("assistant", "b")]),
        ([say("system", "s"), say("developer", "t")], [say("user", f"{system('s')}\n\n{system('t')}")]),
        ([say("system", " "), say("user", "u")], [say("user", "u")]),
        ([say("system", system("s"))], [say("user", system("s"))]),
        ([say("system", [{"type": "text", "text": " "}, IMAGE])], [say("user", [IMAGE])]),
        ([say("system", 7), say("user", "u")], [say("system", 7), say("user", "u")]),
        ([say("system", "s"), say("user", None)], [say("user", system("s")), say("user", None)]),
    ],
)
def test_system_text_behind_an_answer(rest: list[Message], folded: list[Message]) -> None:
    history = [say("user", "q"), say("assistant", "a")]
    assert fold([*history, *rest], **STRICT) == [*history, *folded]


def test_system_text_between_a_call_and_its_result_does_not_part_them() -> None:
    history = [say("user", "q"), calls(), say("system", "s"), say("tool", "r")]
    assert fold(history, **STRICT) == [*history[:2], say("tool", f"{system('s')}\n\nr")]


def test_images_stay_where_they_are() -> None:
    history = [say("user", [IMAGE]), say("system", [{"type": "text", "text": "s"}, IMAGE])]
    assert fold(history, **STRICT) == [say("user", [IMAGE, {"type": "text", "text": system("s")}, IMAGE])]


def test_users_who_speak_twice_are_merged_where_turns_alternate() -> None:
    history = [say("user", "a"), say("user", [{"type": "text", "text": "b"}], name="x"), say("assistant", "c")]
    merged = [say("user", [{"type": "text", "text": "a\n\nb"}]), history[2]]
    assert fold(history, late_system=True, several_leading=True, must_alternate=True) == merged


def test_prompt_behind_a_tool_result_follows_a_closed_loop_where_turns_alternate() -> None:
    """Claude Code's compaction request: [tool_result, text]."""
    history = [say("user", "q"), calls(), say("tool", "r"), say("user", "CRITICAL")]
    closed = [*history[:3], say("assistant", FILLER), history[3]]
    assert fold(history, late_system=True, several_leading=True, must_alternate=True) == closed


def test_answers_in_a_row_are_one_where_turns_alternate() -> None:
    history = [
        say("user", "q"),
        say("assistant", "a", reasoning_content="one"),
        {**calls("b"), "reasoning_content": "two"},
        say("tool", "r"),
        say("user", "u"),
    ]
    both = {**calls("a\n\nb"), "reasoning_content": "one\n\ntwo"}
    folded = fold(history, late_system=True, several_leading=True, must_alternate=True)
    assert folded == [history[0], both, history[3], say("assistant", FILLER), history[4]]


def test_answer_behind_calls_without_results_stays_its_own() -> None:
    """Results that come for the calls later must not stand behind another text."""
    history = [say("user", "q"), calls(), say("assistant", "a"), say("user", "u")]
    assert fold(history, late_system=True, several_leading=True, must_alternate=True) == history
