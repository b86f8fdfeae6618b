"""Which spellings of a message are one, and that nothing else is."""

import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.append_only import defaults_of, diff_kinds, normal
from policies.message_parts import only_reminders, reminders
from tests.policies.respellings import DEFAULTS, IMAGE, TOOLS, Message, call, messages, respelled, texts, values, words

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.just("tool"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from("role content tool_calls function name arguments id type text x".split()), inner, max_size=5
        )
    ),
    max_leaves=12,
)
R = "<system-reminder>\nbe kind\n</system-reminder>"


def norm(message: Any) -> bytes:
    return normal(message, DEFAULTS)


def say(role: str, content: object, **more: object) -> Message:
    return {"role": role, "content": content, **more}


def calling(given: object, name: str = "edit") -> Message:
    return say("assistant", "", tool_calls=[call(name, given, "c1")])


@given(st.data(), messages())
def test_other_words_for_a_message_are_equal(data: st.DataObject, message: Message) -> None:
    other = data.draw(respelled(message))
    before = copy.deepcopy((message, other))
    assert norm(other) == norm(message)
    assert (message, other) == before


@given(messages(), messages())
def test_messages_that_say_different_things_differ(one: Message, other: Message) -> None:
    """Judged by a plain reading of both: texts without thoughts, arguments as Python values without defaults."""
    assert (norm(one) == norm(other)) == (_read(one) == _read(other))


def _read(message: Message) -> object:
    content = message["content"]
    text = content.rstrip() if message["role"] == "assistant" else content
    calls = []
    for each in message.get("tool_calls", ()):
        given = json.loads(each["function"]["arguments"])
        kept = {
            k: v for k, v in given.items() if json.dumps(v) != json.dumps(DEFAULTS["edit"].get(k, object), default=str)
        }
        calls.append((each["id"], json.dumps(kept, sort_keys=True)))
    return message["role"], str(text), calls, message.get("tool_call_id")


@given(messages(), st.sampled_from(["role", "text", "id", "argument", "name", "field", "part"]), st.data())
def test_a_real_change_counts(message: Message, what: str, data: st.DataObject) -> None:
    changed = copy.deepcopy(message)
    calls = changed.get("tool_calls")
    if what == "role":
        changed["role"] = data.draw(
            st.sampled_from(["developer", "user", "tool", "system"]).filter(lambda r: r != message["role"])
        )
    elif what == "text":
        changed["content"] = f"q{message['content'] if isinstance(message['content'], str) else ''}"
    elif what == "part":
        parts = (
            message["content"]
            if isinstance(message["content"], list)
            else [{"type": "text", "text": message["content"]}]
        )
        changed["content"] = [*parts, {**IMAGE, "detail": "low"}]
    elif what == "field":
        changed["weight"] = 0
    elif calls is None:
        keys = ["tool_call_id"] if message["role"] == "tool" else ["tool_call_id", "name"]
        changed[data.draw(st.sampled_from(keys))] = "other"
    elif what == "argument":
        given = json.loads(calls[0]["function"]["arguments"])
        given["path"] = given["path"] + "/"
        calls[0]["function"]["arguments"] = json.dumps(given)
    elif what == "name":
        calls[0]["function"]["name"] = "write"
    else:
        calls[0]["id"] = "c9"
    assert norm(changed) != norm(message)


@given(ANY)
def test_any_json_has_a_form(message: Any) -> None:
    form = norm(message)
    assert form == norm(json.loads(json.dumps(message, sort_keys=True)))
    reminders(message)
    only_reminders(message)
    assert diff_kinds(message, message) == ()


@pytest.mark.parametrize("depth", [200, 1000, 100_000])
def test_depth_is_no_matter(depth: int) -> None:
    deep: Any = 1
    other: Any = 2
    for _ in range(depth):
        deep, other = [deep], [other]
    assert norm(calling({"x": deep})) == norm(calling({"x": deep}))
    assert norm(calling({"x": deep})) != norm(calling({"x": other}))
    assert norm(say("user", deep)) != norm(say("user", other))
    assert norm(calling("[" * depth)) == norm(calling("[" * depth))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1}', '{"a":true}'),
        ('{"a":0}', '{"a":false}'),
        ('{"a":null}', "{}"),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":9007199254740993}', '{"a":9007199254740992}'),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"limit":2001}', "{}"),
        ('{"all":0}', "{}"),
        ('{"limit":true}', '{"limit":1}'),
        ('{"a":1e999}', '{"a":1e998}'),
        ('{"a":NaN}', '{"a":null}'),
        ("{", "{ "),
        ("{", '"{"'),
        ('"{}"', "{}"),
        ('{"where":{"a":[1]}}', "{}"),
    ],
)
def test_arguments_that_are_not_equal(one: str, other: str) -> None:
    assert norm(calling(one)) != norm(calling(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1.0}', '{"a":1}'),
        ('{"a":-0.0}', '{"a":0}'),
        ('{"a":1e2}', {"a": 100}),
        ('{"a":"\\u00e9"}', '{"a": "é"}'),
        ('{"a":"\\ud83d\\ude42"}', {"a": "🙂"}),
        ('{"a":"\\/"}', '{"a":"/"}'),
        ("", "{}"),
        (None, {}),
        ('{"all":false,"limit":2000.0,"where":{"a":[1.0,null]}}', {}),
        ({"a": 1.0}, {"a": 1}),
        ('{"a":1,"a":2}', '{"a":2}'),
    ],
)
def test_arguments_that_are_equal(one: object, other: object) -> None:
    assert norm(calling(one)) == norm(calling(other))


