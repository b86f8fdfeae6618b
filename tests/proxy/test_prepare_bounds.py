"""Histories that are respelled at more places than one request may take of the event loop: given up, never wrong."""

from __future__ import annotations

import pytest

from policies.types import Match
from tests.proxy.talk import Json, Talk, answer, call, is_prefix, result, sent, system, text, user

FEW = 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of these tests."""
    monkeypatch.setattr("proxy.prepare.MOST_RESPELLED", FEW)
    monkeypatch.setattr("proxy.recognise.MOST_ASIDE", FEW)


def steps(n: int, arguments: str, content: str = "long " * 100) -> list[Json]:
    return [m for i in range(n) for m in (call(arguments, f"c{i}"), result(content, f"c{i}"))]


@pytest.mark.parametrize("n", [FEW, FEW + 2])
def test_other_spellings(n: int) -> None:
    """The first few are respelled; behind them the client's own are sent, and stay from then on."""
    talk = Talk()
    talk.send([system(), user("x"), *steps(n, '{"path": "a.py", "n": 1}')])
    respelled = [system(), user("x"), *steps(n, '{"n":1,"path":"a.py"}'), answer(), user("y")]
    two = talk.send(respelled)
    gave_up = n > FEW
    assert ("gave_up" in two.repairs) is gave_up
    assert (two.found.match is Match.EDITED) is gave_up
    assert text(two).count(r"{\"n\":1,\"path\":\"a.py\"}") == (n - FEW if gave_up else 0)
    three = talk.send([*respelled, answer(), user("z")])
    assert is_prefix(two, three) and three.found.match is Match.EXTENDS and not three.repairs


def test_prunes() -> None:
    talk = Talk()
    talk.send([system(), user("x"), *steps(FEW + 1, "{}")])
    pruned = [system(), user("x"), *steps(FEW + 1, "{}", "[Old tool result content cleared]"), user("y")]
    two = talk.send(pruned)
    assert set(two.repairs) == {"gave_up"} and "long" not in text(two)
    assert is_prefix(two, talk.send([*pruned, answer(), user("z")]))


def test_reminders_of_their_own() -> None:
    talk = Talk()
    blocks = [user(f"<system-reminder>note {i}</system-reminder>") for i in range(FEW + 1)]
    talk.send([system(), user("x"), *blocks])
    now = [system(), user("x"), user("y"), *blocks, user("z")]
    two = talk.send(now)
    assert "gave_up" in two.repairs and [m["content"] for m in sent(two)[2:]] == [m["content"] for m in now[2:]]
    assert is_prefix(two, talk.send([*now, answer(), user("w")]))


def test_answers_behind_an_edit() -> None:
    """What the model said there is given back, up to the bound."""
    talk = Talk()
    talk.send([system(), user("x"), answer(), user("y"), *steps(FEW + 2, '{"path": "a.py", "n": 1}')])
    edited = talk.send([system(), user("x"), answer(), user("other"), *steps(FEW + 2, '{"n":1,"path":"a.py"}')])
    assert "gave_up" in edited.repairs
    assert text(edited).count(r"{\"n\":1,\"path\":\"a.py\"}") == 2
