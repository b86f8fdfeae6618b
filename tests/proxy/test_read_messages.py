"""Anthropic Messages bodies as chat completions: order kept, histories append-only, wrong ones refused."""

import itertools
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.api.dialect import Json
from proxy.api.read_messages import count, read
from proxy.errors import BadRequest

TRACE = Path(__file__).parent.parent / "data" / "claude-tool-search.jsonl"
DEFERRED = [
    {"name": "ToolSearch", "input_schema": {"type": "object"}},
    {"name": "WebFetch", "description": "Fetches", "input_schema": {"type": "object"}, "defer_loading": True},
    {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True},
]


def translated(**body: Any) -> Json:
    """The engine's body for a request with these fields."""
    return read({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}, {}).body


def called(*ids: str) -> Json:
    """The turn that results with these ids answer."""
    return assistant(*(use(id_, "Read", {}) for id_ in ids))


def messages(*given: Any, **body: Any) -> list[Json]:
    """The chat messages for these of the client's."""
    found = translated(messages=list(given), **body)["messages"]
    assert isinstance(found, list)
    return found


def user(*blocks: Any) -> Json:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def result(call: str, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def use(call: str, name: str, given: Any) -> Json:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


# --- messages --------------------------------------------------------------------------------------------------------


def test_content_keeps_its_order() -> None:
    """Text before and after a tool result stays there (llama-server moves it in front)."""
    given = user(text("before"), result("c1", "r1"), result("c2", [text("r"), text("2")]), text("after"))
    assert messages(called("c1", "c2"), given)[1:] == [
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "tool_call_id": "c2", "content": "r2"},
        {"role": "user", "content": "after"},
    ]


def test_several_texts_stay_parts() -> None:
    """The template joins them, as it does for llama-server's own endpoint; cache marks are no content."""
    marked = {**text("b"), "cache_control": {"type": "ephemeral"}}
    assert messages(user(text("a"), marked)) == [{"role": "user", "content": [text("a"), text("b")]}]
    assert messages(user(marked)) == messages({"role": "user", "content": "b"})


def test_assistant_turn() -> None:
    """Thinking, text and calls are one message; arguments are compact JSON in the order sent."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    turn = assistant(thinking, text("a"), use("c1", "Read", {"b": 1, "a": "é"}), text("b"))
    assert messages(turn) == [
        {
            "role": "assistant",
            "content": "ab",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": '{"b":1,"a":"é"}'}}
            ],
            "reasoning_content": "hm",
        }
    ]


def test_redacted_thinking_is_accepted_and_not_told() -> None:
    """It cannot be read; the log learns of it."""
    turn = assistant({"type": "redacted_thinking", "data": "x"}, text("a"))
    found = read({"messages": [turn]}, {})
    assert found.body["messages"] == [{"role": "assistant", "content": "a"}]
    assert found.dropped == ("content.redacted_thinking",)


def test_system_messages_stay_where_they_are() -> None:
    """In front as one text, in mid-conversation as they come."""
    system = [text("a"), {**text("b"), "cache_control": {"type": "ephemeral"}}]
    late = {"role": "system", "content": [text("late")]}
    assert messages(user(text("hi")), late, system=system) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "late"},
    ]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("x-anthropic-billing-header: v=1; cch=a5145;You", "x-anthropic-billing-header: v=1; cch=fffff;You"),
        ("x-anthropic-billing-header: v=1; cch=a5;You", "x-anthropic-billing-header: v=1; cch=a5;You"),
        ("x-anthropic-billing-header: v=1;", "x-anthropic-billing-header: v=1;"),
        ("You: cch=a5145;", "You: cch=a5145;"),
    ],
)
def test_billing_stamp(given: str, want: str) -> None:
    """The stamp that changes with each request is blanked exactly as llama-server blanks it."""
    assert messages(user(text("hi")), system=given)[0]["content"] == want
    assert messages(user(text("hi")), system=[text(given)])[0]["content"] == want


def test_images() -> None:
    """As data URLs, in messages and in results."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    far = {"type": "image", "source": {"type": "url", "url": "https://example.invalid/a.png"}}
    assert messages(user(text("a"), image, far))[0]["content"] == [
        text("a"),
        part,
        {"type": "image_url", "image_url": {"url": "https://example.invalid/a.png"}},
    ]
    assert messages(called("c"), user(result("c", [text("a"), image])))[1]["content"] == [text("a"), part]


def test_documents() -> None:
    """Text documents are read; of others the model learns that it cannot read them, and the log too."""
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("e")]}}
    pdf = {"type": "document", "title": "P", "source": {"type": "base64", "data": "x"}}
    found = read({"messages": [called("c"), user(plain, blocks, result("c", [pdf]))]}, {})
    assert found.body["messages"][1]["content"] == [text("T\nd"), text("e")]
    assert "'P'" in found.body["messages"][2]["content"]
    assert found.dropped == ("content.document",)


