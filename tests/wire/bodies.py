"""Bodies of the three dialects as hostile or broken clients send them: hypothesis strategies, and known evils."""

import copy
from typing import Any

from hypothesis import strategies as st

from tests.proxy.test_read_messages_any import ANY_MESSAGE, BLOCKS, JSON
from tests.wire.dialects import COUNT, MESSAGES, RESPONSES
from tests.wire.wire import CHAT

ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "x", "", None, 5])
WORDS = st.text("ab é🙂\n", max_size=6)
COMMON = """stream tools tool_choice temperature top_p stop max_tokens seed model metadata response_format
chat_template_kwargs reasoning_effort logprobs top_logprobs n id_slot cache_prompt parallel_tool_calls stream_options
grammar json_schema logit_bias reasoning_format thinking_budget_tokens""".split()
ONLY = {
    CHAT: "max_completion_tokens functions echo add_generation_prompt continue_final_message".split(),
    MESSAGES: "system stop_sequences thinking output_config output_format context_management".split(),
    RESPONSES: "instructions text reasoning include store prompt_cache_key max_output_tokens client_metadata "
    "previous_response_id truncation".split(),
}
ONLY[COUNT] = ONLY[MESSAGES]


def some(names: list[str], value: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields."""
    return st.dictionaries(st.sampled_from(names), value, max_size=6)


def typed(kinds: str, fields: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of known types with known fields that hold anything."""
    inner = some(fields.split(), JSON | WORDS)
    return st.builds(lambda kind, found: {**found, "type": kind}, st.sampled_from(kinds.split()), inner)


CALL = st.builds(
    lambda function, more: {"id": "c1", "type": "function", "function": function, **more},
    some(["name", "arguments", "x"], JSON | WORDS) | JSON,
    some(["id", "type", "index"], JSON),
)
PART = typed("text image_url input_audio input_text refusal x", "text image_url input_audio data format x")
CHAT_MESSAGE = st.builds(
    lambda role, content, more: {"role": role, "content": content, **more},
    ROLES,
    WORDS | st.lists(PART | JSON, max_size=3) | JSON,
    st.fixed_dictionaries(
        {}, optional={"tool_calls": st.lists(CALL | JSON, max_size=2) | JSON, "tool_call_id": JSON, "name": JSON}
    ),
)
RESPONSES_PART = typed(
    "input_text output_text input_image input_file refusal reasoning_text x", "text image_url refusal"
)
ITEM = st.builds(
    lambda item, role: {"role": role, **item},
    typed(
        "message function_call function_call_output reasoning item_reference custom_tool_call web_search_call x",
        "id call_id name namespace arguments output summary status encrypted_content phase",
    ),
    ROLES,
)
ITEM = st.builds(lambda item, content: {**item, "content": content}, ITEM, st.lists(RESPONSES_PART, max_size=2) | JSON)
TOOL = typed("function namespace custom web_search x", "name description parameters function input_schema tools strict")
VALUE = JSON | st.lists(TOOL, max_size=2) | st.lists(WORDS, max_size=2) | st.integers(-(2**70), 2**70)
PROMPTS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    CHAT: ("messages", st.lists(CHAT_MESSAGE, min_size=1, max_size=3) | JSON),
    MESSAGES: ("messages", st.lists(ANY_MESSAGE, min_size=1, max_size=3) | JSON | BLOCKS),
    RESPONSES: ("input", st.lists(ITEM, min_size=1, max_size=3) | WORDS | JSON),
}
PROMPTS[COUNT] = PROMPTS[MESSAGES]


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
USER = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "max_tokens": 1,
        "stream": False,
        "stop": ["x"],
        "temperature": 0,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":"b"}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "found"},
            USER,
        ],
    },
    MESSAGES: {
        "model": "m",
        "max_tokens": 1,
        "stream": False,
        "stop_sequences": ["x"],
        "temperature": 0,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "u"},
        "tools": [
            {"name": "look", "description": "d", "input_schema": SCHEMA},
            {"name": "later", "input_schema": SCHEMA, "defer_loading": True},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "document", "source": {"type": "text", "data": "d"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": ""},
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "c", "name": "look", "input": {"a": "b"}},
                    {"type": "tool_use", "id": "d", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "found"}]},
                    {"type": "tool_result", "tool_use_id": "d", "is_error": True, "content": "x"},
                    {"type": "tool_reference", "tool_name": "later"},
                    {"type": "text", "text": "and"},
                ],
            },
            {"role": "system", "content": "late"},
            USER,
        ],
    },
    RESPONSES: {
        "model": "m",
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
        "instructions": "s",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "client_metadata": {"session_id": "s"},
        "prompt_cache_key": "k",
        "tools": [
            {"type": "function", "name": "look", "description": "d", "strict": False, "parameters": SCHEMA},
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "go"}]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "s"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "go", "namespace": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "found"}]},
            {"role": "developer", "content": "late"},
            USER,
        ],
    },
}
"""Bodies that use much of their dialect."""
GOOD[COUNT] = GOOD[MESSAGES]


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A good body with one to three values replaced, doubled or gone, anywhere in it."""
    body = copy.deepcopy(good) | {"stream": draw(st.booleans())}
    for _ in range(draw(st.integers(1, 3))):
        node: Any = body
        while True:
            names = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            if node is body:
                names += [name for name in ("messages", "input", "tools") if name in body] * 5
            key = draw(st.sampled_from(names))
            if not isinstance(node[key], dict | list) or not node[key] or draw(st.integers(0, 3)) == 0:
                break
            node = node[key]
        how = draw(st.sampled_from(["replaced", "gone", "doubled"]))
        if how == "gone" and node is not body:
            del node[key]
        elif how == "doubled" and isinstance(node, list):
            node.insert(draw(st.integers(0, len(node))), node[key])
        else:
            node[key] = draw(JSON | WORDS | VALUE)
    return body


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Bodies for a path: good ones with some damage, prompts of parts that hold anything, any JSON."""
    name, prompts = PROMPTS[path]
    given = st.builds(lambda prompt, more: {**more, name: prompt}, prompts, some([*COMMON, *ONLY[path]], VALUE))
    return st.one_of(*[damaged(GOOD[path])] * 4, given, JSON)


