"""Parts of Responses bodies, and what the reader makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.api.dialect import Translated
from proxy.api.read_responses import read
from proxy.errors import BadRequest

Json = dict[str, Any]
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
SPAWN = {"type": "function", "name": "spawn", "description": "D", "strict": False, "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [SPAWN]}


def translated(**body: object) -> Translated:
    return read({"model": "m", "input": "hi", **body}, {})


def messages(*items: object, **body: object) -> list[Json]:
    found: list[Json] = translated(input=list(items), **body).body["messages"]
    return found


def refused(**body: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        translated(**body)
    return caught.value
