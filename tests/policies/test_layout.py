"""Layout: every fact stays, one spelling from day to day and in any directory, tools in first-seen order."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.layout import (
    Laid,
    Value,
    change_note,
    first_note,
    lay_out,
    line_note,
    order_tools,
    to_tell,
    tool_key,
    with_note,
)
from policies.layout_rules import Rule
from policies.layout_text import MAX_PLACES, Learned
from proxy.api import read_messages, read_responses
from tests.policies.layout_cases import STATIC, VOLATILE, base, copied, given_back, moved, same_json

TRACES = Path("/work/shared/traces")

pieces = st.one_of(
    st.sampled_from([text for text, _ in VOLATILE] + STATIC),
    st.sampled_from(
        ["[[env:date]]", "[[env:cwd]]/x", "/home/dev/repo/a.py", "/home/dev/repo2", "Today's date: ", "2026-11-29"]
    ),
    st.text("aT09[]\n /:.-~=İé", max_size=12),
)
texts = st.lists(pieces, max_size=6).map("\n".join) | st.lists(pieces, max_size=4).map(" ".join)
contents = (
    texts
    | st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=2)
    | st.sampled_from([None, 3, [1]])
)
schemas = st.fixed_dictionaries(
    {"type": st.just("string")}, optional={"description": texts, "default": texts, "enum": st.lists(texts, max_size=2)}
)
tools_lists = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {
                    "name": st.just("f"),
                    "description": texts,
                    "parameters": st.fixed_dictionaries(
                        {"properties": st.dictionaries(st.sampled_from(["description", "title", "enum", "a"]), schemas)}
                    ),
                }
            ),
        }
    ),
    max_size=2,
)
messages = st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": contents}), max_size=2)


def told(laid: Laid) -> dict[str, str]:
    return {value.name: value.text for value in laid.values}


@settings(deadline=None)
@given(messages, st.none() | tools_lists)
def test_every_fact_stays_and_laying_out_again_changes_nothing(
    leading: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    before = copied([leading, tools])
    laid = lay_out(leading, tools)
    assert [leading, tools] == before
    assert same_json(given_back([*laid.leading], told(laid)), leading)
    assert same_json(given_back(laid.tools, told(laid)), tools)
    again = lay_out(laid.leading, laid.tools)
    assert (again.leading, again.tools, again.values, again.changes) == (laid.leading, laid.tools, (), ())


def test_two_days_in_two_directories_have_one_base() -> None:
    one, other = lay_out(*base(0, "/home/dev/repo")), lay_out(*base(1, "/srv/another place/repo-2"))
    assert same_json([one.leading, one.tools], [other.leading, other.tools]) is False  # the default stays literal
    for laid in (one, other):
        laid.tools[0]["function"]["parameters"]["properties"]["workdir"].pop("default")  # type: ignore[index]
    assert same_json([one.leading, one.tools], [other.leading, other.tools])
    assert one.values == (Value("cwd", "/home/dev/repo", "path"), Value("date", "Sun Nov 29 2026", "move"))
    assert other.values == (Value("cwd", "/srv/another place/repo-2", "path"), Value("date", "Mon Nov 30 2026", "move"))
    assert one.changes == ("cwd", "date")


def test_what_a_call_may_contain_stays_literal() -> None:
    _, tools = base()
    laid = lay_out(*base())
    function = laid.tools[0]["function"]  # type: ignore[index]
    assert function["description"] == "Runs in [[env:cwd]]."
    assert function["parameters"]["properties"]["workdir"]["description"] == "Default [[env:cwd]]"
    assert function["parameters"]["properties"]["workdir"]["default"] == "/home/dev/repo"
    assert list(function) == list(tools[0]["function"])


def test_a_path_is_replaced_at_its_ends_only_and_the_longer_one_first() -> None:
    text = "cwd: /home/dev/repo\nHome: /home/dev\n"
    text += "/home/dev/repo/a /home/dev/repo-2 /home/dev/repo.git /x/home/dev /home/dev."
    content = lay_out([{"role": "system", "content": text}], None).leading[0]["content"]
    assert content.split("\n")[2] == "[[env:cwd]]/a [[env:home]]/repo-2 [[env:home]]/repo.git /x/home/dev [[env:home]]."


def test_two_values_of_a_rule_have_two_names_and_names_in_the_text_are_left_free() -> None:
    text = "Date: 2026-11-29\nToday is 2026-11-30.\nDate: 2026-11-29\nSee [[env:date_2]]."
    laid = lay_out([{"role": "system", "content": text}], None)
    assert (
        laid.leading[0]["content"]
        == "Date: [[env:date]]\nToday is [[env:date_3]].\nDate: [[env:date]]\nSee [[env:date_2]]."
    )
    assert told(laid) == {"date": "2026-11-29", "date_3": "2026-11-30"}


def test_brackets_of_other_languages_are_no_placeholders() -> None:
    """A wiki's and R's own: they stay, take no name, and may stand within a value."""
    git = "Branch: main\nStatus: clean\nRecent commits:\nabc1234 fix [[x]]"
    text = f"Date: 2026-11-29\nLink [[date]] and df[[cwd]].\n{git}"
    laid = lay_out([{"role": "system", "content": text}], None)
    assert laid.leading[0]["content"] == "Date: [[env:date]]\nLink [[date]] and df[[cwd]].\n[[env:git]]"
    assert told(laid)["git"] == git


def test_short_values_have_a_name_each_because_they_may_be_equal_by_chance() -> None:
    for memory in ("2MB", "3MB"):
        text = f"a PID 7 up 1s mem=2MB\nb PID 8 up 1s mem={memory}"
        laid = lay_out([{"role": "system", "content": text}], None)
        assert (
            laid.leading[0]["content"].split("\n")[1] == "b PID [[env:pid_2]] up [[env:uptime_2]] mem=[[env:memory_2]]"
        )


def test_names_of_rules_and_numbers_never_meet() -> None:
    rules = [Rule(name, "system", f"{name}: (\\d+)", "move", f"{name}: 3") for name in ("a", "a_2")]
    laid = lay_out([{"role": "system", "content": "a: 1, a_2: 2, a: 3"}], None, rules=rules)
    assert len(told(laid)) == 3
    assert given_back([*laid.leading], told(laid)) == [{"role": "system", "content": "a: 1, a_2: 2, a: 3"}]


def test_what_stands_everywhere_is_no_value() -> None:
    for n, n_values in ((MAX_PLACES, MAX_PLACES), (MAX_PLACES + 1, 0)):
        text = "\n".join(f"up {i}s" for i in range(n))
        assert len(lay_out([{"role": "system", "content": text}], None).values) == n_values


def test_a_path_of_static_texts_is_replaced_at_its_cue_only() -> None:
    text = "Working directory: /tmp\nWrite to /tmp/out."
    laid = lay_out([{"role": "system", "content": text}], None)
    assert laid.leading[0]["content"] == "Working directory: [[env:cwd]]\nWrite to /tmp/out."


def test_project_instructions_keep_their_dates_and_follow_the_directory() -> None:
    text = "cwd: /r/app\nInstructions from: /r/app/AGENTS.md\nCurrent date: 2026-01-01\nWrite to /r/app/out."
    laid = lay_out([{"role": "system", "content": text}], None)
    assert laid.leading[0]["content"] == text.replace("/r/app", "[[env:cwd]]")


def test_parts_stay_parts_and_other_keys_stay() -> None:
    part = {"type": "text", "text": "Today is 2026-11-29.", "cache_control": {"type": "ephemeral"}}
    laid = lay_out([{"role": "developer", "content": [part, {"type": "image_url"}], "name": "x"}], None)
    assert laid.leading == (
        {
            "role": "developer",
            "content": [{**part, "text": "Today is [[env:date]]."}, {"type": "image_url"}],
            "name": "x",
        },
    )


def test_a_learned_line_gives_its_value_out_once() -> None:
    known = Learned("Mood of the day: ", " (random)", "value_1")
    laid = lay_out([{"role": "system", "content": "A\nMood of the day: fine-7 (random)\nB"}], None, learned=[known])
    assert laid.leading[0]["content"] == "A\nMood of the day: [[env:value_1]] (random)\nB"
    assert laid.values == (Value("value_1", "fine-7", "move"),)
    assert lay_out(laid.leading, None, learned=[known]).values == ()
    for text in (
        "Mood of the day: " + "7" * 201 + " (random)",
        "Mood of the day: 7 (random)\n" * 2,
        "Mood of the day: 7",
        "Mood of the day: fine (random)",
        "Mood of the day: never more than 7 files (random)",
    ):
        assert lay_out([{"role": "system", "content": text}], None, learned=[known]).values == ()


@pytest.mark.parametrize(
    "around", ["Instructions from: /r/AGENTS.md\n{}", "<instructions>\n{}\n</instructions>\nBe brief."]
)
def test_a_learned_value_stays_in_project_instructions(around: str) -> None:
    """Learned elsewhere; where the line stands outside as well, that one is taken out."""
    known, line = Learned("Dev server port: ", "", "value_1"), "Dev server port: 8080"
    text = around.format(line)
    assert lay_out([{"role": "system", "content": text}], None, learned=[known]).values == ()
    laid = lay_out([{"role": "system", "content": f"Dev server port: 3000\n{text}"}], None, learned=[known])
    assert laid.leading[0]["content"] == f"Dev server port: [[env:value_1]]\n{text}"


def test_learned_words_are_few() -> None:
    known = Learned("The mood of the day is ", "", "value_1", is_words=True)
    for mood, is_moved in (("fine", True), ("neither good nor bad", True), ("what you make of it", False), ("7", True)):
        text = f"A\nThe mood of the day is {mood}\nB"
        assert bool(lay_out([{"role": "system", "content": text}], None, learned=[known]).values) is is_moved


def test_users_rules_for_tools_leave_the_system_text_alone() -> None:
    rule = Rule("credit", "tools", r"credit: (\d+)", "move", "credit: 3")
    leading, tools = [{"role": "system", "content": "credit: 1"}], [{"function": {"description": "credit: 2"}}]
    laid = lay_out(leading, tools, rules=[rule])
    assert (laid.leading, laid.tools) == (tuple(leading), [{"function": {"description": "credit: [[env:credit]]"}}])


def test_equal_definitions_have_one_key_in_any_order_of_their_keys() -> None:
    one: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": [1, 2]}}}
    other: dict[str, Any] = {"function": {"parameters": {"y": [1, 2], "x": 1}, "name": "a"}, "type": "function"}
    assert tool_key(one) == tool_key(other)
    assert len(tool_key(one)) == 16
    other["function"]["parameters"]["y"] = [2, 1]
    assert tool_key(one) != tool_key(other)
    assert tool_key({"description": "\ud800"}) != tool_key({"description": "?"})


def test_tools_take_the_order_of_the_base_that_they_join() -> None:
    a, b, c, d = (bytes([i]) * 16 for i in range(4))
    assert order_tools([c, a, b], []) == (c, a, b)
    assert order_tools([c, a, b], [(a, b, c), (b, a, c)]) == (a, b, c)
    assert order_tools([d, c, a, b], [(a,), (b, a), (c, b), (a, b, c, d, d)]) == (b, a, d, c)
    assert order_tools([a, a, b], [(b, a)]) == (b, a, a)
    assert order_tools([], [(a,)]) == ()


keys = st.lists(st.sampled_from([bytes([i]) * 16 for i in range(6)]), max_size=8)


@settings(deadline=None)
@given(keys, st.lists(keys.map(tuple), max_size=4), st.randoms())
def test_the_order_of_known_tools_is_irrelevant(mine: list[bytes], known: list[tuple[bytes, ...]], random: Any) -> None:
    ordered = order_tools(mine, known)
    assert Counter(ordered) == Counter(mine)
    assert order_tools(ordered, [*known, ordered]) == ordered
    shuffled = mine[:]
    random.shuffle(shuffled)
    assert order_tools(shuffled, [*known, ordered]) == ordered


def test_notes_say_what_the_brackets_are() -> None:
    values = (Value("date", "2026-11-29", "move"), Value("git", "a\nb", "move"))
    assert first_note(values) == (
        "<context>\nValues of the [[env:names]] in the instructions:\n"
        "[[env:date]] = 2026-11-29\n[[env:git]] = a\nb\n</context>"
    )
    assert change_note(values[:1]) == "<context>\n[[env:date]] is now 2026-11-29\n</context>"
    moved = (Value("cwd", "/srv/two", "path"), Value("cwd_2", "/x", "path"), Value("date", "Monday", "move"))
    assert change_note(moved, {"cwd": "/srv/one", "date": "Sunday"}).splitlines()[1:-1] == [
        "[[env:cwd]] is now /srv/two (until here: /srv/one)",
        "[[env:cwd_2]] is now /x",
        "[[env:date]] is now Monday",
    ]
    assert first_note(()) == change_note(()) == ""
    assert line_note("Mode: plan", "Mode: build") == 'In the system prompt, "Mode: plan" now reads "Mode: build".'


def test_a_note_is_added_to_the_text_of_a_message() -> None:
    text, image = {"type": "text", "text": "Hi", "cache_control": {}}, {"type": "image_url"}
    for content, before, behind in (
        ("Hi", "N\n\nHi", "Hi\n\nN"),
        ("", "N", "N"),
        (None, "N", "N"),
        ([text], [{**text, "text": "N\n\nHi"}], [{**text, "text": "Hi\n\nN"}]),
        ([image], [{"type": "text", "text": "N"}, image], [image, {"type": "text", "text": "N"}]),
        ([], [{"type": "text", "text": "N"}], [{"type": "text", "text": "N"}]),
        (7, 7, 7),
    ):
        message = {"role": "tool", "content": content, "tool_call_id": "x"}
        given_message = copied(message)
        assert with_note(message, "N", front=True) == {**message, "content": before}
        assert with_note(message, "N", front=False) == {**message, "content": behind}
        assert with_note(message, "", front=False) == message == given_message


def clock(old: str, new: str) -> bool:
    return bool(to_tell({"time": old}, (Value("time", new, "clock"),)))


@pytest.mark.parametrize(
    ("old", "new", "is_told"),
    [
        ("10:00:00", "10:29:59", False),
        ("10:00:00", "10:30:00", True),
        ("10:30", "10:00", True),
        ("23:50", "00:10", False),
        ("11:50 AM", "12:10 PM", False),
        ("1:00 AM", "1:00 PM", True),
        ("10:00 UTC", "10:01 CET", True),
        ("2026-11-29T10:00:00Z", "2026-11-29T10:05:00Z", False),
        ("2026-11-29T10:00:00Z", "2026-11-30T10:05:00Z", True),
        ("Sun Nov 29 10:00:00 UTC 2026", "Sun Nov 29 10:00:59 UTC 2026", False),
        ("1764410400", "1764412199", False),
        ("1764410400", "1764412200", True),
        ("1764410400000", "1764410460000", False),
        ("3s", "29m", False),
        ("3s", "2h 3m", True),
        ("2 days", "3 days", True),
        ("soon", "later", True),
    ],
)
def test_a_clock_is_told_again_after_half_an_hour(old: str, new: str, is_told: bool) -> None:
    assert clock(old, new) == is_told


def test_changed_values_are_told_and_a_new_day_brings_its_time() -> None:
    date, time, cwd = Value("date", "2026-11-30", "move"), Value("time", "00:01", "clock"), Value("cwd", "/r", "path")
    before = {"date": "2026-11-29", "time": "23:59", "cwd": "/r", "gone": "x"}
    assert to_tell(before, (date, time, cwd)) == (date, time)
    assert to_tell({**before, "date": "2026-11-30"}, (date, time, cwd)) == ()
    assert to_tell({}, (date, time, cwd)) == (date, time, cwd)


def recorded(path: Path, replace: tuple[str, str] | None = None) -> Iterator[tuple[list[Any], list[Any] | None]]:
    """The bases of a trace, as chat messages."""
    text = path.read_text()
    for line in (moved(text, *replace) if replace else text).splitlines():
        record = json.loads(line)
        body, door = record.get("body"), record["path"].split("?")[0].rsplit("/", 1)[-1]
        if not isinstance(body, dict) or door not in ("completions", "messages", "responses"):
            continue
        if door != "completions":
            body = (read_messages if door == "messages" else read_responses).read(body, record["headers"]).body
        said = body["messages"]
        n_leading = next((i for i, m in enumerate(said) if m["role"] not in ("system", "developer")), len(said))
        yield said[:n_leading], body.get("tools")


def laid_bases(path: Path, replace: tuple[str, str] | None = None) -> list[str]:
    out: dict[str, None] = {}
    for leading, tools in recorded(path, replace):
        laid = lay_out(leading, tools)
        assert same_json(given_back([[*laid.leading], laid.tools], told(laid)), [leading, tools])
        assert lay_out(laid.leading, laid.tools).values == ()
        out[json.dumps([laid.leading, laid.tools])] = None
    return list(out)


N_BASES = {"continue-nextday": 1, "continue-run1": 1, "opencode-nextday": 2, "claude-tui": 3}
"""Bases of a trace after layout: title and sub-agent requests have their own."""


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recordings here")
@pytest.mark.parametrize("name", [path.stem for path in sorted(TRACES.glob("*.jsonl"))])
def test_a_recorded_agent_has_the_same_bases_in_another_directory(name: str) -> None:
    path = TRACES / f"{name}.jsonl"
    bases = laid_bases(path)
    assert len(bases) == N_BASES.get(name, len(bases))
    repo = "/home/dev/repo-tui" if name == "claude-tui" else "/home/dev/repo"
    assert laid_bases(path, (repo, "/srv/others/work.tree_2")) == bases
    assert not any(re.search(r"2026-1[12]-\d\d|Nov\w* \d+,? 2026", each) for each in bases)
