"""llama-server's own metrics on /metrics: with its engine's name, for several scrapers, and never at anybody's cost."""

import asyncio
from typing import Any

import pytest

from llamacpp.errors import EngineUnreachable
from llamacpp.wire import Props
from proxy import engine_metrics
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat

NAME = "llamacpp_prompt_tokens_total"
UNSEEN = {"logprobs": True, "stream": False}
"""Wanted whole, and with what no stream has: sent without events (llamacpp.wire.must_be_whole)."""


@pytest.fixture(autouse=True)
def nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape may ask; tests of what is shared set it themselves."""
    monkeypatch.setattr(engine_metrics, "FRESH_SECONDS", 0.0)


def asked(fake: FakeLlama) -> int:
    """How often the engine's /metrics was read."""
    return sum(r.path == "/metrics" for r in fake.requests)


async def say(wire: Wire, text: str, **more: Any) -> None:
    """A request, and until the engine is rid of it."""
    assert (await wire.post(CHAT, chat(text, **more))).status_code == 200
    await until(lambda: _is_idle(wire))


async def _is_idle(wire: Wire) -> bool:
    return not any(e.n_requests or e.table.runners() for e in wire.service.engines.all)


async def scrape(wire: Wire) -> dict[str, float]:
    """The engine's own count of prompt tokens, by series."""
    answer = await wire.http.get("/metrics")
    assert answer.status_code == 200
    lines = (line.rsplit(" ", 1) for line in answer.text.splitlines() if line.startswith(NAME))
    return {name: float(value) for name, value in lines}


async def test_with_the_engines_name(wire: Wire, fake: FakeLlama) -> None:
    """One scrape suffices."""
    await say(wire, "hello there")
    assert await scrape(wire) == {f'{NAME}{{engine="engine0"}}': fake.processed_total}
    assert fake.processed_total > 0