def test_defaults_hold_for_their_own_tool_only() -> None:
    assert defaults_of(TOOLS) == DEFAULTS
    assert norm(calling({"all": False}, "edit")) == norm(calling({}, "edit"))
    assert norm(calling({"all": False}, "write")) != norm(calling({}, "write"))


@given(ANY)
def test_any_tools_have_defaults(tools: Any) -> None:
    assert isinstance(defaults_of(tools), dict)
    assert isinstance(defaults_of([tools, {"function": tools}, {"function": {"parameters": tools}}]), dict)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a", "b"], "ab"),
        (["a", "b"], "a\nb"),
        (["a", "b"], ["b", "a"]),
        ("a ", "a"),
        (" a", "a"),
    ],
)
def test_user_texts_that_are_not_equal(one: list[str] | str, other: list[str] | str) -> None:
    forms = [each if isinstance(each, str) else [{"type": "text", "text": t} for t in each] for each in (one, other)]
    assert norm(say("user", forms[0])) != norm(say("user", forms[1]))


def test_a_results_name_repeats_its_call() -> None:
    """Hermes sends it until it resumes (hermes-run1, requests 7 and 10)."""
    result = say("tool", "a", tool_call_id="c1")
    assert norm({**result, "name": "read_file"}) == norm(result)
    assert norm(say("tool", "a", name="read_file")) != norm(say("tool", "a"))
    assert diff_kinds({**result, "name": "read_file"}, result) == ("extra_keys",)


def test_leading_white_space_of_an_answer_counts() -> None:
    assert norm(say("assistant", " a")) != norm(say("assistant", "a"))
    assert norm(say("assistant", "a\n ")) == norm(say("assistant", "a"))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (f"{R}\n\nask", "ask"),
        (f"ask\n\n{R}", "ask"),
        (f"one\n\n{R}\n\ntwo", "one\n\ntwo"),
        (f"one\n{R}\n\ntwo", "one\n\ntwo"),
        (f"one{R}two", "onetwo"),
        (f"{R}\n{R}\nask", "ask"),
        (f"{R}", ""),
        ("<x-reminder>a<system-reminder>b</system-reminder></x-reminder>ask", "ask"),
        ('<plan-reminder mode="on">a</plan-reminder>ask', "ask"),
    ],
)
def test_reminders_do_not_count(text: str, plain: str) -> None:
    for role in ("user", "tool"):
        assert norm(say(role, text)) == norm(say(role, plain))
    assert norm(say("assistant", text)) != norm(say("assistant", plain))
    assert norm(say("system", text)) != norm(say("system", plain))
    assert only_reminders(say("user", text)) == (not plain)
    assert not only_reminders(say("tool", text))


@pytest.mark.parametrize(
    "text", ["<system-reminder>a", "a</system-reminder>", "<reminder>a</reminder>", "<a-reminder>x</b-reminder>"]
)
def test_what_is_no_whole_reminder_counts(text: str) -> None:
    assert reminders(say("user", text)) == ()
    assert norm(say("user", text)) != norm(say("user", ""))
    assert norm(say("user", text)) != norm(say("user", text + "."))


def test_reminders_are_told_in_order_and_whole() -> None:
    other = "<todo-reminder>x</todo-reminder>"
    assert reminders(say("user", f"<a-reminder> {R} </b-reminder>")) == (R,)
    message = say("user", [{"type": "text", "text": f"a {R} b {other}"}, {"type": "text", "text": R}])
    assert reminders(message) == (R, other, R)


def test_many_tags_take_no_long_time() -> None:
    """Quadratic searching would take minutes (pytest-timeout)."""
    open_only = "".join(f"<t{i}-reminder>" for i in range(100_000))
    assert reminders(say("user", open_only)) == ()
    assert reminders(say("user", "<system-reminder>" * 200_000)) == ()
    assert len(reminders(say("user", f"{R} " * 50_000))) == 50_000
    assert norm(say("user", f"a\n{R} " * 50_000)) == norm(say("user", "\n".join("a" * 50_000)))


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        (say("user", "a"), say("user", [{"type": "text", "text": "a"}]), ("content_form",)),
        (say("assistant", ""), say("assistant", None), ("content_form",)),
        (say("assistant", "a\n"), say("assistant", "a"), ("whitespace",)),
        (say("assistant", "a", reasoning_content="r"), say("assistant", "a"), ("reasoning",)),
        (say("user", f"{R}\na"), say("user", "a"), ("reminder",)),
        (say("user", f"{R}\na"), say("user", [{"type": "text", "text": "a"}]), ("reminder", "content_form")),
        (calling('{"a": 1}'), calling('{"a":1}'), ("arguments",)),
        (calling({"a": 1, "b": 2}), calling({"b": 2, "a": 1}), ("arguments",)),
        (calling({"a": 1}), dict(reversed(calling({"a": 1}).items())), ()),
        (say("tool", "a", tool_call_id="c"), say("tool", "a", tool_call_id="c", _x=1), ("extra_keys",)),
        (say("user", "a"), say("user", "a", refusal=None), ()),
        (say("user", "a"), say("user", "a"), ()),
    ],
)
def test_differences_have_names(one: Message, other: Message, kinds: tuple[str, ...]) -> None:
    assert norm(one) == norm(other)
    assert diff_kinds(one, other) == kinds


@given(texts, values)
def test_thoughts_count_nowhere_but_outside_answers(text: str, thought: Any) -> None:
    assume(thought is not None)
    bare = say("assistant", text)
    assert norm({**bare, "reasoning_content": thought}) == norm(bare)
    assert norm(say("assistant", [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}])) == norm(
        bare
    )
    assert norm({**bare, "role": "user", "reasoning_content": thought}) != norm({**bare, "role": "user"})
