"""Models behind llama-swap (a stand-in: tests/fakes/swap.py says which of its documentation it keeps to)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llamacpp.errors import EngineRefused
from proxy.config import load
from proxy.doctor import alone
from proxy.engine import Engine
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.fakes.swap import FakeSwap
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat

LONG = {"one": "a long enough opening " * 40, "two": "and quite another one here " * 40}
REPLY = " w0 w1 w2 w3"


@pytest.fixture
async def swap(tmp_path: Path) -> AsyncIterator[FakeSwap]:
    """Two models, none loaded, that share a slot directory."""
    (tmp_path / "slots").mkdir()
    models = [FakeLlama(n_slots=2, slot_dir=tmp_path / "slots", alias=name) for name in LONG]
    async with FakeSwap(models) as swap:
        yield swap


@pytest.fixture
async def swapped(swap: FakeSwap, serve: Serve, tmp_path: Path) -> Wire:
    """A proxy in front of it."""
    return await serve(upstream=(f"{swap.url},slots={tmp_path / 'slots'}",))


async def turn(wire: Wire, model: str, *more: str, status: int = 200) -> dict[str, str]:
    """One request of that model's conversation; the headers of the answer and, as `cache_n`, what it reused."""
    answer = await wire.post(
        CHAT, {**chat(LONG[model], *more), "model": model}, headers={"x-slotkeeper-session": model}
    )
    assert answer.status_code == status, answer.text
    found = answer.json()
    return {**answer.headers, "cache_n": str(found["timings"]["cache_n"]) if status == 200 else "", "text": answer.text}


async def looked(swap: FakeSwap) -> None:
    """Our watch has asked twice more: whatever it does, it has done."""
    wanted = swap.n_looks + 2

    async def has_looked() -> bool:
        return swap.n_looks >= wanted

    await until(has_looked)


