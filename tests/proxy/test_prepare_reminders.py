"""Reminders that a client adds, drops and moves: told once, where they were told first, and the line goes on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.types import Match
from tests.proxy.talk import Json, Talk, answer, call, is_prefix, result, sent, system, text, user

R, S = "<system-reminder>Plan mode.</system-reminder>", "<system-reminder>Build mode.</system-reminder>"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("session", [None, "s"])
def test_a_reminder_that_moves_to_the_newest_message_is_told_once(apart: bool, session: str | None) -> None:
    """Within the messages, or as a message of its own."""
    talk, before = Talk(session=session), None
    history: list[Json] = [user("do")]
    for number in range(4):
        reminded = [*history, user(R)] if apart else [*history[:-1], user(f"{history[-1]['content']}\n{R}")]
        prepared = talk.send([system(), *reminded], reply=answer(f"a{number}"))
        assert text(prepared).count(R) == 1
        assert before is None or (prepared.found.match is Match.EXTENDS and is_prefix(before, prepared))
        before = prepared
        history = [*history, answer(f"a{number}"), user(f"more {number}")]


def test_a_reminder_that_changes_back_is_told_again() -> None:
    """The model must not believe what was said in between."""
    talk, history, told = Talk(), [user("do")], []
    for number, block in enumerate((R, R, S, R, S, S)):
        asked = [*history[:-1], user(f"{history[-1]['content']}\n{block}")]
        prepared = talk.send([system(), *asked], reply=answer(f"a{number}"))
        told.append([b for m in sent(prepared) for b in (R, S) if b in str(m["content"])])
        history = [*history, answer(f"a{number}"), user(f"more {number}")]
    assert told == [[R], [R], [R, S], [R, S, R], [R, S, R, S], [R, S, R, S]]


def test_a_message_of_reminders_that_comes_and_goes() -> None:
    talk = Talk()
    steps = [user("do"), call(), result("42"), answer("Done."), user("more")]
    one = talk.send([system(), user("do"), user(R), *steps[1:3]], reply=answer("Done."))
    two = talk.send([system(), *steps])
    assert two.found.match is Match.EXTENDS and is_prefix(one, two) and "reminder" in two.repairs
    three = talk.send([system(), *steps, answer("So."), user(S), user("on")])
    assert is_prefix(two, three) and text(three).count(S) == 1
    new = "<a-reminder>x</a-reminder>"
    late = [system(), *steps[:3], user(new), *steps[3:], answer("So."), user("on")]
    assert sent(talk.ask([*late, answer("B"), user("o")]))[-1]["content"] == f"o\n\n{new}", "the rest is sent already"
    again = sent(talk.ask(late))
    assert again[:-1] == sent(three)[:-1] and again[-1]["content"] == f"on\n\n{new}", "the same asked again"


def test_the_first_message_may_be_a_reminder() -> None:
    talk = Talk()
    one = talk.send([system(), user(R), user("do")], reply=answer())
    two = talk.send([system(), user("do"), answer(), user("more")])
    assert is_prefix(one, two)
    assert is_prefix(two, talk.send([system(), user(S), user("do"), answer(), user("more"), answer("B"), user("on")]))


def test_an_empty_answer_that_goes() -> None:
    talk = Talk()
    one = talk.send([system(), user("do"), answer(""), user("go on")], reply=answer())
    two = talk.send([system(), user("do"), user("go on"), answer(), user("more")])
    assert is_prefix(one, two)
    assert is_prefix(
        two, talk.send([system(), user("do"), user("go on"), answer(), user("more"), answer("B"), user("o")])
    )


def test_an_edit_behind_a_reminder_that_is_gone_is_the_clients() -> None:
    talk = Talk()
    talk.send([system(), user("do"), user(R), answer("a"), user("more")], reply=answer())
    edited = talk.ask([system(), user("do"), answer("another"), user("more")])
    assert edited.found.match is Match.EDITED
    assert [m["content"] for m in sent(edited)[2:]] == ["another", "more"]


PLACED = st.lists(st.tuples(st.sampled_from([R, S]), st.booleans(), st.integers(0, 9)), max_size=3)


def reminded(history: list[Json], placed: list[tuple[str, bool, int]]) -> list[Json]:
    """The history with reminders, each in a message that is there or in one of its own, anywhere."""
    messages = [dict(m) for m in history]
    for block, apart, at in placed:
        asking = [i for i, m in enumerate(messages) if m["role"] in ("user", "tool")]
        i = asking[at % len(asking)]
        if apart and messages[i]["role"] == "user":
            messages.insert(i + 1, user(block))
        else:
            messages[i]["content"] = f"{messages[i]['content']}\n{block}"
    return messages


def last_told(messages: list[Json]) -> str | None:
    """The mode that the model, or the client, was told last."""
    told = "".join(str(m["content"]) for m in messages if m["role"] != "assistant")
    return max((R, S), key=told.rfind) if R in told or S in told else None


@settings(max_examples=60, deadline=None)
@given(st.lists(PLACED, min_size=2, max_size=5), st.sampled_from([None, "s"]))
def test_wherever_reminders_stand_the_line_goes_on(
    turns: list[list[tuple[str, bool, int]]], session: str | None
) -> None:
    """And everything that the client tells is told, its reminders included."""
    talk, before = Talk(session=session), None
    history = [user("do it")]
    for number, placed in enumerate(turns):
        messages = [system(), *reminded(history, placed)]
        prepared = talk.send(messages, reply=answer(f"a{number}"))
        assert before is None or (prepared.found.match is Match.EXTENDS and is_prefix(before, prepared))
        told = text(prepared)
        for fact in (R, S, *(m["content"] for m in history)):
            assert fact in told or not any(fact in m["content"] for m in messages), (fact, messages)
        assert last_told(messages) in (None, last_told(sent(prepared))), (messages, sent(prepared))
        before = prepared
        history += [answer(f"a{number}"), user(f"more {number}")]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(PLACED, st.sampled_from(["goes on", "is asked again", "is cut back"])), min_size=2, max_size=6)
)
def test_wherever_the_history_is_cut_the_last_reminder_counts(
    turns: list[tuple[list[tuple[str, bool, int]], str]],
) -> None:
    """What was told behind the cut is told again, if the client still says it."""
    talk = Talk(session="s")
    history: list[Json] = [user("do it")]
    for number, (placed, then) in enumerate(turns):
        messages = [system(), *reminded(history, placed)]
        prepared = talk.send(messages, reply=answer(f"a{number}"))
        told = text(prepared)
        for fact in (R, S, *(m["content"] for m in history)):
            assert fact in told or not any(fact in m["content"] for m in messages), (fact, messages)
        assert last_told(messages) in (None, last_told(sent(prepared))), (messages, sent(prepared))
        if then == "goes on":
            history += [answer(f"a{number}"), user(f"more {number}")]
        elif then == "is asked again":
            history[-1] = user(f"other words {number}")
        elif len(history) > 2:
            history = [*history[:-3], user(f"instead {number}")]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("said", [("Hi.", "Hi."), ("Hi.", "Hello.")])
def test_conversations_that_open_with_other_reminders_are_two(apart: bool, said: tuple[str, str]) -> None:
    """Nobody's name on them, the same words and even the same answers: neither hears of the other's folder."""
    talk, folders = Talk(), ("/w/one", "/w/two")
    openings: list[list[Json]] = []
    for folder in folders:
        told = f"<system-reminder>Folder: {folder}</system-reminder>"
        openings.append([user(told), user("hello")] if apart else [user(f"{told}\n\nhello")])
    histories = [[*opening, answer(words)] for opening, words in zip(openings, said, strict=True)]
    for opening, words in zip(openings, said, strict=True):
        talk.send([system(), *opening], reply=answer(words))
    for number in range(3):
        for own, other, history in zip(folders, reversed(folders), histories, strict=True):
            history.append(user(f"ask {number}"))
            prepared = talk.send([system(), *history], reply=answer("So."))
            assert own in text(prepared) and other not in text(prepared)
            assert prepared.found.match is Match.EXTENDS
            history.append(answer("So."))


def test_the_first_prompt_again_with_another_reminder() -> None:
    """Esc, and the same words the next day: the new day is told."""
    talk = Talk(session="s")
    for day in ("Sunday", "Monday"):
        told = f"<system-reminder>Today is {day}, and these are the files.</system-reminder>"
        prepared = talk.send([system(cwd=f"/w/{day}"), user(told), user("fix it")], reply=answer())
        assert told in text(prepared)


def test_a_reminder_that_changes_back_in_an_old_message() -> None:
    """Plan, build, plan, all in the first message: told as they change, though plan stands where it always stood."""
    talk, history = Talk(session="s"), [user("do")]
    build = "<system-reminder>You may edit the files of this project now.</system-reminder>"
    plan = "<system-reminder>Plan mode is active: edit nothing.</system-reminder>"
    for number, block in enumerate((plan, build, plan, plan, build)):
        prepared = talk.send([system(), user(f"do\n{block}"), *history[1:]], reply=answer(f"a{number}"))
        told = text(prepared)
        assert max((plan, build), key=told.rfind) == block
        history += [answer(f"a{number}"), user(f"more {number}")]
    assert told.count(plan) == 2 and told.count(build) == 2
