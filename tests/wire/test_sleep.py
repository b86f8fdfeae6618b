"""An engine that sleeps is left asleep, and what it held is known to be gone."""

import asyncio

import pytest

from proxy import engine as engine_module
from proxy import keeper
from tests.fakes.llama import FakeLlama
from tests.wire.wire import CHAT, Wire, chat

LONG = "a long enough opening " * 40


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep without pauses."""
    monkeypatch.setattr(engine_module, "LEAST_SLEEP_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "RECONCILE_SECONDS", 0.0)


def asked(fake: FakeLlama) -> int:
    """Questions that wake a sleeping engine, and keep an idle one awake."""
    return sum(r.path not in {"/props", "/health"} for r in fake.requests)


@pytest.mark.usefixtures("hurried")
async def test_a_sleeping_engine_is_asked_nothing_but_props(wire: Wire, fake: FakeLlama) -> None:
    """Its slots are empty from then on, and the next turn does not hope for what it held."""
    await wire.post(CHAT, chat(LONG))
    fake.sleeping = True
    async with asyncio.timeout(10):
        while (await wire.state())["engines"][0]["slots"][0]["n_tokens"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    before, props = asked(fake), sum(r.path == "/props" for r in fake.requests)
    await asyncio.sleep(0.2)
    assert asked(fake) == before
    assert sum(r.path == "/props" for r in fake.requests) <= props + 1, "nothing is left that it could lose"
    fake.sleeping = False
    again = await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now"))
    assert again.headers["x-slotkeeper-placement"] == "cold"


@pytest.mark.usefixtures("hurried")
async def test_an_idle_engine_is_left_to_fall_asleep(wire: Wire, fake: FakeLlama) -> None:
    """Its slots are looked at once after it was used, not again and again."""
    await wire.post(CHAT, chat(LONG))
    async with asyncio.timeout(10):
        while not any(r.path == "/slots" for r in fake.requests[-20:]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    before = sum(r.path == "/slots" for r in fake.requests)
    await asyncio.sleep(0.3)
    assert sum(r.path == "/slots" for r in fake.requests) == before
