"""A stop while answers run: clients are told, in their dialect, and nobody is left waiting."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog

from proxy.app import _tell_stopped
from proxy.page.text import size
from proxy.service import Service
from tests.conftest import StartProxy
from tests.fakes.llama import FakeLlama
from tests.fakes.run import Cue
from tests.servers import until
from tests.wire.conftest import Serve
from tests.wire.wire import CHAT, chat


@pytest.mark.parametrize("stream", [True, False])
async def test_running_answers_end_with_a_sentence(stream: bool, serve: Serve, fake: FakeLlama) -> None:
    """A second signal ends them at once: 503, or an error event in a stream that has begun."""
    wire = await serve(fake)
    fake.cues.append(Cue(pace=asyncio.Semaphore(4)))
    sent = asyncio.create_task(wire.post(CHAT, chat("hi", stream=stream)))
    await wire.has_slots("busy", "empty")
    service: Service = wire.service
    service.begin_stop(at_once=True)
    answer = await sent
    assert answer.status_code == (200 if stream else 503)
    assert "Slotkeeper is stopping" in answer.text
    assert '"source":"slotkeeper"' in answer.text
    refused = await wire.post(CHAT, chat("later"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")


async def test_a_second_signal_waits_for_no_slot_file(serve: Serve, fake: FakeLlama) -> None:
    """What saves at the end is broken off, or does not begin; what is over was done."""
    service: Service = (await serve(fake)).service
    done: list[str] = []

    async def work(name: str, gate: asyncio.Event) -> None:
        await gate.wait()
        done.append(name)

    opened, closed = asyncio.Event(), asyncio.Event()
    opened.set()
    await service.unless_hurried(work("first", opened))
    saving = asyncio.create_task(service.unless_hurried(work("second", closed)))
    service.begin_stop(at_once=False)
    assert not (await asyncio.wait({saving}, timeout=0.05))[0]
    service.begin_stop(at_once=True)
    await saving
    await service.unless_hurried(work("third", closed))
    assert done == ["first"]


async def test_what_was_kept_is_said(proxy_server: StartProxy, tmp_path: Path) -> None:
    """The last line of a stop: how many conversations the next start finds, and how large their files are."""
    (tmp_path / "slots").mkdir()
    async with FakeLlama(slot_dir=tmp_path / "slots") as fake:
        upstream = f"{fake.url},slots={tmp_path / 'slots'}"
        proxy = await proxy_server("--upstream", upstream, "--log-format", "console", wait=False)
        await until(lambda: _says(proxy.text, "Ready: "))
        url = next(line for line in proxy.text if line.startswith("Ready: ")).split()[1]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.post(f"{url}/chat/completions", json=chat("word " * 200))
        assert answer.status_code == 200
        assert await proxy.stop(signal.SIGINT) == 130
        [file] = (tmp_path / "slots").glob("*.bin")
        assert proxy.text[-2].startswith("Stopping, within 30 s: ")
        assert proxy.text[-1] == f"Stopped: 1 conversation saved ({size(file.stat().st_size)})."


@pytest.mark.parametrize(
    ("n_saved", "n_kept", "said"),
    [
        (0, 0, "Stopped: nothing new to save."),
        (0, 2, "Stopped: nothing new to save; 2 snapshots kept in all (4.0 KiB)."),
        (1, 1, "Stopped: 1 conversation saved (2.0 KiB)."),
        (2, 3, "Stopped: 2 conversations saved (4.0 KiB); 3 snapshots kept in all (6.0 KiB)."),
    ],
)
def test_a_stop_in_words(n_saved: int, n_kept: int, said: str) -> None:
    """What earlier saves have kept is told apart."""
    saved: Any = [SimpleNamespace(bytes=2048)] * n_saved
    store: Any = SimpleNamespace(all=lambda: [None] * n_kept, total_bytes=2048 * n_kept)
    with structlog.testing.capture_logs() as logs:
        _tell_stopped(saved, store)
    assert logs[0]["sentence"] == said
    assert (logs[0]["saved"], logs[0]["kept"]) == (n_saved, n_kept)


async def _says(lines: list[str], beginning: str) -> bool:
    return any(line.startswith(beginning) for line in lines)
