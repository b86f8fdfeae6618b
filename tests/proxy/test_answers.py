"""Whose answer is it? What the model said goes back to where it said it; what the client adds to that is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import orjson
import pytest

from policies.types import Match
from proxy.engine import Engine
from proxy.lines import Found, Line
from proxy.settle import signs_of
from tests.proxy.talk import Json, Talk, answer, call, is_prefix, result, sent, system, text, user

Turns = list[Json]


def thought(content: str, thoughts: str) -> Json:
    return answer(content, reasoning_content=thoughts)


def bare(message: Json) -> Json:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def test_a_fork_keeps_its_own_thoughts() -> None:
    """Another question at the same place, answered in the same words."""
    talk = Talk(session="s")
    history = [system(), user("q0"), answer("Zero."), user("is 7 prime")]
    talk.send(history, reply=thought("Yes.", "7 is prime"))
    theirs = [*history[:3], user("is 9 odd"), thought("Yes.", "9 is odd: 9 mod 2 is 1"), user("thanks")]
    assert sent(talk.ask(theirs))[4] == theirs[4]
    for echo in ("Yes.", "Ye"):
        without = [*theirs[:4], answer(echo), user("thanks")]
        assert sent(talk.ask(without))[4] == answer(echo), "nobody knows what was thought"


@pytest.mark.parametrize("drops", [False, True])
def test_equal_answers_behind_an_edit(drops: bool) -> None:
    """They are told apart by what they answer."""
    talk = Talk(session="s")
    answers = [thought("Done.", f"R{i}") for i in range(4)]
    history: Turns = [system()]
    for i, said in enumerate(answers):
        history.append(user(f"q{i}"))
        talk.send(history, reply=said)
        history.append(said)
    talk.send([*history, user("q4")], reply=thought("Fine.", "R4"))
    edited = [*history, user("q5")]
    edited[3] = user("q1, edited")
    if drops:
        edited = [bare(m) for m in edited]
    got = [m for m in sent(talk.send(edited)) if m["role"] == "assistant"]
    assert [m.get("reasoning_content") for m in got] == ["R0", None if drops else "R1", "R2", "R3"]


def test_the_newest_answer_behind_an_edit() -> None:
    """It was the answer to what stood there before."""
    talk = Talk(session="s")
    history = [system(), user("x"), answer(), user("y"), answer(), user("z")]
    talk.send(history, reply=thought("Fine.", "About y."))
    edited = talk.ask([*history[:3], user("other"), *history[4:], answer("Fine."), user("w")])
    assert edited.found.match is Match.EDITED and "About y." not in text(edited)
    assert "About y." in text(talk.ask([*history, answer("Fine."), user("w")]))


def test_twins_are_told_apart_by_their_thoughts() -> None:
    """Two conversations of nobody's name that begin alike and were answered alike."""
    talk = Talk()
    said = [thought("Hi", "of one"), thought("Hi", "of two")]
    first = [talk.send([system(), user("hello")], reply=each) for each in said]
    for one, own in zip(first, said, strict=True):
        again = talk.send([system(), user("hello"), own, user("and?")], reply=answer())
        assert is_prefix(one, again) and sent(again)[2] == own


def test_thoughts_that_the_client_adds_later() -> None:
    """A session that another proxy began comes without them, then with them."""
    talk = Talk(session="s")
    history = [system(), user("q1"), answer("A one."), user("q2")]
    talk.send(history, reply=thought("A two.", "R2"))
    history = [*history[:2], thought("A one.", "R1"), user("q2"), answer("A two."), user("q3")]
    two = talk.send(history, reply=thought("A three.", "R3"))
    assert (two.found.match, two.found.shared) == (Match.EDITED, 2)
    assert [m.get("reasoning_content") for m in sent(two)[2::2]] == ["R1", "R2"]
    three = talk.send([*history, answer("A three."), user("q4")])
    assert is_prefix(two, three) and three.found.match is Match.EXTENDS


def test_older_thoughts_are_not_lost_with_those_that_are_added() -> None:
    talk = Talk(session="s")
    history = [system(), user("q1"), answer("A one."), user("q2")]
    talk.send(history, reply=thought("A two.", "R2"))
    history += [answer("A two."), user("q3")]
    talk.send(history, reply=thought("A three.", "R3"))
    history += [answer("A three."), user("q4")]
    history[2] = thought("A one.", "R1")
    assert [m.get("reasoning_content") for m in sent(talk.send(history))[2::2]] == ["R1", "R2", "R3"]


