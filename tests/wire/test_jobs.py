"""A prefill whose client has left: it goes on where that is wanted, and whoever asks again joins it."""

import asyncio
from typing import Any

import httpx
import pytest

from proxy import jobs
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.wire.conftest import Serve
from tests.wire.dialects import BODIES, MESSAGES, PARSERS, RESPONSES, said
from tests.wire.test_leaving import STREAMED, leave, within
from tests.wire.wire import CHAT, Wire, chat

LONG = "word " * 195
"""A prompt of 200 tokens, template included."""
N_PROMPT = 202
ALL = 1_000_000
JOINED = "x-slotkeeper-joined"
ASKED = {CHAT: chat(LONG), MESSAGES: BODIES[MESSAGES] | {"messages": chat(LONG)["messages"]}}
ASKED[RESPONSES] = BODIES[RESPONSES] | {"input": LONG}


class Client:
    """Somebody who asks, and may leave. `answer` is what came."""

    def __init__(self, wire: Wire, path: str, body: dict[str, Any], **headers: str) -> None:
        self.answer: httpx.Response
        self._task = asyncio.create_task(self._ask(wire, path, body, headers))

    async def _ask(self, wire: Wire, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.answer = await wire.post(path, body, headers=headers)

    async def leave(self) -> None:
        """Closes the connection."""
        await leave(self._task)

    async def served(self) -> httpx.Response:
        """The whole answer."""
        await self._task
        return self.answer


async def done_is(wire: Wire, done: int) -> None:
    """Return once the proxy has read a report of `done` tokens, of whichever job."""
    async with asyncio.timeout(30):
        while all(job.done < done for job in wire.service.jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def has_left(wire: Wire, count: int = 1) -> None:
    """Return once the proxy knows that `count` clients left jobs that go on."""
    async with asyncio.timeout(30):
        while sum(job.has_left for job in wire.service.jobs) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def at(wire: Wire, fake: FakeLlama, done: int, body: dict[str, Any] | None = None) -> tuple[Client, Cue]:
    """A client whose prompt is done up to there."""
    cue = Cue(steps=asyncio.Queue())
    before = len(fake.model_requests)
    fake.cues.append(cue)
    client = Client(wire, CHAT, body or chat(LONG))
    await within(fake.arrived(before + 1))
    assert cue.steps is not None
    cue.steps.put_nowait(done)
    await done_is(wire, done)
    return client, cue


def finish(cue: Cue) -> None:
    """The prompt is processed to its end."""
    assert cue.steps is not None
    cue.steps.put_nowait(ALL)


@STREAMED
@pytest.mark.parametrize("path", ASKED)
async def test_five_retries_join_one_prefill(path: str, stream: bool, wire: Wire, fake: FakeLlama) -> None:
    """A client that gives up at 30 % each time, five times: the engine sees one request and processes it once."""
    cue = Cue(steps=asyncio.Queue())
    fake.cues.append(cue)
    body = ASKED[path] | {"stream": stream}
    assert cue.steps is not None
    for attempt in range(5):
        client = Client(wire, path, body)
        if attempt == 0:
            await within(fake.arrived(1))
            cue.steps.put_nowait(60)
            await done_is(wire, 60)
        else:
            await has_left(wire, 0)
        await client.leave()
        await has_left(wire)
    last = Client(wire, path, body)
    await has_left(wire, 0)
    finish(cue)
    answer = await last.served()
    assert (answer.status_code, answer.headers[JOINED]) == (200, "5")
    assert (len(fake.model_requests), fake.left) == (1, 0)
    await within(fake.idle())
    assert fake.processed_total <= 1.02 * len(fake.slots[0].tokens)
    record = (await wire.recorded(1))[0]
    assert (record["outcome"], record["joined"]) == ("ok", 5)
    assert record["prompt_n"] == fake.processed_total
    if stream and path in PARSERS:
        assert said(path, answer.content) == " w0 w1 w2 w3"
    else:
        assert all(f"w{i}" in answer.text for i in range(4))
    counted = [line for line in (await wire.get("/metrics")).text.splitlines() if "requests_total" in line]
    assert [float(line.split()[-1]) for line in counted if 'outcome="client_left"' in line and " 0" not in line] == [5]


@pytest.mark.parametrize("path", ASKED)
async def test_who_joins_gets_a_whole_stream(path: str, serve: Serve, fake: FakeLlama) -> None:
    """Also when an earlier client had been sent the beginning of it: what opens the stream is said again, once."""
    wire = await serve(fake, keep_alive=1e-9)
    cue = Cue(steps=asyncio.Queue())
    fake.cues.append(cue)
    assert cue.steps is not None
    async with wire.stream(path, ASKED[path]) as stream:
        for done in (20, 30, 40):
            cue.steps.put_nowait(done)
            await stream.next()
    await has_left(wire)
    client = Client(wire, path, ASKED[path] | {"stream": True})
    await has_left(wire, 0)
    finish(cue)
    answer = await client.served()
    assert answer.headers[JOINED] == "1"
    if path in PARSERS:
        assert said(path, answer.content) == " w0 w1 w2 w3"
        opening = b"event: message_start" if path == MESSAGES else b"event: response.created"
        assert answer.content.count(opening) == 1
    else:
        assert answer.content.startswith(b"data: ") and answer.content.endswith(b"data: [DONE]\n\n")


async def test_first_events_are_buffered(wire: Wire, fake: FakeLlama) -> None:
    """The prompt ends while nobody is there: who comes soon gets the answer from its first word."""
    client, cue = await at(wire, fake, 150, chat(LONG, stream=True))
    pace = cue.pace = asyncio.Semaphore(0)
    await client.leave()
    await has_left(wire)
    finish(cue)
    for _ in range(4):
        pace.release()
    async with asyncio.timeout(30):
        while sum(b" w" in event for event in cue.sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    again = Client(wire, CHAT, chat(LONG, stream=True))
    await has_left(wire, 0)
    for _ in range(20):
        pace.release()
    answer = await again.served()
    assert [answer.text.count(f" w{i}") for i in range(4)] == [1, 1, 1, 1]
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert len(fake.model_requests) == 1


async def test_nobody_comes_back(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after the prompt's end the engine is stopped; the slot keeps the prompt, and the next turn finds it."""
    monkeypatch.setattr(jobs, "UNREAD_EVENTS", 3)
    client, cue = await at(wire, fake, 50, chat(LONG, max_tokens=400))
    cue.hold_after, cue.hold_at = asyncio.Event(), 6  # a model that would go on for long
    await client.leave()
    await has_left(wire)
    finish(cue)
    await within(fake.abandoned(1))
    record = (await wire.recorded(1))[0]
    assert (record["outcome"], record["prompt_n"]) == ("client_left", fake.processed_total)
    await wire.has_slots("empty", "idle")
    assert not list(wire.service.jobs)
    again = await wire.post(CHAT, chat(LONG))
    assert (again.headers["x-slotkeeper-placement"], again.json()["timings"]["prompt_n"]) == ("continue", 1)
    assert JOINED not in again.headers


async def test_a_time_limit_for_what_nobody_reads(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model is stopped as well."""
    monkeypatch.setattr(jobs, "UNREAD_SECONDS", 0.01)
    client, cue = await at(wire, fake, 50)
    cue.hold_after = asyncio.Event()
    await client.leave()
    await has_left(wire)
    finish(cue)
    await within(fake.abandoned(1))
    await wire.has_slots("empty", "idle")


async def test_whoever_waits_comes_first(serve: Serve) -> None:
    """With somebody in the waiting line the work ends at the prompt's end."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake)
        client, cue = await at(wire, fake, 150)
        cue.hold_after = asyncio.Event()
        await client.leave()
        await has_left(wire)
        other = Client(wire, CHAT, chat("another"))
        await wire.waiting(1)
        finish(cue)
        await within(fake.abandoned(1))
        assert (await other.served()).status_code == 200


@pytest.mark.parametrize(
    ("finish_prefill", "done", "goes_on"),
    [("always", 60, True), ("half", 60, False), ("half", 120, True), ("never", 120, False)],
)
async def test_with_another_running(finish_prefill: str, done: int, goes_on: bool, serve: Serve) -> None:
    """Of an engine that has something else to do, `half` takes more than half of the work."""
    async with FakeLlama(n_slots=2) as fake:
        wire = await serve(fake, finish_prefill=finish_prefill)
        hold = asyncio.Event()
        fake.cues.append(Cue(hold_after=hold))
        other = Client(wire, CHAT, chat("company"))
        await within(fake.arrived(1))
        client, cue = await at(wire, fake, done)
        await client.leave()
        if goes_on:
            await has_left(wire)
            again = Client(wire, CHAT, chat(LONG))
            await has_left(wire, 0)
            finish(cue)
            assert (await again.served()).headers[JOINED] == "1"
        else:
            await within(fake.abandoned(1))
        hold.set()
        assert (await other.served()).status_code == 200
        assert fake.left == (0 if goes_on else 1)


async def test_half_ends_when_somebody_else_comes(wire: Wire, fake: FakeLlama) -> None:
    """What went on because the engine had nothing else to do gives way with its next report."""
    client, cue = await at(wire, fake, 40)
    await client.leave()
    await has_left(wire)
    hold = asyncio.Event()
    fake.cues.append(Cue(hold_after=hold))
    other = Client(wire, CHAT, chat("company"))
    await within(fake.arrived(2))
    assert cue.steps is not None
    cue.steps.put_nowait(50)
    await within(fake.abandoned(1))
    hold.set()
    assert (await other.served()).status_code == 200
    again = await wire.post(CHAT, chat(LONG))
    assert again.json()["timings"]["cache_n"] == 50


async def test_both_there_are_two(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identical requests of two clients run side by side, and each has its answer."""
    monkeypatch.setattr(jobs, "LEAVING_SECONDS", 0.0)
    first, cue = await at(wire, fake, 50)
    second = Client(wire, CHAT, chat(LONG))
    await within(fake.arrived(2))
    finish(cue)
    for client in (first, second):
        answer = await client.served()
        assert answer.status_code == 200 and JOINED not in answer.headers
    assert len(fake.model_requests) == 2


OTHERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "another text": (chat(LONG + "!"), {}),
    "another order of keys": (chat(LONG) | {"messages": [{"content": LONG, "role": "user"}]}, {}),
    "other sampling": (chat(LONG, temperature=0.5), {}),
    "a stream": (chat(LONG, stream=True), {}),
    "another salt": (chat(LONG), {"x-slotkeeper-salt": "b"}),
    "another session": (chat(LONG), {"x-slotkeeper-session": "b"}),
    "another mode": (chat(LONG), {"x-slotkeeper-mode": "observe"}),
    "no compaction": (chat(LONG), {"x-slotkeeper-compaction": "off"}),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_what_does_not_join(other: str, serve: Serve, fake: FakeLlama) -> None:
    """Anything that differs is a request of its own."""
    wire = await serve(fake, finish_prefill="always")
    client, cue = await at(wire, fake, 150)
    await client.leave()
    await has_left(wire)
    body, headers = OTHERS[other]
    second = Client(wire, CHAT, body, **headers)
    await within(fake.arrived(2))
    finish(cue)
    assert JOINED not in (await second.served()).headers


async def test_another_tenant_does_not_join(serve: Serve, fake: FakeLlama, tmp_path: Any) -> None:
    """The same bytes with another key."""
    keys = tmp_path / "keys"
    keys.write_text("one:key-one\ntwo:key-two\n")
    wire = await serve(fake, wait=False, api_key_file=keys, finish_prefill="always")
    while not (await wire.get("/readyz")).is_success:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    cue = Cue(steps=asyncio.Queue())
    fake.cues.append(cue)
    one = Client(wire, CHAT, chat(LONG), authorization="Bearer key-one")
    await within(fake.arrived(1))
    await one.leave()
    await has_left(wire)
    two = Client(wire, CHAT, chat(LONG), authorization="Bearer key-two")
    await within(fake.arrived(2))
    again = Client(wire, CHAT, chat(LONG), authorization="Bearer key-one")
    await has_left(wire, 0)
    finish(cue)
    assert (await again.served()).headers[JOINED] == "1"
    assert JOINED not in (await two.served()).headers


async def test_a_failure_after_joining(wire: Wire, fake: FakeLlama) -> None:
    """Who was told nothing yet gets it as a status."""
    client, cue = await at(wire, fake, 50, chat(LONG, stream=True))
    cue.error_at = 0
    await client.leave()
    await has_left(wire)
    again = Client(wire, CHAT, chat(LONG, stream=True))
    await has_left(wire, 0)
    finish(cue)
    answer = await again.served()
    assert "Context size has been exceeded" in answer.text


async def test_a_failure_with_nobody_there(wire: Wire, fake: FakeLlama) -> None:
    """It is in the record; the slot comes back, and the next request is one of its own."""
    client, cue = await at(wire, fake, 50)
    cue.break_at = 0
    await client.leave()
    await has_left(wire)
    finish(cue)
    assert (await wire.recorded(1))[0]["outcome"] == "engine_error"
    assert not list(wire.service.jobs)
    answer = await wire.post(CHAT, chat(LONG))
    assert answer.status_code == 200 and JOINED not in answer.headers


async def test_stopping_ends_what_nobody_waits_for(wire: Wire, fake: FakeLlama) -> None:
    """It would hold up the saving of slots."""
    client, _ = await at(wire, fake, 150)
    await client.leave()
    await has_left(wire)
    wire.service.begin_stop(at_once=False)
    await within(fake.abandoned(1))


async def test_nobody_joins_what_is_being_ended(wire: Wire, fake: FakeLlama) -> None:
    """Between its cancellation and its end, which may wait for the engine."""
    client, _ = await at(wire, fake, 150)
    await client.leave()
    await has_left(wire)
    (job,) = wire.service.jobs
    assert await wire.service.jobs.find(job.request) is job
    job.task.cancel()
    assert await wire.service.jobs.find(job.request) is None
    await within(fake.abandoned(1))


async def test_answers_in_one_piece_are_cancelled(wire: Wire, fake: FakeLlama) -> None:
    """Of a request that had to be asked for whole nobody knows where its prompt ends."""
    cue = Cue(hold_before=asyncio.Event())
    fake.cues.append(cue)
    client = Client(wire, CHAT, chat(LONG, logprobs=True))
    await within(fake.arrived(1))
    await client.leave()
    await within(fake.abandoned(1))
