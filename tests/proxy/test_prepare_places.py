"""The same words in another directory, or on another day: nobody is told what is not so."""

from __future__ import annotations

from tests.proxy.talk import Json, Talk, answer, is_prefix, sent, system, text, user

HERE, THERE = "/home/u/repo", "/srv/other"


def test_the_same_first_message_in_another_directory() -> None:
    talk = Talk()
    here = talk.send([system(cwd=HERE), user("x")])
    there = talk.send([system(cwd=THERE), user("x")])
    assert THERE in text(there) and HERE not in text(there)
    assert sent(there)[0] == sent(here)[0]
    history = [user("x"), answer(), user("y")]
    here_2 = talk.send([system(cwd=HERE), *history])
    there_2 = talk.send([system(cwd=THERE), user("x"), answer("Other."), user("y")])
    assert here_2.found.line is not there_2.found.line
    assert is_prefix(here, here_2) and is_prefix(there, there_2)
    assert THERE not in text(here_2) and HERE not in text(there_2)
    begun = talk.ask([system(cwd="/srv/third"), user("x")])
    assert not {HERE, THERE} & set(text(begun).split("\\n")) and "/srv/third" in text(begun)


def test_a_named_session_that_asks_the_same_again_elsewhere() -> None:
    talk = Talk(session="s")
    history = [user("x"), answer(), user("y")]
    talk.send([system(cwd=HERE), *history[:1]])
    one = talk.send([system(cwd=HERE), *history])
    again = talk.ask([system(cwd=THERE), *history])
    assert sent(again)[:3] == sent(one)[:3]
    assert f"[[env:cwd]] is now {THERE}" in sent(again)[-1]["content"]
    begun = talk.ask([system(cwd=THERE), *history[:1]])
    assert THERE in text(begun) and HERE not in text(begun)


def test_two_agents_that_share_a_sessions_name() -> None:
    """They begin alike: neither is told the other's directory, and each keeps its line."""
    talk = Talk(session="s")
    ones = {}
    for cwd, said in ((HERE, "Here."), (THERE, "There.")):
        ones[cwd] = talk.send([system(cwd=cwd), user("x")], reply=answer(said))
    for cwd, said in ((HERE, "Here."), (THERE, "There.")):
        two = talk.send([system(cwd=cwd), user("x"), answer(said), user("y")])
        assert is_prefix(ones[cwd], two)
        assert (HERE in text(two), THERE in text(two)) == (cwd == HERE, cwd == THERE)


def test_a_session_that_moves_goes_on() -> None:
    talk = Talk()
    one = talk.send([system(cwd=HERE), user("x")], reply=answer())
    two = talk.send([system(cwd=THERE), user("x"), answer(), user("y")])
    assert is_prefix(one, two)
    assert f"[[env:cwd]] is now {THERE} (until here: {HERE})" in sent(two)[-1]["content"]


def test_a_beginning_that_a_line_has_left_behind_is_another_conversation() -> None:
    talk, history = Talk(), [user("x"), answer(), user("y")]
    talk.send([system(), *history[:1]])
    one = talk.send([system(), *history])
    assert not talk.ask([system(), *history[:1]]).found.is_same_line
    named = Talk(session="s")
    named.send([system(), *history[:1]])
    named.send([system(), *history])
    assert named.ask([system(), *history[:1]]).found.is_same_line, "it asks again"
    talk.send([system(), *history[:1]])
    assert is_prefix(one, talk.ask([system(), *history, answer(), user("z")]))


def environment(cwd: str, date: str = "Sun Nov 29 2026") -> Json:
    """What Claude Code tells in a system message behind the first user message."""
    return {
        "role": "system",
        "content": f"# Environment\nWorking directory: {cwd}\nSkills: many.\nToday's date: {date}",
    }


BASE = {"role": "system", "content": "You help."}


def test_an_environment_behind_the_first_message_tells_its_values_at_its_end() -> None:
    here, there = (Talk().ask([BASE, user("x"), environment(cwd)]) for cwd in (HERE, THERE))
    assert sent(here)[:2] == sent(there)[:2] == [BASE, user("x")]
    begins = "# Environment\nWorking directory: [[env:cwd]]\nSkills: many.\nToday's date: [[env:date]]"
    assert all(sent(prepared)[2]["content"].startswith(begins) for prepared in (here, there))
    assert text(here).count(HERE) == text(here).count("Nov 29 2026") == 1
    assert sent(Talk().ask(sent(here))) == sent(here), "repairing again changes nothing"


def test_an_environment_that_changes_is_told_in_the_newest_message() -> None:
    talk = Talk(session="s")
    one = talk.send([BASE, user("x"), environment(HERE)])
    two = talk.send([BASE, user("x"), environment(HERE, "Mon Nov 30 2026"), answer(), user("y")])
    assert is_prefix(one, two)
    assert sent(two)[-1]["content"].count("[[env:date]] is now Mon Nov 30 2026") == 1
    three = talk.send([BASE, user("x"), environment(HERE, "Mon Nov 30 2026"), answer(), user("y"), answer(), user("z")])
    assert is_prefix(two, three) and sent(three)[-1] == user("z")


def test_system_text_that_comes_behind_a_first_message_later_tells_nothing_twice() -> None:
    talk = Talk(session="s")
    one = talk.send([system(cwd=HERE), user("x")])
    late = {"role": "system", "content": "Be brief."}
    two = talk.send([system(cwd=HERE), user("x"), late, user("y")])
    assert is_prefix(one, two)
    assert text(two).count(HERE) == 1
