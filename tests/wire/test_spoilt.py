"""An engine that computes otherwise since it refused a slot file (llama.cpp #27068): it is not trusted any more."""

import asyncio
from pathlib import Path

import pytest

from proxy import engines as engines_module
from tests.fakes.gguf_bytes import gguf_file
from tests.fakes.llama import FakeLlama
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, Wire, chat

FIRST, SECOND = "a long enough opening " * 60, "and quite another one here " * 60
REPLY = " w0 w1 w2 w3"


class FakeChild:
    """A child process that is none: `stop` ends it, and what was in its slots is gone."""

    kind, build, api_key, exit_code = "binary", "b0-fake", None, 0

    def __init__(self, fake: FakeLlama) -> None:
        self.fake, self.base_url = fake, fake.url
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        """Once it was stopped."""
        await self.ended.wait()
        return 0

    async def stop(self, seconds: float) -> int:
        """At once."""
        self.fake.restart()
        self.ended.set()
        return 0

    def obituary(self, *, has_served: bool = False) -> str:
        """Why it ended."""
        return "The engine ended."


async def spoil(wire: Wire, fake: FakeLlama) -> int:
    """Has the one slot change hands twice, the file of the second change refused; the status of what asked for it."""
    for text in (FIRST, SECOND):
        assert (await wire.post(CHAT, chat(text))).status_code == 200
    assert fake.saves > 0
    fake.spoilt_by_files = True
    return (await wire.post(CHAT, chat(FIRST, REPLY, "and now"))).status_code


async def test_one_of_somebody_else_gets_no_file_any_more(serve: Serve, tmp_path: Path) -> None:
    """It is said, nothing is saved or restored until it was started again, everybody is served."""
    (tmp_path / "slots").mkdir()
    async with FakeLlama(n_slots=1, slot_dir=tmp_path / "slots") as fake:
        wire = await serve(upstream=(f"{fake.url},slots={tmp_path / 'slots'}",))
        assert await spoil(wire, fake) == 200
        (engine,) = (await wire.state())["engines"]
        assert (engine["can_save"], engine["fingerprint"]) == (False, None)
        assert any("computes otherwise" in sentence for sentence in engine["missing"])
        before = fake.saves, fake.restores
        assert (await wire.post(CHAT, chat(SECOND, REPLY, "and now"))).status_code == 200
        assert (fake.saves, fake.restores) == before


async def test_one_of_ours_is_started_again(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that met it is told to come again; the new engine has its files, but for the one refused."""
    (tmp_path / "m.gguf").write_bytes(gguf_file({"general.architecture": "llama", "llama.block_count": 2}))
    async with FakeLlama(n_slots=1, slot_dir=tmp_path / "state" / "slots") as fake:
        started: list[FakeChild] = []

        async def start(*_: object, **__: object) -> FakeChild:
            started.append(FakeChild(fake))
            return started[-1]

        monkeypatch.setattr(engines_module.children, "start", start)
        monkeypatch.setattr(engines_module, "FIRST_BACKOFF", 0.01)
        wire = await serve(model=tmp_path / "m.gguf", engine="binary")
        assert await spoil(wire, fake) == 503
        assert not fake.is_spoilt
        await until(wire.is_ready)
        assert len(started) == 2
        answer = await wire.post(CHAT, chat(SECOND, REPLY, "and now"))
        assert (answer.status_code, answer.headers["x-slotkeeper-placement"]) == (200, "restore")
        assert (await wire.post(CHAT, chat(FIRST, REPLY, "and now"))).headers["x-slotkeeper-placement"] == "cold"