async def test_a_request_chooses_its_model(swapped: Wire, swap: FakeSwap) -> None:
    """Listed, loaded for a request alone, refused by its name; slots of each apart."""
    listed = (await swapped.get("/v1/models")).json()["data"]
    assert {m["id"]: m["status"]["value"] for m in listed} == {"one": "unloaded", "two": "unloaded"}
    assert swap.touched == []
    wrong = await swapped.post(CHAT, {**chat("hi"), "model": "three"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    first = await turn(swapped, "one")
    second = await turn(swapped, "one", REPLY, "and now")
    assert (first["x-slotkeeper-placement"], second["x-slotkeeper-placement"]) == ("cold", "continue")
    assert int(second["cache_n"]) > 100
    assert {model for model, _ in swap.touched} == {"one"}
    state = {e["name"]: e for e in (await swapped.state())["engines"]}
    assert {name: e["unloaded"] for name, e in state.items()} == {"engine0/one": False, "engine0/two": True}


@pytest.mark.parametrize("mode", ["repair", "observe"])
async def test_the_same_words_to_two_models(mode: str, swapped: Wire) -> None:
    """Two conversations, also where no session is named; each goes on where it was."""

    async def ask(model: str, *more: str) -> tuple[str, str]:
        body = {**chat("the same words " * 40, *more), "model": model}
        assert (await swapped.post(CHAT, body, headers={"x-slotkeeper-mode": mode})).status_code == 200
        newest = (await swapped.records())[0]
        return newest["match"], newest["line"]

    new, lines = [await ask(model) for model in LONG], []
    assert [match for match, _ in new] == ["new", "new"]
    for model in LONG:
        match, line = await ask(model, REPLY, "go on")
        assert match == "extends"
        lines.append(line)
    assert lines == [line for _, line in new] and len(set(lines)) == 2


async def test_looking_touches_no_model(swapped: Wire, swap: FakeSwap) -> None:
    """Neither one that is not loaded nor, once idle, one that is: its `ttl` runs on."""
    await turn(swapped, "one")
    engine = swapped.service.engines.pick("one")
    engine.clock = lambda clock=engine.clock: clock() + 3600  # long idle: what is to be done then is done
    await until(lambda: _is_saved(engine))
    await looked(swap)
    before = list(swap.touched)
    await looked(swap)
    assert swap.touched == before
    swap.unload()
    with pytest.raises(EngineRefused):
        await engine.client.metrics()  # before it is noticed
    await looked(swap)
    assert (engine.ready, engine.unloaded, engine.table.used()) == (False, True, 0)
    for path in ("/metrics", "/v1/models", "/slotkeeper/state", "/readyz"):
        assert (await swapped.get(path)).status_code == 200
    await looked(swap)
    assert (swap.loaded, swap.touched) == (None, before)


async def _is_saved(engine: Engine) -> bool:
    slots = engine.table.slots
    return any(engine.table.saved_of(s) == s.n_tokens > 0 for s in slots)


async def test_a_swap_costs_no_prefill(swapped: Wire, swap: FakeSwap) -> None:
    """What would push a model out saves its conversation first; back again, it is restored before it is asked."""
    await turn(swapped, "one")
    await turn(swapped, "two")
    back = await turn(swapped, "one", REPLY, "and now")
    assert back["x-slotkeeper-placement"] == "restore"
    assert int(back["cache_n"]) > 100
    assert (await swapped.records())[0]["reprocessed"] == 0
    assert (await turn(swapped, "two", REPLY, "and now"))["x-slotkeeper-placement"] == "restore"


async def test_an_answer_ends_before_its_model_is_pushed_out(swapped: Wire, swap: FakeSwap) -> None:
    """The other request waits; the conversation that ends meanwhile is saved whole."""
    gate, one = asyncio.Event(), swap.models["one"]
    await turn(swapped, "one")
    one.cues.append(Cue(hold_after=gate))
    running = asyncio.create_task(turn(swapped, "one", REPLY, "and now"))
    await one.arrived(len(one.model_requests) + 1)
    other = asyncio.create_task(turn(swapped, "two"))
    await looked(swap)
    assert (swap.loaded, other.done()) == ("one", False)
    gate.set()
    held = int((await running)["cache_n"])
    assert (await other)["x-slotkeeper-placement"] == "cold"
    back = await turn(swapped, "one", REPLY, "and now", REPLY, "on")
    assert back["x-slotkeeper-placement"] == "restore"
    assert int(back["cache_n"]) > held


async def test_nobody_asks_a_model_that_is_being_pushed_out(swapped: Wire, swap: FakeSwap) -> None:
    """The router would load it again at once, and push out the one that it was loading."""
    one = swap.models["one"]
    await turn(swapped, "one")
    n_asked = len(one.model_requests)
    swap.may_load.clear()
    other = asyncio.create_task(turn(swapped, "two"))

    async def is_loading() -> bool:
        return any(model == "two" for model, _ in swap.touched)

    await until(is_loading)
    back = asyncio.create_task(turn(swapped, "one", REPLY, "and now"))
    await looked(swap)
    await looked(swap)
    assert (len(one.model_requests), back.done(), swap.loaded) == (n_asked, False, "one")
    swap.may_load.set()
    assert (await other)["x-slotkeeper-placement"] == "cold"
    assert (await back)["x-slotkeeper-placement"] == "restore"


async def test_a_model_that_cannot_be_loaded(swapped: Wire, swap: FakeSwap) -> None:
    """The client is told in its dialect, and the next request tries again."""
    swap.cannot_load = True
    assert "error" in (await turn(swapped, "one", status=500))["text"]
    swap.cannot_load = False
    assert (await turn(swapped, "one"))["x-slotkeeper-placement"] == "cold"


async def test_a_router_that_goes_and_comes_back(swapped: Wire, swap: FakeSwap) -> None:
    """Nothing is ready meanwhile, and every request says so."""
    await turn(swapped, "one")
    swap.is_gone = True

    async def is_down() -> bool:
        return not await swapped.is_ready()

    await until(is_down)
    assert (await swapped.post(CHAT, {**chat("hi"), "model": "two"})).status_code == 502
    swap.is_gone = False
    await until(swapped.is_ready)
    assert (await turn(swapped, "one", REPLY, "and now"))["cache_n"] != ""


async def test_only_so_many_wait_for_a_model(swap: FakeSwap, serve: Serve) -> None:
    """The waiting line is bounded while a model loads, too."""
    wire = await serve(upstream=(swap.url,), max_waiting=0)
    assert "waiting_line_full" in (await turn(wire, "one", status=503))["text"]


async def test_a_model_of_its_own_upstream(swap: FakeSwap, serve: Serve) -> None:
    """`model=` picks one; one that is listed no more goes, and comes back."""
    wire = await serve(upstream=(f"{swap.url},model=two",))
    two = swap.models.pop("two")

    async def names() -> set[str]:
        return {e["name"] for e in (await wire.state())["engines"]}

    assert await names() == {"engine0/two"}

    async def is_gone() -> bool:
        return await names() == {"engine0"}

    await until(is_gone)
    assert "lists no model two" in (await wire.get("/readyz")).text
    swap.models["two"] = two
    await until(wire.is_ready)
    assert (await turn(wire, "two"))["x-slotkeeper-placement"] == "cold"


async def test_doctor_wakes_nothing(swap: FakeSwap, tmp_path: Path) -> None:
    """It says what it does not know, which is no fault of the setup."""
    settings = load({"upstream": (swap.url,), "state_dir": tmp_path / "state"})
    told = await alone(settings, print, probe=True, determinism=False)
    assert [(e["name"], e["findings"][0]["level"]) for e in told["engines"]] == [
        ("engine0/one", "unknown"),
        ("engine0/two", "unknown"),
    ]
    assert (told["effective"], swap.touched) == (True, [])
