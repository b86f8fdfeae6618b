"""Any history at all, well-formed or not: a compaction never fails, never sends what cannot run, and parts no pair."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.message_parts import size_of
from proxy import compact
from proxy.rendering import Tokens
from tests.proxy.talk import sent, system, user
from tests.proxy.test_compact import N_CTX, Client, n_tokens

WORDS = st.sampled_from(["", "one ", "fox " * 40, "/src/app.py E4711 " * 30, "文" * 300, "x" * 3000])
IDS = st.sampled_from(["a", "b", "", "a"])
CALL = IDS.map(lambda i: {"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}})
CONTENT: st.SearchStrategy[Any] = st.one_of(
    WORDS,
    st.none(),
    WORDS.map(lambda text: [{"type": "text", "text": text}]),
    st.just([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 9000}}]),
)
MESSAGE = st.one_of(
    st.builds(lambda c: {"role": "user", "content": c}, CONTENT),
    st.builds(lambda c: {"role": "assistant", "content": c}, CONTENT),
    st.builds(lambda c, calls: {"role": "assistant", "content": c, "tool_calls": calls}, CONTENT, st.lists(CALL)),
    st.builds(lambda c, i: {"role": "tool", "tool_call_id": i, "content": c}, CONTENT, IDS),
    st.builds(lambda c: {"role": "system", "content": c}, WORDS),
)


@pytest.fixture(autouse=True, scope="module")
def rendered() -> Any:
    """A token for every four bytes of what is sent, an image's data left out."""

    async def render(engine: Any, request: Any, line: Any) -> Tokens:
        return Tokens(bytes(4 * (sum(size_of(orjson.dumps(m)) for m in request.body["messages"]) // 4)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "render", render)
        yield


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=12), min_size=1, max_size=5))
def test_any_history(more: list[list[Any]]) -> None:
    client, messages = Client(), [system(), user("start")]
    for part in more:
        messages = [*messages, *part]
        one = client.say(messages)
        if client.record.compaction.get("outcome"):
            assert n_tokens(one) <= N_CTX
            assert sent(one)[-1]["role"] == messages[-1]["role"]
        again = client.say(messages)
        if not client.record.compaction:
            assert sent(again) == sent(one)