def test_results_without_content() -> None:
    """An empty result is an empty text; that a tool failed is the text's to say, as with llama-server."""
    bare = {"type": "tool_result", "tool_use_id": "c"}
    found = read({"messages": [called("c", "d"), user(bare, result("d", "no", is_error=True))]}, {})
    assert [m["content"] for m in found.body["messages"][1:]] == ["", "no"]
    assert found.dropped == ("tool_result.is_error",)


# --- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "at"),
    [
        ([user(result("c", "r"))], "messages.0"),
        ([called("c"), user(text("a"))], "messages.0"),
        ([called("c", "d"), user(result("c", "r")), called("e")], "messages.0"),
        ([called("c"), user(result("c", "r"), result("c", "r"))], "messages.1"),
        ([called("c"), user(result("c", "r")), user(result("c", "r"))], "messages.2"),
        ([called("c"), user(result("d", "r"))], "messages.1"),
        (
            [{"role": "user", "content": "hi"}, called("c"), user(result("c", "r")), called("d"), user(text("a"))],
            "messages.3",
        ),
    ],
)
def test_calls_and_results_that_do_not_pair(turns: list[Json], at: str) -> None:
    """As Anthropic's API: every result answers a call of the turn before, every call is answered in the next."""
    with pytest.raises(BadRequest, match=at.replace(".", r"\.")) as refused:
        messages(*turns)
    assert refused.value.param == at


def test_a_turn_may_be_several_messages() -> None:
    """Calls wait for results as long as no turn of the other side has gone by; the last turn's may still come."""
    turns = [
        called("c"),
        called("d"),
        {"role": "system", "content": "s"},
        user(result("d", "2")),
        user(result("c", "1")),
    ]
    assert [m["role"] for m in messages(*turns)] == ["assistant", "assistant", "system", "tool", "tool"]
    assert messages(*turns, called("c"))[-1]["tool_calls"][0]["id"] == "c"


# --- tools -----------------------------------------------------------------------------------------------------------


def test_tools() -> None:
    """Functions as llama-server makes them; tools of Anthropic's servers are dropped by name."""
    tools = [
        {"name": "a", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
        {"name": "web_search", "type": "web_search_20250305", "max_uses": 1},
        {"name": "bash", "type": "bash_20250124"},
    ]
    found = read({"messages": [user(text("hi"))], "tools": tools}, {})
    assert found.body["tools"] == [
        {"type": "function", "function": {"name": "a", "description": "", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}},
    ]
    assert found.dropped == ("tools.web_search_20250305",)


def test_deferred_tools() -> None:
    """They are not listed; one constant tool stands for them from the first request on."""
    listed = translated(tools=DEFERRED)["tools"]
    assert [t["function"]["name"] for t in listed] == ["ToolSearch", "call_deferred_tool"]
    only_placeholder = [DEFERRED[0], DEFERRED[2]]
    assert translated(tools=only_placeholder)["tools"] == listed
    assert [t["function"]["name"] for t in translated(tools=DEFERRED[:1])["tools"]] == ["ToolSearch"]


def test_a_reference_announces_the_tool() -> None:
    """The definition stands in the result, with the way to call it; an unknown tool is named."""
    references = [{"type": "tool_reference", "tool_name": name} for name in ("WebFetch", "Gone")]
    content = messages(called("c"), user(result("c", references)), tools=DEFERRED)[1]["content"]
    assert content == (
        "The tool WebFetch is now available. Its definition:\n"
        '{"name":"WebFetch","description":"Fetches","parameters":{"type":"object"}}\n'
        "It is not in the list of tools: call it with call_deferred_tool, as "
        '{"name":"WebFetch","arguments":{...}}.\n\n'
        "The tool Gone is now available.\n"
        'It is not in the list of tools: call it with call_deferred_tool, as {"name":"Gone","arguments":{...}}.'
    )


def test_a_call_of_a_deferred_tool_is_what_was_generated() -> None:
    """The client echoes the inner name; the model reads its own generic call again. Listed tools keep their names."""
    turn = assistant(use("c1", "WebFetch", {"url": "u"}), use("c2", "ToolSearch", {}))
    calls = messages(turn, tools=DEFERRED)[0]["tool_calls"]
    assert [c["function"] for c in calls] == [
        {"name": "call_deferred_tool", "arguments": '{"name":"WebFetch","arguments":{"url":"u"}}'},
        {"name": "ToolSearch", "arguments": "{}"},
    ]


def test_without_deferral_names_stay() -> None:
    """A call of a tool that is no longer listed is history like any other."""
    turn = assistant(use("c1", "Old", {}))
    assert messages(turn, tools=DEFERRED[:1])[0]["tool_calls"][0]["function"]["name"] == "Old"


def test_a_client_with_a_tool_of_that_name() -> None:
    """The generic tool takes another one."""
    mine = {"name": "call_deferred_tool", "input_schema": {}}
    names = [t["function"]["name"] for t in translated(tools=[mine, *DEFERRED])["tools"]]
    assert names == ["call_deferred_tool", "ToolSearch", "call_deferred_tool_"]


def test_anthropics_own_tool_search() -> None:
    """Nobody would announce the deferred tools here: they are listed."""
    search = {"name": "tool_search_tool_regex", "type": "tool_search_tool_regex_20251119"}
    found = read({"messages": [user(text("hi"))], "tools": [search, DEFERRED[1]]}, {})
    assert [t["function"]["name"] for t in found.body["tools"]] == ["WebFetch"]
    assert found.dropped == ("tools.tool_search_tool_regex_20251119",)


def test_tools_that_change_in_mid_conversation() -> None:
    """An addition announces the tool where it stands, known by name or defined there; a removal says so."""
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "WebFetch"}}
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "New"}}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "WebFetch"}}
    late = {"role": "system", "content": [added, defined, removed]}
    parts = [p["text"] for p in messages(user(text("hi")), late, tools=DEFERRED)[1]["content"]]
    assert '"description":"Fetches"' in parts[0]
    assert parts[1].startswith('The tool New is now available. Its definition:\n{"name":"New"')
    assert parts[2] == "The tool WebFetch is no longer available."


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "a"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        (None, {}),
    ],
)
def test_tool_choice(choice: Any, want: Json) -> None:
    """As the engine spells it."""
    found = translated(tool_choice=choice, tools=[{"name": "a", "input_schema": {}}])
    assert {k: v for k, v in found.items() if k in ("tool_choice", "parallel_tool_calls")} == want


