"""How `serve` ends while real streams run: one signal lets them finish and saves, a second waits for nothing."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from tests.conftest import StartProxy
from tests.live.talk import CHATML, FOX, Json, piece_of, streaming, user
from tests.servers import PATIENCE

SERVE = ("--parallel", "2", "--ctx-size", "16384", "--exit-deadline-seconds", str(3 * PATIENCE))
"""Answers get a third of the deadline, in which the slowest machine of ours generates the 600 tokens."""


def body(who: str, n: int) -> Json:
    """A chat of its own, whose answer has n tokens."""
    return {"messages": user(f"{who} says hello"), "max_tokens": n}


async def test_streams_are_finished_and_saved(proxy_server: StartProxy, tmp_path: Path) -> None:
    """Two streams; whoever comes meanwhile is told to come again; both end whole, and both slots lie on disk."""
    proxy = await proxy_server(*SERVE, model="dense", engine_flags=CHATML)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(streaming(proxy, body(who, 600))) for who in ("Anna", "Bert")]
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.logged("stopping")
        late = await proxy.client.post("/v1/chat/completions", json={**FOX, **body("Carl", 1)})
        assert (late.status_code, late.headers["retry-after"]) == (503, "5")
        ends = [[event async for event in stream][-1] for stream in streams]
    assert [(end["timings"]["predicted_n"], end["choices"][0]["finish_reason"]) for end in ends] == [
        (600, "length")
    ] * 2
    assert await proxy.ended() == 0
    assert len(list((tmp_path / "state" / "slots").glob("*.bin"))) == 2
    found = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert [str(path) for path in found if path.stat().st_mode & 0o077] == []


async def test_a_second_signal_waits_for_nothing(proxy_server: StartProxy, tmp_path: Path) -> None:
    """The stream ends in the middle with a sentence, nothing is saved, and no half file is left."""
    proxy = await proxy_server(*SERVE, model="dense", engine_flags=CHATML)
    async with streaming(proxy, body("Anna", 8000)) as stream:
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.logged("stopping")
        proxy.process.send_signal(signal.SIGTERM)
        events = [event async for event in stream]
    assert sum(bool(piece_of(event)) for event in events) < 8000 - 1
    assert events[-1]["error"]["code"] == "shutting_down"
    async with asyncio.timeout(PATIENCE):
        assert await proxy.ended() == 0
    assert list((tmp_path / "state" / "slots").iterdir()) == []
