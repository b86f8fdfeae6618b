"""Every line that a session leaves on stderr: one JSON object, with its request's id, and nothing of any prompt."""

import json
from typing import Any

import pytest

from tests.conftest import StartProxy
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.page_scenes import HOSTILE
from tests.wire.wire import CHAT, Wire, chat

SECRET = "xyzzy-9f31"
QUOTING = {"code": 500, "type": "server_error", "message": f"template: cannot take {SECRET}\n{HOSTILE}"}
TOOL = {"type": "function", "function": {"name": SECRET, "description": SECRET, "parameters": {"title": SECRET}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{SECRET}'}}
WRONG: list[tuple[str, Any]] = [
    (CHAT, f'{{"messages": [{{"role": "user", "content": "{SECRET}'.encode()),
    (CHAT, f'["{SECRET}"]'.encode()),
    (CHAT, SECRET.encode() + b"\xff\xfe"),
    (CHAT, b'{"messages": ' + b"[" * 3000 + f'"{SECRET}"'.encode() + b"]" * 3000 + b"}"),
    (CHAT, {"messages": SECRET}),
    (CHAT, {"messages": [{"role": SECRET, "content": SECRET}, {"role": "tool", "content": SECRET}]}),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}),
    (CHAT, chat(SECRET, n=SECRET, max_tokens=SECRET, stop=[SECRET], tools=[TOOL], tool_choice=SECRET)),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]}),
    (
        "/v1/messages",
        {"max_tokens": 4, "system": SECRET, "messages": [{"role": "user", "content": SECRET}], "x": SECRET},
    ),
    ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": [{"type": "x", "text": SECRET}]}]}),
    ("/v1/responses", {"input": SECRET, "instructions": SECRET, "metadata": {"a": SECRET}}),
    ("/completion", {"prompt": {"prompt_string": SECRET, "multimodal_data": [SECRET]}}),
    ("/completion", {"prompt": SECRET, "n_predict": 4, "grammar": SECRET}),
    ("/infill", {"input_prefix": SECRET, "input_suffix": SECRET}),
    ("/tokenize", {"content": SECRET}),
    ("/apply-template", {"messages": [{"role": "user", "content": SECRET}]}),
]


async def talk(wire: Wire, fake: FakeLlama) -> None:
    """Turns that go well, hostile ones, edits; engines that fail in each way, quoting; bodies that make no sense."""
    session = {"x-slotkeeper-session": "".join(c for c in HOSTILE if c.isascii() and c.isprintable())}
    for texts in ((SECRET,), (SECRET, f"{SECRET} 2", SECRET), (f"edited {SECRET}", f"{SECRET} 2", SECRET), (HOSTILE,)):
        await wire.post(CHAT, chat(*texts, tools=[TOOL]), headers=session)
    cues = (
        Cue(status=500, error=QUOTING),
        Cue(status=400, error=QUOTING | {"code": 400}),
        Cue(break_at=1),
        Cue(error_at=1, error=QUOTING),
        Cue(garbage_at=1),
    )
    for cue in cues:
        for stream in (True, False):
            fake.cues.append(cue)
            await wire.post(CHAT, chat(f"{SECRET} again", stream=stream))
    for path, body in WRONG:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        await wire.http.post(path, content=content, headers={"content-type": "application/json"})
    await wire.get(f"/{SECRET}?q={SECRET}")


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_a_session_with_errors(level: str, proxy_server: StartProxy, fake: FakeLlama) -> None:
    """Nothing of a prompt on any line; requests that reached the engine say which, where and in which conversation."""
    proxy = await proxy_server("--upstream", fake.url, "--log-level", level)
    async with Wire(proxy.url) as wire:
        await talk(wire, fake)
    assert await proxy.stop() == 0
    assert SECRET not in proxy.said()
    assert len(proxy.lines) == len(proxy.text)
    ended = [line for line in proxy.lines if line["event"] in ("answered", "not_answered")]
    assert len(ended) > 20
    assert {line["outcome"] for line in ended} >= {"ok", "engine_error"}
    placed = [line for line in ended if line["slot"] >= 0]
    assert len(placed) > 10
    for line in placed:
        assert line["request"].startswith("req_")
        assert line["line"]
        assert line["engine"] == "engine0"