def test_other_thoughts_than_those_that_were_sent() -> None:
    """Twins that go on alike: the one's are not the other's."""
    talk = Talk(session="s")
    history = [system(), user("x"), thought("Fine.", "One."), user("y")]
    talk.send(history)
    other = [*history[:2], thought("Fine.", "Two."), *history[3:], answer(), user("z")]
    edited = talk.send(other)
    assert (edited.found.match, sent(edited)[2]) == (Match.EDITED, other[2])


@pytest.mark.parametrize("again", ["One  of\nthem. ", "One of", "One of them. And more.", "", None])
def test_thoughts_that_come_and_go_cost_nothing(again: str | None) -> None:
    """Sent in one turn, dropped, cut or respelled in the next, and sent again: the same line, no edit."""
    talk = Talk(session="s")
    history = [system(), user("x"), thought("Fine.", "One of them."), user("y")]
    prepared = [talk.send(history)]
    other = bare(history[2]) if again is None else thought("Fine.", again)
    for i, spelled in enumerate((other, history[2], other)):
        history = [*history[:2], spelled, *history[3:], answer(), user(f"z{i}")]
        prepared.append(talk.send(history))
        assert prepared[-1].found.match is Match.EXTENDS
        assert is_prefix(*prepared[-2:])


def test_thoughts_that_name_a_placeholder() -> None:
    """The client was told the value of that day, and sends it back."""
    talk = Talk(session="s")
    said = thought("It is [[env:date]].", "Look at [[env:date]].")
    told = thought("It is Sun Nov 29 2026.", "Look at Sun Nov 29 2026.")
    one = talk.send([system(), user("x")], reply=said)
    history = [told, user("y")]
    two = talk.send([system("Mon Nov 30 2026"), user("x"), bare(told), user("y")])
    three = talk.send([system("Mon Nov 30 2026"), user("x"), *history, answer(), user("z")])
    assert three.found.match is Match.EXTENDS and sent(three)[2] == said
    assert is_prefix(one, two) and is_prefix(two, three)
    edited = talk.send([system("Mon Nov 30 2026"), user("x"), *history, answer("Otherwise."), user("z")])
    assert edited.found.match is Match.EDITED and sent(edited)[2] == said


def test_an_interrupted_answer_that_names_a_placeholder() -> None:
    talk = Talk(session="s")
    talk.send([system(), user("x")], reply=thought("The date [[env:date]] is known to all.", "Hm."))
    two = talk.send([system(), user("x"), answer("The date Sun Nov 29 2026 is "), user("more")])
    assert sent(two)[2] == thought("The date [[env:date]] is ", "Hm.")


def test_results_that_are_pruned_late_do_not_hide_the_answer() -> None:
    """Prunes that were put off change the prompt at last; what was answered since is the same line's."""
    talk = Talk()
    history = [system(), user("x"), *(m for i in "abc" for m in (call(id_=i), result("long " * 100, i)))]
    talk.send(history)
    pruned = [
        result("[Old tool result content cleared]", m["tool_call_id"]) if "tool_call_id" in m else m for m in history
    ]
    pruned += [answer(), user("y")]
    talk.send(pruned, reply=thought("Fine.", "Hm."), n_tokens=90_000)
    after = talk.send([*pruned, answer("Fine."), user("z")])
    assert after.found.match is Match.EDITED and sent(after)[-2] == thought("Fine.", "Hm.")


@pytest.mark.parametrize(("now", "is_dropped"), [(None, True), ("One", True), ("Other.", False)])
def test_the_cause_of_what_changed(now: str | None, is_dropped: bool) -> None:
    """What repair would give back was dropped; other thoughts are an edit."""
    engine = cast(Engine, SimpleNamespace(drops_reasoning=False, prints_clock=False))
    line = cast(Line, SimpleNamespace(day=""))
    before = orjson.dumps({"messages": [user("x"), thought("Fine.", "One."), user("y")]})
    body = {"messages": [user("x"), answer("Fine.") if now is None else thought("Fine.", now), user("y")]}
    signs = signs_of(engine, Found(line, Match.EDITED, 1), body, before)
    assert signs.dropped_reasoning is is_dropped
