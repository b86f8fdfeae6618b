"""First divergences: positions that can be checked against the flattened prompts, kinds, advice."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.advice import AGENTS, TABLE, advice, advice_for_cause, agent_of
from policies.causes import Cause
from policies.changes import Kind
from policies.divergence import AROUND, Divergence, first_divergence
from policies.flatten import flatten, groups_of
from policies.prefix import common

Json = dict[str, Any]

TEXT = st.text("ab \n<>/:19é", max_size=12)
PART = st.builds(lambda text: {"type": "text", "text": text}, TEXT)
CALL = st.builds(
    lambda i, arguments: {"id": f"c{i}", "function": {"name": f"f{i}", "arguments": arguments}}, st.integers(0, 3), TEXT
)
MESSAGE = st.builds(
    lambda role, content, more: {"role": role, "content": content, **more},
    st.sampled_from(["user", "assistant", "tool", "system", "developer"]),
    TEXT | st.none() | st.lists(PART, max_size=3),
    st.fixed_dictionaries({}, optional={"reasoning_content": TEXT, "tool_calls": st.lists(CALL, max_size=2)}),
)
TOOL = st.builds(lambda name, text: {"type": "function", "function": {"name": name, "description": text}}, TEXT, TEXT)
BODY = st.builds(
    lambda messages, tools, more: {"messages": messages, "tools": tools, **more},
    st.lists(MESSAGE, max_size=5),
    st.lists(TOOL, max_size=3),
    st.fixed_dictionaries({}, optional={"tool_choice": st.sampled_from(["auto", "none"]), "system": TEXT}),
)
KEYS = st.sampled_from(
    "messages tools system instructions input prompt role content text type thinking tool_calls function arguments "
    "name id tool_call_id call_id output summary reasoning_content tool_choice".split()
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def flat(body: Json, *, ids: bool = False) -> str:
    """The flattened prompt."""
    return "".join(piece.text for piece in flatten(body, ids=ids))


def chat(*messages: Json, system: str = "You help.", tools: list[Json] | None = None) -> Json:
    """A chat body."""
    return {"messages": [{"role": "system", "content": system}, *messages], "tools": tools or []}


def user(content: Any) -> Json:
    """A user message."""
    return {"role": "user", "content": content}


def tool(name: str, description: str = "does it") -> Json:
    """A tool's definition."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def called(arguments: str, **more: Any) -> Json:
    """An assistant message with one call."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "I call", "tool_calls": [call], **more}


def answer(content: str) -> Json:
    """An answer without a call."""
    return {"role": "assistant", "content": content}


def result(content: str) -> Json:
    """A tool result."""
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def diverged(before: Json, now: Json) -> Divergence:
    """The divergence, which has to be there."""
    found = first_divergence(before, now)
    assert found is not None
    return found


@given(BODY)
def test_a_prompt_extends_itself(body: Json) -> None:
    """Nothing differs between a body and its copy."""
    assert first_divergence(body, copy.deepcopy(body)) is None


@given(BODY, st.lists(MESSAGE, max_size=3))
def test_appending_is_no_divergence(body: Json, more: list[Json]) -> None:
    """Messages behind a conversation's last change nothing before them."""
    asked = {**body, "messages": [*body["messages"], user("go on")]}
    assert first_divergence(asked, {**asked, "messages": [*asked["messages"], *more]}) is None


@given(BODY, BODY)
def test_positions_are_where_the_flattened_prompts_part(before: Json, now: Json) -> None:
    """Everything before `flat` is equal, `old` and `new` follow it, and `at` counts from the section's start."""
    found = first_divergence(before, now)
    if found is None:
        assert flat(now).startswith(flat(before))
        return
    if found.section == "params":
        return
    ids = flat(before) == flat(now)[: len(flat(before))] and (found.old, found.new) != (
        flat(before)[found.flat :][:AROUND],
        flat(now)[found.flat :][:AROUND],
    )
    was, is_now = flat(before, ids=ids), flat(now, ids=ids)
    assert was[: found.flat] == is_now[: found.flat]
    assert found.old == was[found.flat :][:AROUND]
    assert found.new == is_now[found.flat :][:AROUND]
    assert was[: found.flat].endswith(found.shared)
    in_section = sum(len(p.text) for p in flatten(now, ids=ids) if p.section == found.section)
    assert 0 <= found.at <= max(in_section, found.flat)


@given(BODY, st.data())
def test_one_changed_message_is_found(body: Json, data: st.DataObject) -> None:
    """The message that was changed is the one that is named."""
    messages = [*body["messages"], user("last")]
    i = data.draw(st.integers(0, len(messages) - 1))
    changed = [*messages[:i], {**messages[i], "content": "ZZZ" + str(messages[i].get("content"))}, *messages[i + 1 :]]
    found = first_divergence({**body, "messages": messages}, {**body, "messages": changed})
    assert found is not None
    assert found.message == i
    # A message without text of its own may be told from the change by what stands behind it in the flattened prompt.
    texts = [piece.text for piece in flatten({"messages": [messages[i]]}) if piece.path[:7] == "content"]
    assert found.path.startswith("content") or not "".join(texts)


