"""Requests against their line's ledger: what is sent, turn by turn, without an engine."""

from __future__ import annotations

import copy
import time
from typing import cast

import pytest

from policies.types import Match
from proxy.errors import BrokenLine
from proxy.ledger import Ledger
from tests.proxy.talk import (
    N_CTX,
    FakeEngine,
    Json,
    Talk,
    Texts,
    answer,
    call,
    is_prefix,
    result,
    sent,
    system,
    text,
    tool,
    user,
)


def test_volatile_values_move_into_the_first_user_message() -> None:
    talk = Talk()
    one = talk.send([system(), user("hello")])
    assert "Sun Nov 29 2026" not in sent(one)[0]["content"]
    assert "Sun Nov 29 2026" in sent(one)[1]["content"]
    assert "/home/u/repo" in sent(one)[1]["content"]
    assert sent(one)[1]["content"].endswith("hello")
    two = talk.send([system(), user("hello"), answer(), user("go on")])
    assert two.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    assert text(two).count("Sun Nov 29 2026") == 1


def test_a_new_date_is_told_once_in_the_newest_message() -> None:
    talk = Talk()
    history = [system(), user("hello")]
    one = talk.send(history)
    history = [system("Mon Nov 30 2026"), *history[1:], answer(), user("go on")]
    two = talk.send(history)
    assert two.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    assert "Mon Nov 30 2026" in sent(two)[-1]["content"]
    three = talk.send([*history, answer(), user("and on")])
    assert is_prefix(two, three)
    assert text(three).count("Mon Nov 30 2026") == 1


def test_two_directories_and_two_days_have_one_base() -> None:
    talk = Talk()
    one = talk.send([system(), user("hello")])
    two = talk.send([system("Tue Dec 01 2026", "/srv/other"), user("something else")])
    assert sent(one)[0] == sent(two)[0]
    assert "/srv/other" in sent(two)[1]["content"]


def test_agents_that_begin_alike_stay_apart() -> None:
    """The same first words, system texts that differ in a word: nobody continues the other's line."""
    talk = Talk()

    def base(animal: str) -> Json:
        return {"role": "system", "content": f"You help.\nYou are the agent called {animal}.\nBe kind.\nBe brief."}

    first = {}
    for animal in ("cat", "dog", "cow"):
        first[animal] = talk.send([base(animal), user("one")], reply=answer(animal))
    for animal in ("cow", "cat", "dog"):
        second = talk.send([base(animal), user("one"), answer(animal), user("two")], reply=answer("end"))
        assert second.found.match is Match.EXTENDS
        assert is_prefix(first[animal], second)
        assert animal in text(second)


def test_two_directories_that_begin_alike_are_told_apart() -> None:
    talk = Talk()
    first = {}
    for cwd in ("/home/u/one", "/home/u/two"):
        first[cwd] = talk.send([system(cwd=cwd), user("fix it")], reply=answer("Same."))
        assert first[cwd].found.match is Match.NEW
    for cwd, other in (("/home/u/one", "/home/u/two"), ("/home/u/two", "/home/u/one")):
        again = talk.send([system(cwd=cwd), user("fix it"), answer("Same."), user("go on")], reply=answer("End."))
        assert is_prefix(first[cwd], again)
        assert cwd in text(again)
        assert other not in text(again)


def test_the_same_words_on_another_day_are_told_the_day() -> None:
    talk = Talk()
    talk.send([system(), user("hello")])
    again = talk.send([system("Mon Nov 30 2026"), user("hello")])
    assert "Mon Nov 30 2026" in text(again)
    assert "Sun Nov 29 2026" not in text(again)


def test_tools_come_in_first_seen_order_and_spelling() -> None:
    talk = Talk()
    a, b, c = tool("a"), tool("b"), tool("c")
    one = talk.send([system(), user("x")], [b, a])
    two = talk.send([system(), user("x"), answer(), user("y")], [a, dict(reversed(list(b.items())))])
    assert two.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    three = talk.send([system(), user("other")], [c, a, b])
    assert three.request.body["tools"] == [b, a, c]


def test_a_tool_that_is_removed_is_removed_and_comes_back_cheaply() -> None:
    talk = Talk(session="s")
    a, b = tool("a"), tool("b")
    history = [system(), user("x")]
    one = talk.send(history, [a, b])
    two = talk.send([*history, answer(), user("y")], [a])
    assert two.found.match is Match.BASE
    assert two.request.body["tools"] == [a]
    three = talk.ask([*history, answer(), user("z")], [b, a])
    assert three.found.match is Match.EXTENDS
    assert is_prefix(one, three)


def test_other_spellings_are_sent_as_they_were_first() -> None:
    talk = Talk()
    tools = [tool("look", mode="fast")]
    one = talk.send([system(), user("x")], tools, reply=call())
    two = talk.send([system(), user("x"), call(), result("found")], tools)
    respelled = [
        system(),
        user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]),
        call('{"n":1,"mode":"fast","path":"a.py"}') | {"content": None},
        result("found"),
        answer("Done. "),
        user("y"),
    ]
    three = talk.send(respelled, tools)
    assert three.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    assert is_prefix(two, three)
    assert "arguments" in three.repairs


