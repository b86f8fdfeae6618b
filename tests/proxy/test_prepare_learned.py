"""Spans that no rule knows: learned by difference, told anew where they change, and no instruction among them."""

from __future__ import annotations

from policies.types import Match
from tests.proxy.talk import Json, Talk, answer, is_prefix, sent, system, text, tool, user


def lamp(color: str) -> Json:
    return {"role": "system", "content": f"You help.\nThe lamp is {color} now.\nBe kind.\nWrite code.\nBe brief."}


def test_a_span_that_no_rule_knows_is_learned_between_sessions() -> None:
    talk = Talk()
    talk.send([lamp("on-1"), user("one")])
    second = talk.send([lamp("on-2"), user("two")])
    third = talk.send([lamp("on-3"), user("three")])
    assert sent(second)[0] == sent(third)[0]
    assert "on-3" not in sent(third)[0]["content"]
    assert "on-3" in sent(third)[1]["content"]


def test_an_edited_instruction_stays_where_it_is() -> None:
    """Words are what the model is told to do. Only when they are others for the fifth time it is nobody's edit."""
    talk = Talk()
    for color in ("orange", "violet", "orange", "violet", "yellow", "orange", "black"):
        assert sent(talk.send([lamp(color), user(f"with {color}")]))[0] == lamp(color)
    assert sent(talk.send([lamp("white"), user("white")]))[0] != lamp("white")
    green = talk.send([lamp("green"), user("four")])
    assert sent(green)[0] == sent(talk.send([lamp("blue"), user("five")]))[0]
    assert "green" in sent(green)[1]["content"]


def test_what_was_learned_takes_no_other_instruction_apart() -> None:
    """A path was edited, then the line was another: its words stand where they stood."""
    talk = Talk()
    for line in ("- Never touch src/old.py", "- Never touch src/new_2.py", "- Never commit to main; ask first."):
        base = {"role": "system", "content": f"You help.\nBe kind.\n{line}\nWrite code.\nBe brief."}
        newest = talk.send([base, user(line)])
    assert sent(newest)[0] == base


def test_an_instruction_that_was_edited_once_stays_where_it_is_though_other_words_changed_as_well() -> None:
    def said(place: str, style: str) -> Json:
        lines = f"The lamp stands {place}.\nAnswer in {style} for people.\n" + "Be kind.\n" * 20
        return {"role": "system", "content": lines}

    talk = Talk()
    places = [(place, "short words") for place in ("here", "over there", "behind", "high up")]
    for place, style in (*places, ("nowhere", "rhymes only")):
        newest = talk.send([said(place, style), user(place)])
    assert "Answer in rhymes only for people." in sent(newest)[0]["content"]


def test_an_instruction_that_is_edited_in_a_conversation_is_a_branch() -> None:
    """The model reads the new words where they stand, and the old ones nowhere."""
    talk, history = Talk(), [user("one"), answer(), user("two")]
    talk.send([lamp("careful"), *history[:1]])
    edited = talk.send([lamp("careless"), *history])
    assert edited.found.match is not Match.EXTENDS
    assert sent(edited)[0] == lamp("careless")
    assert "careful" not in text(edited)


def test_a_span_that_no_rule_knows_is_learned_in_tools_too() -> None:
    """Whatever order they come in; the system text, which is the same, teaches nothing."""
    talk = Talk()

    def tools(color: str) -> list[Json]:
        lamp = tool("lamp")
        lamp["function"]["description"] = f"Switches.\nThe lamp is {color} now.\nBe kind.\nWrite code.\nBe brief."
        return [tool("look"), lamp]

    talk.send([system(), user("one")], tools("on-1"))
    second = talk.send([system(), user("two")], tools("on-2")[::-1])
    third = talk.send([system(), user("three")], tools("on-3"))
    assert second.request.body["tools"] == third.request.body["tools"]
    assert "on-3" not in str(third.request.body["tools"]) and "= on-3" in sent(third)[1]["content"]
    assert "on-1" not in text(third) and "on-2" not in text(third)


def test_a_span_that_no_rule_knows_changes_within_a_line() -> None:
    talk, base = Talk(), lamp
    history = [user("one"), answer(), user("two")]
    one = talk.send([base("on-1"), *history[:1]])
    two = talk.send([base("on-1"), *history])
    three = talk.send([base("violet-2"), *history, answer(), user("three")])
    assert three.found.match is Match.EXTENDS
    assert is_prefix(one, two)
    assert is_prefix(two, three)
    assert "violet-2" in sent(three)[-1]["content"]
    four = talk.send([base("violet-2"), *history, answer(), user("three"), answer(), user("four")])
    assert is_prefix(three, four)
    assert text(four).count("violet") == 1
    five = talk.send([base("orange-3"), *history, answer(), user("three"), answer(), user("four"), answer(), user("x")])
    assert is_prefix(four, five)
    assert "orange-3" in sent(five)[-1]["content"]


def test_asked_again_when_a_value_has_changed() -> None:
    """The note in the newest message is another one: what the slot holds of it is not counted on."""
    talk = Talk()
    history = [user("one"), answer(), user("two")]
    talk.send([lamp("on-1"), *history[:1]])
    talk.send([lamp("on-2"), *history])
    again = talk.send([lamp("on-3"), *history])
    assert (again.found.match, again.found.shared) == (Match.EDITED, 3)
    assert "is now on-3" in sent(again)[-1]["content"]
    once_more = talk.send([lamp("on-3"), *history])
    assert once_more.found.match is Match.EXTENDS
    assert sent(once_more) == sent(again)


def test_a_line_that_is_nothing_but_a_clock() -> None:
    """Told anew while it ticks; the base stays, in a short prompt, too, and on a line that was learned in part."""
    talk, before = Talk(), None
    history = [user("hello")]
    for number, (day, hour) in enumerate([("Montag", 9), ("Montag", 10), ("Dienstag", 8), ("Mittwoch", 11)]):
        told = f"17644{number}0000\nDu hilfst.\nEs ist {day}, {hour} Uhr.\nSei nett."
        prepared = talk.send([{"role": "system", "content": told}, *history], reply=answer(f"a{number}"))
        assert before is None or is_prefix(before, prepared)
        newest = sent(prepared)[-1]["content"]
        assert before is None or f'" now reads "17644{number}0000"' in newest
        assert number != 2 or "Dienstag, 8 Uhr" in newest
        before = prepared
        history = [*history, answer(f"a{number}"), user(f"go on {number}")]
