"""An engine that somebody else runs: what it lacks, its restarts, and the end of the proxy."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.conftest import StartProxy
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat, data

LONG = "a long enough opening " * 40


async def turns(wire: Wire) -> list[int]:
    """Two turns of a conversation; `cache_n` of each."""
    first = await wire.post(CHAT, chat(LONG))
    second = await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now"))
    assert second.headers["x-slotkeeper-placement"] == "continue"
    return [answer.json()["timings"]["cache_n"] for answer in (first, second)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots_endpoint": False}, "--no-slots"),
        ({"metrics_endpoint": False}, "--metrics"),
        ({}, "--slot-save-path"),
        ({"slots_endpoint": False, "metrics_endpoint": False}, "--no-slots"),
    ],
)
async def test_what_an_engine_lacks(options: dict[str, bool], said: str, serve: Serve) -> None:
    """The missing part is off and said, everything else works: streaming, continuing, leaving."""
    async with FakeLlama(n_slots=1, **options) as fake:
        wire = await serve(fake)
        engine = (await wire.state())["engines"][0]
        assert any(said in sentence for sentence in engine["missing"])
        assert (engine["can_save"], len(engine["slots"])) == (False, 1)
        assert (await turns(wire))[1] > 150
        fake.cues.append(Cue(hold_after=asyncio.Event()))
        async with wire.stream(CHAT, chat("hi")) as stream:
            while b" w0" not in await stream.next():
                pass
        await fake.abandoned(1)
        assert (await wire.post(CHAT, chat("hello"))).status_code == 200
        assert (await wire.get("/slots")).status_code == 200


async def test_it_is_said_at_start(proxy_server: StartProxy) -> None:
    """One warning a missing part."""
    async with FakeLlama(slots_endpoint=False, metrics_endpoint=False) as fake:
        proxy = await proxy_server("--upstream", fake.url)
        said = [line["what"] for line in proxy.lines if line["event"] == "engine_lacks"]
        assert len(said) == 3
        assert all(flag in " ".join(said) for flag in ("--no-slots", "--metrics", "--slot-save-path"))


async def test_a_slotkeeper_is_no_engine(wire: Wire, serve: Serve, proxy_server: StartProxy, tmp_path: Path) -> None:
    """Two would place and repair on top of each other: wrong usage at start, and never ready when it came later."""
    refused = await proxy_server("--upstream", wire.url, state_dir=tmp_path / "first", wait=False)
    assert await refused.ended() == 2
    assert f"{wire.url} is a Slotkeeper, not a llama-server" in refused.said()
    second = await serve(upstream=(wire.url,), state_dir=tmp_path / "second", wait=False)
    await until(lambda: reason_is(second, "is a Slotkeeper"))
    refusal = await second.post(CHAT, chat("hi"))
    assert (refusal.status_code, "is a Slotkeeper" in refusal.text) == (502, True)


async def reason_is(wire: Wire, words: str) -> bool:
    """What /readyz says."""
    answer = await wire.get("/readyz")
    return answer.status_code == 503 and words in answer.text


async def test_a_template_that_prints_the_clock(proxy_server: StartProxy) -> None:
    """Told once, however often the engine is attached to, with what to do about it."""
    async with FakeLlama() as fake:
        fake.chat_template = "{{ strftime_now('%Y') }}"
        proxy = await proxy_server("--upstream", fake.url, "--upstream", fake.url)
        told = [line for line in proxy.lines if line["event"] == "template_prints_clock"]
        assert sorted(line["engine"] for line in told) in (["engine0"], ["engine1"], ["engine0", "engine1"])
        assert "--chat-template-file" in told[0]["advice"]


async def test_a_directory_that_is_not_there(serve: Serve, fake: FakeLlama, tmp_path: Path) -> None:
    """slots=DIR that does not exist, and one that the engine does not write to."""
    wire = await serve(upstream=(f"{fake.url},slots={tmp_path / 'nowhere'}",))
    assert any("is not there" in sentence for sentence in (await wire.state())["engines"][0]["missing"])
    assert (await turns(wire))[1] > 150


async def test_a_directory_of_somebody_else(serve: Serve, tmp_path: Path) -> None:
    """The engine writes its files where we do not see them: nothing is kept, everybody is served."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    async with FakeLlama(slot_dir=tmp_path / "theirs") as fake:
        wire = await serve(upstream=(f"{fake.url},slots={tmp_path / 'ours'}",))
        engine = (await wire.state())["engines"][0]
        assert engine["can_save"] is False
        assert any("is not the --slot-save-path" in sentence for sentence in engine["missing"])
        assert (await turns(wire))[1] > 150
        engines = wire.service.engines
        await engines.identify(engines.all[0])  # as every half minute
        assert fake.saves == 1
        fake.restart()
        engines.lost_instance(engines.all[0], "it was restarted")
        await until(wire.is_ready)
        assert fake.saves == 2
    assert len(list((tmp_path / "theirs").iterdir())) == 1
    assert list((tmp_path / "ours").iterdir()) == []