# --- fields ----------------------------------------------------------------------------------------------------------


def test_fields() -> None:
    """Sampling and llama-server's own fields pass; what has no effect is named."""
    body = {
        "model": "m",
        "messages": [user(text("hi"))],
        "max_tokens": 5,
        "stream": True,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "stop_sequences": ["END"],
        "seed": 1,
        "chat_template_kwargs": {"a": 1},
        "service_tier": "auto",
        "id_slot": 3,
        "context_management": {"edits": []},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "u"},
    }
    found = read(body, {"anthropic-beta": "anything-2030-01-01"})
    assert found.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stream": True,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ["END"],
        "verbose": True,
        "seed": 1,
        "chat_template_kwargs": {"a": 1},
        "thinking_budget_tokens": 2048,
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"type": "object"}},
        },
    }
    assert found.dropped == ("service_tier", "id_slot", "context_management")
    assert found.session is None


def test_defaults() -> None:
    """llama-server's own, where a client leaves fields out."""
    found = read({"messages": [user(text("hi"))], "thinking": {"type": "enabled"}}, {}).body
    assert (found["max_tokens"], found["stream"], found["thinking_budget_tokens"]) == (4096, False, 10000)
    assert "verbose" not in found


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"device_id":"d","session_id":"cea6bea3"}', "cea6bea3"),
        ("user_ab_account__session_cea6bea3-b02a-4368-87dd-b976e1cb2461", "cea6bea3-b02a-4368-87dd-b976e1cb2461"),
        ("somebody", None),
        ('{"session_id":5}', None),
        ("{broken", None),
    ],
)
def test_session(user_id: str, session: str | None) -> None:
    """Claude Code's session id, in both spellings of its versions."""
    assert read({"messages": [user(text("hi"))], "metadata": {"user_id": user_id}}, {}).session == session


def test_count() -> None:
    """The answer of count_tokens."""
    assert count(7) == b'{"input_tokens":7}'


def test_claude_code_with_a_tool_search() -> None:
    """Three recorded requests (claude-tui 7, 8 and 9, cut): the search's tools appear in the middle of `tools`, and
    each prompt is nevertheless the last one and more."""
    bodies = [read(orjson.loads(line), {}).body for line in TRACE.read_bytes().splitlines()]
    for earlier, later in itertools.pairwise(bodies):
        assert later["tools"] == earlier["tools"]
        shown = [orjson.dumps(m) for m in later["messages"]]
        assert shown[: len(earlier["messages"])] == [orjson.dumps(m) for m in earlier["messages"]]
        assert len(shown) > len(earlier["messages"])
    results = [m["content"] for m in bodies[-1]["messages"] if m["role"] == "tool"]
    assert any("The tool WebFetch is now available. Its definition:" in content for content in results)