def test_reasoning_that_the_client_drops_is_given_back() -> None:
    talk = Talk()
    reply = answer("Fine.", reasoning_content="Think hard.")
    talk.send([system(), user("x")], reply=reply)
    two = talk.send([system(), user("x"), answer("Fine."), user("y")])
    assert sent(two)[2] == reply
    three = talk.send([system(), user("x"), answer("Fine. "), user("y"), answer(), user("z")])
    assert is_prefix(two, three)


def test_a_placeholder_that_the_model_repeats_stays_in_the_ledger() -> None:
    talk = Talk()
    reply = call('{"path":"[[env:cwd]]/a.py"}')
    one = talk.send([system(), user("x")], reply=reply)
    echo = call('{"path": "/home/u/repo/a.py"}')
    two = talk.send([system(), user("x"), echo, result("found")])
    assert sent(two)[2] == reply
    three = talk.send([system(), user("x"), echo, result("found"), answer(), user("y")])
    assert is_prefix(one, two)
    assert is_prefix(two, three)


@pytest.mark.parametrize("echo", [[answer("Once upon")], [answer("")], []], ids=["prefix", "empty", "vanished"])
def test_a_cancelled_turn_goes_on(echo: list[Json]) -> None:
    talk = Talk()
    one = talk.send([system(), user("x")], reply=answer("Once upon a time", reasoning_content="Tell."))
    two = talk.send([system(), user("x"), *echo, user("no, stop")])
    assert two.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    assert sent(two)[-1]["content"] == "no, stop"


def test_pruned_results_stay_until_the_context_is_full() -> None:
    talk = Talk()
    history = [system(), user("x")]
    for i in range(3):
        history += [call(id_=f"c{i}"), result("long " * 100, f"c{i}")]
    one = talk.send(history)
    pruned = copy.deepcopy(history)
    for i in (3, 5):
        pruned[i]["content"] = "[Old tool result content cleared]"
    pruned += [answer(), user("y")]
    two = talk.send(pruned)
    assert two.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    assert "prune_deferred" in two.repairs
    three = talk.send([*pruned, answer(), user("z")], n_tokens=int(0.9 * N_CTX))
    assert is_prefix(two, three)
    four = talk.send([*pruned, answer(), user("z"), answer(), user("w")])
    assert four.found.match is Match.EDITED
    assert sent(four)[3]["content"] == "[Old tool result content cleared]"
    five = talk.send([*pruned, answer(), user("z"), answer(), user("w"), answer(), user("v")])
    assert is_prefix(four, five)


def test_an_edit_is_the_clients() -> None:
    talk = Talk()
    history = [system(), user("x"), answer(), user("y"), answer(), user("z")]
    talk.send(history[:2])
    talk.send(history[:4])
    talk.send(history)
    edited = talk.send([*history[:3], user("something else")])
    assert (edited.found.match, edited.found.shared) == (Match.EDITED, 3)
    assert sent(edited)[-1]["content"] == "something else"
    back = talk.ask([*history, answer(), user("again")])
    assert back.found.match is Match.EXTENDS


def test_a_question_in_between_does_not_take_the_line() -> None:
    talk = Talk()
    history = [system(), user("x"), answer(), user("y")]
    talk.send(history[:2])
    main = talk.send(history)
    assert main.found.line is not None
    talk.send([*history, answer(), user("Suggest what I may say next.")])
    after = talk.send([*history, answer(), user("z")])
    assert after.found.line is main.found.line
    assert after.found.is_same_line
    assert is_prefix(main, after)


def test_a_title_of_the_same_session_is_on_the_side() -> None:
    talk = Talk(session="s")
    main = talk.send([system(), user("x")], [tool("a")])
    title = talk.send([{"role": "system", "content": "Make a title."}, user("x")])
    assert (title.kind, title.found.line) == ("side", None)
    after = talk.ask([system(), user("x"), answer(), user("y")], [tool("a")])
    assert after.found.match is Match.EXTENDS
    assert is_prefix(main, after)


@pytest.mark.parametrize(
    ("headers", "history", "tools", "kind"),
    [
        ({"x-session-id": "s"}, 1, None, "side"),  # opencode's title, asked before its first turn
        ({"x-claude-code-session-id": "s"}, 1, [], "side"),
        ({"x-session-id": "s"}, 1, [tool("a")], "main"),
        ({"x-session-id": "s"}, 3, None, "main"),  # it goes on: a conversation without tools
        ({"x-slotkeeper-session": "s"}, 1, None, "main"),  # whoever uses our own header says nothing of tools
        ({}, 1, None, "main"),
    ],
)
def test_a_first_question_without_tools(headers: Json, history: int, tools: list[Json] | None, kind: str) -> None:
    """Agents that name their sessions give each turn its tools; what has none then is aside."""
    messages = [system(), *[user("x"), answer(), user("y")][:history]]
    assert Talk(session="s", headers=headers).send(messages, tools).kind == kind


