"""Signs of life during a prefill, as clients see them."""

import asyncio

import pytest

from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.conftest import Serve
from tests.wire.dialects import BODIES, MESSAGES, PARSERS, RESPONSES, said
from tests.wire.wire import CHAT, chat, data

ALWAYS = 1e-9
"""Seconds: a sign with each report of the engine's."""
ASKED = {**BODIES, CHAT: chat("hi"), "/v1/completions": {"prompt": "tell me more", "max_tokens": 4}, "/completion": {
    "prompt": "tell me much more", "n_predict": 4}}  # fmt: skip
SIGNS = {
    CHAT: b'"delta":{}',
    MESSAGES: b"event: ping",
    RESPONSES: b"event: response.in_progress",
    "/v1/completions": b'"text":""',
    "/completion": b'"content":""',
}


def stepped(*done: int) -> Cue:
    """A prefill with these reports between its first and its last."""
    steps: asyncio.Queue[int] = asyncio.Queue()
    for n in (*done, 1_000_000):
        steps.put_nowait(n)
    return Cue(steps=steps)


@pytest.mark.parametrize("path", ASKED)
async def test_a_sign_for_each_report(path: str, serve: Serve, fake: FakeLlama) -> None:
    """Reports at 0, 1, 2 tokens and at the end: four signs, whole events, before the first word."""
    wire = await serve(fake, keep_alive=ALWAYS)
    fake.cues.append(stepped(1, 2))
    events = await wire.events(path, ASKED[path])
    first = next(i for i, event in enumerate(events) if b" w0" in event)
    signs = [event for event in events[:first] if SIGNS[path] in event]
    assert len(signs) >= 4 and not any(b"prompt_progress" in event for event in events)
    if path in PARSERS:
        assert said(path, b"".join(events)) == " w0 w1 w2 w3"


@pytest.mark.parametrize("keep_alive", ["off", "3600s"])
@pytest.mark.parametrize("path", ASKED)
async def test_no_sign(path: str, keep_alive: str, serve: Serve, fake: FakeLlama) -> None:
    """Where none is wanted, or the prompt is done before one is due."""
    wire = await serve(fake, keep_alive=keep_alive)
    fake.cues.append(stepped(1, 2, 3))
    events = await wire.events(path, ASKED[path])
    extra = 1 if path in PARSERS else 0  # a ping behind message_start, in_progress behind created
    first = next(i for i, event in enumerate(events) if b" w0" in event)
    assert sum(SIGNS[path] in event for event in events[:first]) == extra


async def test_reports_that_were_asked_for_are_signs_enough(serve: Serve, fake: FakeLlama) -> None:
    """They pass unchanged, and nothing is added; none of them counts as a token."""
    wire = await serve(fake, keep_alive=ALWAYS)
    cue = stepped(1, 2)
    fake.cues.append(cue)
    assert await wire.events(CHAT, chat("hi", return_progress=True)) == cue.sent


async def test_a_whole_answer_has_none(serve: Serve, fake: FakeLlama) -> None:
    """JSON is not begun before it is known to be one."""
    wire = await serve(fake, keep_alive=ALWAYS)
    fake.cues.append(stepped(1, 2))
    answer = await wire.post(CHAT, chat("hi"))
    assert answer.json()["choices"][0]["message"]["content"] == " w0 w1 w2 w3"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_nothing_before_acceptance(path: str, serve: Serve) -> None:
    """A prompt that does not fit is a plain 400, however eager the signs are."""
    async with FakeLlama(n_slots=1, n_ctx=64) as fake:
        wire = await serve(fake, keep_alive=ALWAYS)
        body = {**ASKED[path], "stream": True}
        body |= {"input": "word " * 80} if path == RESPONSES else {"messages": chat("word " * 80)["messages"]}
        answer = await wire.post(path, body)
        assert (answer.status_code, "available context size" in answer.text) == (400, True)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_error_behind_signs(path: str, serve: Serve, fake: FakeLlama) -> None:
    """It is the dialect's own error event, the last of the stream."""
    wire = await serve(fake, keep_alive=ALWAYS)
    cue = stepped(1)
    cue.error_at = 0
    fake.cues.append(cue)
    events = await wire.events(path, ASKED[path])
    assert SIGNS[path] in b"".join(events[:-1])
    assert b"Context size has been exceeded" in events[-1]
    assert {CHAT: b"data: ", MESSAGES: b"event: error", RESPONSES: b"event: response.failed"}[path] in events[-1]


async def test_signs_of_several_choices(serve: Serve, fake: FakeLlama) -> None:
    """Each has its choice's number, and none is taken for an end."""
    wire = await serve(fake, keep_alive=ALWAYS)
    events = await wire.events(CHAT, chat("hi", n=2))
    chunks = [data(event) for event in events[:-1]]
    texts = {
        i: "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"][0]["index"] == i)
        for i in (0, 1)
    }
    assert texts == {0: " w0 w1 w2 w3", 1: " w0 w1 w2 w3"}
    assert {c["choices"][0]["index"] for c in chunks if c["choices"][0]["delta"] == {}} == {0, 1}
