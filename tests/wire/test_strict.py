"""Mode strict: a request that departs from its conversation is refused in its dialect's words, and harms nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.dialects import MESSAGES, RESPONSES, error_of
from tests.wire.wire import CHAT, Wire

Json = dict[str, Any]
STRICT = {"x-slotkeeper-mode": "strict", "x-slotkeeper-session": "s"}


def history(path: str, *texts: str) -> Json:
    """A body of a dialect: texts of user and assistant in turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    if path == MESSAGES:
        return {"system": "You help.", "messages": messages, "max_tokens": 4}
    if path == RESPONSES:
        return {"instructions": "You help.", "input": messages, "max_output_tokens": 4}
    return {"messages": [{"role": "system", "content": "You help."}, *messages], "max_tokens": 4}


def answer_of(path: str, body: Json) -> str:
    if path == MESSAGES:
        return "".join(part["text"] for part in body["content"])
    if path == RESPONSES:
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    text: str = body["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_break_is_refused_and_the_line_goes_on(wire: Wire, path: str, stream: bool) -> None:
    first = await wire.post(path, history(path, "hello"), headers=STRICT)
    said = answer_of(path, first.json())
    whole = await wire.post(path, history(path, "hello", said, "more"), headers=STRICT)
    assert whole.headers["x-slotkeeper-placement"] == "continue"
    edited = history(path, "hello", "something else", "more", "x", "y")
    refused = await wire.post(path, edited | {"stream": stream}, headers=STRICT)
    assert refused.status_code == 409, refused.text
    error = error_of(path, refused)
    assert error["type"] == "invalid_request_error" and "message 2" in error["message"], error
    assert error["divergence"]["section"] == "messages" and "something" not in refused.text, error
    texts = ("hello", said, "more", answer_of(path, whole.json()), "and")
    after = await wire.post(path, history(path, *texts), headers=STRICT)
    assert after.headers["x-slotkeeper-placement"] == "continue"
    assert after.headers["x-slotkeeper-line"] == whole.headers["x-slotkeeper-line"]


@pytest.mark.parametrize("value", ["STRICT", "", "repair, strict", "x" * 9000, "\u00e9"])
async def test_modes_that_do_not_exist(wire: Wire, value: str) -> None:
    headers = [(b"x-slotkeeper-mode", value.encode("latin-1"))]
    answer = await wire.post(CHAT, history(CHAT, "hello"), headers=headers)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 600 and "observe, repair or strict" in answer.text
