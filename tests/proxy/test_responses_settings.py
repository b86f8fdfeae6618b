"""Tools, names and settings of Responses bodies as the engine gets them."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.read_responses import read
from proxy.api.responses_tools import flat_name
from proxy.errors import BadRequest
from tests.proxy.responses_bodies import AGENTS, CALL, RESULT, SPAWN, USER, Json, messages, refused, translated

# --- tools -------------------------------------------------------------------------------------------------------


def test_functions_and_namespaces_are_functions() -> None:
    plain = {"type": "function", "name": "look", "description": None, "parameters": None}
    custom = {"type": "custom", "name": "patch"}
    found = translated(tools=[plain, AGENTS | {"tools": [SPAWN, custom]}, {"type": "web_search"}, custom])
    assert found.body["tools"] == [
        {"type": "function", "function": {"name": "look", "strict": True}},
        {
            "type": "function",
            "function": {
                "name": "agents__spawn",
                "description": "D",
                "parameters": {"type": "object"},
                "strict": False,
            },
        },
    ]
    assert found.dropped == ("tools.namespace.description", "tools.custom", "tools.web_search")


def test_only_tools_that_the_engine_has_not_leave_none() -> None:
    assert "tools" not in translated(tools=[{"type": "web_search"}]).body


def test_names_that_would_fall_together_are_kept_apart() -> None:
    plain = {"type": "function", "name": "agents__spawn"}
    found = translated(tools=[plain, AGENTS, AGENTS | {"name": "agents__"}, AGENTS | {"name": "é" * 70}])
    names = [tool["function"]["name"] for tool in found.body["tools"]]
    assert names[0] == "agents__spawn" and len(set(names)) == 4
    call = CALL | {"namespace": "agents", "name": "spawn"}
    again = read({"input": [USER, call, RESULT], "tools": [plain, AGENTS]}, {}).body
    assert again["messages"][1]["tool_calls"][0]["function"]["name"] == names[1]


NAME = st.text(st.sampled_from("ab_-é "), min_size=1, max_size=40)


@given(st.sets(st.tuples(NAME, NAME), min_size=1, max_size=8), st.sets(NAME, max_size=4))
def test_flat_names_are_legal_distinct_and_go_back(pairs: set[tuple[str, str]], plain: set[str]) -> None:
    functions = [{"type": "function", "name": name} for name in sorted(plain)]
    spaces = [
        {"type": "namespace", "name": n, "description": "", "tools": [{"type": "function", "name": t}]}
        for n, t in sorted(pairs)
    ]
    found = translated(tools=[*functions, *spaces])
    names = [tool["function"]["name"] for tool in found.body["tools"]]
    assert len(set(names)) == len(names) == len(plain) + len(pairs)
    for (namespace, name), flat in zip(sorted(pairs), names[len(plain) :], strict=True):
        assert len(flat) <= 64 and all(c.isascii() and (c.isalnum() or c in "_-") for c in flat)
        whole = found.writer().whole(
            {"choices": [{"finish_reason": "tool_calls", "message": {"tool_calls": [{"function": {"name": flat}}]}}]}
        )
        assert (whole["output"][0]["namespace"], whole["output"][0]["name"]) == (namespace, name)


def test_a_call_has_the_same_name_when_its_tool_is_gone() -> None:
    """Codex compacts with the same history and no tools."""
    call = CALL | {"namespace": "mcp__docs", "name": "read_page"}
    space = AGENTS | {"name": "mcp__docs", "tools": [SPAWN | {"name": "read_page"}]}
    with_tools = messages(USER, call, RESULT, tools=[space])
    assert with_tools == messages(USER, call, RESULT, tools=[]) == messages(USER, call, RESULT)
    assert with_tools[1]["tool_calls"][0]["function"]["name"] == "mcp__docs__read_page"
    assert flat_name("a__b", "c") != flat_name("a", "b__c")


@pytest.mark.parametrize(
    "choice, sent, dropped",
    [
        ("auto", "auto", ()),
        ("required", "required", ()),
        ("none", "none", ()),
        ({"type": "function", "name": "look"}, "required", ("tool_choice.name",)),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "auto", ("tool_choice.tools",)),
        ({"type": "web_search_preview"}, None, ("tool_choice.web_search_preview",)),
        (None, None, ()),
    ],
)
def test_tool_choices(choice: object, sent: str | None, dropped: tuple[str, ...]) -> None:
    found = translated(tool_choice=choice)
    assert (found.body.get("tool_choice"), found.dropped) == (sent, dropped)


# --- settings ----------------------------------------------------------------------------------------------------


def test_settings_have_their_chat_names_and_others_pass() -> None:
    schema = {"type": "object"}
    found = translated(
        reasoning={"effort": "low", "summary": None},
        max_output_tokens=5,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        temperature=0,
        top_k=3,
        seed=1,
        grammar="g",
        chat_template_kwargs={"a": 1},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream=True,
        cache_prompt=False,
        id_slot=3,
        n=4,
    )
    assert found.body == {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "m",
        "reasoning_effort": "low",
        "max_tokens": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "temperature": 0,
        "top_k": 3,
        "seed": 1,
        "grammar": "g",
        "chat_template_kwargs": {"a": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
    }
    assert found.dropped == ("id_slot", "n")


@pytest.mark.parametrize("value", [True, 1, "json", [1], {"json_schema": True}, {"type": "json_object"}])
def test_chats_own_response_format_is_the_engines_to_judge(value: object) -> None:
    assert translated(response_format=value).body["response_format"] == value


def test_what_has_no_effect_is_named() -> None:
    found = translated(
        store=True,
        background=True,
        truncation="auto",
        service_tier="flex",
        user="u",
        max_tool_calls=1,
        include=["file_search_call.results", "reasoning.encrypted_content"],
        text={"verbosity": "low", "format": {"type": "text"}},
        reasoning={"summary": "auto"},
        stream_options={"include_obfuscation": True},
        top_logprobs=3,
        input=[USER | {"phase": "final_answer"}],
        tools=[SPAWN | {"defer_loading": True}],
    )
    assert set(found.dropped) == set(
        "store background truncation service_tier user max_tool_calls include.file_search_call.results text.verbosity "
        "reasoning.summary stream_options.include_obfuscation top_logprobs input[].phase tools[].defer_loading".split()
    )
    assert set(found.body) == {"messages", "model", "tools"}


def test_values_that_ask_for_nothing_are_no_loss() -> None:
    found = translated(
        store=False, background=False, truncation="disabled", service_tier="auto", user=None, metadata={"a": "b"},
        include=["reasoning.encrypted_content"], previous_response_id=None, prompt_cache_key="k",
    )  # fmt: skip
    assert found.dropped == () and set(found.body) == {"messages", "model"}
    assert found.session == "k"


def test_a_sub_agent_is_known_by_its_thread_and_its_parent() -> None:
    found = translated(
        prompt_cache_key="s",
        client_metadata={"session_id": "s", "thread_id": "t", "x-codex-parent-thread-id": "s"},
    )
    assert (found.session, found.agent, found.parent) == ("s", "t", "s")


@pytest.mark.parametrize(
    "body, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0]"),
        ({"tools": [AGENTS | {"tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
        ({"tools": [SPAWN | {"parameters": []}]}, "tools[0]"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": [[]]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"include": [1]}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_fields_that_are_refused(body: Json, param: str) -> None:
    error = refused(**body)
    assert error.param == param and error.status == 400


@pytest.mark.parametrize("where", ["grammar", "tools", "chat_template_kwargs", "context_management", "input", "text"])
def test_a_body_nested_too_deep_is_refused_or_written(where: str) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    value = [SPAWN | {"parameters": {"a": deep}}] if where == "tools" else {"a": deep} if where == "text" else deep
    with contextlib.suppress(BadRequest):
        orjson.dumps(translated(**{where: value}).body)