def nested(depth: int, opened: bytes = b'{"a":', closed: bytes = b"}") -> bytes:
    """JSON of many levels."""
    return opened * depth + b"1" + closed * depth


def asked(content: bytes) -> bytes:
    """A body that holds `content` as a prompt of each dialect."""
    return b'{"max_tokens":1,"max_output_tokens":1,"messages":[{"role":"user","content":%b}],"input":%b}' % (
        content,
        content,
    )


IMAGE = (
    b'[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"%%%"}},'
    b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%%%"}}]'
)
EVILS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "bytes": bytes(range(256)),
    "half a character": asked(b'"\xf0\x9f"'),
    "lone surrogate": asked(b'"\\ud800"'),
    "zero": asked(b'"\\u0000"'),
    "not a number": asked(b"NaN"),
    "deep text": asked(nested(300)),
    "very deep text": asked(nested(100_000)),
    "deep list": asked(nested(1000, b"[", b"]")),
    "deep tools": asked(b'"x"')[:-1] + b',"tools":[{"name":"a","input_schema":' + nested(400) + b"}]}",
    "deep field": asked(b'"x"')[:-1] + b',"chat_template_kwargs":' + nested(400) + b"}",
    "huge number": asked(b'"x"')[:-1] + b',"seed":' + b"9" * 400 + b',"top_k":1e400}',
    "unknown values": asked(b'"x"')[:-1]
    + b',"stream":true,"reasoning":{"effort":"z","summary":"z"},"text":{"verbosity":"z"},'
    b'"tool_choice":{"type":"z"},"tools":[{"type":"z","name":"z"},{"type":"namespace","name":"n","tools":[{"type":"z"}]}]}',
    "unknown format": asked(b'"x"')[:-1]
    + b',"stream":true,"text":{"format":{"type":"json_schema","schema":{},"z":5}}}',
    "many messages": b'{"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 5000) + b"]}",
    "broken image": asked(IMAGE),
    "result without a call": b'{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result",'
    b'"tool_use_id":"c","content":"x"}]}],"input":[{"type":"function_call_output","call_id":"c","output":"x"}]}',
    "call without a result": b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c",'
    b'"name":"n","input":{}}]}],"input":[{"type":"function_call","call_id":"c","name":"n","arguments":"{"}]}',
    "unknown role": b'{"messages":[{"role":"wizard","content":"x"}],"input":[{"role":"wizard","content":"x"}]}',
    "unknown block": asked(b'[{"type":"hologram"}]'),
}
