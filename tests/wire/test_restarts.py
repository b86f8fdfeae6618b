"""An attached engine that is stopped, started anew or replaced under traffic: nothing of the old one is believed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy import beliefs, watching
from tests.fakes.http import Answer, Request, Server
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat, data

LONG = "a long enough opening " * 40


async def engine_of(wire: Wire) -> dict[str, Any]:
    """What the state says of the one engine."""
    engine: dict[str, Any] = (await wire.state())["engines"][0]
    return engine


async def not_ready(wire: Wire) -> bool:
    """Whether /readyz says so."""
    return (await wire.get("/readyz")).status_code == 503


@asynccontextmanager
async def keeping(serve: Serve, tmp_path: Path, n_slots: int) -> AsyncIterator[tuple[FakeLlama, Wire]]:
    """An engine whose slot files are kept, and a proxy in front of it."""
    slots = tmp_path / "engine-slots"
    slots.mkdir()
    async with FakeLlama(n_slots=n_slots, slot_dir=slots) as fake:
        yield fake, await serve(upstream=(f"{fake.url},slots={slots}",))


async def test_an_engine_that_dies_under_traffic(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are waited for no longer than it takes to find that nobody listens; the next is another one."""
    monkeypatch.setattr(watching, "WATCH_SECONDS", 0.1)
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake)
        await wire.post(CHAT, chat(LONG))
        fake.cues.append(Cue(hold_after=asyncio.Event()))
        async with wire.stream(CHAT, chat(LONG, " w0 w1 w2 w3", "and now")) as stream:
            while b" w0" not in await stream.next():
                pass
            await fake.__aexit__(None, None, None)
            assert data((await stream.rest())[-1])["error"]["source"] == "engine"
        await until(lambda: not_ready(wire))
        refused = await wire.post(CHAT, chat(LONG))
        assert (refused.status_code, "Is it running?" in refused.text) == (502, True)
        async with FakeLlama(n_slots=1, port=fake._server.port):
            await until(wire.is_ready)
            again = await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now"))
            assert again.json()["timings"]["cache_n"] == 0
            assert (await wire.records())[0]["cause"] == "engine_restart"


async def test_another_server_in_its_place(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers 404 to everything is no engine, however much it answers."""
    monkeypatch.setattr(watching, "WATCH_SECONDS", 0.1)

    async def nothing(_: Request, answer: Answer) -> None:
        await answer.json({"detail": "Not Found"}, 404)

    async with FakeLlama() as fake:
        wire = await serve(fake)
        await wire.post(CHAT, chat(LONG))
        await fake.__aexit__(None, None, None)
        async with Server(nothing, fake._server.port):

            async def is_noticed() -> bool:
                return (await wire.post(CHAT, chat("hi"))).status_code == 503

            await until(is_noticed)
            assert await not_ready(wire)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_other_flags_after_a_short_restart(is_busy: bool, serve: Serve) -> None:
    """It was away for less than a look: the next turn, or the broken one, shows it; it is asked what it is now."""
    async with FakeLlama(n_slots=1) as fake:
        wire = await serve(fake)
        await wire.post(CHAT, chat(LONG))
        fake.n_ctx = 4096
        if is_busy:
            fake.cues.append(Cue(hold_after=asyncio.Event()))
            async with wire.stream(CHAT, chat(LONG, " w0 w1 w2 w3", "and now")) as stream:
                while b" w0" not in await stream.next():
                    pass
                fake.restart()
                await stream.rest()
        else:
            fake.restart()
            await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now"))

        async def is_known() -> bool:
            return bool((await engine_of(wire))["n_ctx"] == 4096) and await wire.is_ready()

        await until(is_known)
        assert (await wire.post(CHAT, chat(LONG))).status_code == 200


async def test_the_same_flags_as_far_as_it_says(serve: Serve, tmp_path: Path) -> None:
    """What its files are known by is found out again: it may compute otherwise (another --rope-freq-base)."""
    async with keeping(serve, tmp_path, 2) as (fake, wire):
        engine = wire.service.engines.all[0]
        await wire.post(CHAT, chat(LONG))
        saved = fake.saves
        engine.fingerprint = "of the old one"
        fake.restart()
        await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now"))

        async def is_found_out() -> bool:
            return engine.fingerprint not in (None, "of the old one")

        await until(is_found_out)
        assert fake.saves > saved


async def test_tasks_that_count_anew(wire: Wire, fake: FakeLlama) -> None:
    """Where each slot has answered since, the numbers of its tasks tell that it was started anew."""
    ours, engine = wire.service.engines.beliefs, wire.service.engines.all[0]
    renewed = []

    async def renew(*args: object) -> None:
        renewed.append(args)

    ours.renew = renew
    for text in ("one " * 100, "two " * 100):
        await wire.post(CHAT, chat(text))
    await wire.has_slots("idle", "idle")
    for _ in range(2):
        await ours.reconcile(engine)
    assert not renewed
    for slot in fake.slots:
        slot.id_task = 1
    await ours.reconcile(engine)
    assert len(renewed) == 1


async def test_a_file_that_the_new_one_refuses_stays(serve: Serve, tmp_path: Path) -> None:
    """A smaller context than that of the engine that wrote it: the engine is asked what it is, the file is kept."""
    async with keeping(serve, tmp_path, 1) as (fake, wire):
        engine = wire.service.engines.all[0]
        for text in (LONG, "quite another " * 200):  # the second has the first one's slot, and its file
            await wire.post(CHAT, chat(text))
        kept = {snapshot.id for snapshot in wire.service.store.all()}
        assert kept
        fake.restart()
        fake.n_ctx, fake.spoilt_by_files = 4096, True
        first = await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now"))
        assert first.status_code == 200 or (first.status_code == 503 and "retry-after" in first.headers)

        async def is_known() -> bool:
            return engine.ready and engine.n_ctx == 4096

        await until(is_known)
        assert kept <= {snapshot.id for snapshot in wire.service.store.all()}


async def test_a_suspicion_that_was_unfounded(wire: Wire, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a comparison that found nothing the next suspicion waits; what may be a restart does not."""
    monkeypatch.setattr(beliefs, "RECHECK_SECONDS", 0.01)
    for text in ("one " * 100, "two " * 100):
        await wire.post(CHAT, chat(text))
    await wire.has_slots("idle", "idle")
    engine = wire.service.engines.all[0]
    asked = [r.path for r in fake.requests].count("/slots")
    wire.service.engines.beliefs.suspect(engine)
    await fake.asked("/slots", asked + 1)
    for _ in range(3):
        wire.service.engines.beliefs.suspect(engine)
        await wire.get("/healthz")
    wire.service.engines.beliefs.suspect(engine, is_doubtful=True)
    await fake.asked("/slots", asked + 2)
    assert [r.path for r in fake.requests].count("/slots") == asked + 2
