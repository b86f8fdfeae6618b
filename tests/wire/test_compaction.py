"""Compactions that something happens to: others beside them, clients that leave, engines that break, other tenants."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy import compact_ahead, keeper
from proxy.api.ops import control_app
from proxy.engine import Engine
from proxy.explain_cli import _told
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.dialects import MESSAGES, RESPONSES, said
from tests.wire.test_keep_alive import ALWAYS, SIGNS
from tests.wire.wire import CHAT, Wire, chat, data

N_CTX = 2000
SUMMARY = [" The", " parser", " is", " ported", ";", " tests", " are", " left"]


@pytest.fixture
def small() -> FakeLlama:
    """An engine of two small slots."""
    return FakeLlama(n_slots=2, n_ctx=N_CTX)


def talk(n: int, name: str = "a") -> dict[str, Any]:
    """So many turns of about 120 tokens and a question."""
    texts = [f"{name} {kind} {i} " + "word " * 55 for i in range(n) for kind in ("asks", "said")]
    return chat(*texts, f"{name} asks last")


def grown() -> dict[str, Any]:
    """The conversation of `talk(15)`, which fits, after one long turn more: it does not."""
    body = talk(15)
    turn = [
        {"role": "assistant", "content": " w0 w1 w2 w3"},
        {"role": "user", "content": "a asks for more " + "word " * 200},
    ]
    return body | {"messages": body["messages"] + turn}


def spoken(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same conversation in that door's dialect."""
    if path == RESPONSES:
        return {"model": "m", "input": body["messages"], "max_output_tokens": 4}
    return {"model": "m", **body}