def test_strict_refuses_what_breaks_the_line() -> None:
    talk = Talk(session="s")
    talk.send([system(), user("x"), answer(), user("y")])
    assert talk.ask([system(), user("x"), answer(), user("y"), answer(), user("z")], mode="strict").found.line
    with pytest.raises(BrokenLine) as refused:
        talk.ask([system(), user("x"), answer("Otherwise."), user("y")], mode="strict")
    assert refused.value.details() == {"divergence": {"message": 2}}


def test_observe_changes_nothing() -> None:
    talk = Talk()
    talk.send([system(), user("x")], [tool("b"), tool("a")])
    messages = [system("Mon Nov 30 2026"), user([{"type": "text", "text": "x"}]), answer("Well. "), user("y")]
    prepared = talk.ask(messages, [tool("a"), tool("b")], mode="observe")
    assert prepared.request.body == {"messages": messages, "tools": [tool("a"), tool("b")]}
    assert prepared.ledger is None


def test_lost_state_costs_one_prompt_and_says_nothing_wrong() -> None:
    talk = Talk()
    history = [system(), user("x")]
    talk.send(history)
    history = [system("Mon Nov 30 2026"), *history[1:], answer(), user("y")]
    talk.send(history)
    anew = Talk()
    first = anew.send([*history, answer(), user("z")])
    assert first.found.match is Match.NEW
    assert "Mon Nov 30 2026" in sent(first)[1]["content"]
    assert "Sun Nov 29 2026" not in text(first)
    second = anew.send([*history, answer(), user("z"), answer(), user("w")])
    assert is_prefix(first, second)


def test_texts_come_back_from_the_store() -> None:
    talk = Talk()
    one = talk.send([system(), user("x")])
    line = next(iter(talk.service.lines))
    assert line.ledger is not None
    line.ledger.sent = None
    two = talk.send([system(), user("x"), answer(), user("y")])
    assert is_prefix(one, two)


@pytest.mark.parametrize("n_more", [0, 1])
def test_texts_of_another_turn_are_known_by_their_seal(n_more: int) -> None:
    """A proxy killed in a turn has kept that turn's texts beside the ledger of the one before."""
    talk = Talk()
    history = [system(), user("x"), call(), result("42")]
    one = talk.send(history)
    (line,) = talk.service.lines
    texts = cast(Texts, talk.service.store).texts[line.id]
    ledger = cast(Ledger, line.ledger)
    ledger.sent = None
    if n_more:
        texts.append(b'{"role":"user","content":"next"}')
    else:
        texts[1] = texts[1].replace(b'x"', b'y"')
    two = talk.send([*history[:2], call('{"n": 1,  "path": "a.py"}'), history[3], answer(), user("y")])
    assert ("gave_up" in two.repairs) is (n_more == 0)
    assert is_prefix(one, two) is bool(n_more)
    assert sent(two)[1]["content"].endswith("x"), "it was told what another turn said"


def test_texts_that_are_lost_are_done_without() -> None:
    talk = Talk()
    talk.send([system(), user("x")])
    line = next(iter(talk.service.lines))
    assert line.ledger is not None
    line.ledger.sent = None
    cast(Texts, talk.service.store).texts.clear()
    two = talk.send([system(), user("x"), answer(), user("y")])
    assert "gave_up" in two.repairs
    assert "Sun Nov 29 2026" in sent(two)[1]["content"]


def test_the_templates_date_is_told() -> None:
    talk = Talk()
    engine = cast(FakeEngine, talk.service.engines.all[0])
    engine.clock_values = (("template_date", "the day %Y"),)
    engine.clock_arguments = (("date_string", "template_date"),)
    year = time.strftime("%Y")
    prepared = talk.send([user("x")])
    assert f"[[env:template_date]] = the day {year}" in sent(prepared)[0]["content"]
    observed = talk.ask([user("x")], mode="observe").request.body
    assert observed["chat_template_kwargs"] == {"date_string": f"the day {year}"}


def test_a_prompt_without_a_user_keeps_its_base() -> None:
    prepared = Talk().send([system()])
    assert sent(prepared) == [system()]


def test_strict_says_where_a_request_departs() -> None:
    """In the middle, at an end that was sent on before, or in the base."""
    history = [system(), user("do"), answer("a"), user("more"), answer("b"), user("on")]
    for instead, said in (
        ([*history[:3], user("other"), *history[4:]], "message 3 differs from what was sent before"),
        (history[:2], "it ends before message 2, which was sent before"),
        ([{"role": "system", "content": "Another text."}, *history[1:]], "its system text or its tools differ"),
    ):
        talk = Talk(session="s", mode="strict")
        for n in (2, 4, 6):
            talk.send(history[:n], reply=answer("x"))
        with pytest.raises(BrokenLine, match=said):
            talk.ask(instead)
