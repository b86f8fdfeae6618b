"""The same words in another directory, or on another day: nobody is told what is not so."""

from __future__ import annotations

from tests.proxy.talk import Talk, answer, is_prefix, sent, system, text, user

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
    assert f"[[cwd]] is now {THERE}" in sent(again)[-1]["content"]
    begun = talk.ask([system(cwd=THERE), *history[:1]])
    assert THERE in text(begun) and HERE not in text(begun)


def test_a_session_that_moves_goes_on() -> None:
    talk = Talk()
    one = talk.send([system(cwd=HERE), user("x")], reply=answer())
    two = talk.send([system(cwd=THERE), user("x"), answer(), user("y")])
    assert is_prefix(one, two)
    assert f"[[cwd]] is now {THERE}" in sent(two)[-1]["content"]
