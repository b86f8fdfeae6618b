"""The same bodies of any shape on a real engine: what it refuses is told in the dialect, and it lives on."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import StartProxy
from tests.live.talk import CHATML
from tests.servers import ProxyServer
from tests.wire.bodies import EVILS, bodies
from tests.wire.test_fuzz import DOORS, check

ANY = st.sampled_from(DOORS).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))
SHORT = {"max_tokens": 1, "max_output_tokens": 1, "max_completion_tokens": 1, "n": 1}


@pytest.fixture
async def proxy(proxy_server: StartProxy) -> ProxyServer:
    """A small engine."""
    return await proxy_server("--parallel", "1", "--ctx-size", "2048", model="dense", engine_flags=CHATML)


async def checked(proxy: ProxyServer, path: str, raw: bytes) -> httpx.Response:
    """One request; nothing of ours failed over it."""
    answer = await proxy.client.post(path, content=raw)
    check(path, answer)
    return answer


async def is_well(proxy: ProxyServer) -> None:
    """It answers, and nothing was thrown that was not caught."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
    assert "Traceback" not in proxy.said() and "exchange_failed" not in proxy.said()


async def test_known_evils(proxy: ProxyServer) -> None:
    """In each dialect."""
    for path in DOORS:
        for raw in EVILS.values():
            await checked(proxy, path, raw)
        await is_well(proxy)


@pytest.mark.parametrize("stream", [True, False])
async def test_cut_arguments(stream: bool, proxy: ProxyServer) -> None:
    """A history with a call that was cut off: the engine's parser fails with 500, the client's mistake is a 400."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": "b'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    answer = await proxy.client.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["source"]) == (400, "invalid_request_error", "engine")
    await is_well(proxy)


async def test_nulls(proxy: ProxyServer) -> None:
    """A client that writes out every field: the engine's parser would fail on those that are no texts."""
    nothing = {"reasoning_content": None, "name": None, "tool_call_id": None, "tool_calls": None}
    messages = [{"role": role, "content": "hi"} | nothing for role in ("user", "assistant", "user")]
    answer = await proxy.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(asked=ANY)
async def test_any_body(proxy: ProxyServer, asked: tuple[str, Any]) -> None:
    """Of any door, one token at most where the body is an object."""
    path, body = asked
    if isinstance(body, dict):
        body = body | SHORT
    await checked(proxy, path, json.dumps(body).encode())
    await is_well(proxy)