async def test_a_directory_that_cannot_be_read(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's files belong to another user: a sentence, no errno."""

    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.suffix == ".tmp":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    (tmp_path / "slots").mkdir()
    async with FakeLlama(slot_dir=tmp_path / "slots") as fake:
        wire = await serve(upstream=(f"{fake.url},slots={tmp_path / 'slots'}",))
        engine = (await wire.state())["engines"][0]
        assert engine["can_save"] is False
        assert any("cannot be used (Permission denied)" in sentence for sentence in engine["missing"])


@pytest.mark.parametrize("slots_endpoint", [True, False])
async def test_an_unseen_restart_is_noticed(slots_endpoint: bool, serve: Serve) -> None:
    """Between two of our looks it was stopped and started: the next turn shows it, and no line is believed any more."""
    async with FakeLlama(slots_endpoint=slots_endpoint) as fake:
        wire = await serve(fake)
        await turns(wire)
        await wire.post(CHAT, chat("another " * 300))
        await wire.has_slots("idle", "idle")
        fake.restart()
        third = await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now", " w0 w1 w2 w3", "more"))
        assert third.json()["timings"]["cache_n"] == 0
        record = (await wire.records())[0]
        assert (record["cause"], record["placement"]) == ("engine_restart", "continue")
        assert record["reprocessed"] > 150
        await wire.has_slots("idle", "empty")
        other = await wire.post(CHAT, chat("another " * 300, " w0 w1 w2 w3", "x"))
        assert other.headers["x-slotkeeper-predicted-cache-n"] == "0"
        assert (await wire.records())[0]["cause"] == "engine_restart"


async def test_a_restart_under_a_running_request(wire: Wire, fake: FakeLlama) -> None:
    """The client has its error, the other conversation's tokens are not believed any more."""
    await wire.post(CHAT, chat("another " * 300))
    fake.cues.append(Cue(hold_after=asyncio.Event()))
    async with wire.stream(CHAT, chat(LONG)) as stream:
        while b" w0" not in await stream.next():
            pass
        fake.restart()
        assert data((await stream.rest())[-1])["error"]["source"] == "engine"
    await wire.has_slots("empty", "empty")
    assert (await wire.post(CHAT, chat(LONG))).status_code == 200
    other = await wire.post(CHAT, chat("another " * 300, " w0 w1 w2 w3", "x"))
    assert other.json()["timings"]["cache_n"] == 0
    assert (await wire.records())[0]["cause"] == "engine_restart"


async def test_a_death_that_is_noticed_before_the_stream_breaks(wire: Wire, fake: FakeLlama) -> None:
    """Whoever learns of it first, the lease comes back."""
    engine = wire.service.engines.all[0]
    fake.cues.append(Cue(hold_after=asyncio.Event()))
    async with wire.stream(CHAT, chat("hi")) as stream:
        while b" w0" not in await stream.next():
            pass
        wire.service.engines.lost_instance(engine, "it was killed")
        fake.restart()
        assert data((await stream.rest())[-1])["error"]["source"] == "engine"
    await until(wire.is_ready)
    await wire.has_slots("empty", "empty")
    assert (await wire.post(CHAT, chat("hi"))).status_code == 200


async def test_a_death_while_a_slot_is_prepared(serve: Serve, tmp_path: Path) -> None:
    """The request is not sent to whatever answers there by now, which may be half-way through its own beginning."""
    slots = tmp_path / "engine-slots"
    slots.mkdir()
    async with FakeLlama(n_slots=1, slot_dir=slots) as fake:
        wire = await serve(upstream=(f"{fake.url},slots={slots}",))
        assert (await wire.post(CHAT, chat("word " * 500))).status_code == 200
        fake.save_gate = asyncio.Event()
        client = asyncio.create_task(wire.post(CHAT, chat("quite another " * 90)))
        await wire.has_slots("saving")
        sent = len(fake.model_requests)
        engine = wire.service.engines.all[0]
        engine.is_loading = True  # or it would be attached again at once
        wire.service.engines.lost_instance(engine, "it was killed.")
        fake.save_gate.set()
        answer = await client
        assert (answer.status_code, len(fake.model_requests)) == (503, sent)
        assert "retry-after" in answer.headers
        assert "killed. Try again" in answer.json()["error"]["message"]
        await until(wire.is_ready)
        assert (await wire.post(CHAT, chat("a third"))).status_code == 200


async def test_a_foreign_client_of_the_engine_is_noticed(wire: Wire, fake: FakeLlama) -> None:
    """Somebody asks the engine directly and takes a slot: that turn is processed again, the next ones are not."""
    await turns(wire)
    asked = [r.path for r in fake.requests].count("/slots")
    fake.slots[0].tokens = [*fake.slots[0].tokens[:2], *fake.tokens_of("something else entirely")]
    fake.slots[0].id_task = 99
    third = chat(LONG, " w0 w1 w2 w3", "and now", " w0 w1 w2 w3", "more")
    assert (await wire.post(CHAT, third)).json()["timings"]["cache_n"] == 2
    fourth = await wire.post(CHAT, chat(LONG, " w0 w1 w2 w3", "and now", " w0 w1 w2 w3", "more", " w0 w1 w2 w3", "x"))
    assert fourth.json()["timings"]["cache_n"] == int(fourth.headers["x-slotkeeper-predicted-cache-n"]) > 150
    # The answer itself told what the slot holds, and no other holds anything: there was nothing to ask.
    assert [r.path for r in fake.requests].count("/slots") == asked


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_drain(proxy_server: StartProxy, fake: FakeLlama) -> None:
    """SIGTERM: the running answer is finished, exit code 0; who comes meanwhile is told to come again."""
    proxy = await proxy_server("--upstream", fake.url)
    async with Wire(proxy.url) as wire, Wire(proxy.url) as late:
        pace = asyncio.Semaphore(4)
        fake.cues.append(Cue(pace=pace))
        async with wire.stream(CHAT, chat("hi")) as stream:
            await stream.next()
            proxy.process.send_signal(signal.SIGTERM)
            await proxy.logged("stopping")

            assert [(await late.get(path)).status_code for path in ("/readyz", "/healthz")] == [503, 200]
            refused = await late.post(CHAT, chat("later"))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "is stopping" in refused.json()["error"]["message"]
            for _ in range(20):
                pace.release()
            assert (await stream.rest())[-1] == b"data: [DONE]\n\n"
        assert await proxy.process.wait() == 0
    assert fake.left == 0


async def test_an_answer_that_outlasts_the_drain(proxy_server: StartProxy, fake: FakeLlama) -> None:
    """The deadline ends it: the client's connection and the engine's are closed, exit code 0."""
    proxy = await proxy_server("--upstream", fake.url, "--exit-deadline-seconds", "3")
    async with Wire(proxy.url) as wire:
        fake.cues.append(Cue(hold_after=asyncio.Event()))
        async with wire.stream(CHAT, chat("hi")) as stream:
            while b" w0" not in await stream.next():
                pass
            assert await proxy.stop() == 0
        await fake.abandoned(1)


async def test_a_second_signal_hurries(proxy_server: StartProxy, fake: FakeLlama) -> None:
    """Ctrl-C twice does not wait for the running answer; the exit code is that of an interruption."""
    proxy = await proxy_server("--upstream", fake.url)
    async with Wire(proxy.url) as wire:
        fake.cues.append(Cue(hold_after=asyncio.Event()))
        async with wire.stream(CHAT, chat("hi")) as stream:
            while b" w0" not in await stream.next():
                pass
            proxy.process.send_signal(signal.SIGINT)
            await proxy.logged("stopping")
            assert await proxy.stop(signal.SIGINT) == 130
        await fake.abandoned(1)
