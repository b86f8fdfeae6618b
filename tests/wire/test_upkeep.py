"""What goes on behind the requests survives whatever happens to it: engines that die in between, files that fail."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamacpp import engines as children
from proxy import engines, keeper, watching
from proxy.api.ops import control_app
from proxy.errors import StoreError
from proxy.keeper import Keeper
from proxy.snapshots import _removed
from tests.fakes.llama import FakeLlama
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, chat


class FakeChild:
    """A child engine that runs for ever: the fake on its port."""

    kind, api_key, build = "binary", "", "b1"

    def __init__(self, fake: FakeLlama) -> None:
        self.base_url = fake.url

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def stop(self, seconds: float) -> int:
        return int(seconds * 0)

    def obituary(self, *, has_served: bool = False) -> str:
        return "The engine ended."


@pytest.mark.parametrize("failure", ["the engine", "the start"])
async def test_a_failure_while_an_engine_is_taken_over(
    failure: str, serve: Serve, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died after /health said yes, or the machine would not start it: it is tried again, not given up."""
    starts = 0

    async def start(*_: Any, **__: Any) -> FakeChild:
        nonlocal starts
        starts += 1
        if failure == "the start" and starts == 2:
            raise PermissionError(13, "Permission denied")
        return FakeChild(fake)

    monkeypatch.setattr(children, "start", start)
    monkeypatch.setattr(engines, "FIRST_BACKOFF", 0.05)
    monkeypatch.setattr(FakeChild, "wait", _ends_once(starts_seen=[]) if failure == "the start" else FakeChild.wait)
    if failure == "the engine":
        fake.junk = b"not JSON"
    wire = await serve(upstream=(), wait=False)
    await fake.asked("/props", 2) if failure == "the engine" else await until(lambda: _is(lambda: starts >= 3))
    fake.junk = None
    await until(wire.is_ready)
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_when_to_come_back_to_an_engine_that_keeps_ending(
    serve: Serve, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDKs ask again twice, after as long as they are told to: not before it is started again."""

    async def start(*_: Any, **__: Any) -> FakeChild:
        return FakeChild(fake)

    monkeypatch.setattr(children, "start", start)
    monkeypatch.setattr(engines, "FIRST_BACKOFF", 20.0)
    monkeypatch.setattr(FakeChild, "wait", _ends_once(starts_seen=[]))
    wire = await serve(upstream=(), wait=False)
    engine = wire.service.engines.all[0]
    await until(lambda: _is(lambda: engine.why_not == "The engine ended."))
    answer = await wire.post(CHAT, chat("hi"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "22")


def _ends_once(starts_seen: list[int]) -> Any:
    async def wait(_: FakeChild) -> int:
        starts_seen.append(1)
        if len(starts_seen) > 1:
            await asyncio.Event().wait()
        return 1

    return wait


async def _is(true: Any) -> bool:
    return bool(true())


async def test_a_round_that_breaks(serve: Serve, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a next one."""
    rounds: list[str] = []

    async def breaks(_: keeper.Keeper, engine: Any) -> None:
        rounds.append(engine.name)
        raise (StoreError("the disk is full"), KeyError("a mistake"))[len(rounds) % 2]

    monkeypatch.setattr(keeper, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(keeper.Keeper, "_round", breaks)
    await serve(fake)
    await until(lambda: _is(lambda: len(rounds) > 3))


async def test_a_look_that_breaks(serve: Serve, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while an attached engine is looked at, it is looked at again."""
    looks, look = 0, watching.Watch._look

    async def breaks(self: watching.Watch) -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise RuntimeError("nobody thought of this")
        await look(self)

    monkeypatch.setattr(watching, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(watching.Watch, "_look", breaks)
    wire = await serve(fake)
    assert looks >= 3
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_an_engine_that_serves_is_not_asked_how_it_is(
    serve: Serve, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers say so; without any for a while it is asked, and gone when it does not say."""
    looks, look = 0, watching.Watch._look

    async def counted(self: watching.Watch) -> None:
        nonlocal looks
        looks += 1
        await look(self)

    monkeypatch.setattr(watching, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(watching.Watch, "_look", counted)
    wire = await serve(fake)
    served = float("inf")
    monkeypatch.setattr(type(wire.service.engines.all[0].client), "served", property(lambda _: served, _forget), False)
    asked, looked = sum(r.path == "/health" for r in fake.requests), looks
    await until(lambda: _is(lambda: looks > looked + 3))
    assert sum(r.path == "/health" for r in fake.requests) <= asked + 1  # one may have been on its way
    served = 0.0
    await fake.asked("/health", asked + 3)
    fake.loading = True
    await until(lambda: _is(lambda: not wire.service.engines.all[0].ready))


def _forget(*_: object) -> None:
    """What else is asked of it does not count in that test."""


HARMLESS = {"/props", "/health"}
"""What a sleeping engine answers without waking up."""


@pytest.mark.parametrize("kind", ["attached", "child"])
async def test_a_sleeping_engine_is_left_asleep(
    kind: str, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compared, rendered, identified or saved, and what lay in its slots is not believed in any more."""
    (slots := tmp_path / "slots").mkdir()
    monkeypatch.setattr(keeper, "next_save", lambda slots, *_, **__: next((s.id for s in slots if s.stake > 64), None))
    monkeypatch.setattr(keeper, "RENDER_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "ROUND_SECONDS", 3600.0)  # no rounds but those below
    async with FakeLlama(slot_dir=slots) as fake:
        wire = await serve(fake, upstream=(f"{fake.url},slots={slots}",))
        keep, engine = Keeper(wire.service), wire.service.engines.all[0]
        engine.kind = "embedded" if kind == "child" else kind
        await wire.post(CHAT, chat("word " * 200))
        await wire.has_slots("idle", "empty")
        fake.sleeping, before = True, len(fake.requests)
        # Not yet due: what is saved and rendered ahead has to look for itself.
        keep._reconciled[engine.name] = float("inf")
        await keep._round(engine)
        assert [slot.n_tokens for slot in engine.table.slots] == [0, 0]
        engine.fingerprint, keep._reconciled = None, {}
        await keep._round(engine)
        await keep.save_all(1, [])
        assert {r.path for r in list(fake.requests)[before:]} <= HARMLESS


async def test_stopping_during_an_idle_save(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is brought to its end: the file is published, and the slot's tokens are there after a restart."""
    monkeypatch.setattr(keeper, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "next_save", lambda slots, *_, **__: next((s.id for s in slots if s.stake > 64), None))
    async with FakeLlama(n_slots=1, slot_dir=tmp_path) as fake:
        wire = await serve(fake, upstream=(f"{fake.url},slots={tmp_path}",))
        service = wire.service
        fake.save_gate = gate = asyncio.Event()
        await wire.post(CHAT, chat("word " * 200))
        await wire.has_slots("saving")
        asyncio.get_running_loop().call_later(0.2, gate.set)
        await _stop(service)
        assert [s.n_tokens > 200 for s in service.store.all()] == [True]
        assert service.engines.all[0].table.slots[0].is_idle


async def _stop(service: Any) -> None:
    """The end of the application's life, as proxy.app has it."""
    upkeep = next(task for task in asyncio.all_tasks() if task.get_name() == "keeper")
    service.stopping = True
    upkeep.cancel()
    await asyncio.gather(upkeep, return_exceptions=True)
    await service.engines.wait_released(2.0)


async def test_a_store_that_fails_costs_no_request(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design rule 2: the save before a loss is given up, the request goes on."""
    async with FakeLlama(n_slots=1, slot_dir=tmp_path) as fake:
        wire = await serve(fake, upstream=(f"{fake.url},slots={tmp_path}",))

        async def fails(*_: Any, **__: Any) -> None:
            raise StoreError("state.db cannot be opened")

        await wire.post(CHAT, chat("word " * 200))
        monkeypatch.setattr(wire.service.store, "make_room", fails)
        monkeypatch.setattr(wire.service.store, "discard", fails)
        assert (await wire.post(CHAT, chat("another " * 200))).status_code == 200


async def test_what_was_purged_is_not_saved_again(serve: Serve, tmp_path: Path) -> None:
    """A person deleted the transcripts: an idle slot's is not written again unless its conversation goes on."""
    (tmp_path / "slots").mkdir()
    async with FakeLlama(slot_dir=tmp_path / "slots") as fake:
        wire = await serve(upstream=(f"{fake.url},slots={tmp_path / 'slots'}",))
        keeper, long = Keeper(wire.service), "a long enough opening " * 40
        await wire.post(CHAT, chat(long))
        await keeper.save_all(5, [])
        assert len(wire.service.store.all()) == 1
        control = httpx.ASGITransport(app=control_app(wire.service))
        async with httpx.AsyncClient(transport=control, base_url="http://slotkeeper") as client:
            answer = (await client.post("/snapshots/purge")).json()
        assert (answer["removed"], answer["in_memory"]) == (1, 1)
        assert "until the server stops" in _removed(answer)
        await keeper.save_all(5, [])
        assert wire.service.store.all() == []
        await wire.post(CHAT, chat(long, " w0 w1 w2 w3", "and now"))
        await keeper.save_all(5, [])
        assert len(wire.service.store.all()) == 1