async def test_several_scrapers(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten at once and ten soon after cost the engine one answer: its two throughput gauges are since the last one."""
    monkeypatch.setattr(engine_metrics, "FRESH_SECONDS", 60.0)
    await say(wire, "hello there")
    before = asked(fake)
    found = await asyncio.gather(*(scrape(wire) for _ in range(10)))
    found += [await scrape(wire) for _ in range(10)]
    assert asked(fake) == before + 1
    assert all(f == {f'{NAME}{{engine="engine0"}}': fake.processed_total} for f in found)


async def test_an_idle_engine_is_left_alone(wire: Wire, fake: FakeLlama) -> None:
    """Each question would keep it from falling asleep; what it said last still holds."""
    await say(wire, "hello there")
    first = await scrape(wire)
    before = len(fake.requests)
    assert await scrape(wire) == first
    assert {r.path for r in fake.requests[before:]} <= {"/health"}  # which keeps nobody awake
    await say(wire, "something else")
    assert await scrape(wire) != first


async def test_a_sleeping_engine_is_not_woken(wire: Wire, fake: FakeLlama) -> None:
    """It is asked whether it sleeps, which wakes nobody."""
    await say(wire, "hello there")
    first = await scrape(wire)
    await say(wire, "something else")
    fake.sleeping, before = True, asked(fake)
    assert await scrape(wire) == first
    assert asked(fake) == before
    fake.sleeping = False
    assert await scrape(wire) != first


async def test_not_while_a_request_without_events_runs(wire: Wire, fake: FakeLlama) -> None:
    """Design rule 7: the engine would notice late that its client left."""
    await say(wire, "hello there")
    first, before = await scrape(wire), asked(fake)
    gate = asyncio.Event()
    fake.cues.append(Cue(hold_before=gate))
    whole = asyncio.create_task(wire.post(CHAT, chat("something else", **UNSEEN)))
    await fake.arrived(2)
    assert await scrape(wire) == first
    assert asked(fake) == before
    gate.set()
    await whole
    assert await scrape(wire) != first


async def test_while_a_stream_runs(wire: Wire, fake: FakeLlama) -> None:
    """Streams are not delayed."""
    gate = asyncio.Event()
    fake.cues.append(Cue(hold_before=gate))
    running = asyncio.create_task(wire.post(CHAT, chat("something else")))
    await fake.arrived(1)
    before = asked(fake)
    await scrape(wire)
    assert asked(fake) == before + 1
    gate.set()
    await running


async def test_an_engine_that_is_busy(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a slot file it answers nobody: the scrape goes on without it, and has it the next time."""
    monkeypatch.setattr(engine_metrics, "ANSWER_SECONDS", 0.02)
    await say(wire, "hello there")
    fake.metrics_gate = gate = asyncio.Event()
    assert await scrape(wire) == {}
    gate.set()
    await fake.asked("/metrics", asked(fake))
    monkeypatch.setattr(engine_metrics, "ANSWER_SECONDS", 10.0)
    assert len(await scrape(wire)) == 1


@pytest.mark.parametrize("trouble", ["none of its own", "gone", "nonsense"])
async def test_a_scrape_never_fails(trouble: str, serve: Serve) -> None:
    """Without --metrics, without an engine, with an answer that makes no sense: ours are there."""
    async with FakeLlama(metrics_endpoint=trouble != "none of its own") as fake:
        wire = await serve(fake)
        await say(wire, "hello there")
        if trouble == "nonsense":
            fake.more_metrics = "\x00 {{{ llamacpp:\n"
        if trouble == "gone":
            await fake.__aexit__(None, None, None)
        for _ in range(3):
            answer = await wire.http.get("/metrics")
            assert answer.status_code == 200
            assert "slotkeeper_engine_up" in answer.text
        if trouble == "none of its own":
            before = asked(fake)
            await say(wire, "more")
            await wire.http.get("/metrics")
            assert asked(fake) == before  # it said no once


async def test_two_engines(serve: Serve, fake: FakeLlama) -> None:
    """One family, a series for each."""
    async with FakeLlama(alias="other") as other:
        wire = await serve(upstream=(f"{fake.url},model=one", f"{other.url},model=two"))
        for model in ("one", "two"):
            await say(wire, "hello there", model=model)
        assert set(await scrape(wire)) == {f'{NAME}{{engine="engine{i}"}}' for i in (0, 1)}


async def test_an_engine_that_hangs_is_not_up(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the way of GET /props: who does not answer it does not serve, until it answers again."""
    engine = wire.service.engines.all[0]
    up = 'slotkeeper_engine_up{engine="engine0"}'

    async def says(value: str) -> bool:
        return f"{up} {value}" in (await wire.http.get("/metrics")).text

    async def silent() -> Props:
        raise EngineUnreachable("no answer")

    await say(wire, "hello there")
    assert await says("1.0")
    await say(wire, "something else")
    with monkeypatch.context() as patch:
        patch.setattr(engine.client, "props", silent)
        await until(lambda: says("0.0"))
    await until(lambda: says("1.0"))


def series(text: str) -> set[str]:
    """Names with labels of an exposition."""
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}


async def test_no_client_makes_series(wire: Wire) -> None:
    """Models, sessions, fields and paths are theirs to name, and an engine's restart takes no count back."""
    await say(wire, "hello there")
    first = (await wire.http.get("/metrics")).text
    for i in range(8):
        names = {"model": f"gpt-{i}", "user": f"user {i}", f"field_{i}": i}
        await wire.post(
            CHAT, chat(f"hello {i}", **names), headers={"x-slotkeeper-session": f"s{i}", "user-agent": f"{i}"}
        )
        await wire.get(f"/no/such/{i}")
    await until(lambda: _is_idle(wire))
    assert series((await wire.http.get("/metrics")).text) == series(first)
    engine = wire.service.engines.all[0]
    counted = (await wire.http.get("/metrics")).text
    engine.down("a test says so")
    await until(wire.is_ready)
    after = (await wire.http.get("/metrics")).text
    own = {
        line
        for line in counted.splitlines()
        if line.startswith("slotkeeper_prompt") or line.startswith("slotkeeper_requests")
    }
    assert own <= set(after.splitlines())
