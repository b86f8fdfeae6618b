"""When a client that waits for a long prefill is told that it goes on, and in which words."""

import time

import orjson
import pytest

from proxy.api import read_messages, read_responses
from proxy.api.write_messages import PING
from proxy.keep_alive import KeepAlive, silent
from tests.wire.dialects import BODIES, MESSAGES, RESPONSES

PROGRESS = {
    "choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}],
    "created": 7,
    "id": "chatcmpl-a",
    "model": "m",
    "object": "chat.completion.chunk",
    "prompt_progress": {"total": 9, "cache": 0, "processed": 3, "time_ms": 1},
}


def test_at_most_one_in_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first when the client has heard nothing for so long, the next as long after that one."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    alive = KeepAlive(10.0, 95.0)
    seen = []
    for now in (100.0, 104.9, 105.0, 106.0, 114.0, 120.0, 129.0, 130.0):
        if alive.is_due():
            seen.append(now)
    assert seen == [105.0, 120.0, 130.0]


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1e9)
    assert not KeepAlive(None, 0.0).is_due()


def test_a_chat_chunk_with_an_empty_delta() -> None:
    """Nothing but the answer's name: no role, no text, no report that was not asked for."""
    chunk = orjson.loads(silent(PROGRESS).removeprefix(b"data: "))
    assert chunk == {
        "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        **{name: PROGRESS[name] for name in ("created", "id", "model", "object")},
    }


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"text": "", "index": 0, "finish_reason": None}], "object": "text_completion", "id": "a"},
        {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": 0},
    ],
)
def test_other_events_stay_but_for_the_report(event: dict[str, object]) -> None:
    """A text completion's and llama-server's own say nothing already."""
    sign = silent({**event, "prompt_progress": {}, "timings": {}})
    assert orjson.loads(sign.removeprefix(b"data: ")) == event


def test_messages_open_with_their_start_and_then_ping() -> None:
    """The start bears what later events would say, and comes once."""
    writer = read_messages.read(BODIES[MESSAGES], {}).writer()
    writer.progress(9, 4)
    first = writer.alive(PROGRESS)
    assert first.startswith(b"event: message_start") and first.endswith(PING)
    assert b'"id":"msg_a"' in first and b'"model":"m"' in first and b'"cache_read_input_tokens":4' in first
    assert writer.alive(PROGRESS) == PING
    assert b"message_start" not in writer.feed({**PROGRESS, "choices": [{"index": 0, "delta": {"content": "x"}}]})


def test_responses_repeat_in_progress() -> None:
    """Behind response.created, with numbers that go on."""
    writer = read_responses.read(BODIES[RESPONSES], {}).writer()
    first, second = writer.alive(PROGRESS), writer.alive(PROGRESS)
    assert [line for line in first.split(b"\n") if line.startswith(b"event:")] == [
        b"event: response.created",
        b"event: response.in_progress",
    ]
    assert second.startswith(b'event: response.in_progress\ndata: {"type":"response.in_progress","sequence_number":2')
    assert b"prompt_progress" not in first + second
    rest = writer.feed({**PROGRESS, "choices": [{"index": 0, "delta": {"content": "x"}}]})
    assert b"response.created" not in rest and b'"sequence_number":3' in rest
