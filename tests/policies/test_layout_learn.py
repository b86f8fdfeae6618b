"""The net under the rules: differences on single lines are learned, everything else is another prompt."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.layout import changed_lines, lay_out, learn
from policies.layout_check import MAX_VALUE
from policies.layout_learn import _change, excerpts
from policies.layout_text import Learned

HEAD = "You are an agent that works on files.\n" * 8


def with_line(line: str) -> list[str]:
    return [f"{HEAD}{line}\nBe brief."]


def test_a_span_on_one_line_is_learned_as_whole_words() -> None:
    old, new = with_line("Mood: calm-17, random."), with_line("Mood: calm-19, random.")
    assert learn(old, new, 3) == (Learned("Mood: ", ", random.", "value_3"),)
    assert changed_lines(old, new) == [("Mood: calm-17, random.", "Mood: calm-19, random.")]
    laid = [
        lay_out([{"role": "system", "content": text[0]}], None, learned=learn(old, new, 3) or ()) for text in (old, new)
    ]
    assert laid[0].leading == laid[1].leading
    assert [each.values[0].text for each in laid] == ["calm-17", "calm-19"]


def test_several_lines_in_several_messages_are_numbered_in_order() -> None:
    old, new = [*with_line("Mood: 7\nLuck: 1 %"), "Seat 3"], [*with_line("Mood: 8\nLuck: 22 %"), "Seat 4"]
    assert learn(old, new, 1) == (
        Learned("Mood: ", "", "value_1"),
        Learned("Luck: ", " %", "value_2"),
        Learned("Seat ", "", "value_3"),
    )


def test_what_is_no_small_difference_is_not_learned() -> None:
    old = with_line("Mood: calm")
    for new in (
        old,
        with_line("Mood: calm\nLuck: bad"),
        [*old, "more"],
        with_line("Mood: " + "x" * 201),
        [old[0].upper()],
        ["Mood: calm"],
    ):
        assert learn(old, new, 1) is None
        assert changed_lines(old, new) is None


def test_within_a_conversation_whole_lines_and_more_of_a_short_text_may_change() -> None:
    for old, new in (("calm-1", "calm-2"), ("/a/b", "/c")):
        assert learn(with_line(old), with_line(new), 1) is None
        assert changed_lines(with_line(old), with_line(new)) == [(old, new)]
    assert changed_lines(["Now 1234567890.\nBe kind."], ["Now 2345678901.\nBe kind."]) is not None
    assert changed_lines(["Now 1234567890.\nBe."], ["Now 2345678901.\nBe."]) is None, "nearly all of it"
    assert changed_lines(with_line("calm\ncalm"), with_line("calm\nwild")) is None, "nobody could tell which"


def test_many_spans_are_another_prompt() -> None:
    for n, is_learned in ((16, True), (17, False)):
        old, new = (
            "".join(f"Line {a}, number: {mark}\n" for a in string.ascii_lowercase[:n]) + HEAD * 2 for mark in "12"
        )
        assert (learn([old], [new], 1) is not None) == is_learned


def test_a_line_without_anything_else_or_like_another_one_is_not_learned() -> None:
    assert learn(with_line("calm"), with_line("wild"), 1) is None
    assert learn(with_line("Mood: a\nMood: z"), with_line("Mood: b\nMood: z"), 1) is None


def test_a_placeholder_is_never_learned() -> None:
    assert learn(with_line("Mood: [[env:date]]"), with_line("Mood: [[env:date_2]]"), 1) is None
    assert learn(with_line("Mood: [[env:date]]/a1"), with_line("Mood: [[env:date]]/a2"), 1) == (
        Learned("Mood: [[env:date]]", "", "value_1"),
    )


def test_what_changes_around_a_learned_value_is_learned_with_it() -> None:
    """The hours were learned on Monday; from Tuesday on the day counts, too, and both days have one base."""
    texts = [with_line(f"Es ist {day}, {hour} Uhr.") for day, hour in (("Montag", 9), ("Montag", 10), ("Dienstag", 8))]
    first = learn(texts[0], texts[1], 1)
    assert first == (Learned("Es ist Montag, ", " Uhr.", "value_1"),)
    laid = [str(lay_out([system(text)], None, learned=first).leading[0]["content"]) for text in texts]
    second = learn([laid[0]], [laid[2]], 2)
    assert second == (Learned("Es ist ", " Uhr.", "value_2"),)
    both = [lay_out([system(text)], None, learned=first + second) for text in texts]
    assert both[0].leading == both[1].leading == both[2].leading
    assert [each.values[0].text for each in both] == ["Montag, 9", "Montag, 10", "Dienstag, 8"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("You are a careful coding agent.", "You are a careless coding agent."),
        ("Style: four spaces, double quotes.", "Style: tabs only, double quotes."),
        ("Rule: never delete files of mine", "Rule: delete files of mine freely"),
        ("Answer in French", "Answer in German"),
        ("Mode: plan", "Mode: build"),
        ("- Never touch src/old.py", "- Never commit to main; ask first."),
        ("- Never delete more than 5 files", "- Never ask more often than 2 times"),
        ("- Keep a log in docs/log.md", ""),
    ],
)
def test_other_wording_is_the_clients_edit(old: str, new: str) -> None:
    """What the model is told to do is no value: it reads the new words where they stand, and the old ones nowhere."""
    assert learn(with_line(old), with_line(new), 1) is None
    assert changed_lines(with_line(old), with_line(new)) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("It is monday today.", "It is Tuesday today."),
        ("- **Branch:** `fix/that`", "- **Branch:** `fix/it`"),
        ("You work in /home/ann/repo now", "You work in /srv/bob now"),
        ("You have 10 tokens left", "You have 9 tokens left"),
        ("cpu 12 %, disk 3 %, ok", "cpu 40 %, disk 35 %, ok"),
    ],
)
def test_a_value_is_known_by_its_shape(old: str, new: str) -> None:
    assert changed_lines(with_line(old), with_line(new)) == [(old, new)]
    assert learn(with_line(old), with_line(new), 1) is not None


def system(texts: list[str]) -> dict[str, str]:
    return {"role": "system", "content": texts[0]}


def test_project_instructions_are_never_learned() -> None:
    old, new = (with_line(f"Instructions from: /r/AGENTS.md\n- Indent by {n} spaces") for n in (2, 4))
    assert learn(old, new, 1) is None
    assert learn(old, new, 1, wording=True) is None
    assert changed_lines(old, new) is None
    inside = "<instructions>\n- Indent by {} spaces\n</instructions>\nThe lamp is on-{} now."
    assert learn(with_line(inside.format(2, 1)), with_line(inside.format(4, 2)), 1) is None
    lamp = learn(with_line(inside.format(2, 1)), with_line(inside.format(2, 2)), 1)
    assert lamp == (Learned("The lamp is ", " now.", "value_1"),)


def test_of_a_long_line_an_excerpt_is_told() -> None:
    old, new = ([f"{'word ' * 100}Time {n} o'clock{' word' * 100}"] for n in (1, 2))
    assert changed_lines(old, new) == [(*old, *new)]
    told = excerpts(*old, *new)
    assert [len(text) for text in told] == [121, 121]
    assert "Time 1 o'clock" in told[0]
    assert "Time 2 o'clock" in told[1]
    assert excerpts("Time 1", "Time 2") == ("Time 1", "Time 2")


def test_an_excerpt_stands_on_its_line_once() -> None:
    """Wider, if need be; where another line says the same, nobody could tell which is meant."""
    same = "and use at most 4 of these workers in every step that you take for the people here, " * 3
    old, new = f"{same}One. {same}{same}", f"{same}One. {same.replace('4', '5', 1)}{same}"
    told = excerpts(old, new)
    assert old.count(told[0]) == 1 and old.replace(*told) == new
    line = f"Rule {{}}: {same}keep at most {{}} files {same}"
    texts = [HEAD * 9 + line.format("a", n) + "\n" + line.format("b", 7) for n in (7, 8)]
    assert changed_lines(texts[:1], texts[1:]) is None
    other = [text.replace("at most 7 files", "at most 7 pages") for text in texts]
    assert changed_lines(other[1:], [other[1].replace("most 8", "most 9")]) is not None


def test_a_line_that_becomes_another_one_is_not_told() -> None:
    """Of two that read alike, which would change next?"""
    assert changed_lines(with_line("Port: 1\nPort: 2"), with_line("Port: 2\nPort: 3")) is None
    assert changed_lines(with_line("Port: 1\nPort: 2"), with_line("Port: 4\nPort: 4")) is None
    assert changed_lines(with_line("Port: 1\nPort: 2"), with_line("Port: 3\nPort: 4")) is None
    assert changed_lines(with_line("Port: 1\nPort: 2"), with_line("Port: 1\nPort: 4")) is not None


words = st.text("a1 /:[", min_size=1, max_size=8)


values = st.from_regex(r"[a1/]{0,3}1[a:/]{0,3}", fullmatch=True)


@settings(deadline=None)
@given(st.lists(words, max_size=4), values, values)
def test_what_is_learned_makes_both_texts_one(lines: list[str], one: str, other: str) -> None:
    old, new = (with_line("\n".join([*lines, f"Mood is {mark} today"])) for mark in (one, other))
    learned = learn(old, new, 1)
    assert (learned is None) == (one == other)
    both = [lay_out([{"role": "system", "content": text[0]}], None, learned=learned or ()) for text in (old, new)]
    assert both[0].leading == both[1].leading
    assert one == other or [[value.text for value in each.values] for each in both] == [[one], [other]]


def test_a_word_without_end_is_not_walked() -> None:
    """A line of megabytes costs a comparison, not a step per character."""
    change = _change(0, "x" * 100_000 + "1" + "y" * 100_000, "x" * 100_000 + "2" + "y" * 100_000)
    assert (change.start, change.tail) == (100_000 - MAX_VALUE, 100_000 - MAX_VALUE)
