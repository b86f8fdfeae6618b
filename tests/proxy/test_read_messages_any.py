"""Anthropic Messages bodies of any shape: read or refused, and only appended to when a history grows."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.api.dialect import Json
from proxy.api.read_messages import read
from proxy.errors import BadRequest
from tests.proxy.test_read_messages import DEFERRED, assistant, messages, result, text, translated, use, user

# --- wrong bodies ----------------------------------------------------------------------------------------------------

DEEP: Any = {}
for _ in range(300):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [user()]}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
        ({"messages": [user("x")]}, "messages.0.content.0"),
        ({"messages": [user({"type": "hologram"})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": ["text"]})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "text", "text": 5})]}, "messages.0.content.0.text"),
        ({"messages": [user(use("c", "n", {}))]}, "messages.0.content.0.type"),
        ({"messages": [assistant(result("c", "x"))]}, "messages.0.content.0.type"),
        ({"messages": [assistant(use("c", "n", "x"))]}, "messages.0.content.0.input"),
        ({"messages": [assistant(use("c", "n", DEEP))]}, "messages.0.content.0.input"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "messages.0.content.0.source.type"),
        ({"messages": [user({"type": "image", "source": 5})]}, "messages.0.content.0.source"),
        ({"messages": [user(result(5, "x"))]}, "messages.0.content.0.tool_use_id"),  # type: ignore[arg-type]
        ({"messages": [user(result("c", 5))]}, "messages.0.content.0.content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [{"name": ""}]}, "tools.0.name"),
        ({"tools": [{"name": "a", "input_schema": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a", "input_schema": DEEP}]}, "body"),
        ({"chat_template_kwargs": DEEP}, "body"),
        ({"seed": 2**70}, "body"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"temperature": "0"}, "temperature"),
        ({"model": 5}, "model"),
        ({"thinking": {"type": "hard"}}, "thinking"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"metadata": "me"}, "metadata"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ],
)
def test_refusals(body: Json, param: str) -> None:
    """Each says which field is wrong."""
    with pytest.raises(BadRequest) as refused:
        translated(**body)
    assert refused.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS = """text image thinking redacted_thinking tool_use tool_result tool_reference tool_addition tool_removal document
search_result compaction server_tool_use base64 url content tool_definition x""".split()
FIELDS = """text source thinking data id name input tool_use_id content is_error tool tool_name title url media_type
definition input_schema""".split()


def nearly(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Blocks of known kinds with known fields, of any types."""
    fields = st.dictionaries(st.sampled_from(FIELDS), inner | st.text(max_size=3), max_size=6)
    return st.builds(lambda kind, fields: {"type": kind, **fields}, st.sampled_from(KINDS), fields)


BLOCKS = st.lists(st.recursive(nearly(JSON), lambda inner: nearly(inner | st.lists(inner, max_size=2)), max_leaves=4))
ANY_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": BLOCKS | st.text(max_size=3) | JSON}
)
TOP = """system tools tool_choice stop_sequences max_tokens stream temperature top_p top_k thinking output_config
output_format metadata model seed chat_template_kwargs""".split()


@settings(max_examples=300)
@given(st.lists(ANY_MESSAGE | JSON, max_size=3), st.dictionaries(st.sampled_from(TOP), JSON | BLOCKS, max_size=4))
def test_any_json_is_read_or_refused(given_messages: list[Any], fields: Json) -> None:
    """No other exception; what is read can be sent, and a writer is there for its answer."""
    try:
        found = read({"messages": given_messages, **fields}, {})
    except BadRequest as refused:
        assert refused.message
        return
    assert orjson.loads(orjson.dumps(found.body))["messages"]
    assert found.writer().end()


# --- histories that grow ---------------------------------------------------------------------------------------------

WORDS = st.text("ab \n", max_size=4)
TEXT = st.builds(text, WORDS)
REFERENCE = st.builds(lambda n: {"type": "tool_reference", "tool_name": n}, st.sampled_from(["WebFetch", "Gone"]))
RESULT = WORDS | st.lists(TEXT | REFERENCE, max_size=2)
TURNS = st.one_of(
    st.builds(lambda c: {"role": "user", "content": c}, WORDS | st.lists(TEXT, min_size=1, max_size=3)),
    st.builds(
        lambda c: {"role": "assistant", "content": c},
        st.lists(
            TEXT
            | st.builds(use, st.just("c1"), st.sampled_from(["WebFetch", "ToolSearch", "Gone"]), st.just({"a": 1}))
            | st.builds(lambda t: {"type": "thinking", "thinking": t, "signature": ""}, WORDS),
            max_size=3,
        ),
    ),
    st.builds(lambda c: {"role": "system", "content": c}, WORDS | st.lists(TEXT, min_size=1, max_size=2)),
)


def paired(turns: list[Any], data: st.DataObject) -> list[Any]:
    """The same turns, each call with an id of its own, and with its result at the beginning of the user's next turn."""
    history: list[Any] = []
    waiting: list[str] = []
    for turn in turns:
        content = turn["content"]
        if turn["role"] == "assistant":
            calls = [
                {**b, "id": f"c{len(history)}.{i}"} if b["type"] == "tool_use" else b for i, b in enumerate(content)
            ]
            waiting += [b["id"] for b in calls if b["type"] == "tool_use"]
            content = calls
        elif turn["role"] == "user" and waiting:
            texts = content if isinstance(content, list) else [text(content)]
            content = [*(result(call, data.draw(RESULT)) for call in waiting), *texts]
            waiting = []
        history.append({**turn, "content": content})
    return history


@given(st.lists(TURNS, min_size=1, max_size=6), st.data())
def test_what_grows_is_only_appended_to(turns: list[Any], data: st.DataObject) -> None:
    """The messages of a part of a history are the beginning of the messages of all of it; the same bytes each time."""
    history = paired(turns, data)
    kept = data.draw(st.integers(0, len(history)))
    part = messages(*history[:kept], tools=DEFERRED, system="s")
    longer = messages(*history, tools=DEFERRED, system="s")
    assert longer[: len(part)] == part
    assert orjson.dumps(longer) == orjson.dumps(messages(*history, tools=DEFERRED, system="s"))