@given(ANY, ANY)
def test_any_json_is_taken(before: Any, now: Any) -> None:
    """Whatever a client sends as an object, nothing is raised, and comparing is total."""
    one, other = ({"messages": value} if not isinstance(value, dict) else value for value in (before, now))
    first_divergence(one, other)
    assert groups_of(flatten(one)) == groups_of(flatten(copy.deepcopy(one)))


@given(TEXT, TEXT)
def test_common(a: str, b: str) -> None:
    """As many characters as two texts share, and not one more."""
    n = common(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


BILLING = "x-anthropic-billing-header:"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("Today's date: Sun Nov 29 2026", "Today's date: Mon Nov 30 2026", Kind.DATE),
        ("Today is 2026-11-29.", "Today is 2026-11-30.", Kind.DATE),
        ("It is 3 December 2026 now", "It is 4 December 2026 now", Kind.DATE),
        ("Time: 10:00:00.", "Time: 10:01:00.", Kind.CLOCK),
        ("now=1795996800", "now=1795996861", Kind.CLOCK),
        ("Working directory: /home/a/app", "Working directory: /home/b/app", Kind.PATH),
        ("cwd: /srv/one/repo\nx", "cwd: /srv/two/repo\nx", Kind.PATH),
        ("Git status:\nM a.py", "Git status:\n?? b.py", Kind.GIT_STATUS),
        ("gitStatus: branch main\n\n3fbaa1c Add", "gitStatus: branch main\n\n9d0e11a Add", Kind.GIT_STATUS),
        (
            "x-anthropic-billing-header: cc_version=2.1.332.c21; a",
            "x-anthropic-billing-header: cc_version=2.1.332.cf6; a",
            Kind.ID,
        ),
        ("agent PID 20718 up", "agent PID 20993 up", Kind.ID),
        ("session 0ac4d1e2-0000-4000-8000-00000000000a", "session 0ac4d1e2-0000-4000-8000-00000000000b", Kind.ID),
        ("ses_5d1f0aa2b3c4", "ses_5d1f0aa2b3c5", Kind.ID),
        ("memory 72% used", "memory 73% used", Kind.METER),
        ("Be kind.", "Be rude.", Kind.EDITED),
    ],
)
def test_kinds_of_values(old: str, new: str, kind: Kind) -> None:
    """A value is known by its shape, wherever the agent prints it."""
    found = diverged(
        chat(user("hi"), system=f"You help.\n{old}\nend"), chat(user("hi"), system=f"You help.\n{new}\nend")
    )
    assert (found.section, found.message, found.role, found.path) == ("system", 0, "system", "content")
    assert found.kind is kind


BIG = "line of a result\n" * 40
REMINDER = "<system-reminder>\nbe quick\n</system-reminder>"
ARGUMENTS = "tool_calls[0].function.arguments"
KINDS: list[tuple[Kind, str, list[Json], list[Json]]] = [
    (
        Kind.ARGUMENTS,
        "tool_calls[0].function.arguments",
        [called('{"a": 1, "b": "\\u00e9"}')],
        [called('{"b":"é","a":1}')],
    ),
    (Kind.ARGUMENTS, ARGUMENTS, [called('{"a": 1}')], [called('{"a": 1, "all": false}')]),
    (Kind.EDITED, ARGUMENTS, [called('{"a": 1}')], [called('{"a": 2}')]),
    (Kind.REASONING_DROPPED, "reasoning_content", [called("{}", reasoning_content="thinking")], [called("{}")]),
    (Kind.REMINDER, "content", [user(f"hello{REMINDER}")], [user("hello")]),
    (
        Kind.WHITE_SPACE,
        "content",
        [{"role": "assistant", "content": "done \n"}],
        [{"role": "assistant", "content": "done"}],
    ),
    (Kind.PRUNED, "content", [result(BIG)], [result("[Old tool result content cleared]")]),
    (Kind.EDITED, "content", [user("one")], [user("two")]),
    (
        Kind.FORM,
        "content",
        [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        [user("a\nb")],
    ),
    (
        Kind.COMPACTION,
        "content",
        [user("do it"), called("{}"), result("x"), user("more")],
        [user("This session is continued from a previous conversation. Summary: ..."), user("more")],
    ),
    (Kind.SHORTENED, "", [user("one"), called("{}"), result("x")], [user("one")]),
]


@pytest.mark.parametrize(
    ("kind", "path", "old", "new"), KINDS, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(KINDS)]
)
def test_kinds_of_messages(kind: Kind, path: str, old: list[Json], new: list[Json]) -> None:
    """What happened to a message, and where in it."""
    before = chat(user("start"), *old, user("end")) if kind is not Kind.SHORTENED else chat(user("start"), *old)
    now = (
        chat(user("start"), *new, user("end"), user("new")) if kind is not Kind.SHORTENED else chat(user("start"), *new)
    )
    found = diverged(before, now)
    assert (found.section, found.kind) == ("messages", kind)
    assert found.message == (3 if kind is Kind.SHORTENED else 2)
    assert found.path == path


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("abc", "cab", Kind.TOOLS_ORDER, 0),
        ("abc", "abxc", Kind.TOOLS_ADDED, 2),
        ("abc", "abcx", Kind.TOOLS_ADDED, 3),
        ("abc", "ac", Kind.TOOLS_REMOVED, 1),
        ("ab", "ax", Kind.TOOLS_EDITED, 1),
        ("", "a", Kind.TOOLS_ADDED, 0),
        ("a", "", Kind.TOOLS_REMOVED, 0),
    ],
)
def test_kinds_of_tools(old: str, new: str, kind: Kind, message: int) -> None:
    """Tools are compared as definitions; the first that differs is named."""
    found = diverged(chat(user("hi"), tools=[*map(tool, old)]), chat(user("hi"), user("x"), tools=[*map(tool, new)]))
    assert (found.section, found.kind, found.message) == ("tools", kind, message)