def answered(path: str, events: list[bytes]) -> str:
    """The text of a stream."""
    if path != CHAT:
        return said(path, b"".join(events))
    choices = [c for event in events if b"[DONE]" not in event for c in data(event)["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices)


def tell(**more: Any) -> Cue:
    """A model that sums up."""
    return Cue(text=list(SUMMARY), finish="stop", **more)


def asked_of(fake: FakeLlama) -> list[dict[str, Any]]:
    """Requests for a summary."""
    return [r.body for r in fake.model_requests if "this conversation" in str(r.body.get("messages", [{}])[-1])]


def others(fake: FakeLlama) -> list[dict[str, Any]]:
    """All the rest."""
    asked = asked_of(fake)
    return [r.body for r in fake.model_requests if r.body not in asked]


def text_of(body: dict[str, Any]) -> str:
    return "\n".join(m["content"] for m in body["messages"])


async def begun(wire: Wire, fake: FakeLlama, body: dict[str, Any]) -> asyncio.Task[Any]:
    """A request whose summary is being asked for."""
    before = len(fake.model_requests)
    task = asyncio.create_task(wire.post(CHAT, body))
    await fake.arrived(before + 1)
    return task


async def test_two_requests_of_one_line(serve: Serve, small: FakeLlama, tmp_path: Path) -> None:
    """The second waits and takes the same summary; what is kept is for its owner's eyes only."""
    async with small as fake:
        wire, go = await serve(fake), asyncio.Event()
        await wire.post(CHAT, talk(15))
        fake.cues.append(tell(hold_before=go))
        first = await begun(wire, fake, grown())
        second = asyncio.create_task(wire.post(CHAT, grown()))

        async def is_second_there() -> bool:
            return wire.service.engines.all[0].n_requests == 3

        await until(is_second_there)
        go.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert len(asked_of(fake)) == 1
        one, two = others(fake)[-2:]
        assert one["messages"] == two["messages"]
        assert "The parser is ported" in text_of(one)
        assert [r["compaction"]["outcome"] for r in await wire.recorded(4) if r["compaction"]] == ["summary"] * 2
        more = grown()
        more["messages"] += [{"role": "assistant", "content": "w"}, {"role": "user", "content": "more"}]
        assert (await wire.post(CHAT, more)).status_code == 200
        assert others(fake)[-1]["messages"][: len(one["messages"])] == one["messages"]
    written = list((tmp_path / "state").glob("state.db*"))
    assert written and {p.stat().st_mode & 0o777 for p in written} == {0o600}


@pytest.mark.parametrize(("word", "status"), [("OFF", 400), ("on", 200), ("no", 400), ("x" * 5000, 400), ("", 400)])
async def test_the_header(serve: Serve, small: FakeLlama, word: str, status: int) -> None:
    """`off` is told that the prompt does not fit; a word that says neither is refused, not overlooked."""
    async with small as fake:
        wire = await serve(fake)
        fake.cues.append(tell())
        answer = await wire.post(CHAT, grown(), headers={"x-slotkeeper-compaction": word})
        assert (answer.status_code, len(asked_of(fake))) == (status, status == 200)
        assert status == 200 or ("available context size" in answer.text) is (word == "OFF")
        assert len(answer.text) < 500 or status == 200


async def test_strict_keeps_its_word(serve: Serve, small: FakeLlama) -> None:
    """A compaction breaks no line, nor does a request that declines its summary: the client's history extends."""
    async with small as fake:
        wire = await serve(fake, mode="strict")
        fake.cues.append(tell())
        body = grown()
        for headers, status in ({}, 200), ({}, 200), ({"x-slotkeeper-compaction": "off"}, 400), ({}, 200):
            answer = await wire.post(CHAT, body, headers=headers)
            assert answer.status_code == status, answer.text
            assert status == 200 or "available context size" in answer.text
            body["messages"] += [{"role": "assistant", "content": " w0 w1 w2 w3"}, {"role": "user", "content": "more"}]
        body["messages"][3]["content"] = "edited"
        assert (await wire.post(CHAT, body)).status_code == 409
        assert len(asked_of(fake)) == 1


async def test_a_client_that_leaves_meanwhile(serve: Serve, small: FakeLlama) -> None:
    """While the summary is made: the engine is told, and the next request has one made. Later: it is kept."""
    async with small as fake:
        wire = await serve(fake, finish_prefill="never")
        await wire.post(CHAT, talk(15))
        fake.cues.append(Cue(hold_before=asyncio.Event()))
        task = await begun(wire, fake, grown())
        task.cancel()
        await fake.abandoned(1)
        fake.cues += [tell(), Cue(hold_before=asyncio.Event())]
        before = len(fake.model_requests)
        task = asyncio.create_task(wire.post(CHAT, grown()))
        await fake.arrived(before + 2)
        task.cancel()
        await fake.abandoned(2)
        assert len(asked_of(fake)) == 2
        assert (await wire.post(CHAT, grown())).status_code == 200
        assert len(asked_of(fake)) == 2
        assert "The parser is ported" in text_of(others(fake)[-1])
        await wire.has_slots("idle", "empty")


async def test_an_engine_that_breaks_meanwhile(serve: Serve, small: FakeLlama) -> None:
    """The conversation goes on with a digest, or is told to come again; nothing is stuck."""
    async with small as fake:
        wire = await serve(fake)
        await wire.post(CHAT, talk(15))
        fake.cues.append(tell(break_at=2))
        answer = await wire.post(CHAT, grown())
        assert answer.status_code in (200, 503), answer.text
        fake.cues.append(tell())
        again = await wire.post(CHAT, grown())
        assert again.status_code == 200, again.text
        assert len(others(fake)[-1]["messages"]) < 20
        await wire.has_slots("idle", "empty")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_signs_of_life_while_it_is_summed_up(path: str, serve: Serve, small: FakeLlama) -> None:
    """The client hears that there is life before there is a summary, and then its answer, in its own dialect."""
    async with small as fake:
        wire, go = await serve(fake, keep_alive=ALWAYS), asyncio.Event()
        fake.cues.append(tell(hold_before=go))
        async with wire.stream(path, spoken(path, grown())) as stream:
            assert stream.response.status_code == 200
            events = [await stream.next()]
            while not any(SIGNS[path] in event for event in events):
                events.append(await stream.next())
            assert len(fake.model_requests) == len(asked_of(fake)) == 1
            go.set()
            events += await stream.rest()
        assert answered(path, events) == " w0 w1 w2 w3"
        assert not any(b"parser" in event for event in events), "what the summary says is not the answer"
        assert "The parser is ported" in str(others(fake)[-1]["messages"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_what_cannot_be_helped_is_said_before_any_sign(path: str, serve: Serve, small: FakeLlama) -> None:
    """Base and last message alone do not fit: a plain 400, and no model is asked in vain."""
    async with small as fake:
        wire = await serve(fake, keep_alive=ALWAYS)
        body = talk(15)
        body["messages"][-1]["content"] = "word " * N_CTX
        answer = await wire.post(path, {**spoken(path, body), "stream": True})
        assert (answer.status_code, "available context size" in answer.text) == (400, True)
        assert fake.model_requests == []


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_engine_that_counts_more_than_we_do(path: str, serve: Serve, small: FakeLlama) -> None:
    """One compaction, and no sign on the way: it may refuse the next prompt as well, which has to be a plain 400."""
    async with small as fake:
        wire = await serve(fake, keep_alive=ALWAYS)
        error = {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 2500, "n_ctx": N_CTX}
        error["message"] = "request (2500 tokens) exceeds the available context size (2000 tokens), try increasing it"
        fake.cues += [Cue(status=400, error=error), tell(), Cue(status=400, error=error)]
        answer = await wire.post(path, {**spoken(path, talk(15)), "stream": True})
        assert (answer.status_code, "request (2500 tokens)" in answer.text) == (400, True)
        assert len(asked_of(fake)) == 1 and len(fake.model_requests) == 3


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_summary_that_fails_behind_a_sign(path: str, serve: Serve, small: FakeLlama) -> None:
    """The answer goes on with a digest: what was promised holds."""
    async with small as fake:
        wire = await serve(fake, keep_alive=ALWAYS)
        fake.cues.append(tell(error_at=2))
        events = await wire.events(path, spoken(path, grown()))
        assert any(SIGNS[path] in event for event in events)
        assert answered(path, events) == " w0 w1 w2 w3"
        assert (await wire.recorded(2))[0]["compaction"]["outcome"] == "digest"


async def test_tenants_do_not_share_a_summary(serve: Serve, small: FakeLlama, tmp_path: Path) -> None:
    """The same history of two tenants: each has its own made, and none reads the other's."""
    keys = tmp_path / "keys"
    keys.write_text("ann:key-of-ann\nbob:key-of-bob\n")
    keys.chmod(0o600)
    async with small as fake:
        wire = await serve(fake, api_key_file=keys)
        for name in ("ann", "bob"):
            fake.cues.append(Cue(text=[f" secret of {name}"], finish="stop"))
            headers = {"authorization": f"Bearer key-of-{name}"}
            answer = await wire.post(CHAT, talk(18), headers=headers)
            assert answer.status_code == 200, answer.text
        assert len(asked_of(fake)) == 2
        assert "secret of ann" not in text_of(others(fake)[-1])
        assert "secret of bob" in text_of(others(fake)[-1])


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is idle is looked after at once."""
    monkeypatch.setattr(compact_ahead, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "ROUND_SECONDS", 0.01)


@pytest.mark.usefixtures("eager")
async def test_preparing_gives_way(serve: Serve, small: FakeLlama) -> None:
    """Another conversation's request ends it, though a slot is free; nothing takes the summary's place meanwhile."""
    async with small as fake:
        wire = await serve(fake, compact_prepare_at=0.5)
        body = talk(9)
        go = asyncio.Event()
        fake.cues += [Cue(), Cue(hold_before=asyncio.Event()), Cue(hold_before=go)]
        await wire.post(CHAT, body)
        await fake.arrived(2)
        assert len(asked_of(fake)) == 1
        other = asyncio.create_task(wire.post(CHAT, chat("who are you?")))
        await fake.abandoned(1)
        go.set()
        assert (await other).status_code == 200
        body["messages"] += [{"role": "assistant", "content": " w0 w1 w2 w3"}, {"role": "user", "content": "and now?"}]
        assert (await wire.post(CHAT, body)).status_code == 200
        assert others(fake)[-1]["messages"] == body["messages"]


@pytest.mark.usefixtures("eager")
async def test_what_was_prepared_is_explained(serve: Serve, small: FakeLlama) -> None:
    """A compaction that nobody asked for has a record of its own: what it replaced, what that cost, who summed up."""
    async with small as fake:
        wire = await serve(fake, compact_prepare_at=0.5)
        fake.cues += [Cue(), tell()]
        await wire.post(CHAT, talk(9))
        ahead, asked, first = await wire.recorded(3)
        assert (ahead["id"][:5], ahead["kind"], ahead["outcome"]) == ("idle_", "compaction", "ok")
        assert (ahead["line"], ahead["cause"]) == (first["line"], "compaction")
        told = ahead["compaction"]
        assert (told["outcome"], told["ahead"], told["requests"]) == ("summary", True, [asked["id"]])
        assert told["after"] < told["before"] and 0 < ahead["prompt_n"] <= told["after"]
        door = httpx.ASGITransport(control_app(wire.service))
        async with httpx.AsyncClient(transport=door, base_url="http://slotkeeper") as client:
            (shown,) = (await client.get("/explain?last=5")).json()["requests"]
            assert shown["id"] == ahead["id"]
            assert (await client.get(f"/explain/{ahead['id']}")).json()["requests"] == [shown]
        assert "in idle time" in str(_told(shown)) and "of messages 1 to" in str(_told(shown))
        metrics = (await wire.get("/metrics")).text
        processed = asked["prompt_n"] + ahead["prompt_n"]
        name = 'slotkeeper_prompt_tokens_processed_total{engine="engine0",kind="compaction",model="fake"}'
        assert f"{name} {float(processed)}" in metrics


@pytest.mark.usefixtures("eager")
async def test_an_engine_that_fails_while_nobody_waits(serve: Serve, small: FakeLlama) -> None:
    """When it should process what was prepared: the summary stays, the slot is empty, the next turn is processed."""
    async with small as fake:
        wire = await serve(fake, compact_prepare_at=0.5)
        fake.cues += [Cue(), tell(), Cue(status=500)]
        body = talk(9)
        await wire.post(CHAT, body)
        ahead = (await wire.recorded(3))[0]
        assert (ahead["id"][:5], ahead["prompt_n"], ahead["compaction"]["outcome"]) == ("idle_", 0, "summary")
        await wire.has_slots("empty", "empty")
        body["messages"] += [{"role": "assistant", "content": " w0 w1 w2 w3"}, {"role": "user", "content": "and now?"}]
        assert (await wire.post(CHAT, body)).status_code == 200
        assert "The parser is ported" in text_of(others(fake)[-1]) and len(asked_of(fake)) == 1


async def test_engines_are_looked_after_side_by_side(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, fake: FakeLlama
) -> None:
    """What takes long on one does not hold up the other."""
    seen = asyncio.Event()

    async def long(_: keeper.Keeper, engine: Engine) -> None:
        if engine.name == "engine1":
            seen.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(keeper, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(keeper.Keeper, "_round", long)
    async with FakeLlama() as other:
        await serve(upstream=(fake.url, other.url))
        async with asyncio.timeout(20):
            await seen.wait()