def test_a_tool_whose_keys_moved_is_the_same_tool() -> None:
    """Another order of keys is another prompt, but no other tool."""
    moved = dict(reversed(tool("a").items()))
    assert diverged(chat(tools=[tool("a")]), chat(tools=[moved])).kind is Kind.TOOLS_ORDER


def test_forms_that_are_no_divergence() -> None:
    """A text and one part with it, marks for a cache, null and no content."""
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert first_divergence(chat(user([marked]), user("x")), chat(user("hi"), user("x"))) is None
    assert first_divergence(chat(user(None), user("x")), chat(user(""), user("x"))) is None


def test_settings_and_ids() -> None:
    """Looked at when no text differs."""
    body = chat(user("x"), called("{}"), result("y"))
    found = diverged(body, {**body, "tool_choice": "none"})
    assert (found.section, found.path, found.kind) == ("params", "tool_choice", Kind.SETTING)
    renamed = json.loads(json.dumps(body).replace("c1", "c2"))
    assert diverged(body, renamed).kind is Kind.ID


@pytest.mark.parametrize(
    "body",
    [
        {"system": [{"type": "text", "text": "s"}], "messages": [user([{"type": "tool_result", "content": "r"}])]},
        {"instructions": "s", "input": [{"type": "function_call_output", "call_id": "c", "output": "r"}]},
    ],
)
def test_all_dialects(body: Json) -> None:
    """System texts and results are found where each dialect puts them."""
    assert flat(body) == "sr"
    changed = json.loads(json.dumps(body).replace('"r"', '"other"'))
    found = diverged(body, changed)
    assert (found.section, found.old, found.new) == ("messages", "r", "other")


def test_advice() -> None:
    """Each kind has an advice; an agent's own switch comes first; every row can be shown."""
    assert all(advice(kind) for kind in Kind)
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in advice(Kind.ID, "claude")
    assert "ENABLE_TOOL_SEARCH=false" in advice(Kind.TOOLS_ADDED, "claude")
    assert "OPENCODE_EXPERIMENTAL_CACHE_STABILIZATION=1" in advice(Kind.DATE, "opencode")
    assert "--mode repair" in advice(Kind.DATE, "pi")
    assert "layout_rules" in advice(Kind.DATE, "pi", repaired=True)
    assert advice(Kind.EDITED, repaired=True) == advice(Kind.EDITED)
    shown = {advice(kind, agent) for kind in Kind for agent in ("", *AGENTS)}
    assert shown == {row.text for row in TABLE}


def test_advice_for_causes() -> None:
    """Causes of ours and of the template name a setting; unknown words name none."""
    assert "--append-only-template" in (advice_for_cause("template_rewrite") or "")
    assert "--template-clock fixed" in (advice_for_cause("template_clock") or "")
    assert "--ctx-size" in (advice_for_cause(Cause.EVICTED) or "")
    for case in ("after a stop of yours", "if the engine ended by itself"):
        assert case in (advice_for_cause(Cause.ENGINE_RESTART) or "")
    assert advice_for_cause("nonsense") is None


def test_agents() -> None:
    """By user agent, or by what their system prompt begins with."""
    assert agent_of("claude-cli/2.1.332 (external, cli)") == "claude"
    assert agent_of("", "x-anthropic-billing-header: cc_version=2;") == "claude"
    assert agent_of("Kilo-Code/7") == "kilo"
    assert agent_of("curl/8") == ""
